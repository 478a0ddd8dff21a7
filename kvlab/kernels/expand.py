"""Spans of tokens from the paged 4-bit cache back to numbers, dense: what FlashAttention reads during prefill."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvlab.checks import check_choice
from kvlab.kernels import nvrtc
from kvlab.kernels.arguments import check_alignment, check_block_table, check_dense, check_tensor
from kvlab.kernels.backends import choose_backend
from kvlab.kernels.layout import HEAD_DIMS, METADATA_BYTES, REGION_TOKENS, check_layout
from kvlab.kernels.naive import prefill as naive

_THREADS = 128  # of a block of expand.cu


class Span(NamedTuple):
    """Tokens ``start`` to ``stop`` (excluded) of the sequence in row ``sequence`` of a block table."""

    sequence: int
    start: int
    stop: int


class Spans:
    """Some spans, told to a device once for all layers.

    Parameters
    ----------
    spans
        (sequence, start, stop) each, any start and stop; every span has at least one token.
    device
        Where the caches are.

    Attributes
    ----------
    num_tokens, num_regions, longest, rows, stop : int
        All their tokens; the regions they touch; the longest one's tokens; the block table's rows and tokens that they
        need.
    table : torch.Tensor
        int32 ``[4, len(spans) + 1]``: sequence, first token, place in the workspace, number of regions before the span;
        the last column ends the last two.

    Raises
    ------
    ValueError
        There is none, or one is empty or before the first token.
    """

    def __init__(self, spans: Sequence[tuple[int, int, int]], device: torch.device | str):
        self.spans = tuple(Span(*span) for span in spans)
        for span in self.spans:
            if not 0 <= span.start < span.stop or span.sequence < 0:
                raise ValueError(f"spans has {tuple(span)}; accepted: (sequence, start, stop), 0 <= start < stop")
        if not self.spans:
            raise ValueError("spans is empty; accepted: at least one (sequence, start, stop)")
        lengths = [span.stop - span.start for span in self.spans]
        regions = [-(-span.stop // REGION_TOKENS) - span.start // REGION_TOKENS for span in self.spans]
        self.num_tokens, self.num_regions, self.longest = sum(lengths), sum(regions), max(lengths)
        self.rows = 1 + max(span.sequence for span in self.spans)
        self.stop = max(span.stop for span in self.spans)
        sequences, starts = [(*(span[i] for span in self.spans), 0) for i in (0, 1)]
        places, before = ((0, *itertools.accumulate(x)) for x in (lengths, regions))
        self.table = to_device((sequences, starts, places, before), device)

    def __len__(self):
        return len(self.spans)


def expand(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    spans: Spans,
    workspace: torch.Tensor,
    *,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read spans of tokens back into a dense workspace: x̂ of the codec, float32 arithmetic rounded once.

    Parameters
    ----------
    cache
        uint8 ``[num_blocks, num_kv_heads, block_size, head_dim + 8]``.
    block_table
        int32 ``[batch, max_blocks]`` on the cache's device.
    spans
        Which tokens.
    workspace
        ``[2, at least as many tokens, num_kv_heads, head_dim]``, contiguous; float16, bfloat16 or, but for CUDA,
        float32.
    backend
        See `kvlab.kernels.backends.choose_backend`.

    Returns
    -------
    tuple of torch.Tensor
        Keys and values, ``[tokens, num_kv_heads, head_dim]``: the workspace's front, the spans one after the other.

    Raises
    ------
    TypeError, ValueError
        An argument is not of these shapes, dtypes and lengths, or no backend runs on this device.
    """
    _check(cache, block_table, spans, workspace)
    keys, values = workspace[:, : spans.num_tokens]
    name = choose_backend(backend, cache.device, head_dim=keys.shape[-1], cuda_head_dims=HEAD_DIMS)
    _BACKENDS[name](cache, block_table, spans, keys, values)
    return keys, values


def to_device(numbers: Sequence[Sequence[int]], device: torch.device | str) -> torch.Tensor:
    """Copy host integers to an int32 tensor without waiting for the device."""
    pinned = torch.device(device).type == "cuda"
    return torch.tensor(numbers, dtype=torch.int32, pin_memory=pinned).to(device, non_blocking=True)


def _expand_cuda(cache, block_table, spans, keys, values) -> None:
    _kernel(keys.shape[-1], keys.dtype)(
        (spans.num_regions * cache.shape[1],),
        _THREADS,
        nvrtc.CacheArgument(cache),
        cache.shape[1],
        block_table,
        ctypes.c_int64(block_table.stride(0)),
        spans.table,
        len(spans),
        keys,
        values,
    )


@functools.cache
def _kernel(head_dim: int, dtype: torch.dtype) -> nvrtc.Kernel:
    check_choice(dtype, "workspace.dtype", (torch.float16, torch.bfloat16))
    return nvrtc.Kernel("expand.cu", "expand", HEAD_DIM=head_dim, BFLOAT=int(dtype == torch.bfloat16))


def _expand_triton(cache, block_table, spans, keys, values) -> None:
    from kvlab.kernels.triton.expand import expand_kernel

    expand_kernel[(spans.num_regions * cache.shape[1],)](
        cache,
        cache.stride(0),
        cache.stride(1),
        cache.shape[2] // REGION_TOKENS,
        cache.shape[1],
        block_table,
        block_table.stride(0),
        spans.table,
        len(spans),
        keys,
        values,
        HEAD_DIM=keys.shape[-1],
        SATURATE=keys.dtype == torch.float16,
    )


def _expand_naive(cache, block_table, spans, keys, values) -> None:
    for to, x in zip((keys, values), naive.expand(cache, block_table, spans.spans, dtype=keys.dtype), strict=True):
        to.copy_(x)


_BACKENDS = {"cuda": _expand_cuda, "triton": _expand_triton, "naive": _expand_naive}


def _check(cache, block_table, spans, workspace) -> None:
    if not isinstance(spans, Spans):
        raise TypeError(f"spans is a {type(spans).__name__}; accepted: a kvlab Spans")
    check_tensor(cache, "cache")
    check_layout(cache)
    check_alignment(cache, "cache")
    _, num_kv_heads, block_size, cell_bytes = cache.shape
    check_block_table(block_table, cache.device)
    rows, tokens = len(block_table), block_table.shape[1] * block_size
    if spans.rows > rows or spans.stop > tokens:
        accepted = f"the {rows} rows and {tokens} tokens of block_table"
        raise ValueError(f"spans has {spans.rows} rows, up to token {spans.stop}; accepted: within {accepted}")
    if spans.table.device != cache.device:
        raise ValueError(f"spans is on {spans.table.device}; accepted: {cache.device}, where cache is")
    check_tensor(workspace, "workspace")
    if workspace.ndim != 4:
        raise ValueError(f"workspace has shape {list(workspace.shape)}; accepted: [2, tokens, num_kv_heads, head_dim]")
    shape = (2, workspace.shape[1], num_kv_heads, cell_bytes - METADATA_BYTES)
    check_dense(workspace, "workspace", shape, (torch.float16, torch.bfloat16, torch.float32), cache.device)
    check_alignment(workspace, "workspace")
    if spans.num_tokens > workspace.shape[1]:
        raise ValueError(f"spans has {spans.num_tokens} tokens; accepted: at most the workspace's {workspace.shape[1]}")
