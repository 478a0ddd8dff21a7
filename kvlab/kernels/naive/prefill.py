"""Prefill over the paged 4-bit cache, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvlab import codec
from kvlab.kernels.layout import read_cells
from kvlab.quantizers.base import saturate


def expand(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    spans: Sequence[tuple[int, int, int]],
    *,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read back some spans of tokens.

    Parameters
    ----------
    cache
        uint8 ``[num_blocks, num_kv_heads, block_size, head_dim + 8]``.
    block_table
        int32 ``[batch, max_blocks]``.
    spans
        (row of ``block_table``, first token, token after the last) each.
    dtype
        Of the results; the arithmetic is the codec's, float32.

    Returns
    -------
    tuple of torch.Tensor
        Keys and values, ``[tokens, num_kv_heads, head_dim]`` each, the spans one after the other.
    """
    parts = [
        [codec.decode(cells[:, start:]) for cells in read_cells(cache, block_table[sequence], stop)]
        for sequence, start, stop in spans
    ]
    return tuple(saturate(torch.cat(x, dim=1), dtype).transpose(0, 1).to(dtype) for x in zip(*parts, strict=True))


def prefill_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: Sequence[int],
    query_start_loc: Sequence[int],
    *,
    scale: float,
    value_mean: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Attend with the last tokens of each sequence to all of its tokens up to each of them.

    Parameters
    ----------
    q
        Rotated queries, ``[tokens, num_heads, head_dim]``.
    cache
        uint8 ``[num_blocks, num_kv_heads, block_size, head_dim + 8]``, the new tokens stored.
    block_table
        int32 ``[batch, max_blocks]``.
    seq_lens
        ``[batch]`` integers, the new tokens included.
    query_start_loc
        ``[batch + 1]`` integers: where each sequence's queries begin in ``q``, and where the last one's end.
    scale
        Multiplies the scores, head_dim^-0.5 as a rule.
    value_mean
        ``[num_kv_heads, head_dim]``, added to the output: what the scheme took off the values before it stored them.
    dtype
        Of the arithmetic and of the result.

    Returns
    -------
    torch.Tensor
        ``[tokens, num_heads, head_dim]``; zeros in rows that belong to no sequence.
    """
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    for sequence, length in enumerate(seq_lens):
        rows = slice(query_start_loc[sequence], query_start_loc[sequence + 1])
        new = rows.stop - rows.start
        if new == 0:
            continue
        keys, values = expand(cache, block_table, [(sequence, 0, length)], dtype=dtype)
        grouped = q[rows].to(dtype).unflatten(1, (cache.shape[1], -1))
        scores = torch.einsum("thgd,shd->thgs", grouped, keys) * scale
        future = torch.ones(new, length, dtype=torch.bool, device=q.device).triu(length - new + 1)
        weights = scores.masked_fill(future[:, None, None], -torch.inf).softmax(-1)
        result = torch.einsum("thgs,shd->thgd", weights, values)
        if value_mean is not None:
            result = result + value_mean.to(dtype)[:, None]
        out[rows] = result.flatten(1, 2)
    return out
