"""Static key means: what all tokens of a KV head have in common."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from kvlab.calibrate.layers import LayerCaptures, full_layers, stored_keys
from kvlab.recording import Capture
from kvlab.schemes import Scheme, get_scheme

BLOCK_TOKENS = 8192


def key_means(captures: Capture | Iterable[Capture], scheme: str | Scheme = "hadamard-int4") -> dict[int, torch.Tensor]:
    """Mean of the keys that ``scheme`` stores, over all tokens of all captures.

    Parameters
    ----------
    captures
        One or more captures of one model.
    scheme
        Decides whether keys are averaged before their gain, on the layers where it folds.

    Returns
    -------
    dict
        Full-attention layer → float32 ``[num_kv_heads, head_dim]`` on the CPU, summed in float64.

    Raises
    ------
    ValueError
        The captures do not fit together, or a key is not finite.

    References
    ----------
    Zhang et al. 2024, arXiv:2410.02367 (SageAttention: smoothing K by its mean over tokens).
    """
    return layer_means(full_layers(captures), get_scheme(scheme))


def layer_means(layers: LayerCaptures, scheme: Scheme) -> dict[int, torch.Tensor]:
    """Means of layers already chosen, as `key_means`."""
    return {index: _mean([stored_keys(scheme, layer) for layer in own], index) for index, own in layers.items()}


def _mean(parts: list[torch.Tensor], index: int) -> torch.Tensor:
    blocks = [block for keys in parts for block in keys.split(BLOCK_TOKENS, dim=-2)]
    total = sum(block.sum((0, -2), dtype=torch.float64).cpu() for block in blocks)
    mean = total / sum(keys.shape[0] * keys.shape[-2] for keys in parts)
    if not mean.isfinite().all():
        raise ValueError(f"captures have a non-finite key in layer {index}; accepted: finite keys only")
    return mean.float()
