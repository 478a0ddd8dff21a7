import itertools

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kvlab import codec
from kvlab.kernels.expand import Spans, expand
from kvlab.kernels.layout import HEAD_DIMS, pack_regions, region_view
from kvlab.kernels.naive import prefill as naive
from kvlab.kernels.nvrtc import why_unavailable
from kvlab.kernels.prefill import prefill_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SCALE = 128**-0.5
SPANS = [(0, 5, 200), (2, 31, 33), (1, 0, 288), (3, 32, 33), (3, 17, 64)]
NUM_TOKENS = 195 + 2 + 288 + 1 + 47


def stored(num_tokens, num_kv_heads, block_size, head_dim=128, padding=0):
    """A cache of Gaussian keys and values with shuffled blocks, and its block table of one row."""
    num_blocks = -(-num_tokens // block_size)
    x = torch.randn(2, num_blocks, num_kv_heads, block_size // 32, 32, head_dim, device="cuda")
    size = num_kv_heads * block_size * (head_dim + 8)
    pool = torch.randint(0, 256, (num_blocks, size + padding), dtype=torch.uint8, device="cuda")
    cache = pool[:, :size].unflatten(1, (num_kv_heads, block_size, head_dim + 8))
    order = torch.randperm(num_blocks, device="cuda")
    region_view(cache)[order] = pack_regions(*codec.encode(x))
    return cache, order.int()[None]


@pytest.fixture(params=["cuda", "triton"])
def backend(request):
    if request.param == "cuda" and (reason := why_unavailable()):
        pytest.skip(reason)
    return request.param


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("num_kv_heads", "block_size", "padding"),
    [(1, 32, 0), (4, 96, 16), (2, 256, 0)],
    ids=["H1-B32", "H4-B96", "H2-B256"],
)
@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids="D{}".format)
def test_expand_is_the_twin(backend, head_dim, num_kv_heads, block_size, padding, dtype):
    cache, table = stored(40 * block_size, num_kv_heads, block_size, head_dim, padding)
    table = table.view(4, 10)
    workspace = torch.full((2, NUM_TOKENS + 9, num_kv_heads, head_dim), torch.nan, dtype=dtype, device="cuda")
    got = expand(cache, table, Spans(SPANS, "cuda"), workspace, backend=backend)
    for x, want in zip(got, naive.expand(cache, table, SPANS, dtype=dtype), strict=True):
        assert torch.equal(x, want)
    assert workspace[:, NUM_TOKENS:].isnan().all()


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_numbers_beyond_fp16_saturate_and_nan_stays(backend):
    if backend == "cuda" and (reason := why_unavailable()):
        pytest.skip(reason)
    cache, table = stored(64, 1, 32)
    metadata = region_view(cache)[table[0].long(), ..., -256:]
    metadata[0] = torch.full((128,), 60_000.0).half().view(torch.uint8).cuda()
    metadata[1] = torch.full((128,), torch.nan).half().view(torch.uint8).cuda()
    region_view(cache)[table[0].long(), ..., -256:] = metadata
    workspace = torch.zeros(2, 64, 1, 128, dtype=torch.float16, device="cuda")
    for x in expand(cache, table, Spans([(0, 0, 64)], "cuda"), workspace, backend=backend):
        assert x[:32].max() == 65_504
        assert x[32:].isnan().all()


@pytest.mark.parametrize("workspace_tokens", [5_000, 1_024, 700])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(24, 2), (8, 8), (4, 1)], ids=["24-2", "8-8", "4-1"])
def test_attention_is_the_twin(backend, num_heads, num_kv_heads, workspace_tokens):
    cache, table = stored(3 * 2_048, num_kv_heads, 256)
    table, q = table.view(3, 8), torch.randn(1_400, num_heads, 128, dtype=torch.bfloat16, device="cuda")
    seq_lens, query_start_loc = [2_000, 31, 1_500], [0, 600, 631, 1_400]
    options = {"scale": SCALE, "value_mean": torch.randn(num_kv_heads, 128, device="cuda")}
    shape = (2, workspace_tokens, num_kv_heads, 128)
    got = prefill_attention(
        q,
        cache,
        table,
        seq_lens,
        query_start_loc,
        workspace=torch.full(shape, torch.nan, dtype=torch.float16, device="cuda"),
        backend=backend,
        **options,
    )
    want = naive.prefill_attention(q, cache, table, seq_lens, query_start_loc, **options)
    # Rounding to bfloat16 alone is 2^-9 at most of each number, 1.7e-3 of their norm.
    assert (got - want).norm() < 2e-3 * want.norm()


def test_no_worse_than_twice_plain_bfloat16(backend):
    cache, table = stored(16_384, 2, 256)
    q = torch.randn(64, 24, 128, dtype=torch.bfloat16, device="cuda")
    got = prefill_attention(q, cache, table, [16_384], [0, 64], scale=SCALE, backend=backend)
    want = naive.prefill_attention(q, cache, table, [16_384], [0, 64], scale=SCALE)
    keys, values = (x.transpose(0, 1)[None] for x in naive.expand(cache, table, [(0, 0, 16_384)], dtype=q.dtype))
    visible = torch.ones(64, 16_384, dtype=torch.bool, device="cuda").tril(16_384 - 64)
    plain = scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys, values, attn_mask=visible, scale=SCALE, enable_gqa=True
    )
    assert (got - want).norm() <= 2 * (plain[0].transpose(0, 1) - want).norm()


@pytest.mark.parametrize("workspace_tokens", [4_096, 900])
@pytest.mark.parametrize("cuts", [[0, 1, 34, 511, 600], [0, 300, 600]], ids=str)
def test_chunks_do_not_matter(cuts, workspace_tokens):
    cache, table = stored(2_048, 2, 256)
    q = torch.randn(600, 24, 128, dtype=torch.bfloat16, device="cuda")
    whole = prefill_attention(q, cache, table, [2_000], [0, 600], scale=SCALE)
    workspace = torch.empty(2, workspace_tokens, 2, 128, dtype=torch.float16, device="cuda")
    chunks = [
        prefill_attention(q[a:b], cache, table, [1_400 + b], [0, b - a], scale=SCALE, workspace=workspace)
        for a, b in itertools.pairwise(cuts)
    ]
    # Merges round pieces to fp16 (2^-11); where that turns the last rounding to bfloat16, a number moves by 2^-7 of
    # itself: one in eight of them or fewer, so 2^-7 / √8 of the norm at most.
    assert (torch.cat(chunks) - whole).norm() < 2**-8.5 * whole.norm()


def test_large_queries_fit():
    cache, table = stored(512, 1, 256)
    q = 2.0**20 * torch.randn(64, 4, 128, device="cuda").clamp(-1.9, 1.9).bfloat16()
    got = prefill_attention(q, cache, table, [512], [0, 64], scale=SCALE)
    want = naive.prefill_attention(q, cache, table, [512], [0, 64], scale=SCALE)
    # One key wins; ties within fp16's rounding of the keys may fall either way in a few rows.
    assert got.isfinite().all()
    assert ((got - want).norm(dim=-1) < 2**-7 * want.norm(dim=-1)).float().mean() > 0.9


def test_not_a_number_stays_in_its_sequence():
    cache, table = stored(1_024, 2, 256)
    table, q = table.view(2, 2), torch.randn(200, 8, 128, dtype=torch.bfloat16, device="cuda")
    lengths = ([400, 300], [0, 100, 200])
    clean = prefill_attention(q, cache, table, *lengths, scale=SCALE)
    poison = torch.full((128,), torch.nan, device="cuda").half().view(torch.uint8)
    region_view(cache)[table[1].long(), ..., -256:] = poison
    region_view(cache)[table[0, 1].long(), :, 5:, -256:] = poison  # tokens 416 and beyond
    got = prefill_attention(q, cache, table, *lengths, scale=SCALE)
    assert torch.equal(got[:100], clean[:100])
    assert got[100:].isnan().all()
