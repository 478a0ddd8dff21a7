"""From the qkv projection's output to rotated queries and 4-bit cells, in plain torch."""

from __future__ import annotations

import torch

from kvlab.checks import FP16_MAX
from kvlab.kernels.folding import Folding, encoder
from kvlab.kernels.layout import write_cells


def norm_rotate_store(
    qkv: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    folding: Folding,
    *,
    num_heads: int,
    num_kv_heads: int,
    eps: float = 1e-6,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Rotate the queries of all tokens, and store the keys and values of those that have a slot.

    Parameters
    ----------
    qkv
        ``[tokens, (num_heads + 2 num_kv_heads) · head_dim]``.
    cache
        uint8 ``[num_blocks, num_kv_heads, block_size, head_dim + 8]``, written in place.
    slot_mapping
        int64 ``[at most tokens]``; a negative slot is skipped.
    folding
        The layer's matrices, biases and quantizers.
    num_heads, num_kv_heads, eps
        The layer's heads, and the number that its norms add to the mean square.
    dtype
        Of the arithmetic and of the result.

    Returns
    -------
    torch.Tensor
        ``[tokens, num_heads, head_dim]``.
    """
    q, keys, values = rotate(qkv, folding, num_heads=num_heads, num_kv_heads=num_kv_heads, eps=eps, dtype=dtype)
    if slots := len(slot_mapping):
        sides = (keys, folding.k_quantizer), (values, folding.v_quantizer)
        write_cells(cache, slot_mapping, *(encoder(quantizer)(saturate(x[:slots])) for x, quantizer in sides))
    return q


def rotate(
    qkv: torch.Tensor,
    folding: Folding,
    *,
    num_heads: int,
    num_kv_heads: int,
    eps: float = 1e-6,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute what `norm_rotate_store` returns and, before their codes, stores; arguments as there.

    Returns
    -------
    tuple of torch.Tensor
        Queries ``[tokens, num_heads, head_dim]``; keys and values ``[tokens, num_kv_heads, head_dim]``.
    """
    heads = qkv.to(dtype).unflatten(-1, (-1, folding.head_dim))
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    grouped = normalise(q, eps).unflatten(1, (num_kv_heads, -1))
    rotated = (grouped @ folding.q_matrix.to(dtype).mT).flatten(1, 2)
    return (
        rotated,
        _affine(normalise(k, eps), folding.k_matrix, folding.k_bias),
        _affine(v, folding.v_matrix, folding.v_bias),
    )


def normalise(x: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS-norm without gain: x / sqrt(mean(x²) + eps) over the last dimension."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def saturate(x: torch.Tensor) -> torch.Tensor:
    """Bring vectors into the range that the codec accepts, as a kernel must: fp16's range, and 0 for NaN."""
    return x.nan_to_num(nan=0.0).clamp(-FP16_MAX, FP16_MAX)


def _affine(x: torch.Tensor, matrix: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply the vectors of each head ``[tokens, num_kv_heads, head_dim]`` by its matrix and add its bias."""
    y = x if matrix is None else (x.unsqueeze(-2) @ matrix.to(x.dtype).mT).squeeze(-2)
    return y if bias is None else y + bias.to(x.dtype)
