"""The Triton decode kernel where it is compiled: long and ragged contexts, every shape, CUDA graphs."""

import pytest
import torch
from decode_cases import FP16_INF, FP16_NAN, DecodeCase, relative_error

from kvlab.kernels.naive.decode import decode_attention

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    # Before the kernels are imported, which the unit tests do in the interpreter.
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton")
TritonDecode = pytest.importorskip("kvlab.kernels.triton.decode").TritonDecode

# As in the unit tests: fp16 weights, 2⁻¹¹ of terms at most twice the values' spread.
OUTPUT_BOUND = 2**-10
# float32 on sums of 256 terms, and exp2 and log2 of the GPU to 2⁻²².
LSE_BOUND = 1e-5

RAGGED = (1, 31, 0, 33, 4097, 300)
SHAPES = [
    DecodeCase(RAGGED),
    DecodeCase(RAGGED, group=1, num_kv_heads=4, block_size=96),
    DecodeCase(RAGGED, q_len=2, group=4, num_kv_heads=3, head_dim=64),
    DecodeCase(RAGGED, q_len=3, group=6, num_kv_heads=1, head_dim=256, block_size=64),
    DecodeCase(RAGGED, q_len=5, group=8, block_size=128),
    DecodeCase(RAGGED, q_len=8, group=12),
    DecodeCase(RAGGED, q_len=8, group=16, num_kv_heads=1, head_dim=64, block_size=96),
]
LONG = [DecodeCase((65536,)), DecodeCase((40000, 0, 64, 8191)), DecodeCase((262144,), group=4, num_kv_heads=1)]


def plan_for(case):
    plan = TritonDecode(
        case.num_heads, case.num_kv_heads, case.head_dim, case.block_size, len(case.lengths), case.q_len, "cuda"
    )
    for tensor in (plan._partial, plan._partial_lse):
        tensor.fill_(torch.nan)
    return plan


def results_for(inputs):
    out = torch.full_like(inputs.q, torch.nan, dtype=torch.float32)
    return out, torch.full(out.shape[:2], torch.nan, device="cuda")


@pytest.mark.parametrize("poison", [FP16_NAN, FP16_INF], ids=["nan", "inf"])
@pytest.mark.parametrize("case", SHAPES + LONG, ids=str)
def test_agrees_with_its_twin(case, poison):
    inputs = case.inputs("cuda", poison=poison)
    out, lse = results_for(inputs)
    plan_for(case).attend(*inputs.arguments, scale=case.scale, out=out, lse=lse)
    expected, expected_lse = decode_attention(*inputs.arguments, scale=case.scale, q_len=case.q_len)
    assert relative_error(out, expected) <= OUTPUT_BOUND
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=LSE_BOUND)
    assert (out[lse == -torch.inf] == 0).all()


def test_replayed_graph_follows_the_lengths():
    case = DecodeCase((5000, 33, 0, 700))
    inputs = case.inputs("cuda")
    out, lse = results_for(inputs)
    plan = plan_for(case)
    plan.attend(*inputs.arguments, scale=case.scale, out=out, lse=lse)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.attend(*inputs.arguments, scale=case.scale, out=out, lse=lse)
    for lengths in ((5000, 33, 0, 700), (1, 0, 0, 64), (4097, 32, 0, 65)):
        inputs.seq_lens.copy_(torch.tensor(lengths))
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        expected, expected_lse = decode_attention(*inputs.arguments, scale=case.scale)
        assert relative_error(out, expected) <= OUTPUT_BOUND
        torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=LSE_BOUND)


def test_nan_in_one_session_stays_there():
    case = DecodeCase((4097, 4097, 4097))
    inputs = case.inputs("cuda")
    plan = plan_for(case)
    (clean, _), (out, _) = results_for(inputs), results_for(inputs)
    plan.attend(*inputs.arguments, scale=case.scale, out=clean)
    inputs.q[1] = torch.nan
    inputs.cache[inputs.block_table[1, :129].long()] = 0xFF
    plan.attend(*inputs.arguments, scale=case.scale, out=out)
    assert out[1].isnan().all()
    assert torch.equal(out[0::2], clean[0::2])


def test_repeats_bit_for_bit():
    case = DecodeCase((8191, 300), q_len=4)
    inputs = case.inputs("cuda")
    plan = plan_for(case)
    (first, first_lse), (second, second_lse) = results_for(inputs), results_for(inputs)
    plan.attend(*inputs.arguments, scale=case.scale, out=first, lse=first_lse)
    plan.attend(*inputs.arguments, scale=case.scale, out=second, lse=second_lse)
    assert torch.equal(first, second)
    assert torch.equal(first_lse, second_lse)
