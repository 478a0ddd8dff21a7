"""Codes of some spans of tokens to numbers, in Triton: one program per region, every number by its own address."""

from __future__ import annotations

import triton
import triton.language as tl


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
    region = base + block * block_stride + head * head_stride + index % regions_per_block * (32 * (HEAD_DIM + 8))

    token, d = tl.arange(0, 32)[:, None], tl.arange(0, HEAD_DIM)[None, :]
    j, t, e = token >> 3, (token >> 1) & 3, token & 1
    key_at = (d >> 6) * 1024 + token * 32 + ((d & 63) >> 1)
    value_at = 16 * HEAD_DIM + j * 4 * HEAD_DIM + ((d >> 2) & 7) * (HEAD_DIM // 2) + t * (HEAD_DIM // 8)
    value_at += (d >> 5) * 4 + e * 2 + ((d & 3) >> 1)
    metadata = (region + 32 * HEAD_DIM).to(tl.pointer_type(tl.float16)) + (8 * t + 2 * j + e)
    nibble = 4 * (d & 1)

    at = index * 32 + token - tl.load(start + span)
    wanted = (at >= 0) & (at < tl.load(place + span + 1) - tl.load(place + span))
    to = ((tl.load(place + span) + at).to(tl.int64) * num_heads + head) * HEAD_DIM + d
    key = _numbers(tl.load(region + key_at) >> nibble, metadata, SATURATE)
    value = _numbers(tl.load(region + value_at) >> nibble, metadata + 64, SATURATE)
    tl.store(keys + to, key.to(keys.dtype.element_ty), mask=wanted)
    tl.store(values + to, value.to(values.dtype.element_ty), mask=wanted)


@triton.jit
def _numbers(codes, metadata, SATURATE: tl.constexpr):
    scale, offset = tl.load(metadata).to(tl.float32), tl.load(metadata + 32).to(tl.float32)
    x = (codes & 15).to(tl.float32) * scale + (offset + 0.0)
    if SATURATE:
        x = tl.where(x > 65504.0, 65504.0, tl.where(x < -65504.0, -65504.0, x))
    return x
