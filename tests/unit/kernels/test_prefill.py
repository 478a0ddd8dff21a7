import itertools

import pytest
import torch

from kvlab import codec
from kvlab.kernels import nvrtc
from kvlab.kernels.expand import Spans, expand
from kvlab.kernels.layout import HEAD_DIMS, region_view, write_cells
from kvlab.kernels.naive import prefill as naive
from kvlab.kernels.prefill import merge_, prefill_attention

pytestmark = pytest.mark.unit

SCALE = 0.1
SPANS = [(0, 5, 100), (2, 31, 33), (1, 0, 192), (2, 64, 65)]
# Attention's own arithmetic in float32 differs from float64's by a few 2^-24 per sum, and by 2^-24 times the largest
# score (below 16 here) in each exponent.
FLOAT32 = 16 * 2**-24


def poisoned(*shape, dtype=torch.float32):
    return torch.full(shape, torch.nan, dtype=dtype)


def random_cache(num_blocks=7, num_kv_heads=2, block_size=64, head_dim=64, padding=0, seed=0):
    """Any bytes are codes; scales and offsets are fp16 numbers up to 1."""
    generator = torch.Generator().manual_seed(seed)
    size = num_kv_heads * block_size * (head_dim + 8)
    blocks = torch.randint(0, 256, (num_blocks, size + padding), dtype=torch.uint8, generator=generator)
    cache = blocks[:, :size].unflatten(1, (num_kv_heads, block_size, head_dim + 8))
    metadata = region_view(cache)[..., -256:]
    numbers = torch.rand(*metadata.shape[:-1], 128, generator=generator) * 2 - 1
    metadata.copy_(numbers.half().view(torch.uint8))
    return cache


@pytest.fixture
def interpreter():
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the kernel is compiled here; tests/gpu has it")


@pytest.fixture
def table():
    return torch.tensor([[3, 0, 6], [5, 2, 1], [4, 1, 3]], dtype=torch.int32)


def test_naive_expand_is_the_codec():
    x = torch.randn(2, 3, 64, 64)  # keys and values, heads, tokens
    cells = codec.encode(x)
    cache = torch.randint(0, 256, (4, 3, 32, 72), dtype=torch.uint8)
    slots = torch.cat([torch.arange(96, 128), torch.arange(32, 64)])  # block 3, then block 1
    write_cells(cache, slots, *cells.transpose(1, 2))
    got = naive.expand(cache, torch.tensor([[3, 1]], dtype=torch.int32), [(0, 3, 61)], dtype=torch.float32)
    torch.testing.assert_close(torch.stack(got), codec.decode(cells)[:, :, 3:61].transpose(1, 2), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["float16", "float32"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_triton_expands_as_the_twin(interpreter, table, head_dim, dtype):
    cache = random_cache(head_dim=head_dim, padding=16)
    workspace = poisoned(2, 300, 2, head_dim, dtype=dtype)
    got = expand(cache, table, Spans(SPANS, "cpu"), workspace, backend="triton")
    for x, want in zip(got, naive.expand(cache, table, SPANS, dtype=dtype), strict=True):
        assert torch.equal(x, want)
    assert workspace[:, 290:].isnan().all()


def test_triton_rounds_to_bfloat16(interpreter, table):
    cache = random_cache()
    got = expand(cache, table, Spans(SPANS, "cpu"), poisoned(2, 290, 2, 64, dtype=torch.bfloat16), backend="triton")
    # The interpreter truncates where a GPU rounds: one unit of 8 bits, and only here.
    for x, want in zip(got, naive.expand(cache, table, SPANS, dtype=torch.float32), strict=True):
        torch.testing.assert_close(x.float(), want, rtol=2**-7, atol=0)


def test_float16_saturates(interpreter):
    cache = random_cache(1, 1, 32)
    region_view(cache)[..., -256:] = torch.full((128,), 60_000.0).half().view(torch.uint8)
    table = torch.zeros(1, 1, dtype=torch.int32)
    for x in expand(
        cache, table, Spans([(0, 0, 32)], "cpu"), poisoned(2, 32, 1, 64, dtype=torch.float16), backend="triton"
    ):
        assert x.max() == 65_504


@pytest.mark.parametrize("bfloat", [0, 1])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_cuda_source_compiles(head_dim, bfloat):
    pytest.importorskip("cuda.bindings")
    assert nvrtc.compile_source("expand.cu", {"HEAD_DIM": head_dim, "BFLOAT": bfloat})[:4] == b"\x7fELF"


@pytest.mark.parametrize("workspace_tokens", [7, 33, 64, 150, 500])
def test_pieces_and_groups_give_the_same(table, workspace_tokens):
    cache, q, mean = random_cache(), torch.randn(260, 6, 64), torch.randn(2, 64)
    seq_lens, query_start_loc = [150, 40, 0, 190], [1, 80, 81, 81, 254]
    block_table = torch.cat([table[[0, 1]], torch.full((1, 3), -1, dtype=torch.int32), table[[2]]])
    options = {"scale": SCALE, "value_mean": mean}
    got = prefill_attention(
        q,
        cache,
        block_table,
        torch.tensor(seq_lens),
        query_start_loc,
        workspace=poisoned(2, workspace_tokens, 2, 64),
        out=torch.zeros_like(q),
        backend="naive",
        **options,
    )
    want = naive.prefill_attention(q, cache, block_table, seq_lens, query_start_loc, **options)
    assert got[254:].eq(0).all() and got[:1].eq(0).all()
    # One more rounding of out and lse per merge, 190 / 7 of them at most.
    assert (got - want).norm() <= (FLOAT32 + 190 / workspace_tokens * 2**-24) * want.norm()


@pytest.mark.parametrize("workspace_tokens", [40, 200])
@pytest.mark.parametrize("cuts", [[0, 150], [0, 1, 34, 35, 99, 150], [0, 31, 150]], ids=str)
def test_chunks_do_not_matter(table, cuts, workspace_tokens):
    cache, q = random_cache(), torch.randn(150, 4, 64)
    whole = naive.prefill_attention(q, cache, table[:1], [150], [0, 150], scale=SCALE)
    workspace = poisoned(2, workspace_tokens, 2, 64)
    parts = [
        prefill_attention(q[a:b], cache, table[:1], [b], [0, b - a], scale=SCALE, workspace=workspace, backend="naive")
        for a, b in itertools.pairwise(cuts)
    ]
    assert (torch.cat(parts) - whole).norm() <= (FLOAT32 + 150 / workspace_tokens * 2**-24) * whole.norm()


@pytest.mark.parametrize("prefix", [32, 96])
def test_a_shared_prefix_is_the_same_prefix(prefix):
    cache, q = random_cache(block_size=32), torch.randn(2, 20, 2, 64)
    own, shared = torch.tensor([[0, 1, 2, 3]], dtype=torch.int32), torch.tensor([[0, 1, 2, 5]], dtype=torch.int32)
    cache[5] = cache[3]
    cache[4] = cache[prefix // 32 - 1]
    shared[0, prefix // 32 - 1] = 4
    a, b = (
        prefill_attention(q[0], cache, table, [116], [0, 20], scale=SCALE, backend="naive") for table in (own, shared)
    )
    assert torch.equal(a, b)


def test_not_a_number_stays_in_its_sequence(table):
    cache, q = random_cache(), torch.randn(60, 2, 64)
    clean = prefill_attention(q, cache, table[:2], [90, 70], [0, 30, 60], scale=SCALE, backend="naive")
    region_view(cache)[5, ..., -256:] = torch.full((128,), torch.nan).half().view(torch.uint8)  # of sequence 1
    region_view(cache)[0, :, 1, -256:] = torch.full((128,), torch.nan).half().view(torch.uint8)  # beyond sequence 0
    got = prefill_attention(q, cache, table[:2], [90, 70], [0, 30, 60], scale=SCALE, backend="naive")
    assert torch.equal(got[:30], clean[:30])
    assert got[30:].isnan().all()


def test_merge_is_attention_over_both():
    scores, values = torch.randn(2, 5, 40, dtype=torch.float64), torch.randn(40, 2, 8, dtype=torch.float64)

    def over(keys):
        weights = scores[..., keys].softmax(-1)
        out = torch.einsum("hts,shd->thd", weights, values[keys])
        return out.float(), scores[..., keys].logsumexp(-1).float()

    (out, lse), (piece, piece_lse) = over(slice(0, 33)), over(slice(33, 40))
    lse = merge_(out, lse, piece, piece_lse)
    want, want_lse = over(slice(0, 40))
    # Four roundings each: weight (whose exponent is below 8), its complement, product, sum.
    torch.testing.assert_close(out, want, rtol=0, atol=8 * 2**-23)
    torch.testing.assert_close(lse, want_lse, rtol=4 * 2**-24, atol=2**-22)


def test_flash_may_be_any(table):
    """What serving hands over is asked for FlashAttention's variable-length call."""
    asked = []

    def flash(q, k, v, *, causal, **lengths):
        asked.append((len(q), len(k), causal, lengths["cu_seqlens_k"].tolist(), lengths["max_seqlen_k"]))
        return torch.ones_like(q), torch.zeros(q.shape[1], len(q))

    q = torch.randn(30, 2, 64)
    workspace = poisoned(2, 100, 2, 64)
    prefill_attention(
        q,
        random_cache(),
        table,
        [40, 60, 180],
        [0, 10, 20, 30],
        scale=1.0,
        flash=flash,
        workspace=workspace,
        backend="naive",
    )
    assert asked == [
        (20, 100, True, [0, 40, 100], 60),
        (10, 100, True, [0, 100], 100),
        (10, 80, False, [0, 80], 80),
    ]


GOOD = {"seq_lens": [100], "query_start_loc": [0, 10], "scale": 1.0, "backend": "naive"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_lens": [9]}, "seq_lens has 9 for a sequence with 10 new tokens"),
        ({"seq_lens": [193]}, r"seq_lens is \[193\]; accepted: within the 1 rows of 192 tokens of block_table"),
        ({"seq_lens": [10.0]}, r"seq_lens is \[10.0\]; accepted: integers on the host"),
        ({"seq_lens": None}, "seq_lens is None; accepted: integers on the host"),
        ({"out": torch.empty(10, 4, 64, dtype=torch.int32)}, "out is torch.int32"),
        ({"out": torch.empty(11, 4, 64)}, r"out is torch.float32 \[11, 4, 64\].*accepted: .*\[10, 4, 64\]"),
        ({"value_mean": torch.zeros(4, 64)}, r"value_mean is torch.float32 \[4, 64\].*accepted: .*\[2, 64\]"),
        ({"workspace": torch.empty(2, 0, 2, 64)}, r"workspace has shape \[2, 0, 2, 64\]"),
        ({"query_start_loc": [0, 11]}, r"query_start_loc is \[0, 11\]"),
        ({"query_start_loc": [0, 5, 10]}, "query_start_loc has 3 numbers; accepted: 2"),
        ({"scale": float("nan")}, "scale is nan"),
        ({"backend": "cutlass"}, "backend is 'cutlass'; accepted: cuda, triton, naive"),
        (
            {"workspace": torch.empty(2, 100, 1, 64)},
            r"workspace is torch.float32 \[2, 100, 1, 64\] on cpu; accepted: .* \[2, 100, 2, 64\], contiguous",
        ),
        ({"q": torch.empty(10, 3, 64)}, r"q has shape \[10, 3, 64\]; accepted: \[tokens, a multiple of 2 heads, 64\]"),
        ({"block_table": torch.zeros(1, 3)}, r"block_table is torch.float32 \[1, 3\] on cpu; accepted: torch.int32"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_mistakes_are_named(table, change, message):
    arguments = {"q": torch.randn(10, 4, 64), "cache": random_cache(), "block_table": table[:1]} | GOOD | change
    with pytest.raises((ValueError, TypeError), match=message):
        prefill_attention(**arguments)


@pytest.mark.parametrize("spans", [[], [(0, 3, 3)], [(0, -1, 3)], [(-1, 0, 3)]], ids=str)
def test_spans_that_are_none(spans):
    with pytest.raises(ValueError, match=r"spans (is empty|has .*); accepted"):
        Spans(spans, "cpu")


def test_nothing_to_do_leaves_out_alone(table):
    out = torch.ones(4, 2, 64)
    q = torch.randn(4, 2, 64)
    prefill_attention(q, random_cache(), table, [0, 90], [0, 0, 0], scale=SCALE, out=out, backend="naive")
    assert out.eq(1).all()


def test_no_backend_says_what_to_do(table, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="backend 'triton' cannot run: device is cpu; accepted: a GPU, or"):
        expand(random_cache(), table, Spans(SPANS, "cpu"), poisoned(2, 290, 2, 64), backend="triton")
