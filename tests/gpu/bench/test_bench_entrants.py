import pytest
import torch

from kvlab.bench import cases, layer, ours
from kvlab.bench.cases import DecodeCase, StoreCase
from kvlab.kernels.folding import CODEC, REFIT
from kvlab.serving import stock_kernels
from kvlab.serving.flash import flash_attention_3

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = torch.device("cuda")
CASE = DecodeCase(24, 2, (4097, 33, 1000), "ragged", q_len=2)
PREFILL = DecodeCase(24, 2, (4097, 300), "prefill", q_len=130)


@pytest.fixture(autouse=True)
def few_sets(monkeypatch):
    monkeypatch.setattr(cases, "ROTATED_BYTES", 1)


@pytest.mark.parametrize(
    ("scheme", "tolerance"),
    # BF16 rounds probabilities and output to 2^-9, FP8 the probabilities to 2^-4; 2 for their sum.
    [("bf16", 2 * 2**-9), ("fp8", 2**-4)],
)
def test_stock_is_called_as_it_is_meant(scheme, tolerance):
    pytest.importorskip("vllm")
    entry = stock_kernels.DECODE[scheme](CASE, CUDA)
    assert 0 < entry.error() < tolerance


@pytest.mark.parametrize("scheme", ["int4-per-token-head", "turboquant-4bit"])
def test_vllm_int4_runs(scheme):
    pytest.importorskip("vllm")
    entry = stock_kernels.DECODE[scheme](DecodeCase(24, 2, (4097, 33, 1000)), CUDA)
    entry.calls[0]()
    torch.cuda.synchronize()


def test_our_decode_is_within_the_bar():
    assert 0 < ours.decode(CASE, CUDA).error() < 2e-3


@pytest.mark.parametrize("quantizer", (CODEC, REFIT), ids=repr)
def test_our_store_is_within_the_bar(quantizer):
    # As on the CPU: queries to bfloat16, and one code in a hundred off by one.
    assert 0 < ours.store(StoreCase(24, 2, 70), CUDA, quantizer).error() < 0.034


@pytest.mark.parametrize("scheme", layer.LAYERS)
def test_our_layers_step_is_within_the_bar(scheme):
    # As decode; where values are mapped, its rounding to bfloat16 is mapped too, and rounded again.
    entry = layer.layer_step(DecodeCase(24, 2, (4097, 33, 1000)), CUDA, layer.LAYERS[scheme])
    assert 0 < entry.error() < 2e-3 + (2 * 2**-9 if "values" in scheme else 0)


@pytest.mark.parametrize("flash", ["torch", "vllm"])
def test_our_prefill_is_within_the_bar(flash):
    attention = flash_attention_3() if flash == "vllm" else None
    if flash == "vllm" and attention is None:
        pytest.skip("needs vLLM's FlashAttention 3")
    # 2^-9 is the output's own rounding to bfloat16, as much again what fp16 leaves.
    assert 0 < ours.prefill(PREFILL, CUDA, attention).error() < 2 * 2**-9


def test_stock_prefill_runs():
    pytest.importorskip("vllm")
    stock_kernels.paged_fp8_prefill(PREFILL, CUDA).calls[0]()
    torch.cuda.synchronize()
