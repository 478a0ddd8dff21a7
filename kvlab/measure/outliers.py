"""Channel outliers: how much larger the largest channel of a layer's keys is than the average one."""

from __future__ import annotations

import math
from typing import Literal

import pandas as pd
import torch

from kvlab.checks import check_choice, check_vectors
from kvlab.measure.layers import measurable_layers
from kvlab.recording import Capture
from kvlab.transforms import RandomizedHadamard

BLOCK_TOKENS = 8192
FORMS = ("raw", "rotated", "without gain", "without gain, rotated")
"""The four forms of a key: k, R·k, n and R·n of the write-up."""


def outlier_ratio(x: torch.Tensor, *, statistic: Literal["mean", "rms"] = "mean", pool_heads: bool = False) -> float:
    """Largest channel over the average channel.

    Per KV head, m_c is the mean over tokens of ``|x_c|``; the head's ratio is max_c m_c / mean_c m_c and
    the result is the largest head's.

    Parameters
    ----------
    x
        ``[..., num_kv_heads, tokens, head_dim]`` (leading dimensions are averaged like tokens) or
        ``[tokens, head_dim]`` for one head; any float dtype, read in blocks of tokens.
    statistic
        ``"mean"`` of the magnitudes, or their root mean square (``"rms"``).
    pool_heads
        Average over heads as well as tokens before taking the ratio.

    Returns
    -------
    float
        At least 1; 1 means that all channels are equally large. All-zero heads have no ratio and do not
        count; NaN where all heads are zero.

    Raises
    ------
    TypeError, ValueError
        ``x`` is not a floating-point tensor of finite vectors, or ``statistic`` is unknown.

    References
    ----------
    “Serving Kolibri-1 with a 4-bit KV cache” (2026): 7.5 raw, 2.2 rotated at most.
    """
    check_vectors(x, min_ndim=2)
    check_choice(statistic, "statistic", ("mean", "rms"))
    x = x[None] if x.ndim == 2 else x
    heads, tokens, head_dim = x.shape[-3:]
    total = torch.zeros(heads, head_dim, dtype=torch.float64, device=x.device)
    for start in range(0, tokens, BLOCK_TOKENS):
        block = x[..., start : start + BLOCK_TOKENS, :]
        # Squares of float32 numbers fit in float64 only.
        size = block.abs() if statistic == "mean" else block.double().square()
        total += size.sum(-2, dtype=torch.float64).reshape(-1, heads, head_dim).sum(0)
    if not total.isfinite().all():
        raise ValueError("x has a non-finite component; accepted: finite numbers only")
    level = total.mean(0, keepdim=True) if pool_heads else total
    level = level if statistic == "mean" else level.sqrt()
    level = level[level.amax(-1) > 0]
    return (level.amax(-1) / level.mean(-1)).max().item() if len(level) else math.nan


def outlier_table(capture: Capture, *, seed: int = 0) -> pd.DataFrame:
    """Outlier ratio of every captured layer's keys in each of `FORMS`.

    Parameters
    ----------
    capture
        From `kvlab.capture`. The forms without gain exist for QK-norm models only.
    seed
        Of the randomized Hadamard rotation.

    Returns
    -------
    pandas.DataFrame
        One row per layer and form: ``layer``, ``form``, ``ratio``.

    Raises
    ------
    ValueError
        The capture is empty or holds padding.
    """
    rotation = RandomizedHadamard(seed=seed)
    rows = []
    for layer in measurable_layers(capture):
        keys = {"raw": layer.k}
        if layer.normed_keys is not None:
            keys["without gain"] = layer.normed_keys
        for form, x in keys.items():
            rotated = "rotated" if form == "raw" else f"{form}, rotated"
            rows.append((layer.index, form, outlier_ratio(x)))
            rows.append((layer.index, rotated, outlier_ratio(rotation.forward(x.float(), layer.index))))
    return pd.DataFrame(rows, columns=["layer", "form", "ratio"])


def layers_lowered_by_folding(table: pd.DataFrame) -> tuple[int, int]:
    """In how many layers keys without their gain have a lower outlier ratio, of how many (0, 0 without QK-norm).

    Parameters
    ----------
    table
        From `outlier_table`.
    """
    ratios = table.pivot_table(index="layer", columns="form", values="ratio")
    if "without gain" not in ratios:
        return 0, 0
    return int((ratios["without gain"] < ratios["raw"]).sum()), len(ratios)
