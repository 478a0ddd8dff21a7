"""Prefill attention over the paged 4-bit cache: read context back, run FlashAttention on it, merge if it took pieces.

Everything that a query sees is read through the codec, the chunk's own new tokens included, so the result depends
neither on how a prompt was cut into chunks nor on how much of it a prefix cache held.

The workspace is fp16: its range is the codec's own (scales and offsets are fp16), its rounding an eighth of bf16's.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from kvlab.checks import check_number, check_vectors
from kvlab.kernels.arguments import check_block_table, check_cache, check_dense
from kvlab.kernels.backends import choose_backend
from kvlab.kernels.expand import Span, Spans, expand, to_device
from kvlab.kernels.layout import HEAD_DIMS, METADATA_BYTES, check_layout

WORKSPACE_TOKENS = 65_536
"""What a workspace made here holds at most: 134 MB for 4 KV heads of 128 in fp16."""

_QUERY_SHRINK = 2.0**-5  # exact; queries below 2^21 fit fp16, the scale of the scores takes the factor back
_QUERY_BLOCK = 512  # queries at once on a CPU: bounds the scores held


class Flash(Protocol):
    """What `prefill_attention` asks of a FlashAttention: the keywords of its variable-length function.

    Sequence i has the queries ``q[cu_seqlens_q[i]:cu_seqlens_q[i + 1]]`` and the keys
    ``k[cu_seqlens_k[i]:cu_seqlens_k[i + 1]]``; under ``causal`` the last query sees the last key, and there are at
    least as many keys as queries. It returns the output (like ``q``) and the natural log-sum-exp of the scores, float32
    ``[num_heads, tokens]``. vLLM's FlashAttention 3 is
    ``partial(flash_attn_varlen_func, fa_version=3, return_softmax_lse=True)``.
    """

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float,
        causal: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend."""


def prefill_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: Sequence[int] | torch.Tensor,
    query_start_loc: Sequence[int] | torch.Tensor,
    *,
    scale: float,
    flash: Flash | None = None,
    workspace: torch.Tensor | None = None,
    value_mean: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Attend with the last tokens of each sequence to all of its tokens up to each of them.

    The new tokens are stored already. A context that fits the workspace takes one `expand` and one call of ``flash``,
    shared by neighbouring sequences as long as they fit together; a longer one is read in pieces whose outputs are
    merged in float32. Prefill is not captured in CUDA graphs: the lengths are the host's.

    Parameters
    ----------
    q
        Rotated queries, ``[tokens, num_heads, head_dim]``; head h reads KV head h // (num_heads / num_kv_heads).
    cache
        uint8 ``[num_blocks, num_kv_heads, block_size, head_dim + 8]``.
    block_table
        int32 ``[batch, max_blocks]`` on the cache's device.
    seq_lens
        ``[batch]`` integers on the host (a sequence or a CPU tensor), the new tokens included.
    query_start_loc
        ``[batch + 1]`` integers on the host: where each sequence's queries begin in ``q``, and where the last one's
        end. A sequence may have none.
    scale
        Multiplies the scores, head_dim^-0.5 as a rule.
    flash
        The attention that runs on the workspace; None is torch's own FlashAttention 2, and plain torch on a CPU.
    workspace
        ``[2, workspace_tokens, num_kv_heads, head_dim]``: keys and values, in the dtype that ``flash`` computes in. Its
        length is the bound. None makes one as long as is needed and at most `WORKSPACE_TOKENS`, in fp16, or in float32
        if ``q`` is.
    value_mean
        ``[num_kv_heads, head_dim]``, added to the output: what the scheme took off the values before it stored them.
    out
        Where to write, like ``q``; None makes one. Rows of no sequence are left as they are.
    backend
        What expands, see `expand`.

    Returns
    -------
    torch.Tensor
        ``out``.

    Raises
    ------
    TypeError, ValueError
        An argument is not of these shapes, dtypes and lengths, or no backend runs on this device.
    """
    num_kv_heads = _check(q, cache, block_table, scale)
    lengths, starts = _integers(seq_lens, "seq_lens"), _integers(query_start_loc, "query_start_loc")
    _check_lengths(lengths, starts, len(q))
    room = block_table.shape[1] * cache.shape[2]
    if len(lengths) > len(block_table) or max(lengths, default=0) > room:
        shape = f"the {len(block_table)} rows of {room} tokens of block_table"
        raise ValueError(f"seq_lens is {list(lengths)}; accepted: within {shape}")
    if workspace is None:
        shape = (2, min(WORKSPACE_TOKENS, max(sum(lengths), 1)), num_kv_heads, q.shape[2])
        dtype = torch.float32 if q.dtype == torch.float32 else torch.float16
        workspace = torch.empty(shape, dtype=dtype, device=q.device)
    if workspace.ndim != 4 or workspace.shape[1] == 0:
        raise ValueError(f"workspace has shape {list(workspace.shape)}; accepted: [2, 1 or more, heads, head_dim]")
    out = torch.empty_like(q) if out is None else out
    check_dense(out, "out", tuple(q.shape), (torch.bfloat16, torch.float16, torch.float32), q.device)
    if value_mean is not None:
        check_dense(value_mean, "value_mean", (num_kv_heads, q.shape[2]), (torch.float32,), q.device)
    choose_backend(backend, q.device, head_dim=q.shape[2], cuda_head_dims=HEAD_DIMS)
    flash = flash or (_flash_cuda if q.is_cuda else _flash_cpu)

    def attend(queries: torch.Tensor, part: _Part, spans: Spans, *, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
        return flash(
            queries,
            *expand(cache, block_table, spans, workspace, backend=backend),
            cu_seqlens_q=part.cu_seqlens_q,
            cu_seqlens_k=spans.table[2],
            max_seqlen_q=part.max_seqlen_q,
            max_seqlen_k=spans.longest,
            softmax_scale=scale / _QUERY_SHRINK,
            causal=causal,
        )

    stream = torch.cuda.current_stream(q.device) if q.is_cuda else None
    for part in _plan(lengths, starts, workspace.shape[1], q.device, stream):
        queries = torch.empty_like(q[part.rows], dtype=workspace.dtype)
        torch.mul(q[part.rows], _QUERY_SHRINK, out=queries)
        result, lse = attend(queries, part, part.spans, causal=True)
        if part.earlier:
            result = result.to(torch.float32, copy=True)
            for spans in part.earlier:
                lse = merge_(result, lse, *attend(queries, part, spans, causal=False))
        _write(result, value_mean, out[part.rows])
    return out


def merge_(out: torch.Tensor, lse: torch.Tensor, piece: torch.Tensor, piece_lse: torch.Tensor) -> torch.Tensor:
    """Join attention over two disjoint sets of keys: out ← (1 − w) out + w piece, w = sigmoid(piece_lse − lse).

    Parameters
    ----------
    out
        float32 ``[tokens, num_heads, head_dim]``, written in place.
    piece
        The same over the other keys, any floating dtype.
    lse, piece_lse
        Their log-sum-exps, float32 ``[num_heads, tokens]``.

    Returns
    -------
    torch.Tensor
        The joint log-sum-exp.
    """
    weight = torch.sigmoid(piece_lse - lse).mT.unsqueeze(-1)
    out.mul_(1 - weight).addcmul_(piece, weight)
    return torch.logaddexp(lse, piece_lse)


def _write(result: torch.Tensor, value_mean: torch.Tensor | None, out: torch.Tensor) -> None:
    if value_mean is None:
        out.copy_(result)
        return
    grouped, to = (x.unflatten(1, (len(value_mean), -1)) for x in (result, out))
    torch.add(grouped, value_mean[:, None], out=to)


class _Part(NamedTuple):
    """Queries of neighbouring sequences that are done together."""

    rows: slice
    cu_seqlens_q: torch.Tensor
    max_seqlen_q: int
    spans: Spans  # all that they see, or the end of it with all of their own tokens
    earlier: list[Spans]  # the pieces before, where one sequence is too long for the workspace


# Every layer of a step asks for the same; on another stream the tensors inside might not be there yet.
@functools.lru_cache(maxsize=4)
def _plan(
    seq_lens: tuple[int, ...],
    query_start_loc: tuple[int, ...],
    capacity: int,
    device: torch.device,
    stream: torch.cuda.Stream | None,
) -> list[_Part]:
    groups: list[list[tuple[int, Span]]] = []
    room = 0
    for sequence, (start, stop) in enumerate(itertools.pairwise(query_start_loc)):
        for first in range(start, stop, capacity):
            last = min(first + capacity, stop)
            seen = seq_lens[sequence] - (stop - last)
            if seen > room:
                groups.append([])
                room = capacity
            span = Span(sequence, max(seen - capacity, 0), seen)
            groups[-1].append((last, span))
            room -= span.stop - span.start
    starts = (query_start_loc[0], *(group[-1][0] for group in groups))
    return [
        _part(start, *zip(*group, strict=True), capacity, device) for start, group in zip(starts, groups, strict=False)
    ]


def _part(start: int, stops: tuple[int, ...], spans: tuple[Span, ...], capacity: int, device: torch.device) -> _Part:
    sequence, before, _ = spans[0]
    pieces = [Span(sequence, at, min(at + capacity, before)) for at in range(0, before, capacity)]
    return _Part(
        slice(start, stops[-1]),
        to_device([[0, *(stop - start for stop in stops)]], device)[0],
        max(b - a for a, b in itertools.pairwise((start, *stops))),
        Spans(spans, device),
        [Spans([piece], device) for piece in pieces],
    )


def _flash_cuda(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal):
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    options = {"dropout_p": 0.0, "is_causal": causal, "return_debug_mask": False, "scale": softmax_scale}
    result, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *lengths, **options)
    return result, lse


def _flash_cpu(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal):
    out, lse = torch.empty_like(q), torch.empty(q.shape[1], len(q))
    for (a, b), (c, d) in zip(*(itertools.pairwise(x.tolist()) for x in (cu_seqlens_q, cu_seqlens_k)), strict=True):
        keys, values = k[c:d].float(), v[c:d].float()
        for rows in torch.arange(a, b).split(_QUERY_BLOCK):
            grouped = q[rows].float().unflatten(1, (k.shape[1], -1))
            scores = torch.einsum("thgd,shd->hgts", grouped, keys) * softmax_scale
            if causal:
                sees = torch.arange(c, d) - d <= rows[:, None] - b
                scores = scores.masked_fill(~sees, -torch.inf)
            lse[:, rows] = scores.logsumexp(-1).flatten(0, 1)
            out[rows] = torch.einsum("hgts,shd->thgd", scores.softmax(-1), values).flatten(1, 2).to(out.dtype)
    return out, lse


def _integers(x: Sequence[int] | torch.Tensor, name: str) -> tuple[int, ...]:
    accepted = "accepted: integers on the host, a list or a CPU tensor"
    if isinstance(x, torch.Tensor) and (x.device.type != "cpu" or x.ndim != 1):
        raise TypeError(f"{name} is a tensor {list(x.shape)} on {x.device}; {accepted}")
    try:
        numbers = x.tolist() if isinstance(x, torch.Tensor) else list(x)
        return tuple(operator.index(number) for number in numbers)
    except TypeError:
        raise TypeError(f"{name} is {x!r}; {accepted}") from None


def _check(q, cache, block_table, scale) -> int:
    """Return num_kv_heads."""
    check_layout(cache)
    num_kv_heads, head_dim = cache.shape[1], cache.shape[3] - METADATA_BYTES
    check_number(scale, "scale")
    if check_vectors(q, "q", head_dim=head_dim).ndim != 3 or q.shape[1] % num_kv_heads:
        accepted = f"[tokens, a multiple of {num_kv_heads} heads, {head_dim}]"
        raise ValueError(f"q has shape {list(q.shape)}; accepted: {accepted}")
    check_cache(cache, num_kv_heads, head_dim, q.device)
    check_block_table(block_table, q.device)
    return num_kv_heads


def _check_lengths(seq_lens: tuple[int, ...], query_start_loc: tuple[int, ...], num_queries: int) -> None:
    if len(query_start_loc) != len(seq_lens) + 1:
        numbers = len(query_start_loc)
        raise ValueError(
            f"query_start_loc has {numbers} numbers; accepted: {len(seq_lens) + 1}, one more than seq_lens"
        )
    new = [b - a for a, b in itertools.pairwise(query_start_loc)]
    if query_start_loc[0] < 0 or query_start_loc[-1] > num_queries or min(new, default=0) < 0:
        accepted = f"rising, within the {num_queries} rows of q"
        raise ValueError(f"query_start_loc is {list(query_start_loc)}; accepted: {accepted}")
    for length, queries in zip(seq_lens, new, strict=True):
        if length < queries:
            raise ValueError(
                f"seq_lens has {length} for a sequence with {queries} new tokens; accepted: at least those"
            )
