"""Pages that the CUDA kernels wrote on an H200 (tests/gpu/write_pages.py), read by everyone."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import kvlab
from kvlab import codec
from kvlab.kernels.decode import DecodePlan
from kvlab.kernels.expand import Spans, expand
from kvlab.kernels.folding import Folding
from kvlab.kernels.layout import read_cells
from kvlab.kernels.store import norm_rotate_store
from kvlab.transforms import FoldedQKNorm

pytestmark = pytest.mark.unit

FILE = Path(__file__).parents[2] / "data" / "pages_h200.safetensors"
LAYER, BLOCKS = 9, (2, 0)


@pytest.fixture(scope="module")
def pages():
    with safe_open(FILE, framework="pt") as file:
        assert "H200" in file.metadata()["machine"]
        # Copies, since a tensor in the file may begin at any byte.
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a dictionary)


@pytest.fixture(scope="module")
def shape(pages):
    """Tokens, query heads, KV heads."""
    return len(pages["qkv"]), pages["queries"].shape[1], pages["cache"].shape[1]


def cells(pages, tokens):
    return read_cells(pages["cache"], torch.tensor(BLOCKS), tokens)


def test_they_decode_to_what_the_gpu_read_from_them(pages, shape):
    for stored, read in zip(cells(pages, shape[0]), (pages["keys"], pages["values"]), strict=True):
        # The GPU rounds offset + scale · code to fp16 once; so does this.
        assert torch.equal(codec.decode(stored).half().transpose(0, 1), read)


def test_every_backend_here_reads_the_same_numbers(pages, shape):
    tokens, _, num_kv_heads = shape
    workspace = torch.full((2, tokens, num_kv_heads, 128), torch.nan, dtype=torch.float16)
    table = torch.tensor([BLOCKS], dtype=torch.int32)
    read = expand(pages["cache"], table, Spans([(0, 0, tokens)], "cpu"), workspace, backend="naive")
    assert all(torch.equal(ours, pages[name]) for ours, name in zip(read, ("keys", "values"), strict=True))


def test_attention_over_them_is_the_gpus(pages, shape):
    tokens, num_heads, num_kv_heads = shape
    plan = DecodePlan(num_heads=num_heads, num_kv_heads=num_kv_heads, block_size=32, max_batch=1, device="cpu")
    seq_lens = torch.tensor([tokens], dtype=torch.int32)
    plan.update(seq_lens)
    out = torch.full((1, num_heads, 128), torch.nan)
    plan.attend(
        pages["queries"][-1:].contiguous(), pages["cache"], torch.tensor([BLOCKS], dtype=torch.int32), seq_lens, out=out
    )
    # The CUDA kernel's bound for float32 outputs (kvlab/kernels/README.md): queries and weights in fp16.
    assert (out - pages["out"]).norm() / pages["out"].norm() < 2e-3


def test_they_hold_what_the_library_stores(pages, shape):
    tokens, num_heads, num_kv_heads = shape
    scheme = kvlab.get_scheme("hadamard-int4")
    folded = FoldedQKNorm(scheme.keys.transform, *pages["gains"])
    folding = Folding(folded.query_matrix(LAYER)[None], folded.key_matrix(LAYER)[None])
    cache = torch.zeros_like(pages["cache"])
    at = torch.arange(tokens)
    slots = torch.tensor(BLOCKS)[at // 32] * 32 + at % 32
    queries = norm_rotate_store(
        pages["qkv"], cache, slots, folding, num_heads=num_heads, num_kv_heads=num_kv_heads, backend="naive"
    )
    ours, theirs = (torch.stack(cells({"cache": x}, tokens)) for x in (cache, pages["cache"]))
    # Sums of another order move a component by float32 rounding; a byte differs only where one lies on a boundary
    # between two codes, or a scale or offset between two fp16 numbers: some in ten thousand.
    assert (ours != theirs).float().mean() < 1e-3
    # A bfloat16 ulp where a float32 sum lies between two of them.
    assert (queries.float() - pages["queries"].float()).abs().max() <= pages["queries"].float().abs().max() * 2**-8
