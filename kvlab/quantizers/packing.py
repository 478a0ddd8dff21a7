"""4-bit codes and their fp16 scale and offset as the bytes of `kvlab.codec`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvlab.checks import FP16_MAX, check_finite, check_vectors
from kvlab.quantizers.base import BLOCK_VECTORS

METADATA_BYTES = 4
"""Of scale and offset."""

Grid = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Codes ``[vectors, head_dim]``, scale and offset ``[vectors, 1]``, as `pack_codes` takes them."""


def encode_vectors(x: torch.Tensor, quantize: Callable[[torch.Tensor], Grid]) -> torch.Tensor:
    """Encode vectors to the bytes that a cache holds, a block of them at a time.

    Parameters
    ----------
    x
        ``[..., head_dim]``, any float dtype, any device, even head_dim.
    quantize
        Takes float32 ``[vectors, head_dim]``.

    Returns
    -------
    torch.Tensor
        uint8 ``[..., head_dim / 2 + 4]`` on the same device.

    Raises
    ------
    TypeError
        ``x`` is not a floating-point tensor.
    ValueError
        ``x`` is empty, head_dim is odd, or a component is not finite or beyond 65,504 in magnitude.
    """
    head_dim = check_vectors(x).shape[-1]
    if head_dim % 2:
        raise ValueError(f"x has head_dim {head_dim} (its last dimension); accepted: an even number")
    vectors = x.reshape(-1, head_dim)
    out = torch.empty(len(vectors), head_dim // 2 + METADATA_BYTES, dtype=torch.uint8, device=x.device)
    for rows, block in zip(out.split(BLOCK_VECTORS), vectors.split(BLOCK_VECTORS), strict=True):
        rows.copy_(pack_codes(*quantize(check_finite(block.float(), limit=FP16_MAX))))
    return out.view(*x.shape[:-1], -1)


def pack_codes(codes: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Byte i of the first head_dim/2 is code_i | code_{i + head_dim/2} << 4; then s and o, little-endian fp16.

    Parameters
    ----------
    codes
        Float32 ``[..., head_dim]``, integers 0 … 15, even head_dim.
    scale, offset
        Float32 ``[..., 1]``, fp16 values.

    Returns
    -------
    torch.Tensor
        uint8 ``[..., head_dim / 2 + 4]``.
    """
    low, high = codes.to(torch.uint8).chunk(2, dim=-1)
    # Bytes by shifts, not by a view: little-endian on any machine.
    words = torch.cat([scale, offset], dim=-1).half().view(torch.int16)
    metadata = torch.stack([words & 0xFF, (words >> 8) & 0xFF], dim=-1).flatten(-2)
    return torch.cat([low | high << 4, metadata.to(torch.uint8)], dim=-1)
