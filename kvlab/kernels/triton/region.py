"""Where the bytes of a region lie, in Triton: `kvlab.kernels.layout` says the same for tensors."""

from __future__ import annotations

import triton
import triton.language as tl

from kvlab.kernels.layout import REGION_TOKENS

TOKENS = tl.constexpr(REGION_TOKENS)


@triton.jit
def key_at(token, d):
    """Return the byte that holds dimension d of a token's key, in its low bits if d is even."""
    return d // 64 * 1024 + token * 32 + d % 64 // 2


@triton.jit
def value_at(token, d, HEAD_DIM: tl.constexpr):
    """Return the byte that holds dimension d of a token's value, in its low bits if d is even."""
    j, t, e = token // 8, token // 2 % 4, token % 2
    of_token = 16 * HEAD_DIM + j * (4 * HEAD_DIM) + t * (HEAD_DIM // 8) + e * 2
    return of_token + d // 4 % 8 * (HEAD_DIM // 2) + d // 32 * 4 + d % 4 // 2


@triton.jit
def number_at(token):
    """Return which of the 32 numbers of a row of metadata is a token's."""
    return 8 * (token // 2 % 4) + 2 * (token // 8) + token % 2


@triton.jit
def read_region(region, present, HEAD_DIM: tl.constexpr):
    """Read a region.

    It is addressed in words of 4 bytes, token T = 8j + 2t + e: a key has 8 words for every 64 dimensions, 32 tokens of
    them in a row; the values and the metadata have words for each pair of tokens (j, t).

    Parameters
    ----------
    region
        Pointer to its first byte.
    present
        ``[32]``, whether each token belongs to the sequence.
    HEAD_DIM
        64, 128 or 256.

    Returns
    -------
    keys
        int32 ``[32, head_dim / 8]``; bits 4n of halfword c of a token hold dimension 4c + n.
    values
        int32 ``[16, head_dim / 4]``; bits 4n of word g · head_dim / 32 + i hold dimension 32i + 4g + n: in the low half
        the even token's of a pair, in the high half the odd one's.
    key_scale, key_offset, value_scale, value_offset
        float32 ``[32]``, zero where no token is present.
    """
    words = region.to(tl.pointer_type(tl.int32))
    CODES: tl.constexpr = TOKENS * HEAD_DIM // 8
    token, pair = tl.arange(0, TOKENS), tl.arange(0, TOKENS // 2)
    eighth, quarter = tl.arange(0, HEAD_DIM // 8), tl.arange(0, HEAD_DIM // 4)
    j, t = pair // 4, pair % 4
    key_column = eighth // 8 * (8 * TOKENS) + eighth % 8
    keys = tl.load(words + 8 * token[:, None] + key_column[None, :])
    value_at = CODES + j * HEAD_DIM + t * (HEAD_DIM // 32)
    value_column = quarter // (HEAD_DIM // 32) * (HEAD_DIM // 8) + quarter % (HEAD_DIM // 32)
    values = tl.load(words + value_at[:, None] + value_column[None, :])
    # One load for all four numbers, so that the compiler fetches them ahead together.
    metadata_at = 2 * CODES + 4 * t + j
    metadata = tl.load(words + metadata_at[:, None] + TOKENS // 2 * tl.arange(0, 4)[None, :])
    scales, offsets = tl.split(tl.reshape(metadata, (TOKENS // 2, 2, 2)))
    key_scale, value_scale = tl.split(scales)
    key_offset, value_offset = tl.split(offsets)
    return (
        keys,
        values,
        _numbers(key_scale, present),
        _numbers(key_offset, present),
        _numbers(value_scale, present),
        _numbers(value_offset, present),
    )


@triton.jit
def _numbers(words, present):
    """Give each token its fp16 number: a word holds those of an even token (low half) and of the next."""
    even = words.to(tl.int16).to(tl.float16, bitcast=True)
    odd = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    # Beyond the sequence lies what nobody wrote: NaN times a weight of zero would still be NaN.
    return tl.where(present, tl.reshape(tl.join(even, odd), (TOKENS,)).to(tl.float32), 0.0)


@triton.jit
def code_pairs(words, shift: tl.constexpr):
    """Take a code of each half of each word as the fp16 number code − 8: 0x6400 is 1024, whose last bit is worth 1."""
    pairs = (words >> shift) & 0x000F000F | 0x64006400
    low = pairs.to(tl.int16).to(tl.float16, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return low - 1032.0, high - 1032.0
