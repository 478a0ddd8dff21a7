import pytest
import torch

from kvlab.bench import cases, ours
from kvlab.bench.cases import KIB, DecodeCase, StoreCase
from kvlab.kernels.folding import CODEC, REFIT
from kvlab.kernels.layout import read_cells, region_view

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")
SMALL = DecodeCase(24, 2, (40, 100, 7), "ragged", q_len=2)


@pytest.fixture
def few_sets(monkeypatch):
    monkeypatch.setattr(cases, "ROTATED_BYTES", 1)


def test_the_grid_is_what_stock_is_held_against():
    uniform = {
        (case.num_heads, case.batch, case.context)
        for case in cases.decode_cases()
        if case.label == "uniform" and case.q_len == 1
    }
    assert uniform == {(h, b, c * KIB) for h in (24, 48) for b in (1, 2, 4, 8, 16, 32, 64) for c in (4, 16, 64, 256)}
    assert {case.q_len for case in cases.decode_cases()} == {1, 2, 4, 8}
    assert {case.tokens for case in cases.store_cases()} == {1, 8, 64, 512, 2048, 8192}


def test_ragged_batches_are_as_named():
    one_long, spread = (case for case in cases.decode_cases() if case.label != "uniform" and case.num_heads == 24)
    assert sorted(one_long.seq_lens) == [4 * KIB] * 63 + [256 * KIB]
    assert sorted(spread.seq_lens) == [KIB * (1 + i) for i in range(64)]
    assert list(spread.seq_lens) != sorted(spread.seq_lens)


def test_quick_is_a_part_of_the_whole():
    assert set(cases.decode_cases(quick=True)) - set(cases.decode_cases()) == set()
    assert set(cases.store_cases(quick=True)) < set(cases.store_cases())


def test_bytes_are_counted_once():
    assert SMALL.cache_bytes(136) == (40 + 100 + 7) * 2 * 136
    # One token of 24/2 heads: 28 vectors read and 24 written in bfloat16, 2 cells of 136 bytes.
    assert StoreCase(24, 2, 1).moved_bytes(136) == (28 + 24) * 128 * 2 + 2 * 136


@pytest.mark.parametrize(("set_bytes", "sets"), [(1, 400), (10**6, 400), (100 * 10**6, 4), (10**10, 1)])
def test_sets_exceed_the_l2(set_bytes, sets):
    assert cases.sets_of_inputs(set_bytes) == sets


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_every_block_is_dealt_once(block_size):
    num_blocks, tables = cases.shuffled_tables(SMALL, block_size, 5, CPU)
    counts = [-(-length // block_size) for length in SMALL.seq_lens]
    dealt = [table[row, :count] for table in tables for row, count in enumerate(counts)]
    assert torch.cat(dealt).sort().values.tolist() == list(range(num_blocks))
    assert all(table.shape == (3, max(counts)) and table.dtype == torch.int32 for table in tables)
    assert torch.cat(dealt).tolist() != list(range(num_blocks))


def test_a_pool_repeats_its_chunk(monkeypatch):
    monkeypatch.setattr(cases, "CHUNK_BYTES", 30)
    pool = cases.fill_blocks(7, 10, lambda blocks: torch.arange(blocks))
    assert pool.tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_random_caches_hold_plausible_vectors():
    cache = ours.random_cache(9, 2, CPU)
    keys, _ = read_cells(cache, torch.arange(9), 9 * 32)
    assert region_view(cache).shape == (9, 2, 1, 4352)
    scale, offset = keys[..., 64:].contiguous().view(torch.float16).unbind(-1)
    assert scale.min() >= 0.05 and scale.max() <= 0.15
    assert offset.min() >= -1.2 and offset.max() <= -0.4
    # All 256 values occur among 36,864 random bytes: one is missing with probability 256·e^-144.
    assert keys[..., :64].unique().numel() == 256


def test_our_decode_runs_and_its_error_is_a_rounding(few_sets):
    entry = ours.decode(SMALL, CPU)
    assert entry.num_bytes == SMALL.cache_bytes(136)
    entry.once_per_step()
    assert entry.calls[0]().shape == (6, 24, 128)
    # One rounding to bfloat16: at most 2^-9 of each component.
    assert 0 < entry.error() < 2**-9


def test_our_decode_notices_a_wrong_kernel(few_sets, monkeypatch):
    from kvlab.kernels.decode import DecodePlan

    attend = DecodePlan.attend
    monkeypatch.setattr(DecodePlan, "attend", lambda *args, **kwargs: attend(*args, **kwargs).mul_(1.01))
    assert ours.decode(SMALL, CPU).error() > 0.009


@pytest.mark.parametrize("quantizer", (CODEC, REFIT), ids=repr)
def test_our_store_runs_and_is_compared(few_sets, monkeypatch, quantizer):
    from kvlab.kernels import store

    plain = store.norm_rotate_store
    monkeypatch.setattr(store, "norm_rotate_store", lambda *args, **kwargs: plain(*args, **kwargs, backend="naive"))
    entry = ours.store(StoreCase(6, 2, 5), CPU, quantizer)
    assert entry.calls[0]().shape == (5, 6, 128)
    # bfloat16 queries round by at most 2^-9; float32 codes may differ from float64 ones by a step of 1/15 of a range of
    # about 5 deviations in one of a hundred components: sqrt(0.01)·(5/15) deviations.
    assert 0 < entry.error() < 0.034
    monkeypatch.setattr(
        store, "norm_rotate_store", lambda *args, **kwargs: plain(*args, **kwargs, backend="naive") * 1.05
    )
    assert ours.store(StoreCase(6, 2, 5), CPU, quantizer).error() > 0.045


def test_a_store_that_writes_nothing_is_noticed(few_sets, monkeypatch):
    from kvlab.kernels import store

    plain = store.norm_rotate_store

    def forgetful(qkv, cache, *args, **kwargs):
        return plain(qkv, cache.clone(), *args, **kwargs, backend="naive")

    monkeypatch.setattr(store, "norm_rotate_store", forgetful)
    assert ours.store(StoreCase(6, 2, 5), CPU).error() > 0.5
