"""From the qkv projection's output to rotated queries and 4-bit cells: the portable kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvlab.checks import FP16_MAX
from kvlab.kernels.folding import REFIT, Folding
from kvlab.kernels.layout import REGION_TOKENS
from kvlab.kernels.triton.region import key_at, number_at, value_at
from kvlab.quantizers.selection import CLEARLY_LESS
from kvlab.quantizers.unequal import STEPS

_TOKENS = 32
"""Tokens of one program: on an H200, 16 are hardly faster for a few tokens, and take twice as long for thousands."""

_DEPTH = 32
"""Dimensions multiplied at once: 32 columns of a 256 x 256 float32 matrix are 32 KB."""

_FP16_MAX = tl.constexpr(FP16_MAX)
_REGION_TOKENS = tl.constexpr(REGION_TOKENS)
_LARGEST_CODE = tl.constexpr(15.0)
_TO_INTEGER = tl.constexpr(1.5 * 2**23)
"""float32 numbers of this size are integers: adding and subtracting it rounds half to even."""

_FINE_STEPS = tl.constexpr(STEPS)

_CLIP = tl.constexpr(REFIT.clips[1])
_CLEARLY_LESS = tl.constexpr(CLEARLY_LESS)


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
    refit_keys, refit_values = folding.refits
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
        REFIT_KEYS=refit_keys,
        REFIT_VALUES=refit_values,
        FINE_KEYS=folding.fine,
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
    REFIT_KEYS: tl.constexpr,
    REFIT_VALUES: tl.constexpr,
    FINE_KEYS: tl.constexpr,
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
        _store(y, region, at, place, 0, slot >= 0, HEAD_DIM, TOKENS, REFIT_KEYS, FINE_KEYS)
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
        _store(y, region, at, place, 2, slot >= 0, HEAD_DIM, TOKENS, REFIT_VALUES, 0)


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
def _store(
    y,
    region,
    at,
    place,
    ROW: tl.constexpr,
    mask,
    HEAD_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    REFIT: tl.constexpr,
    FINE: tl.constexpr,
):
    """Encode vectors: codes of 4 dimensions to byte ``at``, scale and offset to two rows of metadata."""
    if REFIT:
        codes, scale, offset = _refit(y, HEAD_DIM, TOKENS, FINE)
    else:
        codes, scale, offset = _encode(y, y, tl.min(y, 1), tl.max(y, 1), HEAD_DIM, TOKENS, FINE)
    if FINE > 0:
        # The last channels are copies of the first: these keep the high halves of eight bits, those the low ones.
        channel = tl.arange(0, HEAD_DIM)[None, :]
        high = tl.floor(codes / 16)
        codes = tl.where(channel >= HEAD_DIM - FINE, codes - 16 * high, tl.where(channel < FINE, high, codes))
    shifts = tl.arange(0, HEAD_DIM)[None, :] % 4 * 4
    words = tl.sum(tl.reshape(codes.to(tl.int32) << shifts, (TOKENS, HEAD_DIM // 4, 4)), 2)
    tl.store((region[:, None] + at).to(tl.pointer_type(tl.uint16)), words.to(tl.uint16), mask[:, None])
    number = number_at(place)
    row = (region + _REGION_TOKENS * HEAD_DIM + ROW * 2 * _REGION_TOKENS).to(tl.pointer_type(tl.float16))
    tl.store(row + number, scale, mask)
    tl.store(row + _REGION_TOKENS + number, offset, mask)


@triton.jit
def _encode(within, y, low, high, HEAD_DIM: tl.constexpr, TOKENS: tl.constexpr, FINE: tl.constexpr):
    """Encode vectors, ``within`` being ``y`` between ``low`` and ``high``, as the codec does: codes, scale, offset."""
    # Adding 0 makes the zero positive.
    offset = (low + 0.0).to(tl.float16)
    span = tl.maximum(high - offset.to(tl.float32), 0.0)
    scale = tl.div_rn(span, tl.full((TOKENS,), _LARGEST_CODE, tl.float32)).to(tl.float16)
    return _with_fine(_nearest(within, scale, offset), y, scale, offset, FINE), scale, offset


@triton.jit
def _nearest(y, scale, offset):
    """Find the nearest codes, integers in float32."""
    return _to_integers(_steps(y, scale, offset), 1)


@triton.jit
def _steps(y, scale, offset):
    """Say how many scales above the offset numbers are; none where the scale is 0."""
    divisor = tl.where(scale > 0, scale.to(tl.float32), float("inf"))
    return tl.div_rn(y - offset.to(tl.float32)[:, None], tl.broadcast_to(divisor[:, None], y.shape))


@triton.jit
def _to_integers(steps, STEPS: tl.constexpr):
    return tl.minimum(tl.maximum(STEPS * steps, 0.0), STEPS * _LARGEST_CODE) + _TO_INTEGER - _TO_INTEGER


@triton.jit
def _with_fine(codes, y, scale, offset, FINE: tl.constexpr):
    """Put codes of eight bits in both places of the fine channels."""
    if FINE > 0:
        channel = tl.arange(0, y.shape[1])[None, :]
        fine = _to_integers(_steps(y, scale, offset), _FINE_STEPS)
        codes = tl.where((channel < FINE) | (channel >= y.shape[1] - FINE), fine, codes)
    return codes


@triton.jit
def _squared_error(y, codes, scale, offset, FINE: tl.constexpr):
    """Sum what the stored vectors err, squared; a fine channel counts in the first of its places."""
    scale, offset = scale.to(tl.float32)[:, None], offset.to(tl.float32)[:, None]
    error = codes * scale + offset - y
    if FINE > 0:
        channel = tl.arange(0, y.shape[1])[None, :]
        error = tl.where(channel < FINE, codes * scale / _FINE_STEPS + offset - y, error)
        error = tl.where(channel < y.shape[1] - FINE, error, 0.0)
    return tl.sum(error * error, 1)


@triton.jit
def _holds(y, scale, offset, FINE: tl.constexpr):
    """Whether a range holds all fine channels, to half a step."""
    steps = _FINE_STEPS * _steps(y, scale, offset)
    outside = (steps < -0.5) | (steps > _FINE_STEPS * _LARGEST_CODE + 0.5)
    return tl.max((outside & (tl.arange(0, y.shape[1])[None, :] < FINE)).to(tl.int32), 1) == 0


@triton.jit
def _refit(y, HEAD_DIM: tl.constexpr, TOKENS: tl.constexpr, FINE: tl.constexpr):
    """Encode as `RefitInteger`, or `RefitUnequalInteger`: the best of four ranges, then a regression on its codes."""
    lowest, highest = tl.min(y, 1), tl.max(y, 1)
    cut = (highest - lowest) * _CLIP
    codes, scale, offset = _encode(y, y, lowest, highest, HEAD_DIM, TOKENS, FINE)
    least = _squared_error(y, codes, scale, offset, FINE)
    for candidate in tl.static_range(1, 4):
        low = lowest + cut if candidate // 2 else lowest
        high = highest - cut if candidate % 2 else highest
        within = tl.minimum(tl.maximum(y, low[:, None]), high[:, None])
        new_codes, new_scale, new_offset = _encode(within, y, low, high, HEAD_DIM, TOKENS, FINE)
        codes, scale, offset, least = _better(y, codes, scale, offset, least, new_codes, new_scale, new_offset, FINE)
    old_offset = offset.to(tl.float32)
    above, regressed = y - old_offset[:, None], codes
    if FINE > 0:
        channel = tl.arange(0, HEAD_DIM)[None, :]
        coarse = (channel >= FINE) & (channel < HEAD_DIM - FINE)
        above, regressed = tl.where(coarse, above, 0.0), tl.where(coarse, codes, 0.0)
    n: tl.constexpr = HEAD_DIM - 2 * FINE
    sum_codes, sum_above = tl.sum(regressed, 1), tl.sum(above, 1)
    squares, products = tl.sum(regressed * regressed, 1), tl.sum(regressed * above, 1)
    # Of integers, and exact; where it is 0 so is what it divides, or should be.
    spread = squares * n - sum_codes * sum_codes
    slope = (products * n - sum_codes * sum_above) / tl.where(spread > 0, spread, float("inf"))
    new_offset = (old_offset + (sum_above - slope * sum_codes) / n).to(tl.float16)
    # The best scale for the offset as fp16 holds it.
    products -= (new_offset.to(tl.float32) - old_offset) * sum_codes
    new_scale = tl.maximum(products / tl.where(squares > 0, squares, float("inf")), 0.0).to(tl.float16)
    new_codes = _nearest(y, new_scale, new_offset)
    new_codes = _with_fine(new_codes, y, new_scale, new_offset, FINE)
    codes, scale, offset, least = _better(y, codes, scale, offset, least, new_codes, new_scale, new_offset, FINE)
    return codes, scale, offset


@triton.jit
def _better(y, codes, scale, offset, least, new_codes, new_scale, new_offset, FINE: tl.constexpr):
    """Choose the new ones where they err clearly less, and say how much the chosen err; not finite is not less."""
    error = _squared_error(y, new_codes, new_scale, new_offset, FINE)
    less = error < least * _CLEARLY_LESS
    if FINE > 0:
        less &= _holds(y, new_scale, new_offset, FINE)
    return (
        tl.where(less[:, None], new_codes, codes),
        tl.where(less, new_scale, scale),
        tl.where(less, new_offset, offset),
        tl.where(less, error, least),
    )
