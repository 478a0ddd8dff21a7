import pytest
import torch

from kvlab.calibrate import (
    KeyObjective,
    KeySample,
    balanced,
    expected_error,
    learned_matrix,
    learned_rotation,
    plain,
    query_basis,
)
from kvlab.quantizers import AsymmetricInteger
from kvlab.schemes import StoredAs
from kvlab.transforms import Matrix, randomized_hadamard

pytestmark = pytest.mark.unit

HEAD_DIM, HEADS, TOKENS = 16, 2, 500
ROTATION = randomized_hadamard(HEAD_DIM, 0)
LEARNERS = [(learned_rotation, (plain, query_basis)), (learned_matrix, (balanced,))]


def planted(seed):
    """Keys near one of a few points: corners that a rotation can turn to where a range is narrow."""
    pattern, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
    points = torch.randn(HEADS, 6, HEAD_DIM, generator=pattern)
    chosen = torch.randint(6, (TOKENS,), generator=own)
    keys = points[:, chosen] + 0.1 * torch.randn(HEADS, TOKENS, HEAD_DIM, generator=own)
    q = torch.randn(HEADS, TOKENS, HEAD_DIM, generator=own).double() * torch.linspace(0.2, 2, HEAD_DIM).double()
    weights = torch.full((HEADS, TOKENS), 1 / TOKENS, dtype=torch.float64)
    return KeySample(keys, weights, q.mT @ q / TOKENS)


@pytest.mark.parametrize(("learn", "starts"), LEARNERS)
@pytest.mark.parametrize("steps", [0, 1, 40])
def test_never_worse_than_any_start(learn, starts, steps):
    sample = planted(1)
    reached = expected_error(sample, learn(sample, ROTATION, steps=steps))
    before = torch.stack([expected_error(sample, start(sample, ROTATION)) for start in starts]).amin(0)
    # Rounding a start to float32 moves it by 2⁻²⁴ of its entries.
    assert (reached <= (1 + 1e-5) * before).all()
    assert steps < 40 or (reached < 0.98 * before).all()


@pytest.mark.parametrize(("learn", "starts"), LEARNERS)
def test_better_on_other_data_too(learn, starts):
    sample, other = planted(1), planted(2)

    def measured(matrix):
        side = StoredAs(Matrix(matrix), quantizer=AsymmetricInteger(4))
        return KeyObjective(other.keys, other.covariance).error(side)

    learned = measured(learn(sample, ROTATION, steps=80))
    for start in starts:
        assert (learned < measured(start(sample, ROTATION))).all()


def test_a_learned_rotation_is_orthogonal():
    A = learned_rotation(planted(1), ROTATION, steps=20)
    # A solve and two products in float32, √d · 2⁻²⁴ each, entries up to 1.
    torch.testing.assert_close(A @ A.mT, torch.eye(HEAD_DIM).double().expand(HEADS, -1, -1), rtol=0, atol=2e-6)


def test_a_rotation_learned_after_a_map_keeps_its_noise():
    sample = planted(1)
    start, A = (
        find.double()
        for find in (balanced(sample, ROTATION), learned_rotation(sample, ROTATION, starts=(balanced,), steps=20))
    )
    torch.testing.assert_close(A.mT @ A, start.mT @ start, rtol=1e-4, atol=1e-4 * (start.mT @ start).abs().max().item())


@pytest.mark.parametrize(("learn", "starts"), LEARNERS)
def test_same_sample_same_bits(learn, starts):
    first, second = (learn(planted(1), ROTATION, steps=15) for _ in range(2))
    assert torch.equal(first, second)


def test_heads_do_not_depend_on_each_other():
    sample = planted(1)
    changed = KeySample(sample.keys.clone(), sample.weights, sample.covariance)
    changed.keys[1] *= 3
    first, second = (learned_matrix(one, ROTATION, steps=10)[0] for one in (sample, changed))
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)


def test_a_progress_bar_where_asked(capsys):
    learned_matrix(planted(1), ROTATION, steps=3, progress=True)
    assert "descent" in capsys.readouterr().err
    learned_matrix(planted(1), ROTATION, steps=3)
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"steps": -1}, ValueError, "steps is -1; accepted: an integer of at least 0"),
        ({"steps": 1.5}, TypeError, "steps is 1.5"),
        ({"starts": ()}, ValueError, "starts is empty; accepted: at least one finder"),
    ],
)
def test_bad_input_is_named(arguments, error, message):
    with pytest.raises(error, match=message):
        learned_rotation(planted(1), ROTATION, **arguments)
