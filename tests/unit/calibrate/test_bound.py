"""The rate–distortion bound: known cases, its defining equation, and that no code of ours is below it."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlab.calibrate import KeySample, balanced, expected_error
from kvlab.calibrate.bound import bound_table, rate_distortion_error, seen_energies, spectrum_table
from kvlab.transforms import randomized_hadamard

pytestmark = pytest.mark.unit

HEAD_DIM, TOKENS = 16, 4000


def gaussian(scales, looks, seed=0):
    """Gaussian keys of one head with these standard deviations, and queries that look so much in each channel."""
    keys = torch.randn(1, TOKENS, HEAD_DIM, generator=torch.Generator().manual_seed(seed)) * scales
    weights = torch.full((1, TOKENS), 1 / TOKENS, dtype=torch.float64)
    return KeySample(keys, weights, torch.diag(looks.double())[None])


@pytest.mark.parametrize("bits", [0.5, 2, 4.25])
def test_white_keys_err_by_a_power_of_two(bits):
    # Exactly white: orthonormal rows, each a token.
    weights = torch.full((1, HEAD_DIM), 1 / HEAD_DIM, dtype=torch.float64)
    sample = KeySample(torch.eye(HEAD_DIM)[None], weights, torch.eye(HEAD_DIM, dtype=torch.float64)[None])
    assert rate_distortion_error(sample, bits).item() == pytest.approx(2**-bits, rel=1e-9)


@given(
    logs=st.lists(st.floats(-6, 6), min_size=HEAD_DIM, max_size=HEAD_DIM),
    bits=st.floats(0.05, 8),
)
def test_the_bits_add_up(logs, bits):
    weights = torch.full((1, HEAD_DIM), 1 / HEAD_DIM, dtype=torch.float64)
    looks = torch.tensor(logs).exp().double()
    sample = KeySample(torch.eye(HEAD_DIM)[None], weights, torch.diag(looks)[None])
    error = rate_distortion_error(sample, bits).item() ** 2 * looks.sum().item()
    # Σ min(θ, λ) grows with θ: found by bisection, with λ = looks / head_dim times head_dim, as energies in all.
    low, high = 0.0, looks.max().item()
    for _ in range(200):
        theta = (low + high) / 2
        used = 0.5 * (looks / theta).log2().clamp(min=0).sum().item()
        low, high = (low, theta) if used < bits * HEAD_DIM else (theta, high)
    assert error == pytest.approx(looks.clamp(max=high).sum().item(), rel=1e-6)


def test_uneven_keys_cost_less_and_more_bits_err_less():
    even = gaussian(torch.ones(HEAD_DIM), torch.ones(HEAD_DIM))
    uneven = gaussian(torch.logspace(-1, 1, HEAD_DIM), torch.ones(HEAD_DIM))
    assert rate_distortion_error(uneven, 4) < rate_distortion_error(even, 4) < rate_distortion_error(even, 3)


@pytest.mark.parametrize("looks", [torch.ones(HEAD_DIM), torch.logspace(1, -1, HEAD_DIM)])
def test_four_bit_codes_are_above_it(looks):
    sample = gaussian(torch.logspace(-0.5, 0.5, HEAD_DIM), looks)
    mapped = expected_error(sample, balanced(sample, randomized_hadamard(HEAD_DIM, 0)))
    # 4 bits a number and two fp16 numbers a vector.
    assert rate_distortion_error(sample, 4 + 32 / HEAD_DIM) < mapped


@pytest.mark.parametrize("bits", [0, -1, float("nan"), "4"])
def test_bits_have_to_be_positive(bits):
    with pytest.raises((TypeError, ValueError), match=r"^bits is "):
        rate_distortion_error(gaussian(torch.ones(HEAD_DIM), torch.ones(HEAD_DIM)), bits)


def test_the_table_has_a_row_a_head_in_one_unit(capture_of):
    captured = capture_of(offset=3.0)
    table = bound_table(captured)
    assert table[["layer", "head"]].values.tolist() == [[4, 0], [4, 1], [9, 0], [9, 1]]
    assert (table["bound"] < table["balanced"]).all() and (table["balanced"] < table["rotation"]).all()
    # Twice the offset is more energy of scores, not another error of what is left when it is stored apart: in the
    # unit of the first all of these would be equal.
    larger = bound_table(capture_of(offset=6.0))
    assert (larger["bound"] < 0.8 * table["bound"]).all()


def test_seen_energies_are_those_of_the_scores():
    sample = gaussian(torch.logspace(-1, 1, HEAD_DIM), torch.logspace(1, 0, HEAD_DIM))
    seen = seen_energies(sample)
    assert (seen.diff() <= 0).all()
    # The trace of a product, by two ways in float64.
    assert seen.sum().item() == pytest.approx(sample.score_energy.item(), rel=1e-10)


def test_seen_energies_do_not_change_with_the_basis():
    sample = gaussian(torch.logspace(-1, 1, HEAD_DIM), torch.logspace(1, 0, HEAD_DIM))
    rotation = randomized_hadamard(HEAD_DIM, 0).double()
    turned = replace(
        sample,
        keys=(sample.keys.double() @ rotation.mT).float(),
        covariance=rotation @ sample.covariance @ rotation.mT,
    )
    # The keys of the second sample are rounded to float32: 2⁻²⁴ of each, twice that in squares, of the strongest.
    torch.testing.assert_close(
        seen_energies(turned), seen_energies(sample), rtol=0, atol=2**-22 * seen_energies(sample).max().item()
    )


def test_the_spectrum_of_keys_has_no_mean_in_it(capture_of):
    table, shifted = spectrum_table(capture_of()), spectrum_table(capture_of(offset=3.0))
    assert table.groupby(["layer", "head"])["share"].sum().tolist() == pytest.approx([1] * 4, rel=1e-12)
    assert table["direction"].tolist() == [*range(1, HEAD_DIM + 1)] * 4
    # A constant added to all keys moves a query's scores alike, so attention is the same; scores of some 50 are rounded
    # to float32, 2⁻²⁴ of that, and weights by as much: 1e-5, in squares and sums a few times that.
    assert shifted["share"].to_numpy() == pytest.approx(table["share"].to_numpy(), abs=1e-4 * table["share"].max())
