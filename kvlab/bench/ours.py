"""The kernels of this library as entrants of the benchmark."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from kvlab import codec
from kvlab.bench.cases import (
    HEAD_DIM,
    DecodeCase,
    Entry,
    StoreCase,
    fill_blocks,
    lengths,
    queries,
    relative_error,
    sets_of_inputs,
    shuffled_tables,
)
from kvlab.kernels.folding import CODEC, Folding
from kvlab.kernels.layout import REGION_TOKENS, cell_bytes, region_view, unpack_regions

if TYPE_CHECKING:
    from kvlab.kernels.prefill import Flash
    from kvlab.quantizers.base import Quantizer

BLOCK_SIZE = REGION_TOKENS
CHECKED_TOKENS = 64
"""Of a store, compared with the twin: it is a reference, not a fast path."""

CHECKED_QUERIES = 8
"""Of a prefill, compared with the twin."""

METADATA_NUMBERS = 4
SCALES, OFFSETS = (0.05, 0.15), (-1.2, -0.4)
"""As codes of unit-variance vectors have them."""


def decode(case: DecodeCase, device: torch.device) -> Entry:
    """Prepare `kvlab.kernels.decode` on random codes.

    The error is of the bfloat16 output of the shortest and the longest sequence, against the naive twin in float64.
    """
    from kvlab.kernels.decode import DecodePlan
    from kvlab.kernels.naive.decode import decode_attention

    num_bytes = case.cache_bytes(cell_bytes(HEAD_DIM))
    sets = sets_of_inputs(num_bytes)
    num_blocks, tables = shuffled_tables(case, BLOCK_SIZE, sets, device)
    cache = random_cache(num_blocks, case.num_kv_heads, device)
    q, seq_lens = queries(case, sets, device), lengths(case, device)
    out = torch.empty_like(q)
    plan = DecodePlan(
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=HEAD_DIM,
        block_size=BLOCK_SIZE,
        max_batch=case.batch,
        q_len=case.q_len,
        device=device,
    )
    plan.update(seq_lens)
    scale = HEAD_DIM**-0.5

    def error() -> float:
        checked = sorted({case.seq_lens.index(min(case.seq_lens)), case.seq_lens.index(max(case.seq_lens))})
        rows = torch.tensor(checked, device=device)
        # A value that no output has: an element the kernel leaves out shows.
        got = plan.attend(q[0], cache, tables[0], seq_lens, scale=scale, out=out[0].fill_(torch.nan))
        q_rows, got_rows = (x.unflatten(0, (-1, case.q_len))[rows].flatten(0, 1) for x in (q[0], got))
        expected, _ = decode_attention(q_rows, cache, tables[0][rows], seq_lens[rows], scale=scale, q_len=case.q_len)
        return relative_error(got_rows, expected)

    calls = [
        partial(plan.attend, one_q, cache, table, seq_lens, scale=scale, out=one_out)
        for one_q, table, one_out in zip(q, tables, out, strict=True)
    ]
    return Entry(calls, num_bytes, once_per_step=partial(plan.update, seq_lens), error=error)


def store(case: StoreCase, device: torch.device, quantizer: Quantizer = CODEC) -> Entry:
    """Prepare `kvlab.kernels.store` with one random rotation, ``quantizer`` encoding keys and values.

    The error is the larger of two, of the queries and of what the cells hold, against the naive twin in float64.
    """
    from kvlab.kernels.naive.norm_rotate_store import norm_rotate_store as naive
    from kvlab.kernels.store import norm_rotate_store

    num_bytes = case.moved_bytes(cell_bytes(HEAD_DIM))
    qkv, slots, num_blocks = store_inputs(case, num_bytes, BLOCK_SIZE, device)
    cache = random_cache(num_blocks, case.num_kv_heads, device)
    matrix = orthogonal(1, device)
    heads = {"num_heads": case.num_heads, "num_kv_heads": case.num_kv_heads}
    folding = Folding(matrix, matrix, k_quantizer=quantizer, v_quantizer=quantizer)
    run = partial(norm_rotate_store, folding=folding, **heads)

    def error() -> float:
        q = run(qkv[0], cache, slots[0])[:CHECKED_TOKENS]
        twin = torch.zeros_like(cache)
        checked = slots[0][:CHECKED_TOKENS]
        expected = naive(qkv[0][:CHECKED_TOKENS], twin, checked, folding, **heads)
        return max(relative_error(q, expected), relative_error(stored(cache, checked), stored(twin, checked)))

    calls = [partial(run, one_qkv, cache, one_slots) for one_qkv, one_slots in zip(qkv, slots, strict=True)]
    return Entry(calls, num_bytes, error=error)


def prefill(case: DecodeCase, device: torch.device, flash: Flash | None = None) -> Entry:
    """Prepare `kvlab.kernels.prefill` on random codes, with ``flash`` as its attention.

    The error is of the last tokens of the last sequence, against the naive twin in float64.
    """
    from kvlab.kernels.naive.decode import decode_attention
    from kvlab.kernels.prefill import WORKSPACE_TOKENS, prefill_attention

    num_blocks, (table,) = shuffled_tables(case, BLOCK_SIZE, 1, device)
    cache = random_cache(num_blocks, case.num_kv_heads, device)
    q = queries(case, 1, device)[0]
    tokens = min(WORKSPACE_TOKENS, sum(case.seq_lens))
    scale = HEAD_DIM**-0.5
    run = partial(
        prefill_attention,
        q,
        cache,
        table,
        case.seq_lens,
        [i * case.q_len for i in range(case.batch + 1)],
        scale=scale,
        flash=flash,
        workspace=torch.empty(2, tokens, case.num_kv_heads, HEAD_DIM, dtype=torch.float16, device=device),
        out=torch.empty_like(q),
    )

    def error() -> float:
        got = run()[-CHECKED_QUERIES:]
        last = (table[-1:], lengths(case, device)[-1:])
        expected, _ = decode_attention(q[-CHECKED_QUERIES:], cache, *last, scale=scale, q_len=CHECKED_QUERIES)
        return relative_error(got, expected)

    return Entry([run], None, error=error)


def store_inputs(
    case: StoreCase, set_bytes: int, block_size: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Draw projections ``[sets, tokens, width]`` and slots ``[sets, tokens]``; return them and the blocks they need."""
    sets = sets_of_inputs(set_bytes)
    width = (case.num_heads + 2 * case.num_kv_heads) * HEAD_DIM
    qkv = torch.randn(sets, case.tokens, width, dtype=torch.bfloat16, device=device)
    num_blocks = -(-sets * case.tokens // block_size)
    slots = torch.randperm(num_blocks * block_size, device=device)[: sets * case.tokens]
    return qkv, slots.view(sets, case.tokens), num_blocks


def random_cache(num_blocks: int, num_kv_heads: int, device: torch.device) -> torch.Tensor:
    """Return a cache full of random codes with plausible scales and offsets."""
    shape = (num_kv_heads, BLOCK_SIZE, cell_bytes(HEAD_DIM))

    def make(blocks: int) -> torch.Tensor:
        chunk = torch.randint(256, (blocks, *shape), dtype=torch.uint8, device=device)
        codes = REGION_TOKENS * HEAD_DIM
        metadata = region_view(chunk)[..., codes:].view(torch.float16).unflatten(-1, (METADATA_NUMBERS, -1))
        metadata[..., 0::2, :].uniform_(*SCALES)
        metadata[..., 1::2, :].uniform_(*OFFSETS)
        return chunk

    return fill_blocks(num_blocks, num_kv_heads * BLOCK_SIZE * shape[-1], make)


def orthogonal(count: int, device: torch.device) -> torch.Tensor:
    """Draw orthogonal matrices, float32 ``[count, head_dim, head_dim]``."""
    return torch.linalg.qr(torch.randn(count, HEAD_DIM, HEAD_DIM, device=device)).Q.contiguous()


def stored(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Decode what a cache holds at some slots: float32 ``[slots, num_kv_heads, 2 · head_dim]``, key beside value."""
    block, place = slots // cache.shape[2], slots % cache.shape[2]
    cells = unpack_regions(region_view(cache)[block, :, place // REGION_TOKENS])
    row = torch.arange(len(slots), device=slots.device)
    return torch.cat([codec.decode(x[row, :, place % REGION_TOKENS]) for x in cells], dim=-1)
