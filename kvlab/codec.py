"""The bytes of one vector in the 4-bit cache.

For the vector x of one token and head: o = fp16(min x), s = fp16(max(max x − o, 0)/15), codes =
clamp(round((x − o)/s), 0, 15) with ties to even, and 0 where s = 0; x̂ = o + s·code. Byte i of the
first head_dim/2 is code_i | code_{i + head_dim/2} << 4; then come s and o, little-endian fp16.
"""

from __future__ import annotations

import torch

from kvlab.quantizers.base import BLOCK_VECTORS, saturate
from kvlab.quantizers.integer import dequantize_asymmetric_, quantize_asymmetric
from kvlab.quantizers.packing import METADATA_BYTES, encode_vectors

_BITS = 4


def encode(x: torch.Tensor) -> torch.Tensor:
    """Encode vectors to the bytes that a cache holds.

    Parameters
    ----------
    x
        ``[..., head_dim]``, any float dtype, any device, even head_dim.

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
    return encode_vectors(x, lambda block: quantize_asymmetric(block, _BITS))


def decode(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Decode what `encode` returned.

    Parameters
    ----------
    codes
        uint8 ``[..., head_dim / 2 + 4]``, any device. A scale or offset whose bytes are NaN or infinite, which
        `encode` never writes, passes through the arithmetic as it is.
    dtype
        The floating dtype of the result; the arithmetic is float32. float16 saturates at ±65,504.

    Returns
    -------
    torch.Tensor
        ``[..., head_dim]`` on the same device.

    Raises
    ------
    TypeError
        ``codes`` is not a uint8 tensor or ``dtype`` is not a floating dtype.
    ValueError
        ``codes`` is empty or its last dimension is shorter than 5 bytes.
    """
    if not isinstance(codes, torch.Tensor) or codes.dtype != torch.uint8:
        kind = codes.dtype if isinstance(codes, torch.Tensor) else type(codes).__name__
        raise TypeError(f"codes is a {kind}; accepted: a torch.uint8 tensor")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype is {dtype!r}; accepted: a floating dtype (torch.float32, torch.bfloat16, …)")
    if codes.numel() == 0 or codes.ndim == 0 or codes.shape[-1] <= METADATA_BYTES:
        raise ValueError(f"codes has shape {list(codes.shape)}; accepted: [..., head_dim / 2 + 4], so 5 bytes or more")
    vectors = codes.reshape(-1, codes.shape[-1])
    head_dim = 2 * (codes.shape[-1] - METADATA_BYTES)
    out = torch.empty(len(vectors), head_dim, dtype=dtype, device=codes.device)
    for rows, block in zip(out.split(BLOCK_VECTORS), vectors.split(BLOCK_VECTORS), strict=True):
        rows.copy_(saturate(_decode_block(block), dtype))
    return out.view(*codes.shape[:-1], head_dim)


def _decode_block(encoded: torch.Tensor) -> torch.Tensor:
    packed, metadata = encoded[:, :-METADATA_BYTES], encoded[:, -METADATA_BYTES:].to(torch.int16)
    codes = torch.cat([packed & 0xF, packed >> 4], dim=-1).float()
    words = metadata[:, 0::2] | metadata[:, 1::2] << 8
    scale, offset = words.view(torch.float16).float().chunk(2, dim=-1)
    return dequantize_asymmetric_(codes, scale, offset)
