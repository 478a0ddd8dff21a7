"""From the qkv projection's output to rotated queries and 4-bit cells: the portable kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from kvlab.checks import FP16_MAX
from kvlab.kernels.layout import REGION_TOKENS
from kvlab.kernels.triton.region import key_at, number_at, value_at

if TYPE_CHECKING:
    from kvlab.kernels.folding import Folding

_TOKENS = 32
"""Tokens of one program: on an H200, 16 are hardly faster for a few tokens, and take twice as long for thousands."""

_DEPTH = 32
"""Dimensions multiplied at once: 32 columns of a 256 x 256 float32 matrix are 32 KB."""

_FP16_MAX = tl.constexpr(FP16_MAX)
_REGION_TOKENS = tl.constexpr(REGION_TOKENS)
_TO_INTEGER = tl.constexpr(1.5 * 2**23)
"""float32 numbers of this size are integers: adding and subtracting it rounds half to even."""


def norm_rotate_store(
    qkv: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    folding: Folding,
    *,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
    out: torch.Tensor,
    debug: tuple[torch.Tensor | None, torch.Tensor | None],
) -> None:
    """Launch the kernel on arguments that `kvlab.kernels.store.norm_rotate_store` has checked; shapes as there."""
    tokens, head_dim = len(qkv), folding.head_dim
    matrices = (folding.q_matrix, folding.k_matrix, folding.v_matrix)
    _kernel[(triton.cdiv(tokens, _TOKENS), num_heads + 2 * num_kv_heads)](
        qkv,
        qkv.stride(0),
        tokens,
        slot_mapping,
        len(slot_mapping),
        eps,
        *matrices,
        *(0 if x is None or len(x) == 1 else head_dim * head_dim for x in matrices),
        folding.k_bias,
        folding.v_bias,
        cache,
        cache.stride(0),
        cache.stride(1),
        cache.shape[2],
        out,
        *debug,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        TOKENS=_TOKENS,
        DEPTH=_DEPTH,
    )


@triton.jit
def _kernel(
    qkv,
    token_stride,
    tokens,
    slot_mapping,
    slots,
    eps,
    q_matrix,
    k_matrix,
    v_matrix,
    q_stride,
    k_stride,
    v_stride,
    k_bias,
    v_bias,
    cache,
    block_stride,
    head_stride,
    block_size,
    out,
    debug_keys,
    debug_values,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """One head of a few tokens; heads are the queries', then the keys', then the values'."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    x = qkv + token[:, None] * token_stride + head * HEAD_DIM
    d = tl.arange(0, HEAD_DIM)[None, :]
    if head < NUM_HEADS:
        matrix = q_matrix + head // (NUM_HEADS // NUM_KV_HEADS) * q_stride
        y = _rotate(x, token < tokens, matrix, eps, HEAD_DIM, TOKENS, DEPTH, NORMALISE=True)
        tl.store(out + (token[:, None] * NUM_HEADS + head) * HEAD_DIM + d, y.to(tl.bfloat16), token[:, None] < tokens)
    elif head < NUM_HEADS + NUM_KV_HEADS:
        kv_head = head - NUM_HEADS
        y = _rotate(x, token < slots, k_matrix + kv_head * k_stride, eps, HEAD_DIM, TOKENS, DEPTH, NORMALISE=True)
        y = _shift(y, k_bias, kv_head, HEAD_DIM)
        if debug_keys is not None:
            tl.store(debug_keys + (token[:, None] * NUM_KV_HEADS + kv_head) * HEAD_DIM + d, y, token[:, None] < slots)
        slot = tl.load(slot_mapping + token, token < slots, other=-1)
        region, place = _region(cache, slot, kv_head, block_stride, head_stride, block_size, HEAD_DIM)
        at = key_at(place[:, None], 4 * tl.arange(0, HEAD_DIM // 4)[None, :])
        _store(y, region, at, place, 0, slot >= 0, HEAD_DIM, TOKENS)
    else:
        kv_head = head - NUM_HEADS - NUM_KV_HEADS
        if v_matrix is None:
            y = tl.load(x + d, token[:, None] < slots, other=0.0).to(tl.float32)
        else:
            y = _rotate(x, token < slots, v_matrix + kv_head * v_stride, eps, HEAD_DIM, TOKENS, DEPTH, NORMALISE=False)
        y = _shift(y, v_bias, kv_head, HEAD_DIM)
        if debug_values is not None:
            tl.store(debug_values + (token[:, None] * NUM_KV_HEADS + kv_head) * HEAD_DIM + d, y, token[:, None] < slots)
        slot = tl.load(slot_mapping + token, token < slots, other=-1)
        region, place = _region(cache, slot, kv_head, block_stride, head_stride, block_size, HEAD_DIM)
        at = value_at(place[:, None], 4 * tl.arange(0, HEAD_DIM // 4)[None, :], HEAD_DIM)
        _store(y, region, at, place, 2, slot >= 0, HEAD_DIM, TOKENS)


@triton.jit
def _rotate(
    x,
    mask,
    matrix,
    eps,
    HEAD_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    """Multiply the vectors at ``x``, normalised or not, by a matrix: float32 ``[TOKENS, HEAD_DIM]``."""
    row = tl.arange(0, HEAD_DIM)[None, :]
    factor = tl.full((TOKENS,), 1.0, tl.float32)
    if NORMALISE:
        whole = tl.load(x + row, mask[:, None], other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(whole * whole, 1) / HEAD_DIM + eps)
    y = tl.zeros((TOKENS, HEAD_DIM), tl.float32)
    for first in range(0, HEAD_DIM, DEPTH):
        column = first + tl.arange(0, DEPTH)
        part = tl.load(x + column[None, :], mask[:, None], other=0.0).to(tl.float32)
        transposed = tl.load(matrix + row * HEAD_DIM + column[:, None])
        y = tl.dot(part * factor[:, None], transposed, acc=y, input_precision="ieee")
    return y


@triton.jit
def _shift(y, bias, kv_head, HEAD_DIM: tl.constexpr):
    """Add the head's bias and bring the vectors into fp16's range, 0 for NaN."""
    if bias is not None:
        y += tl.load(bias + kv_head * HEAD_DIM + tl.arange(0, HEAD_DIM))[None, :]
    return tl.where(y == y, tl.minimum(tl.maximum(y, -_FP16_MAX), _FP16_MAX), 0.0)


@triton.jit
def _region(cache, slot, kv_head, block_stride, head_stride, block_size, HEAD_DIM: tl.constexpr):
    """Where the region of each slot starts, and the token's place in it."""
    place = slot % block_size
    size: tl.constexpr = _REGION_TOKENS * (HEAD_DIM + 8)
    region = (
        cache + slot // block_size * block_stride + kv_head.to(tl.int64) * head_stride + place // _REGION_TOKENS * size
    )
    return region, place % _REGION_TOKENS


@triton.jit
def _store(y, region, at, place, ROW: tl.constexpr, mask, HEAD_DIM: tl.constexpr, TOKENS: tl.constexpr):
    """Encode as the codec does: codes of 4 dimensions to byte ``at``, scale and offset to two rows of metadata."""
    # Adding 0 makes the zero positive.
    offset = (tl.min(y, 1) + 0.0).to(tl.float16)
    span = tl.maximum(tl.max(y, 1) - offset.to(tl.float32), 0.0)
    scale = tl.div_rn(span, tl.full((TOKENS,), 15.0, tl.float32)).to(tl.float16)
    divisor = tl.where(scale > 0, scale.to(tl.float32), float("inf"))
    quotient = tl.div_rn(y - offset.to(tl.float32)[:, None], tl.broadcast_to(divisor[:, None], (TOKENS, HEAD_DIM)))
    codes = (tl.minimum(tl.maximum(quotient, 0.0), 15.0) + _TO_INTEGER - _TO_INTEGER).to(tl.int32)
    shifts = tl.arange(0, HEAD_DIM)[None, :] % 4 * 4
    words = tl.sum(tl.reshape(codes << shifts, (TOKENS, HEAD_DIM // 4, 4)), 2)
    tl.store((region[:, None] + at).to(tl.pointer_type(tl.uint16)), words.to(tl.uint16), mask[:, None])
    number = number_at(place)
    row = (region + _REGION_TOKENS * HEAD_DIM + ROW * 2 * _REGION_TOKENS).to(tl.pointer_type(tl.float16))
    tl.store(row + number, scale, mask)
    tl.store(row + _REGION_TOKENS + number, offset, mask)
