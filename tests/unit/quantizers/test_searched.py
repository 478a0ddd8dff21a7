"""What a search over scales promises: never worse than its first candidate, and the bytes it says."""

import itertools
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab import codec
from kvlab.quantizers import AsymmetricInteger, Float8ScaledInteger, LloydMax, PerGroup, RefitInteger
from kvlab.quantizers.codebook import lloyd_max_levels
from kvlab.quantizers.selection import least_error, ordered_sum

pytestmark = pytest.mark.unit

CLIPS = (0.0, 0.03125, 0.25)
REFITS = [RefitInteger(), RefitInteger(rounds=0), RefitInteger(CLIPS, rounds=3), RefitInteger((0.0,), rounds=1)]

magnitudes = st.sampled_from([65_504.0, 65_472.0, 300.0, 1.0, 1e-3, 6e-8, 1e-20, 1e-40, 0.0])


@st.composite
def vectors(draw):
    """Noise, constants, tiny ranges around a large mean, few levels, sparse and any floats, some with an outlier."""
    n = 2 * draw(st.integers(1, 70))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shapes = {
        "uniform": lambda: rng.uniform(-1, 1, n),
        "gaussian": lambda: rng.standard_normal(n) / 6,
        "constant": lambda: np.full(n, rng.uniform(-1, 1)),
        "tiny range": lambda: rng.uniform(0.999, 1, n),
        "two levels": lambda: rng.choice([-1.0, rng.uniform(-1, 1)], n),
        "sparse": lambda: rng.uniform(-1, 1, n) * (rng.random(n) < 0.1),
        "any": lambda: np.array(draw(st.lists(st.floats(-1, 1, width=32), min_size=n, max_size=n))),
    }
    x = draw(magnitudes) * np.clip(shapes[draw(st.sampled_from(sorted(shapes)))](), -1, 1)
    if draw(st.booleans()):
        x[draw(st.integers(0, n - 1))] = draw(st.sampled_from([-1, 1])) * draw(magnitudes)
    return torch.from_numpy(x.astype(np.float32))


def squared_error(stored: torch.Tensor, x: torch.Tensor) -> float:
    return (stored.double() - x.double()).square().sum().item()


@settings(deadline=None, max_examples=400)
@given(vectors(), st.sampled_from(REFITS))
def test_refit_is_never_worse_than_min_max(x, quantizer):
    # No tolerance: a candidate must win by more than float32 sums can be wrong. (float64 sums are off by 2⁻⁵⁰.)
    plain = squared_error(AsymmetricInteger(4).roundtrip(x), x)
    assert squared_error(quantizer.roundtrip(x), x) <= plain * (1 + 2.0**-40)


@settings(deadline=None, max_examples=200)
@given(vectors(), st.integers(0, 2))
def test_another_round_is_never_worse(x, rounds):
    fewer, more = (RefitInteger(rounds=r).roundtrip(x) for r in (rounds, rounds + 1))
    assert squared_error(more, x) <= squared_error(fewer, x) * (1 + 2.0**-40)


@settings(deadline=None, max_examples=200)
@given(vectors(), st.integers(1, 4))
def test_a_longer_reach_is_never_worse_than_the_first_scale(x, reach):
    first, searched = (LloydMax(4, PerGroup(len(x)), reach=r).roundtrip(x) for r in (0, reach))
    assert squared_error(searched, x) <= squared_error(first, x) * (1 + 2.0**-40)


@settings(deadline=None, max_examples=200)
@given(vectors(), st.integers(0, 2**32 - 1), st.sampled_from([0.0, 1e-7, 1e-6, 1e-3, 1.0]))
def test_the_candidate_chosen_is_never_worse_than_the_first(x, seed, apart):
    # Candidates that are nearly equal, down to differences that float32 sums cannot see.
    noise = torch.from_numpy(np.random.default_rng(seed).standard_normal((4, len(x))).astype(np.float32))
    candidates = x + x.abs().max() * (noise[:1] + apart * noise)
    (stored,) = least_error(x[None], [(row[None],) for row in candidates])
    assert squared_error(stored, x) <= squared_error(candidates[0], x) * (1 + 2.0**-40)


@settings(deadline=None, max_examples=300)
@given(vectors(), st.sampled_from(REFITS), st.sampled_from([torch.float32, torch.float16, torch.float64]))
def test_bytes_decode_to_what_roundtrip_returns(x, quantizer, dtype):
    x = x.to(dtype)
    decoded, stored = codec.decode(quantizer.encode(x), dtype), quantizer.roundtrip(x)
    assert decoded.shape == stored.shape and decoded.dtype == stored.dtype
    assert torch.equal(decoded, stored)
    assert torch.equal(torch.signbit(decoded), torch.signbit(stored))


def gaussian(*shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).standard_normal(shape).astype(np.float32))


def test_without_search_the_bytes_are_the_codecs():
    x = gaussian(5000, 64) * 3 + 1
    assert torch.equal(RefitInteger((0.0,), rounds=0).encode(x), codec.encode(x))


def test_encode_keeps_leading_dimensions_and_its_input():
    x = gaussian(2, 3, 2500, 32)
    strided = x.transpose(1, 2)
    before = strided.clone()
    encoded = RefitInteger().encode(strided)
    assert encoded.shape == (2, 2500, 3, 20) and encoded.dtype == torch.uint8
    assert torch.equal(encoded, RefitInteger().encode(x).transpose(1, 2))
    assert torch.equal(strided, before)


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.zeros(3, 5), ValueError, "x has head_dim 5"),
        (torch.zeros(0, 4), ValueError, r"x has shape \[0, 4\]"),
        (torch.zeros(2, 4).int(), TypeError, "torch.int32"),
        (torch.tensor([0.0, float("nan")]), ValueError, "x has a non-finite component"),
        (torch.tensor([0.0, 65_505.0]), ValueError, "magnitude 65505; accepted: at most 65504"),
    ],
)
def test_encode_refuses(x, error, message):
    with pytest.raises(error, match=message):
        RefitInteger().encode(x)


def half(value: float) -> float:
    return struct.unpack("<e", struct.pack("<e", value))[0]


def test_refit_is_the_regression_on_the_codes():
    # Dyadic, so that float32 loses nothing but the divisions; compared with a regression by NumPy.
    x = [0.0, 15.0, 1.25, 2.25, 3.25, 7.25, 8.25, 14.25]
    codes = np.array([0, 15, 1, 2, 3, 7, 8, 14])
    offset = half(np.polyfit(codes, x, 1)[1])
    scale = half(codes @ (np.array(x) - offset) / (codes @ codes))
    stored = RefitInteger((0.0,), rounds=1).roundtrip(torch.tensor(x))
    assert (scale, offset) != (1.0, 0.0)
    assert stored.tolist() == [float(np.float32(offset + scale * code)) for code in codes]


@settings(deadline=None)
@given(st.floats(-6000, 6000, width=32).filter(lambda v: abs(v) > 15 / 64))
def test_constant_groups_return(value):
    # s is |x|/15 rounded to e4m3, normal from 15/64 on, so 1/16 off at most. Where it is smaller, the offset moves
    # the levels by up to half a step beyond zero, which reaches x (15.5 · 15/16 < 15, so 0.47 short of that).
    x = torch.full((64,), value)
    step = abs(value) / 15 * 17 / 16
    # In reach the nearest offset leaves 1/32 of a step.
    bound = max(step / 32, abs(value) * (1 - 15 / 16 * (15 + 7 / 16) / 15))
    assert (Float8ScaledInteger().roundtrip(x) - x).abs().max() <= bound * (1 + 2.0**-20)


def test_float8_metadata_are_as_they_are_said():
    x = gaussian(300, 128) + gaussian(300, 1)
    for row in Float8ScaledInteger().roundtrip(x).reshape(-1, 64)[:100]:
        levels = row.unique()
        assert len(levels) <= 16
        step = levels.diff().min()
        # Every level is a multiple of s/16 that ends in the same digit, s being an e4m3 number.
        scales = [step / k for k in (1, 2, 3)]
        scale = next(s for s in scales if s == s.to(torch.float8_e4m3fn).float())
        sixteenths = levels / scale * 16
        assert torch.equal(sixteenths, sixteenths.round())
        assert ((sixteenths - sixteenths[0]) % 16 == 0).all()


def test_lloyd_max_takes_the_best_of_its_scales():
    x = gaussian(200, 32)
    levels = np.array(lloyd_max_levels(4), dtype=np.float32)
    numbers = torch.arange(127, dtype=torch.int8).view(torch.float8_e4m3fn).float().numpy()
    stored = LloydMax(reach=2).roundtrip(x)
    for row, out in zip(x.numpy(), stored.double().numpy(), strict=True):
        first = np.abs(numbers - np.abs(row).max() / levels[-1]).argmin()
        errors = []
        for scale in numbers[first - 2 : first + 3]:
            nearest = (levels * scale)[np.abs(row[:, None] - levels * scale).argmin(axis=1)]
            errors.append(np.square(nearest.astype(np.float64) - row).sum())
        # Near-ties may go to the first: 2⁻¹⁸, and float32's rounding of quotients moves numbers on a boundary.
        assert np.square(out - row).sum() <= min(errors) * (1 + 2.0**-17)


@pytest.mark.parametrize(
    "make",
    [lambda s: Float8ScaledInteger(global_scale=s), lambda s: LloydMax(global_scale=s)],
    ids=["float8-scaled", "lloyd-max"],
)
def test_global_scale_is_the_unit(make):
    x = gaussian(50, 64)
    assert torch.equal(make(2.0**-6).roundtrip(x * 2.0**-6), make(1.0).roundtrip(x) * 2.0**-6)
    # With e4m3's smallest scale, 2⁻⁹, every level but zero is at least eight times these numbers.
    assert not make(1.0).roundtrip(x * 2.0**-17).any()
    # In units of the smallest scale accepted these numbers are infinite.
    assert make(2.0**-126).roundtrip(x * 1e4).isfinite().all()


@pytest.mark.parametrize(
    ("quantizer", "percent"),
    [
        (RefitInteger((0.0,), rounds=0), 9.98),
        (RefitInteger(rounds=0), 9.31),
        (RefitInteger(), 9.21),
        (RefitInteger((0.0, 0.025, 0.05)), 9.11),
        (Float8ScaledInteger(), 8.39),
        (LloydMax(), 7.89),
    ],
    ids=repr,
)
def test_error_of_gaussian_vectors(quantizer, percent):
    # Measured on 20,000 vectors of another sample with a standard error of 0.007 points at most; 0.01 on 10,000.
    x = torch.from_numpy(np.random.default_rng(1).standard_normal((10_000, 128)).astype(np.float32))
    error = 100 * (squared_error(quantizer.roundtrip(x), x) / squared_error(torch.zeros_like(x), x)) ** 0.5
    assert error == pytest.approx(percent, abs=0.05)


def test_no_search_beats_the_rate_distortion_bound():
    # 2⁻ᵇ per number is the least relative error of a Gaussian at b bits, whatever the code.
    x = gaussian(2000, 128)
    for quantizer in (RefitInteger(), Float8ScaledInteger(), LloydMax()):
        error = (squared_error(quantizer.roundtrip(x), x) / squared_error(torch.zeros_like(x), x)) ** 0.5
        assert error > 2 ** -quantizer.bits_per_number(128)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 127])
def test_ordered_sum_has_the_order_it_says(n):
    x = gaussian(5, n)
    before = x.clone()
    for row, total in zip(x.numpy(), ordered_sum(x), strict=True):
        row = list(row)
        while len(row) > 1:
            keep = (len(row) + 1) // 2
            row = [low + high for low, high in itertools.zip_longest(row[:keep], row[keep:], fillvalue=np.float32(0))]
        assert total.item() == row[0]
    assert torch.equal(x, before)


def test_a_tie_stays_with_the_first_candidate():
    x = torch.zeros(1, 4)
    first, second = torch.tensor([[1.0, 0, 0, 0]]), torch.tensor([[0, 0, 0, 1.0]])
    (stored,) = least_error(x, [(first,), (second,)])
    assert torch.equal(stored, first)
    # Less by one rounding is no evidence; by a thousandth it is.
    assert torch.equal(least_error(x, [(first,), (second * (1 - 2.0**-23),)])[0], first)
    assert torch.equal(least_error(x, [(first,), (second * 0.999,)])[0], second * 0.999)
