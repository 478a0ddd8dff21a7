"""The Triton decode kernel: on the GPU if there is one, else in Triton's interpreter."""

import pytest
import torch
from decode_cases import FP16_INF, FP16_NAN, DecodeCase, relative_error

from kvlab.kernels.naive.decode import decode_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytest.importorskip("triton")
TritonDecode = pytest.importorskip("kvlab.kernels.triton.decode").TritonDecode

pytestmark = pytest.mark.unit

# fp16 rounds each weight by at most 2⁻¹¹ of itself, and its term, scale · (code − 8), is at most twice the
# value's spread: 2⁻¹⁰, half of the 2e-3 that a kernel may be off.
OUTPUT_BOUND = 2**-10
# bf16 queries and codes are exact in fp16; what is left is float32 on sums of 256 terms of a few units.
LSE_BOUND = 1e-5

CASES = [
    DecodeCase((1, 31, 0, 33), group=12, num_kv_heads=1),
    DecodeCase((4097,), group=4, num_kv_heads=1, head_dim=64, block_size=96),
    DecodeCase((100,), q_len=8, group=3, num_kv_heads=1, head_dim=64, block_size=64),
    DecodeCase((35,), group=16, num_kv_heads=1, head_dim=64, block_size=64),
    DecodeCase((2, 70), q_len=3, group=6, num_kv_heads=1, head_dim=64),
    DecodeCase((65,), group=1, num_kv_heads=4, head_dim=256),
    DecodeCase((40,), group=8, num_kv_heads=3, block_size=96),
]


def plan_for(case):
    return TritonDecode(
        case.num_heads, case.num_kv_heads, case.head_dim, case.block_size, len(case.lengths), case.q_len, DEVICE
    )


def attend(case, inputs, **options):
    """Output and log-sum-exp, on a workspace and results that held NaN."""
    plan = plan_for(case)
    for tensor in (plan._partial, plan._partial_lse):
        tensor.fill_(torch.nan)
    out = torch.full_like(inputs.q, torch.nan, dtype=torch.float32)
    lse = torch.full(out.shape[:2], torch.nan, device=DEVICE)
    plan.attend(*inputs.arguments, scale=case.scale, out=out, lse=lse, **options)
    return out, lse


@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_its_twin(case):
    inputs = case.inputs(DEVICE, poison=FP16_NAN)
    value_mean = torch.randn(case.num_kv_heads, case.head_dim).to(DEVICE)
    out, lse = attend(case, inputs, value_mean=value_mean)
    # The mean is added to both in full precision; taken off, it does not flatter the error.
    plain, expected_lse = decode_attention(*inputs.arguments, scale=case.scale, q_len=case.q_len)
    expected, _ = decode_attention(*inputs.arguments, scale=case.scale, q_len=case.q_len, value_mean=value_mean)
    assert (out.double() - expected).norm() <= OUTPUT_BOUND * plain.norm()
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=LSE_BOUND)
    assert (out[lse == -torch.inf] == 0).all()


def test_infinity_beyond_the_sequence_is_not_read():
    case = DecodeCase((33, 1), group=1, num_kv_heads=1, head_dim=64, block_size=64)
    nan, inf = (attend(case, case.inputs(DEVICE, poison=poison)) for poison in (FP16_NAN, FP16_INF))
    assert nan[0].isfinite().all()
    assert torch.equal(nan[0], inf[0])
    assert torch.equal(nan[1], inf[1])


@pytest.mark.parametrize("value_std", [1e-5, 1e4])
def test_value_scales_neither_overflow_nor_vanish(value_std):
    case = DecodeCase((70,), group=1, num_kv_heads=1, head_dim=64)
    inputs = case.inputs(DEVICE, value_std=value_std)
    expected, _ = decode_attention(*inputs.arguments, scale=case.scale)
    assert relative_error(attend(case, inputs)[0], expected) <= OUTPUT_BOUND


def test_constant_values_have_scale_zero():
    case = DecodeCase((3,), group=1, num_kv_heads=1, head_dim=64)
    inputs = case.inputs(DEVICE, value_std=0)
    out, _ = attend(case, inputs)
    assert (out == 0).all()


@pytest.mark.parametrize("q_std", [0.0, 1e-6, 1e6])
def test_queries_of_any_size(q_std):
    case = DecodeCase((70,), group=1, num_kv_heads=1, head_dim=64)
    inputs = case.inputs(DEVICE, q_std=q_std)
    expected, expected_lse = decode_attention(*inputs.arguments, scale=case.scale)
    out, lse = attend(case, inputs)
    assert relative_error(out, expected) <= OUTPUT_BOUND
    # Scores grow with the query, and float32 keeps 2⁻²⁴ of them per operation.
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=LSE_BOUND)


def test_full_precision_queries():
    case = DecodeCase((70,), group=1, num_kv_heads=1, head_dim=64)
    inputs = case.inputs(DEVICE, q_dtype=torch.float32)
    expected, _ = decode_attention(*inputs.arguments, scale=case.scale)
    # fp16 rounds each component by 2⁻¹¹, so a score, itself about one, by less; and the weights as above.
    assert relative_error(attend(case, inputs)[0], expected) <= 2 * OUTPUT_BOUND


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
def test_nan_in_one_session_stays_there():
    case = DecodeCase((40, 40, 40), group=1, num_kv_heads=1, head_dim=64)
    inputs = case.inputs(DEVICE)
    clean, _ = attend(case, inputs)
    inputs.q[1] = torch.nan
    inputs.cache[inputs.block_table[1, 0]] = 0xFF
    out, _ = attend(case, inputs)
    assert out[1].isnan().any()
    assert torch.equal(out[0::2], clean[0::2])


def test_batch_composition_changes_no_result():
    # As many splits for one sequence as for two, when the context has one split's tiles at most.
    case = DecodeCase((100, 33), group=1, num_kv_heads=1, head_dim=64)
    inputs = case.inputs(DEVICE)
    both, _ = attend(case, inputs)
    alone = torch.full_like(both[1:], torch.nan)
    plan_for(case).attend(
        inputs.q[1:], inputs.cache, inputs.block_table[1:], inputs.seq_lens[1:], scale=case.scale, out=alone
    )
    assert torch.equal(alone, both[1:])


def test_padded_blocks():
    case = DecodeCase((70,), group=2, num_kv_heads=2, head_dim=64)
    inputs = case.inputs(DEVICE)
    expected, _ = attend(case, inputs)
    size = inputs.cache[0].numel()
    padded = torch.full((len(inputs.cache), size + 16), 0xFF, dtype=torch.uint8, device=DEVICE)[:, :size]
    inputs.cache = padded.copy_(inputs.cache.flatten(1)).unflatten(1, inputs.cache.shape[1:])
    assert not inputs.cache.is_contiguous()
    assert torch.equal(attend(case, inputs)[0], expected)


def test_output_takes_its_dtype():
    case = DecodeCase((40,), group=2, num_kv_heads=1, head_dim=64)
    inputs = case.inputs(DEVICE)
    expected, _ = attend(case, inputs)
    out = torch.full_like(inputs.q, torch.nan)
    plan_for(case).attend(*inputs.arguments, scale=case.scale, out=out)
    # One in the last of bfloat16's 8 places: the interpreter truncates.
    torch.testing.assert_close(out.float(), expected, rtol=2**-7, atol=0)
