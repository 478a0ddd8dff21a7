import importlib.util
import math

import pytest
import torch
from store_cases import (
    EPS,
    QUANTIZERS,
    Case,
    all_cells,
    cases,
    check_encoded,
    check_near_twin,
    check_special_values,
    placed,
    run,
)

from kvlab import codec
from kvlab.kernels import nvrtc
from kvlab.kernels.folding import CODEC, REFIT, Folding, encoder
from kvlab.kernels.naive.norm_rotate_store import norm_rotate_store as naive_store
from kvlab.kernels.naive.norm_rotate_store import rotate
from kvlab.kernels.store import norm_rotate_store
from kvlab.quantizers import RefitInteger, UnequalInteger

pytestmark = pytest.mark.unit

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


SMALL = Case(tokens=5, num_heads=4, num_kv_heads=2, head_dim=64, v_matrix=True)


# The naive twin against the definitions.


def test_twin_is_the_formula():
    case, x = SMALL, SMALL.qkv().double()
    folding = case.folding()
    q, keys, values = rotate(case.qkv(), folding, **case.heads, eps=EPS)

    def normal(v):
        return v / math.sqrt(sum(float(c) ** 2 for c in v) / 64 + EPS)

    for token in range(case.tokens):
        vectors = x[token].view(8, 64)
        for h in range(4):
            torch.testing.assert_close(q[token, h], folding.q_matrix[h // 2].double() @ normal(vectors[h]))
        for h in range(2):
            key = folding.k_matrix[h].double() @ normal(vectors[4 + h]) + folding.k_bias[h]
            torch.testing.assert_close(keys[token, h], key)
            torch.testing.assert_close(
                values[token, h], folding.v_matrix[h].double() @ vectors[6 + h] + folding.v_bias[h]
            )


@pytest.mark.parametrize(("refit_keys", "refit_values"), [(False, False), (True, False), (False, True)])
def test_twin_stores_what_the_quantizers_encode(refit_keys, refit_values):
    case = Case(40, 2, 2, bias=False, refit_keys=refit_keys, refit_values=refit_values)
    cache = case.cache()[1]
    naive_store(case.qkv(), cache, torch.arange(40), case.folding(), **case.heads, eps=EPS)
    numbers = rotate(case.qkv(), case.folding(), **case.heads, eps=EPS)[1:]
    for cells, x, refit in zip(all_cells(cache), numbers, (refit_keys, refit_values), strict=True):
        encode = RefitInteger().encode if refit else codec.encode
        assert torch.equal(cells[:, :40], encode(x.transpose(0, 1)))


def test_scores_of_unequal_bits_are_those_of_what_is_stored():
    quantizer, dim = UnequalInteger(16), 128
    x, matrix, q_matrix = torch.randn(9, dim), *torch.randn(2, dim, dim)
    expanded = quantizer.expansion(dim).mT @ q_matrix
    folding = Folding(expanded[None], *placed(quantizer, matrix[None]), k_quantizer=quantizer)
    qkv, cache = x.bfloat16().repeat(1, 3), torch.zeros(1, 1, 32, dim + 8, dtype=torch.uint8)
    heads = {"num_heads": 1, "num_kv_heads": 1}
    q = naive_store(qkv, cache, torch.arange(9), folding, **heads)[:, 0]
    scores = q @ codec.decode(all_cells(cache)[0][0, :9]).double().mT
    normal = rotate(qkv, Folding(q_matrix[None], matrix[None]), **heads)
    stored = quantizer.roundtrip(normal[1][:, 0].float()).double()
    # A stored number is rounded thrice in float32, a matrix's once.
    reference = normal[0][:, 0] @ stored.mT
    torch.testing.assert_close(scores, reference, rtol=0, atol=4 * 2**-24 * reference.abs().max().item() * dim**0.5)


def test_a_rotation_of_queries_and_keys_keeps_scores():
    dim = 128
    rotation = torch.linalg.qr(torch.randn(dim, dim, dtype=torch.float64))[0].float()[None]
    qkv = torch.randn(9, 3 * dim).bfloat16()
    plain, rotated = (
        rotate(qkv, Folding(m, m), num_heads=1, num_kv_heads=1)[:2] for m in (torch.eye(dim)[None], rotation)
    )
    scores = [q[:, 0] @ k[:, 0].T for q, k in (plain, rotated)]
    # A float32 rotation is orthogonal to about d · 2^-24; scores are up to d.
    torch.testing.assert_close(*scores, atol=dim * dim * 2**-24, rtol=0)


# The portable backends.

SHAPES = cases(
    Case(1, 4, 1, head_dim=64),
    Case(33, 4, 4, head_dim=64, block_size=64, per_head=False, v_matrix=True),
    Case(33, 8, 2, block_size=96, slots=20),
    Case(16, 12, 1, v_matrix=True, bias=False),
    Case(17, 4, 1, head_dim=256, block_size=64, v_matrix=True),
    Case(5, 2, 1, block_size=64, slots=0, per_head=False),
    Case(33, 2, 2, refit_keys=True, refit_values=True),
    Case(33, 2, 2, head_dim=64, v_matrix=True, refit_keys=True),
    Case(17, 2, 1, head_dim=256, refit_values=True),
    Case(33, 2, 2, fine=16),
    Case(33, 4, 1, head_dim=64, bias=False, fine=31, refit_values=True),
    Case(17, 2, 1, head_dim=256, per_head=False, fine=3),
    Case(33, 2, 2, fine=16, refit_keys=True),
    Case(70, 4, 1, head_dim=64, bias=False, fine=31, refit_keys=True),
    Case(17, 2, 1, head_dim=256, per_head=False, fine=3, refit_keys=True),
)


@needs_triton
@SHAPES
def test_triton_agrees_with_twin(case):
    # The interpreter truncates to bfloat16: twice the error of rounding.
    check_near_twin(case, run(case, "triton", device=DEVICE), device=DEVICE, q_ratio=2.1 if DEVICE == "cpu" else 1.01)


@SHAPES
def test_naive_backend_rounds_the_twin_once(case):
    memory, cache = case.cache()
    q = norm_rotate_store(case.qkv(), cache, case.slot_mapping(), case.folding(), **case.heads, backend="naive")
    twin_memory, twin_cache = case.cache()
    twin = naive_store(case.qkv(), twin_cache, case.slot_mapping(), case.folding(), **case.heads)
    assert torch.equal(q, twin.bfloat16())
    assert torch.equal(memory, twin_memory)


# Squares of numbers near bfloat16's largest overflow, and infinity times zero is NaN, as they should.
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")
@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=repr)
@pytest.mark.parametrize("backend", [pytest.param("triton", marks=needs_triton), "naive"])
def test_special_values_keep_to_their_own_bytes(backend, quantizer):
    check_special_values(backend, DEVICE, head_dim=64, quantizer=quantizer)


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=repr)
def test_cells_of_another_encoder_are_noticed(quantizer):
    x = torch.randn(200, 128, generator=torch.Generator().manual_seed(0))
    ours, other = (encoder(each)(x) for each in (quantizer, REFIT if quantizer == CODEC else CODEC))
    check_encoded(ours, x, quantizer)
    with pytest.raises(AssertionError):
        check_encoded(other, x, quantizer)


# The CUDA kernel as far as no GPU is needed.


@pytest.mark.parametrize(
    ("num_kv_heads", "group", "sides"),
    [(2, 12, (0, 0, 0)), (4, 12, (1, 1, 0)), (1, 1, (1, 0, 0)), (8, 4, (0, 1, 16)), (4, 12, (1, 0, 24))],
    ids=str,
)
def test_cuda_kernel_compiles(num_kv_heads, group, sides, monkeypatch, tmp_path):
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path))
    sides = dict(zip(("REFIT_KEYS", "REFIT_VALUES", "FINE_KEYS"), sides, strict=True))
    defines = {"HEAD_DIM": 128, "NUM_KV_HEADS": num_kv_heads, "GROUP": group, **sides}
    try:
        cubin = nvrtc.compile_source("norm_rotate_store.cu", defines)
    except ImportError as error:
        pytest.skip(str(error))
    assert b"norm_rotate_store" in cubin


@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30], ids="{:g}".format)
def test_fragments_are_the_matrix(size):
    matrix = torch.randn(2, 128, 128) * size
    folding = Folding(matrix, matrix[:1])
    for fragments, x in ((folding.q_fragments, matrix), (folding.k_fragments, matrix[:1])):
        high, low = fragments.terms.double().unbind(1)
        places = torch.arange(128 * 128).view(4, 4, 4, 32, 8)
        quarter, c, j, lane, r = torch.meshgrid(*(torch.arange(n) for n in places.shape), indexing="ij")
        g, t = lane // 4, lane % 4
        # As the kernel's instruction reads them: lane (g, t) gives row g of an 8-row tile, 8 columns.
        row, column = 32 * quarter + 8 * (g // 2) + 2 * j + g % 2, 32 * c + 8 * t + r
        wanted = x[:, row, column].flatten(1).double()
        # Two fp16 numbers hold 22 bits.
        assert ((high + low) * fragments.unscale - wanted).abs().max() <= 2**-22 * wanted.abs().max()
        assert (high * fragments.unscale - wanted).abs().max() <= 2**-11 * wanted.abs().max()


def test_fragments_of_zeros():
    zeros = torch.zeros(1, 128, 128)
    assert not Folding(zeros, zeros).q_fragments.terms.any()


# What users get wrong.

EYE = torch.eye(64)[None]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q_matrix": EYE.double()}, TypeError, "q_matrix has dtype torch.float64; accepted: torch.float32"),
        ({"q_matrix": None}, TypeError, "q_matrix is a NoneType"),
        ({"k_matrix": EYE[0]}, ValueError, r"k_matrix has shape \[64, 64\]"),
        (
            {"k_matrix": EYE[:, :32]},
            ValueError,
            r"k_matrix has shape \[1, 32, 64\]; accepted: \[num_kv_heads or 1, head",
        ),
        ({"v_matrix": EYE * torch.nan}, ValueError, "v_matrix has a non-finite component"),
        ({"k_bias": torch.zeros(1, 32)}, ValueError, "k_bias has head_dim 32"),
        ({"k_quantizer": "refit"}, TypeError, "k_quantizer is a str; accepted: a kvlab quantizer"),
        (
            {"v_quantizer": RefitInteger(rounds=2)},
            ValueError,
            r"v_quantizer is RefitInteger\(.*rounds=2\); accepted: Asym.* or RefitInteger\(.*rounds=1\)",
        ),
        ({"v_quantizer": UnequalInteger(16)}, ValueError, r"v_quantizer is UnequalInteger\(fine=16\); accepted: Asym"),
        ({"k_quantizer": UnequalInteger(32)}, ValueError, "fine is 32; accepted at head_dim 64: less than 32"),
        ({"k_quantizer": UnequalInteger(8)}, ValueError, "k_matrix has other rows last than first; accepted with"),
        ({"v_bias": torch.zeros(1, 64, device="meta")}, ValueError, "v_bias is a torch.strided tensor on meta"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_folding_refuses(change, error, message):
    with pytest.raises(error, match=message):
        Folding(**{"q_matrix": EYE, "k_matrix": EYE, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 3}, "num_heads is 3; accepted: a multiple of num_kv_heads 2"),
        ({"qkv": torch.zeros(5, 8 * 64)}, "qkv is torch.float32"),
        ({"qkv": torch.zeros(5, 7 * 64).bfloat16()}, r"qkv is torch.bfloat16 \[5, 448\]; accepted: .* \[tokens, 512\]"),
        ({"qkv": torch.zeros(5, 513).bfloat16()[:, :512]}, "qkv has strides .* accepted: dense rows"),
        ({"cache": torch.zeros(2, 2, 32, 136, dtype=torch.uint8)}, "cache has shape .* accepted: .* 72"),
        ({"cache": torch.zeros(2, 1, 32, 72, dtype=torch.uint8)}, "cache has shape"),
        ({"slot_mapping": torch.zeros(5, dtype=torch.int32)}, "slot_mapping is torch.int32"),
        (
            {"slot_mapping": torch.zeros(6, dtype=torch.int64)},
            r"slot_mapping is torch.int64 \[6\]; accepted: .*at most 5",
        ),
        ({"folding": Folding(EYE.expand(3, -1, -1), EYE)}, "q_matrix has 3 heads; accepted: 1 or 2"),
        ({"out": torch.zeros(5, 4, 64)}, "out is torch.float32"),
        ({"debug_keys": torch.zeros(5, 4, 64)}, "debug_keys is torch.float32"),
        ({"backend": "cuda"}, "backend 'cuda' cannot run: "),
        ({"backend": "numpy"}, "backend is 'numpy'; accepted: cuda, triton, naive"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_store_refuses(change, message):
    arguments = {
        "qkv": SMALL.qkv(),
        "cache": SMALL.cache()[1],
        "slot_mapping": SMALL.slot_mapping(),
        "folding": SMALL.folding(),
        **SMALL.heads,
        "backend": "naive",
    }
    with pytest.raises(ValueError, match=message):
        norm_rotate_store(**{**arguments, **change})


def test_on_a_cpu_the_twin_answers(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    (_, first), (_, second) = SMALL.cache(), SMALL.cache()
    inputs = SMALL.slot_mapping(), SMALL.folding()
    norm_rotate_store(SMALL.qkv(), first, *inputs, **SMALL.heads)
    norm_rotate_store(SMALL.qkv(), second, *inputs, **SMALL.heads, backend="naive")
    assert torch.equal(first, second)
