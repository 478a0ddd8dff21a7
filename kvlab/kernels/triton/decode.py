"""Decode attention over the paged 4-bit cache in plain Triton: any GPU, head_dim 64, 128 or 256, and the interpreter.

The context is cut into splits of whole regions (32 tokens); a program walks one split of one KV head with an online
softmax (FlashAttention-2: Dao 2023, arXiv:2307.08691), and a second kernel merges the splits by their log-sum-exp. How
many regions a split has follows from ``seq_lens`` on the device.

Numbers. A code enters the matrix units as the fp16 number code − 8, which makes a vector
(offset + 8 scale) + scale · (code − 8): the terms have both signs, so their sum does not grow with the context as that
of bare codes would, in accumulators that truncate. What fp16 rounds is the query and the weights, each by at most 2⁻¹¹
of itself. Both are scaled first (the query by a power of two per row, the weights by the region's largest value scale):
neither overflows, and only what is negligible becomes subnormal. A bfloat16 query is exact.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvlab.kernels.layout import REGION_TOKENS, region_view
from kvlab.kernels.triton.region import TOKENS, code_pairs, read_region

_ROWS = 16
"""Query rows of one program: the fewest that a matrix instruction takes."""

_MIN_REGIONS = 4
"""Regions per split at least: fewer, and the partial results weigh as much as the cells they come from."""

_MIN_SPLITS = 16
"""Splits of every sequence at least, so that one long sequence among short ones is shared by many programs."""

_RESIDENT_PROGRAMS = 8
"""Programs that run at a time on each processor: on an H200, whose registers hold that many."""

_MERGED_AT_ONCE = 64
"""Partial results that a program of the merge holds: as many loads in flight, within the registers of four warps."""

_INTERPRETER_PROCESSORS = 1

_STAGES = 5
"""Depth of the software pipeline. This one and the warp per program are the fastest of those tried on an H200."""

_LOG2_E = tl.constexpr(1.4426950408889634)
_LEAST_HALF = tl.constexpr(2.0**-24)
_LN_2 = tl.constexpr(0.6931471805599453)


class TritonDecode:
    """Decode attention with a workspace allocated once; semantics of `kvlab.kernels.naive.decode.decode_attention`.

    Parameters
    ----------
    num_heads, num_kv_heads
        Query heads and KV heads; query head h reads KV head h // (num_heads // num_kv_heads).
    head_dim
        64, 128 or 256.
    block_size
        Tokens per block of the cache, a multiple of 32.
    max_batch
        The most sequences of one call.
    q_len
        New tokens of every sequence.
    device
        A GPU, or the CPU under ``TRITON_INTERPRET=1``.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        max_batch: int,
        q_len: int,
        device: torch.device | str,
    ):
        self._geometry = {
            "Q_LEN": q_len,
            "NUM_HEADS": num_heads,
            "NUM_KV_HEADS": num_kv_heads,
            "HEAD_DIM": head_dim,
            "MIN_REGIONS": _MIN_REGIONS,
        }
        self._block_regions = block_size // REGION_TOKENS
        self._groups = num_kv_heads * triton.cdiv(q_len * num_heads // num_kv_heads, _ROWS)
        device = torch.device(device)
        self._processors = (
            torch.cuda.get_device_properties(device).multi_processor_count
            if device.type == "cuda"
            else _INTERPRETER_PROCESSORS
        )
        slots = q_len * num_heads * max(batch * self._splits(batch) for batch in range(1, max_batch + 1))
        self._partial = torch.empty(slots, head_dim, dtype=torch.float32, device=device)
        self._partial_lse = torch.empty(slots, dtype=torch.float32, device=device)

    def attend(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        scale: float,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
        value_mean: torch.Tensor | None = None,
    ) -> None:
        """Attend as `kvlab.kernels.decode.DecodePlan.attend`, which checks the arguments; q may have any float dtype.

        Two launches whose shapes follow from the batch alone; nothing is allocated, nothing waits for the device.
        """
        regions = region_view(cache)
        batch = len(seq_lens)
        splits = self._splits(batch)
        _split_kernel[(batch, self._groups, splits)](
            q,
            regions,
            block_table,
            seq_lens,
            self._partial,
            self._partial_lse,
            scale,
            regions.stride(0),
            regions.stride(1),
            block_table.stride(0),
            **self._geometry,
            ROWS=_ROWS,
            BLOCK_REGIONS=self._block_regions,
            num_warps=1,
            num_stages=_STAGES,
        )
        _merge_kernel[q.shape[:2]](
            self._partial,
            self._partial_lse,
            seq_lens,
            value_mean,
            out,
            lse,
            splits,
            **self._geometry,
            BATCH=min(triton.next_power_of_2(splits), _MERGED_AT_ONCE),
            num_warps=4,
        )

    def _splits(self, batch: int) -> int:
        """Cut every sequence so often that all processors are busy, and no program waits for a last few."""
        programs = _RESIDENT_PROGRAMS * self._processors
        return max(programs // (batch * self._groups), _MIN_SPLITS)


@triton.jit
def _split_kernel(
    q,
    cache,
    block_table,
    seq_lens,
    partial,
    partial_lse,
    scale,
    block_stride,
    head_stride,
    table_stride,
    Q_LEN: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MIN_REGIONS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_REGIONS: tl.constexpr,
):
    """Attend to one split of one sequence with some query rows of one KV head; writes a normalised partial result."""
    sequence, kv_head, row_tile = tl.program_id(0), tl.program_id(1) % NUM_KV_HEADS, tl.program_id(1) // NUM_KV_HEADS
    split, splits = tl.program_id(2), tl.num_programs(2)
    length = tl.load(seq_lens + sequence)
    regions, regions_per_split = _cut(length, splits, MIN_REGIONS)
    first = split * regions_per_split
    if first >= regions:
        return

    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    QUARTER: tl.constexpr = HEAD_DIM // 4
    row = row_tile * ROWS + tl.arange(0, ROWS)
    query = sequence * Q_LEN + row // GROUP
    head = kv_head * GROUP + row % GROUP
    real = row < Q_LEN * GROUP
    visible = length - Q_LEN + row // GROUP + 1

    q0, q1, q2, q3, unit = _read_query(q + (query * NUM_HEADS + head)[:, None] * HEAD_DIM, real, HEAD_DIM)
    q_sum = tl.sum(q0.to(tl.float32) + q1.to(tl.float32) + q2.to(tl.float32) + q3.to(tl.float32), 1)
    # Scores are kept in base 2.
    row_scale = unit * (scale * _LOG2_E)
    table = block_table + sequence.to(tl.int64) * table_stride
    cache += kv_head.to(tl.int64) * head_stride

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    constant = tl.zeros([ROWS], tl.float32)
    out0 = tl.zeros([ROWS, QUARTER], tl.float32)
    out1 = tl.zeros([ROWS, QUARTER], tl.float32)
    out2 = tl.zeros([ROWS, QUARTER], tl.float32)
    out3 = tl.zeros([ROWS, QUARTER], tl.float32)
    for index in range(first, min(first + regions_per_split, regions)):
        block = tl.load(table + index // BLOCK_REGIONS).to(tl.int64)
        region = cache + block * block_stride + index % BLOCK_REGIONS * (TOKENS * (HEAD_DIM + 8))
        token = index * TOKENS + tl.arange(0, TOKENS)
        keys, values, key_scale, key_offset, value_scale, value_offset = read_region(region, token < length, HEAD_DIM)
        scores = _scored(q0, keys, 0, tl.zeros([ROWS, TOKENS], tl.float32))
        scores = _scored(q1, keys, 4, scores)
        scores = _scored(q2, keys, 8, scores)
        scores = _scored(q3, keys, 12, scores)
        scores = key_scale[None, :] * scores + (key_offset + 8 * key_scale)[None, :] * q_sum[:, None]
        scores = tl.where(token[None, :] < visible[:, None], scores * row_scale[:, None], float("-inf"))

        new_top = tl.maximum(top, tl.max(scores, 1))
        # A row that has seen nothing yet keeps weights of zero instead of exp(−inf + inf).
        reference = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - reference[:, None])
        shrink = tl.exp2(top - reference)
        top = new_top
        total = total * shrink + tl.sum(weights, 1)
        constant = constant * shrink + tl.sum(weights * (value_offset + 8 * value_scale)[None, :], 1)
        # The largest scale of the region becomes 2¹⁴: within fp16, and only what is below 2⁻²⁸ of it is subnormal.
        lift = 16384.0 / tl.maximum(tl.max(value_scale, 0), _LEAST_HALF)
        weights = (weights * (value_scale * lift)[None, :]).to(tl.float16)
        even, odd = tl.split(tl.reshape(weights, (ROWS, TOKENS // 2, 2)))
        inverse = 1 / lift
        out0 = out0 * shrink[:, None] + inverse * _weighted(even, odd, values, 0)
        out1 = out1 * shrink[:, None] + inverse * _weighted(even, odd, values, 4)
        out2 = out2 * shrink[:, None] + inverse * _weighted(even, odd, values, 8)
        out3 = out3 * shrink[:, None] + inverse * _weighted(even, odd, values, 12)

    slot = (query.to(tl.int64) * NUM_HEADS + head) * splits + split
    # A row that saw nothing: zeros and −inf.
    total = tl.where(total == 0, 1.0, total)
    share = 1 / total
    at = partial + slot[:, None] * HEAD_DIM + tl.arange(0, QUARTER)[None, :]
    tl.store(at, (out0 + constant[:, None]) * share[:, None], mask=real[:, None])
    tl.store(at + QUARTER, (out1 + constant[:, None]) * share[:, None], mask=real[:, None])
    tl.store(at + 2 * QUARTER, (out2 + constant[:, None]) * share[:, None], mask=real[:, None])
    tl.store(at + 3 * QUARTER, (out3 + constant[:, None]) * share[:, None], mask=real[:, None])
    tl.store(partial_lse + slot, top + tl.log2(total), mask=real)


@triton.jit
def _merge_kernel(
    partial,
    partial_lse,
    seq_lens,
    value_mean,
    out,
    lse,
    splits,
    Q_LEN: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MIN_REGIONS: tl.constexpr,
    BATCH: tl.constexpr,
):
    """Merge the splits of one query head, and put its dimensions back in order."""
    query, head = tl.program_id(0), tl.program_id(1)
    regions, regions_per_split = _cut(tl.load(seq_lens + query // Q_LEN), splits, MIN_REGIONS)
    used = tl.cdiv(regions, regions_per_split)
    slot = (query.to(tl.int64) * NUM_HEADS + head) * splits
    split = tl.arange(0, BATCH)
    place = tl.arange(0, HEAD_DIM)
    top = float("-inf")
    total = 0.0
    result = tl.zeros([HEAD_DIM], tl.float32)
    for first in range(0, used, BATCH):
        there = first + split < used
        at = slot + first + split
        logs = tl.load(partial_lse + at, mask=there, other=float("-inf"))
        parts = tl.load(partial + at[:, None] * HEAD_DIM + place[None, :], mask=there[:, None], other=0.0)
        new_top = tl.maximum(top, tl.max(logs, 0))
        reference = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(logs - reference)
        shrink = tl.exp2(top - reference)
        total = total * shrink + tl.sum(weights, 0)
        result = result * shrink + tl.sum(weights[:, None] * parts, 0)
        top = new_top
    unseen = total == 0
    total = tl.where(unseen, 1.0, total)
    result = result / total
    # The values' words hold dimension 32i + 4g + n in bits 4n of column g · head_dim / 32 + i.
    column = place % (HEAD_DIM // 4)
    dim = column % (HEAD_DIM // 32) * 32 + column // (HEAD_DIM // 32) * 4 + place // (HEAD_DIM // 4)
    if value_mean is not None:
        mean = tl.load(value_mean + head // (NUM_HEADS // NUM_KV_HEADS) * HEAD_DIM + dim).to(tl.float32)
        result = tl.where(unseen, 0.0, result + mean)
    tl.store(out + (query * NUM_HEADS + head) * HEAD_DIM + dim, result)
    if lse is not None:
        tl.store(lse + query * NUM_HEADS + head, (top + tl.log2(total)) * _LN_2)


@triton.jit
def _cut(length, splits, MIN_REGIONS: tl.constexpr):
    """Regions of a sequence, and how many of them each split takes."""
    regions = tl.cdiv(length, TOKENS)
    return regions, tl.maximum(tl.cdiv(regions, splits), MIN_REGIONS)


@triton.jit
def _read_query(at, real, HEAD_DIM: tl.constexpr):
    """Read rows of the query as four fp16 operands, the n-th of dimensions 4c + n, and the unit that each row is in."""
    at += 4 * tl.arange(0, HEAD_DIM // 4)[None, :]
    q0 = tl.load(at, mask=real[:, None], other=0.0).to(tl.float32)
    q1 = tl.load(at + 1, mask=real[:, None], other=0.0).to(tl.float32)
    q2 = tl.load(at + 2, mask=real[:, None], other=0.0).to(tl.float32)
    q3 = tl.load(at + 3, mask=real[:, None], other=0.0).to(tl.float32)
    largest = tl.maximum(tl.maximum(tl.abs(q0), tl.abs(q1)), tl.maximum(tl.abs(q2), tl.abs(q3)))
    # The exponent of the row's largest: dividing by it is exact. Zero takes that of some small normal number.
    unit = (tl.maximum(tl.max(largest, 1), 1e-30).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    inverse = 1 / unit[:, None]
    half = tl.float16
    return (q0 * inverse).to(half), (q1 * inverse).to(half), (q2 * inverse).to(half), (q3 * inverse).to(half), unit


@triton.jit
def _scored(q, words, shift: tl.constexpr, scores):
    """Add a quarter of the dimensions to the scores; the halves of a key's word are neighbours in the query."""
    low, high = code_pairs(words, shift)
    codes = tl.reshape(tl.join(low, high), (words.shape[0], 2 * words.shape[1]))
    return tl.dot(q, tl.trans(codes), scores)


@triton.jit
def _weighted(even, odd, words, shift: tl.constexpr):
    """Sum a quarter of the values' dimensions over a region; a word's halves are an even token and the next."""
    even_codes, odd_codes = code_pairs(words, shift)
    return tl.dot(odd, odd_codes, tl.dot(even, even_codes))
