import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kvlab import codec
from kvlab.quantizers import AsymmetricInteger, RefitInteger, RefitUnequalInteger, UnequalInteger
from kvlab.quantizers.unequal import STEPS

pytestmark = pytest.mark.unit

DIM, FINE = 16, 5
QUANTIZER, REFITTED = UnequalInteger(FINE), RefitUnequalInteger(FINE)
both = pytest.mark.parametrize("quantizer", [QUANTIZER, REFITTED], ids=repr)
vectors = arrays("float32", (3, DIM), elements=st.floats(-60_000, 60_000, width=32))


def gaussian(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def test_by_hand():
    # Range 0 to 15, so that a step is 1, and a fine one 1/17.
    x = torch.tensor([[2.03, 7.5, 0.0, 15.0, 6.4, 99.0, -99.0]])
    stored = UnequalInteger(2).roundtrip(x)
    assert stored.tolist() == [[pytest.approx(35 / 17), pytest.approx(128 / 17), 0.0, 15.0, 6.0, 0.0, 0.0]]
    # 35 = 2 · 16 + 3, and 7.5 · 17 = 127.5 is rounded to even.
    x = torch.cat([x, torch.zeros(1, 1)], dim=1)
    packed = UnequalInteger(2).encode(x[:, [0, 1, 2, 3, 4, 7, 5, 6]])[0, :4]
    assert torch.cat([packed & 15, packed >> 4]).tolist() == [2, 8, 0, 15, 6, 0, 3, 0]


@both
@given(vectors)
def test_what_a_cache_reads_expands_to_what_is_stored(quantizer, x):
    x = torch.from_numpy(x)
    read = codec.decode(quantizer.encode(x)).double()
    stored = quantizer.roundtrip(x)
    # Four roundings of numbers no larger than the largest; o + 15 s may pass it by fp16's rounding.
    bound = 4 * 2**-24 * 1.01 * max(x.abs().max().item(), 1e-30)
    assert ((read @ quantizer.expansion(DIM).double().mT) - stored).abs().max() <= bound


@given(vectors)
def test_no_fine_channel_is_stored_worse_than_by_equal_bits(x):
    x = torch.from_numpy(x)[:, : DIM - FINE]
    plain = AsymmetricInteger(4).roundtrip(x)
    ours = QUANTIZER.roundtrip(torch.cat([x, torch.zeros(3, FINE)], dim=1))
    assert torch.equal(ours[:, FINE : DIM - FINE], plain[:, FINE:])
    assert not ours[:, DIM - FINE :].any()
    # Half a fine step, and what fp16 takes from the offset and, 15 times, from the scale: 2^-11 of them, and of the
    # smallest half of 2^-24.
    offset, scale = x.amin(-1), (x.amax(-1) - x.amin(-1)) / 15
    slack = 2**-10 * (offset.abs() + 16 * scale) + 16 * 2**-25
    error = (ours - torch.cat([x, torch.zeros(3, FINE)], dim=1))[:, :FINE].abs().amax(-1)
    assert (error <= scale / (2 * STEPS) + slack).all()


@given(vectors)
def test_searched_ranges_store_no_vector_worse(x):
    x = torch.from_numpy(x)
    stored = x[:, : DIM - FINE].double()
    ours, plain = (
        (quantizer.roundtrip(x)[:, : DIM - FINE] - stored).square().sum(-1) for quantizer in (REFITTED, QUANTIZER)
    )
    # Sums that the search rounds to float32.
    assert (ours <= plain * (1 + 2**-18) + 1e-30).all()


def test_without_fine_channels_that_matter_the_search_is_that_of_equal_bits():
    x = gaussian(4000, 128)
    # Constant within the range: they are exact but for a fine step, and the others' error decides.
    x[:, :2] = 0.0
    x[:, -2:] = 0.0
    ours, equal = RefitUnequalInteger(2).roundtrip(x), RefitInteger().roundtrip(x[:, 2:-2].contiguous())
    differ = (ours[:, 2:-2] != equal).any(-1)
    # What the two fine zeros err, up to (s/34)^2 each of 124 (s^2/12), tips choices that are nearly even.
    assert differ.float().mean() < 0.05
    assert (ours[:, 2:-2] - x[:, 2:-2]).norm() <= 1.001 * (equal - x[:, 2:-2]).norm()


def test_searched_ranges_err_less_where_fine_channels_are_small():
    x = gaussian(4000, 128)
    x[:, :16] *= 0.5
    x[:, -16:] = 0.0
    ours, plain = ((quantizer.roundtrip(x) - x).norm() for quantizer in (RefitUnequalInteger(16), UnequalInteger(16)))
    equal = [(q.roundtrip(x[:, 16:112]) - x[:, 16:112]).norm() for q in (RefitInteger(), AsymmetricInteger(4))]
    # What the search gains is gained by the channels of four bits, as it would be alone.
    assert (ours / plain).item() == pytest.approx((equal[0] / equal[1]).item(), abs=0.005)


@both
def test_dropped_channels_are_not_looked_at(quantizer):
    x = gaussian(20, DIM)
    other = x.clone()
    other[:, -FINE:] = 1e4
    assert torch.equal(quantizer.encode(x), quantizer.encode(other))
    assert torch.equal(quantizer.roundtrip(x), quantizer.roundtrip(other))


def test_fine_channels_err_a_seventeenth():
    x = gaussian(4000, 128)
    error = (UnequalInteger(16).roundtrip(x) - x).square().mean(0)
    # Uniform rounding in both: 64,000 squares are known to half a percent, fp16 scales are off by 2^-11 of 15 steps.
    assert (error[16:112].mean() / error[:16].mean()).sqrt().item() == pytest.approx(STEPS, rel=0.03)


def test_placement_puts_each_codes_number_where_it_goes():
    x = gaussian(7, DIM)
    placed = x @ QUANTIZER.placement(DIM).mT
    assert torch.equal(placed[:, : DIM - FINE], x[:, : DIM - FINE])
    assert torch.equal(placed[:, -FINE:], x[:, :FINE])
    assert torch.equal(QUANTIZER.encode(placed), QUANTIZER.encode(x))


def test_matrices_are_float32_on_the_host_whatever_a_server_has_set():
    expected = QUANTIZER.placement(DIM), QUANTIZER.expansion(DIM)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            matrices = QUANTIZER.placement(DIM), QUANTIZER.expansion(DIM)
    finally:
        torch.set_default_dtype(before)
    for ours, other in zip(matrices, expected, strict=True):
        assert (ours.dtype, ours.device.type) == (torch.float32, "cpu")
        assert torch.equal(ours, other)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: UnequalInteger(0), ValueError, "fine is 0; accepted: an integer of at least 1"),
        (lambda: UnequalInteger(1.5), TypeError, "fine is 1.5; accepted: an integer"),
        (lambda: UnequalInteger(8).bits_per_number(16), ValueError, "fine is 8; accepted at head_dim 16: less than 8"),
        (lambda: UnequalInteger(8).roundtrip(torch.zeros(2, 16)), ValueError, "fine is 8; accepted at head_dim 16"),
        (lambda: UnequalInteger(8).encode(torch.zeros(2, 16)), ValueError, "fine is 8; accepted at head_dim 16"),
        (lambda: UnequalInteger(8).expansion(4), ValueError, "fine is 8; accepted at head_dim 4: less than 2"),
    ],
)
def test_what_cannot_be_is_refused(make, error, message):
    with pytest.raises(error, match=f"^{message}"):
        make()
