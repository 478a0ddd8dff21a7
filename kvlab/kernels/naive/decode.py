"""Decode attention over the paged 4-bit cache, in plain torch."""

from __future__ import annotations

import torch

from kvlab import codec
from kvlab.kernels.layout import read_cells


def decode_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    q_len: int = 1,
    value_mean: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with the last ``q_len`` tokens of each sequence to all of its tokens up to each of them.

    Parameters
    ----------
    q
        Rotated queries, ``[batch · q_len, num_heads, head_dim]``, the tokens of a sequence in order.
    cache
        uint8 ``[num_blocks, num_kv_heads, block_size, head_dim + 8]``.
    block_table
        int32 ``[batch, max_blocks]``.
    seq_lens
        int32 ``[batch]``, the new tokens included; 0 is an empty sequence.
    scale
        Multiplies the scores, head_dim^-0.5 as a rule.
    q_len
        New tokens of every sequence.
    value_mean
        ``[num_kv_heads, head_dim]``, added to the output: what the scheme took off the values before it stored them.
    dtype
        Of the arithmetic and of the results.

    Returns
    -------
    tuple of torch.Tensor
        Output ``[batch · q_len, num_heads, head_dim]`` and the natural log-sum-exp of the scores
        ``[batch · q_len, num_heads]``; zeros and −inf where a sequence is shorter than that token's place.
    """
    num_kv_heads = cache.shape[1]
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=dtype, device=q.device)
    for sequence, length in enumerate(seq_lens.tolist()):
        keys, values = (
            (codec.decode(cells).to(dtype) for cells in read_cells(cache, block_table[sequence], length))
            if length
            else (None, None)
        )
        for token in range(q_len):
            visible = length - q_len + token + 1
            if visible <= 0:
                continue
            row = sequence * q_len + token
            grouped = q[row].to(dtype).unflatten(0, (num_kv_heads, -1))
            scores = grouped @ keys[:, :visible].mT * scale
            result = scores.softmax(-1) @ values[:, :visible]
            if value_mean is not None:
                result = result + value_mean.to(dtype)[:, None]
            out[row], lse[row] = result.flatten(0, 1), scores.logsumexp(-1).flatten()
    return out, lse
