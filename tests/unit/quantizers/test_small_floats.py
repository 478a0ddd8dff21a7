import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlab.quantizers import MXFP4, NVFP4, Float8, PerTensor, PerTokenHead
from kvlab.quantizers.rounding import divide, to_e2m1, to_fp8, vector_norm

pytestmark = pytest.mark.unit


def non_negative(exponent_bits: int, mantissa_bits: int, bias: int, largest: float) -> list[float]:
    """Every value of a small float in the order of its code, whose lowest bit is the mantissa's."""
    values = []
    for exponent, mantissa in itertools.product(range(2**exponent_bits), range(2**mantissa_bits)):
        fraction = mantissa / 2**mantissa_bits
        values.append(2.0 ** (exponent - bias) * (1 + fraction) if exponent else 2.0 ** (1 - bias) * fraction)
    return [value for value in values if value <= largest]


FORMATS = {
    "e2m1": (to_e2m1, non_negative(2, 1, 1, 6.0)),
    "e4m3": (lambda x: to_fp8(x, "e4m3"), non_negative(4, 3, 7, 448.0)),
    "e5m2": (lambda x: to_fp8(x, "e5m2"), non_negative(5, 2, 15, 57_344.0)),
}
every_format = pytest.mark.parametrize(("round_to", "values"), FORMATS.values(), ids=FORMATS.keys())


def test_e2m1_is_what_it_is():
    assert FORMATS["e2m1"][1] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]


@every_format
def test_every_value_returns(round_to, values):
    x = torch.tensor(values)
    assert torch.equal(round_to(x), x)
    assert torch.equal(round_to(-x), -x)


@every_format
def test_ties_go_to_the_even_code(round_to, values):
    for code, (low, high) in enumerate(itertools.pairwise(values)):
        even = low if code % 2 == 0 else high
        assert round_to(torch.tensor([(low + high) / 2])).item() == even


@every_format
def test_off_ties_the_nearest_wins(round_to, values):
    for low, high in itertools.pairwise(values):
        middle = torch.tensor((low + high) / 2)
        assert round_to(torch.nextafter(middle, torch.tensor(0.0))[None]).item() == low
        assert round_to(torch.nextafter(middle, torch.tensor(1e9))[None]).item() == high


@every_format
def test_saturates(round_to, values):
    far = torch.tensor([values[-1] * 1.01, values[-1] * 10, 1e30])
    assert round_to(far).tolist() == [values[-1]] * 3
    assert round_to(-far).tolist() == [-values[-1]] * 3


def test_stock_fp8_saturates_at_448():
    assert Float8().roundtrip(torch.tensor([1e4, -500.0, 464.0, 0.3])).tolist() == [
        448.0,
        -448.0,
        448.0,
        0.3125,
    ]


def test_per_tensor_scale_is_a_constant():
    x = torch.linspace(-900, 900, 64)
    assert torch.equal(Float8("e4m3", PerTensor(4.0)).roundtrip(x), 4 * Float8().roundtrip(x / 4))


def test_per_token_head_scale_reaches_the_extremes():
    x = torch.linspace(-1, 1, 64)[:, None] * torch.tensor([1e-3, 1.0, 7e3])
    stored = Float8("e4m3", PerTokenHead()).roundtrip(x.T)
    # Two roundings in float32 of the largest number, which e4m3 itself holds exactly.
    torch.testing.assert_close(stored.abs().amax(-1), x.abs().amax(0), rtol=2.0**-23, atol=0)


def test_nvfp4_by_hand():
    # First block: absmax 12 gives the scale 2. Second: 0.1/6 = 8.53·2⁻⁹ rounds to 9·2⁻⁹.
    x = torch.cat([torch.tensor([12.0, -2.0, 1.4, 0.5]), torch.zeros(12), torch.full((16,), 0.1)])
    stored = NVFP4().roundtrip(x)
    assert stored[:4].tolist() == [12.0, -2.0, 1.0, 0.0]
    assert stored[16:].tolist() == [6 * 9 * 2.0**-9] * 16


def test_nvfp4_global_scale_moves_the_range():
    x = torch.linspace(-1e4, 1e4, 32)
    assert NVFP4().roundtrip(x).abs().max() == 448 * 6
    assert torch.equal(NVFP4(16.0).roundtrip(x), 16 * NVFP4().roundtrip(x / 16))


@pytest.mark.parametrize("exponent", [-120, -14, -1, 0, 1, 12, 100])
def test_mxfp4_scale_is_exact_at_powers_of_two(exponent):
    top = torch.tensor(2.0**exponent)
    # A power of two is 4 in its own scale; the float just below it is almost 8 in the next: 6 at most.
    assert MXFP4().roundtrip(torch.full((32,), top)).tolist() == [top.item()] * 32
    below = torch.nextafter(top, torch.tensor(0.0))
    assert MXFP4().roundtrip(torch.full((32,), below)).tolist() == [0.75 * top.item()] * 32


# Where the quotient is a normal float32, rounding it from float64 once more is innocuous.
@given(st.floats(2.0**-100, 2.0**100, width=32), st.integers(1, 64))
def test_divide_is_correctly_rounded(value, divisor):
    x = torch.tensor([value])
    assert divide(x, divisor).item() == (x.double() / divisor).float().item()


@pytest.mark.parametrize("head_dim", [1, 2, 3, 7, 80, 96, 128])
def test_vector_norm(head_dim):
    x = torch.arange(5 * head_dim, dtype=torch.float32).reshape(5, head_dim) - 100
    # At most log2(128) + 1 additions, a square and a root, each off by at most 2⁻²⁴.
    torch.testing.assert_close(vector_norm(x)[:, 0].double(), x.double().norm(dim=-1), rtol=10 * 2.0**-24, atol=0)
