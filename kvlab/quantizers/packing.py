"""4-bit codes and their fp16 scale and offset as the bytes of `kvlab.codec`."""

from __future__ import annotations

import torch


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
