"""The plan object: what it accepts, and its CPU path."""

import pytest
import torch

from kvlab.kernels import backends, nvrtc
from kvlab.kernels.decode import DecodePlan
from kvlab.kernels.naive.decode import decode_attention

pytestmark = pytest.mark.unit

SHAPE = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "block_size": 32, "max_batch": 3, "device": "cpu"}


def step(q_len: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "q": torch.randn(2 * q_len, 4, 64, generator=generator).bfloat16(),
        "cache": torch.zeros(3, 2, 32, 72, dtype=torch.uint8),
        "block_table": torch.tensor([[0, 2], [1, -1]], dtype=torch.int32),
        "seq_lens": torch.tensor([40, 9], dtype=torch.int32),
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 5}, "num_heads is 5; accepted: a multiple of num_kv_heads 2"),
        ({"num_heads": 0}, "num_heads is 0"),
        ({"num_kv_heads": True}, "num_kv_heads is True"),
        ({"block_size": 48}, "block_size is 48; accepted: a multiple of 32 tokens"),
        ({"max_batch": 0}, "max_batch is 0"),
        ({"q_len": 9}, "q_len is 9; accepted: 1, 2, 3, 4, 5, 6, 7, 8"),
        ({"head_dim": 96}, "head_dim is 96; accepted: 64, 128, 256"),
        ({"q_len": True}, "q_len is True"),
        ({"device": "gpu"}, "device is 'gpu'; accepted: a device with memory"),
        ({"device": "meta"}, "device is 'meta'; accepted: a device with memory"),
        ({"backend": "metal"}, "backend is 'metal'; accepted: cuda, triton, naive"),
        ({"backend": "cuda"}, "backend 'cuda' cannot run: device is cpu"),
    ],
)
def test_a_plan_refuses(change, message):
    with pytest.raises((ValueError, TypeError), match=message):
        DecodePlan(**SHAPE | change)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("q", lambda x: x.float(), "q is torch.float32"),
        ("q", lambda x: x[:1], r"q is torch.bfloat16 \[1, 4, 64\].*accepted: torch.bfloat16 \[2, 4, 64\]"),
        ("q", lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), "not contiguous"),
        ("cache", lambda x: x[:, :1], r"cache has shape \[3, 1, 32, 72\]"),
        ("cache", lambda x: x[:0], "cache has shape .*accepted: at least one block"),
        ("cache", lambda x: x[:1].expand(3, -1, -1, -1), "cache has strides .*accepted: blocks and heads apart"),
        ("block_table", lambda x: x[:, :0], r"block_table is torch.int32 \[2, 0\]"),
        ("scale", lambda _: 10**400, "scale is 1000"),
        ("cache", lambda x: x.to(torch.int8), "cache is a torch.int8"),
        ("block_table", lambda x: x.long(), "block_table is torch.int64"),
        ("block_table", lambda x: x[:1], r"block_table is torch.int32 \[1, 2\] on cpu; accepted: torch.int32 \[2, max"),
        ("seq_lens", lambda x: x.long(), "seq_lens is torch.int64"),
        ("seq_lens", lambda x: x.repeat(2), r"seq_lens is torch.int32 \[4\] .*accepted: torch.int32 \[1 to 3\]"),
        (
            "seq_lens",
            lambda x: x.repeat(2)[::2],
            r"seq_lens is torch.int32 \[2\] with stride \(2,\); accepted:.*contiguous",
        ),
        ("seq_lens", lambda _: [40, 9], "seq_lens is a list; accepted: a tensor"),
        ("q", lambda _: None, "q is a NoneType; accepted: a tensor"),
        (
            "q",
            lambda x: torch.empty(1 + x.numel(), dtype=x.dtype)[1:].view(x.shape),
            "q starts at 0x.*a multiple of 16",
        ),
        ("block_table", lambda x: x.to("meta"), "block_table is torch.int32 .* on meta; accepted: .* on cpu"),
        ("scale", lambda _: float("nan"), "scale is nan; accepted: a finite number"),
        ("out", lambda _: torch.zeros(2, 4, 64, dtype=torch.float16), "out is torch.float16"),
        ("lse", lambda _: torch.zeros(2, 4, dtype=torch.float64), "lse is torch.float64"),
        ("value_mean", lambda _: torch.zeros(4, 64), r"value_mean is torch.float32 \[4, 64\]"),
    ],
)
def test_attend_refuses(name, change, message):
    arguments = step()
    arguments[name] = change(arguments.get(name))
    plan = DecodePlan(**SHAPE)
    plan.update(step()["seq_lens"])
    with pytest.raises((ValueError, TypeError), match=message):
        plan.attend(**arguments)


def test_attend_asks_for_a_plan_of_its_step():
    plan, arguments = DecodePlan(**SHAPE), step()
    with pytest.raises(ValueError, match="seq_lens has 2 sequences; accepted: 0, as update was given"):
        plan.attend(**arguments)
    plan.update(torch.ones(3, dtype=torch.int32))
    with pytest.raises(ValueError, match="seq_lens has 2 sequences; accepted: 3, as update was given"):
        plan.attend(**arguments)


@pytest.mark.parametrize("q_len", [1, 3])
def test_on_a_cpu_the_twin_answers(q_len):
    arguments = step(q_len)
    plan = DecodePlan(**SHAPE, q_len=q_len)
    lse = torch.full((2 * q_len, 4), torch.nan)
    plan.update(arguments["seq_lens"])
    options = {"scale": 0.3, "value_mean": torch.linspace(-1, 1, 128).view(2, 64)}
    out = plan.attend(**arguments, **options, lse=lse)
    expected, expected_lse = decode_attention(**arguments, **options, q_len=q_len)
    assert torch.equal(out, expected.bfloat16())
    assert torch.equal(lse, expected_lse.float())


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU tests/gpu compares them")
def test_triton_is_handed_everything():
    pytest.importorskip("triton")
    arguments, options = step(2), {"scale": 0.3, "value_mean": torch.linspace(-1, 1, 128).view(2, 64)}
    results = {}
    for backend in ("naive", "triton"):
        plan = DecodePlan(**SHAPE, q_len=2, backend=backend)
        plan.update(arguments["seq_lens"])
        out, lse = torch.full((4, 4, 64), torch.nan), torch.full((4, 4), torch.nan)
        results[backend] = plan.attend(**arguments, **options, out=out, lse=lse), lse
    # fp16 weights, 2⁻¹¹ of values of order 1; scores are float32.
    for got, expected in zip(results["triton"], results["naive"], strict=True):
        torch.testing.assert_close(got, expected, rtol=2**-10, atol=2**-10)


@pytest.mark.parametrize(("head_dim", "backend"), [(128, "cuda"), (64, "triton")])
def test_the_fastest_that_is_written_for_the_head_size(monkeypatch, head_dim, backend):
    pytest.importorskip("triton")
    monkeypatch.setattr(backends, "_why_no_cuda", lambda device: None)
    device = torch.device("cuda")
    assert backends.choose_backend(None, device, head_dim=head_dim) == backend
    assert backends.choose_backend(None, device, head_dim=head_dim, cuda_head_dims=(64, 128)) == "cuda"


@pytest.mark.parametrize("source", ["plan.cu", "decode.cu", "combine.cu"])
@pytest.mark.parametrize(("group", "q_len"), [(1, 1), (12, 1), (6, 8), (16, 8)])
def test_the_cuda_sources_compile_for_hopper(source, group, q_len):
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings and NVRTC, no GPU")
    defines = {"HEAD_DIM": 128, "GROUP": group, "Q_LEN": q_len, "BLOCK_REGIONS": 1, "STAGES": 3, "BLOCKS_PER_SM": 2}
    assert nvrtc.compile_source(source, defines).startswith(b"\x7fELF")
