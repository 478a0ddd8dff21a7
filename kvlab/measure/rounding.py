"""One key rounded to 4 bits, before and after the rotation."""

from __future__ import annotations

import pandas as pd
import torch

from kvlab.checks import check_integer, check_vectors
from kvlab.quantizers import AsymmetricInteger
from kvlab.quantizers.base import Quantizer
from kvlab.transforms import RandomizedHadamard
from kvlab.transforms.base import Transform


def relative_error(original: torch.Tensor, stored: torch.Tensor) -> float:
    """Return ‖stored − original‖_F / ‖original‖_F; both ``[..., head_dim]``, any float dtype.

    Raises
    ------
    TypeError, ValueError
        The shapes differ, or one is not a floating-point tensor.
    """
    check_vectors(original, "original")
    check_vectors(stored, "stored", head_dim=original.shape[-1])
    if original.shape != stored.shape:
        raise ValueError(f"stored has shape {list(stored.shape)}; accepted: original's, {list(original.shape)}")
    original = original.double()
    return ((stored.double() - original).norm() / original.norm()).item()


def median_token(x: torch.Tensor, quantizer: Quantizer) -> int:
    """Index of the token whose relative rounding error is the median (the lower one) over ``x`` [tokens, head_dim]."""
    x = x.float()
    error = (quantizer.roundtrip(x) - x).norm(dim=-1) / x.norm(dim=-1)
    return int(error.argsort(stable=True)[(len(error) - 1) // 2])


def rounding_table(
    x: torch.Tensor,
    *,
    layer: int = 0,
    transform: Transform | None = None,
    quantizer: Quantizer | None = None,
    dimensions: int = 32,
) -> pd.DataFrame:
    """One key's components and their rounded values, before and after a rotation.

    The key is the one of median error under plain rounding; the dimensions shown are the aligned
    window that holds its largest component, so the choice is a rule and not an eye.

    Parameters
    ----------
    x
        Keys of one head, ``[tokens, head_dim]``, any float dtype.
    layer
        Absolute decoder layer, which draws the rotation.
    transform, quantizer
        Default: `RandomizedHadamard` with seed 0 and 4-bit `AsymmetricInteger`, the write-up's.
    dimensions
        How many to show; the whole vector where head_dim is smaller.

    Returns
    -------
    pandas.DataFrame
        One row per state (``before rotation``, ``after rotation``) and dimension: ``state``, ``token``,
        ``dimension``, ``original``, ``rounded``, ``error`` (rounded − original), and the whole vector's
        ``head_dim`` and ``relative_error`` in that state.

    Raises
    ------
    TypeError, ValueError
        ``x`` is not a non-empty floating-point ``[tokens, head_dim]``, ``dimensions`` is no positive integer, or
        ``transform`` or ``quantizer`` is of another type.
    """
    check_vectors(x, min_ndim=2)
    if x.ndim != 2:
        raise ValueError(f"x has shape {list(x.shape)}; accepted: [tokens, head_dim], the keys of one head")
    check_integer(dimensions, "dimensions", minimum=1)
    transform = RandomizedHadamard(seed=0) if transform is None else transform
    quantizer = AsymmetricInteger(4) if quantizer is None else quantizer
    for name, value, kind in (("transform", transform, Transform), ("quantizer", quantizer, Quantizer)):
        if not isinstance(value, kind):
            raise TypeError(f"{name} is a {type(value).__name__}; accepted: a kvlab {name}")
    token = median_token(x, quantizer)
    key = x[token : token + 1].float()
    first = int(key.abs().argmax()) // dimensions * dimensions
    tables = []
    for state, vector in {"before rotation": key, "after rotation": transform.forward(key, layer)}.items():
        stored = quantizer.roundtrip(vector)
        table = pd.DataFrame({"original": vector[0].tolist(), "rounded": stored[0].tolist()})
        table.insert(0, "dimension", table.index)
        table.insert(0, "token", token)
        table.insert(0, "state", state)
        table["error"] = table["rounded"] - table["original"]
        table["head_dim"] = len(table)
        table["relative_error"] = relative_error(vector, stored)
        tables.append(table[first : first + dimensions])
    return pd.concat(tables, ignore_index=True)
