import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.calibrate import (
    KeyObjective,
    KeySample,
    balanced,
    channel_scales,
    expected_error,
    plain,
    query_basis,
    scaled_query_basis,
)
from kvlab.calibrate.closed_forms import FREE_FACTOR, SHRINKAGE
from kvlab.quantizers import AsymmetricInteger
from kvlab.schemes import StoredAs
from kvlab.transforms import Hadamard, Matrix, hadamard_matrix, randomized_hadamard

pytestmark = pytest.mark.unit

HEAD_DIM, HEADS, TOKENS = 16, 2, 400
FINDERS = [plain, query_basis, channel_scales, scaled_query_basis, balanced]
ROTATION = randomized_hadamard(HEAD_DIM, 3)


def planted(seed, head_dim=HEAD_DIM, *, channels=False, aligned=False):
    """Keys and queries of very uneven directions: channels themselves if ``channels``, and the same if ``aligned``."""
    pattern, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
    x, q = (torch.randn(HEADS, TOKENS, head_dim, generator=own) for _ in range(2))
    sizes = torch.logspace(0, -1.5, head_dim)
    for vectors in (x, q):
        if aligned:
            pattern.manual_seed(0)
        basis = torch.linalg.qr(torch.randn(HEADS, head_dim, head_dim, generator=pattern))[0]
        order = torch.randperm(head_dim, generator=pattern)
        vectors *= sizes[order]
        if not channels:
            vectors.copy_(vectors @ basis.mT)
    weights = torch.rand(HEADS, TOKENS, generator=own).double()
    return KeySample(x, weights / weights.sum(1, keepdim=True), q.double().mT @ q.double() / TOKENS)


def shrunk(moment):
    mean = moment.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    return moment + SHRINKAGE * mean * torch.eye(moment.shape[-1])


def cost(A, sample):
    """Noise that queries see, times what widens a range: all of A M Aᵀ but its part along 1/√d."""
    C, M = shrunk(sample.covariance), shrunk(sample.moment)
    inverse, moved = torch.linalg.inv(A), A @ M @ A.mT
    noise = (inverse.mT @ C @ inverse).diagonal(dim1=-2, dim2=-1).sum(-1)
    return noise * (moved.diagonal(dim1=-2, dim2=-1).sum(-1) - moved.mean(-1).sum(-1))


def singular_values(sample):
    roots = [torch.linalg.cholesky(shrunk(moment)) for moment in (sample.covariance, sample.moment)]
    return torch.linalg.svdvals(roots[0].mT @ roots[1])


@pytest.mark.parametrize(
    "rotation", [ROTATION, torch.eye(HEAD_DIM), hadamard_matrix(12) / 12**0.5], ids=["random", "no", "Paley"]
)
def test_balanced_costs_what_theory_says(rotation):
    sample = planted(1, len(rotation))
    sigma = singular_values(sample)
    rest = sigma[:, 1:].sum(1)
    # The free direction is there FREE_FACTOR times larger; the rotation is orthogonal to 2⁻²³.
    expected = rest * (rest + sigma[:, 0] / FREE_FACTOR**2)
    torch.testing.assert_close(cost(balanced(sample, rotation), sample), expected, rtol=1e-4, atol=0)


def test_balanced_shows_keys_and_queries_alike():
    sample = planted(1)
    B = ROTATION.double().T @ balanced(sample, ROTATION)
    inverse = torch.linalg.inv(B)
    keys, queries = B @ shrunk(sample.moment) @ B.mT, inverse.mT @ shrunk(sample.covariance) @ inverse
    sigma = singular_values(sample)
    factor = torch.ones(HEAD_DIM).double()
    factor[0] = FREE_FACTOR**2
    # Diagonal but for the rotation's rounding, 2⁻²³ of the largest.
    bound = 1e-5 * FREE_FACTOR**2 * sigma.max().item()
    torch.testing.assert_close(keys, torch.diag_embed(sigma * factor), rtol=0, atol=bound)
    torch.testing.assert_close(queries, torch.diag_embed(sigma / factor), rtol=0, atol=bound)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), away=st.floats(0, 2))
def test_no_map_costs_less_than_the_bound(seed, away):
    sample = planted(1)
    bound = singular_values(sample)[:, 1:].sum(1).square()
    noise = torch.randn(HEADS, HEAD_DIM, HEAD_DIM, generator=torch.Generator().manual_seed(seed)).double()
    tried = balanced(sample, ROTATION) + away * noise
    assert (cost(tried, sample) >= (1 - 1e-6) * bound).all()
    assert (cost(noise, sample) >= bound).all()


@settings(derandomize=True, deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32), away=st.floats(0, 2))
def test_no_other_channel_scales_cost_less(seed, away):
    sample = planted(1)

    def whole_cost(scales):
        C, M = (shrunk(moment).diagonal(dim1=-2, dim2=-1) for moment in (sample.covariance, sample.moment))
        return (C / scales**2).sum(-1) * (M * scales**2).sum(-1)

    found = (ROTATION.double().T @ channel_scales(sample, ROTATION)).diagonal(dim1=-2, dim2=-1)
    noise = torch.randn(HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(seed)).double()
    # The rotation is orthogonal to 2⁻²³.
    assert (whole_cost(found) <= (1 + 1e-5) * whole_cost(found * (away * noise).exp())).all()


def test_query_basis_is_a_rotation_led_by_the_strongest_query_direction():
    sample = planted(1)
    A = query_basis(sample, ROTATION)
    identity = torch.eye(HEAD_DIM).double()
    torch.testing.assert_close(A @ A.mT, identity.expand(HEADS, -1, -1), rtol=0, atol=2**-22)
    strongest = torch.linalg.eigh(sample.covariance).eigenvectors[..., -1]
    # It is stored as a constant vector, which costs a min/max quantizer no range.
    stored = (A @ strongest[..., None])[..., 0]
    assert (stored.std(-1) < 1e-6).all()
    assert stored.abs().mean(-1).tolist() == pytest.approx([HEAD_DIM**-0.5] * HEADS, rel=1e-5)


def test_plain_is_the_rotation():
    x = torch.randn(HEADS, 5, HEAD_DIM)
    found = Matrix(plain(planted(1), hadamard_matrix(HEAD_DIM) / HEAD_DIM**0.5)).forward(x)
    # Four butterflies in float32.
    torch.testing.assert_close(found, Hadamard().forward(x), rtol=0, atol=4 * 2**-24 * x.norm(dim=-1).max().item())


def held_out_error(finder, **structure):
    sample, other = planted(1, **structure), planted(2, **structure)
    side = StoredAs(Matrix(finder(sample, ROTATION)), quantizer=AsymmetricInteger(4))
    measured = KeyObjective(other.keys, other.covariance).error(side)
    return measured, expected_error(sample, finder(sample, ROTATION)), expected_error(sample, plain(sample, ROTATION))


@pytest.mark.parametrize("finder", FINDERS[1:])
def test_each_beats_the_rotation_on_its_objective_and_on_other_data(finder):
    # Rotating can only use what keys have along the leading direction of the queries.
    structure = {"channels": finder is channel_scales, "aligned": finder is query_basis}
    measured, expected, before = held_out_error(finder, **structure)
    baseline = held_out_error(plain, **structure)[0]
    assert (expected < before).all()
    assert (measured < baseline).all()


def test_balanced_beats_all_others_on_other_data():
    errors = {finder.__name__: held_out_error(finder)[0] for finder in FINDERS}
    best = errors.pop("balanced")
    assert all((best < error).all() for error in errors.values())


@pytest.mark.parametrize("finder", FINDERS)
def test_what_is_expected_is_what_is_measured(finder):
    sample = planted(1)
    sample = KeySample(sample.keys, torch.full_like(sample.weights, 1 / TOKENS), sample.covariance)
    sample = sample.minus(sample.mean)
    A = finder(sample, ROTATION)
    measured = KeyObjective(sample.keys, sample.covariance).error(StoredAs(Matrix(A), quantizer=AsymmetricInteger(4)))
    # The least and the largest of 16 numbers are exact, which the model leaves out: up to 2/16 of the squares; and
    # 400 tokens' errors average to √(2/400) of their squares in a leading direction.
    torch.testing.assert_close(measured, expected_error(sample, A), rtol=0.12, atol=0)


def test_same_sample_same_bits():
    for finder in FINDERS:
        assert torch.equal(finder(planted(1), ROTATION), finder(planted(1), ROTATION))


@pytest.mark.parametrize("finder", [channel_scales, balanced])
def test_keys_without_energy_are_refused(finder):
    sample = planted(1)
    with pytest.raises(ValueError, match="mean energy per channel of 0, 0 per KV head; accepted: positive"):
        finder(KeySample(torch.zeros_like(sample.keys), sample.weights, sample.covariance), ROTATION)
