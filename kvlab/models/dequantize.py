"""FP8 weights with a scale per block of 128×128 back to numbers."""

from __future__ import annotations

import torch

BLOCK = 128


def dequantize(weight: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write ``weight · scale`` to ``out``: one float32 product per number, then one rounding to ``out``'s dtype.

    A row of blocks at a time, so that the float32 temporaries stay small.

    Parameters
    ----------
    weight
        float8_e4m3fn ``[..., rows, columns]``.
    scale
        float32 ``[..., ⌈rows/128⌉, ⌈columns/128⌉]``; blocks at the border are partial.
    out
        Any floating dtype, ``weight``'s shape, on its device.

    Returns
    -------
    torch.Tensor
        ``out``.

    References
    ----------
    DeepSeek-AI 2024, arXiv:2412.19437 (the block format, with its name ``weight_scale_inv``).
    """
    columns = weight.shape[-1]
    for block in range(scale.shape[-2]):
        rows = slice(block * BLOCK, (block + 1) * BLOCK)
        factors = scale[..., block : block + 1, :].repeat_interleave(BLOCK, dim=-1)[..., :columns]
        out[..., rows, :] = weight[..., rows, :].float().mul_(factors)
    return out
