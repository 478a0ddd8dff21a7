import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.quantizers import AsymmetricInteger, PerGroup
from kvlab.quantizers.integer import quantize_asymmetric

pytestmark = pytest.mark.unit

magnitudes = st.sampled_from([65_504.0, 300.0, 1.0, 1e-3, 1e-6, 1e-30])
vectors = magnitudes.flatmap(
    lambda m: st.lists(st.floats(-np.float32(m).item(), np.float32(m).item(), width=32), min_size=1, max_size=40)
)


def fp16_error(value: float) -> float:
    # Half the spacing of fp16 numbers around value: 2⁻¹¹ of it, or half of the subnormals' 2⁻²⁴.
    return max(abs(value) * 2.0**-11, 2.0**-25)


@settings(deadline=None, max_examples=150)
@given(vectors, st.sampled_from([2, 3, 4, 8]))
def test_error_is_bounded_by_half_a_step_and_the_metadata(vector, bits):
    x = torch.tensor(vector, dtype=torch.float32)
    n = 2**bits - 1
    o = float(np.float16(min(vector)))
    s = float(np.float16(np.float32(max(max(vector) - o, 0)) / np.float32(n)))
    # Between the outermost levels a number is within s/2 of one. Below the lowest it is off by at most
    # the rounding of o, above the highest by n times that of s. Three float32 operations on numbers up to
    # |o| + n·s add 2⁻²⁴ of that each, and so do o and s read back.
    bound = max(s / 2, fp16_error(o), n * fp16_error(s)) + 4 * 2.0**-24 * (abs(o) + n * s)
    error = (AsymmetricInteger(bits).roundtrip(x).double() - x.double()).abs().max()
    assert error <= bound


@given(st.floats(-65_504, 65_504, width=32), st.integers(1, 200))
def test_constant_returns_to_fp16_rounding(value, head_dim):
    # A constant above its fp16 rounding leaves a span, so up to fp16_error more is recovered, never lost.
    x = torch.full((head_dim,), value)
    error = (AsymmetricInteger(4).roundtrip(x).double() - x.double()).abs().max()
    assert error <= fp16_error(value)


def test_hand_computed():
    # o = −1, s = fp16(3/3) = 1; 0.5 lies half way between codes 1 and 2 and goes to the even one.
    stored = AsymmetricInteger(2).roundtrip(torch.tensor([-1.0, 0.5, 2.0, 0.4, -0.5, 1.6]))
    assert stored.tolist() == [-1.0, 1.0, 2.0, 0.0, -1.0, 2.0]


def test_groups_are_quantized_on_their_own():
    x = torch.linspace(-3, 5, 3 * 128).reshape(3, 128) ** 3
    groups = [AsymmetricInteger(4).roundtrip(group) for group in x.split(32, dim=-1)]
    assert torch.equal(AsymmetricInteger(4, PerGroup(32)).roundtrip(x), torch.cat(groups, dim=-1))


def test_scale_that_vanishes_in_fp16_gives_code_zero():
    # 15 codes over 3e-8 need a scale of 2e-9, less than half of fp16's smallest number.
    codes, scale, offset = quantize_asymmetric(torch.tensor([[1.0, 1.0 + 1e-7]]), bits=4)
    assert codes.tolist() == [[0.0, 0.0]]
    assert (scale.item(), offset.item()) == (0.0, 1.0)


@pytest.mark.parametrize("zeros", [[-0.0, 0.0], [0.0, -0.0], [-0.0, -0.0]])
def test_zero_has_one_sign(zeros):
    _, scale, offset = quantize_asymmetric(torch.tensor([zeros * 8]), bits=4)
    assert not torch.signbit(torch.cat([scale, offset])).any()


def test_elementwise_work_keeps_the_layout_of_its_input():
    # The Hadamard transform hands over a view whose channels are strided; copying it would cost more.
    strided = torch.arange(32.0 * 8).reshape(32, 8).t()
    assert AsymmetricInteger(4)._roundtrip(strided).stride() == strided.stride()
