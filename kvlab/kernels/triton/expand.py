"""Codes of some spans of tokens to numbers, in Triton: one program per region, every number by its own address."""

from __future__ import annotations

import triton
import triton.language as tl

from kvlab.kernels.triton.region import key_at, number_at, value_at


@triton.jit
def expand_kernel(
    base,
    block_stride,
    head_stride,
    regions_per_block,
    num_heads,
    block_table,
    table_stride,
    spans,
    num_spans,
    keys,
    values,
    HEAD_DIM: tl.constexpr,
    SATURATE: tl.constexpr,
):
    """See ``cuda/expand.cu``: the same arguments, the same work per program."""
    head, nth = tl.program_id(0) % num_heads, tl.program_id(0) // num_heads
    start, place, first = spans + (num_spans + 1), spans + 2 * (num_spans + 1), spans + 3 * (num_spans + 1)
    span, end = 0, num_spans
    while end - span > 1:
        middle = (span + end) // 2
        before = tl.load(first + middle) <= nth
        span, end = tl.where(before, middle, span), tl.where(before, end, middle)
    index = tl.load(start + span) // 32 + nth - tl.load(first + span)
    block = tl.load(block_table + tl.load(spans + span) * table_stride + index // regions_per_block).to(tl.int64)
    region = (
        base
        + block * block_stride
        + head.to(tl.int64) * head_stride
        + index % regions_per_block * (32 * (HEAD_DIM + 8))
    )

    token, d = tl.arange(0, 32)[:, None], tl.arange(0, HEAD_DIM)[None, :]
    metadata = (region + 32 * HEAD_DIM).to(tl.pointer_type(tl.float16)) + number_at(token)
    nibble = 4 * (d & 1)

    at = index * 32 + token - tl.load(start + span)
    wanted = (at >= 0) & (at < tl.load(place + span + 1) - tl.load(place + span))
    to = ((tl.load(place + span) + at).to(tl.int64) * num_heads + head) * HEAD_DIM + d
    key = _numbers(tl.load(region + key_at(token, d)) >> nibble, metadata, SATURATE)
    value = _numbers(tl.load(region + value_at(token, d, HEAD_DIM)) >> nibble, metadata + 64, SATURATE)
    tl.store(keys + to, key.to(keys.dtype.element_ty), mask=wanted)
    tl.store(values + to, value.to(values.dtype.element_ty), mask=wanted)


@triton.jit
def _numbers(codes, metadata, SATURATE: tl.constexpr):
    scale, offset = tl.load(metadata).to(tl.float32), tl.load(metadata + 32).to(tl.float32)
    x = (codes & 15).to(tl.float32) * scale + (offset + 0.0)
    if SATURATE:
        x = tl.where(x > 65504.0, 65504.0, tl.where(x < -65504.0, -65504.0, x))
    return x
