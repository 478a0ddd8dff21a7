import pytest
import torch
from test_closed_forms import HEAD_DIM, ROTATION, planted, shrunk, singular_values

from kvlab.calibrate import balanced, unequal
from kvlab.calibrate.closed_forms import FREE_FACTOR
from kvlab.calibrate.unequal import cosines
from kvlab.quantizers import AsymmetricInteger, UnequalInteger
from kvlab.schemes import StoredAs
from kvlab.transforms import Matrix

pytestmark = pytest.mark.unit

FINE = 4


def test_cosines_are_orthonormal_and_begin_constant():
    for size in (1, 2, 5, 24):
        matrix = cosines(size)
        torch.testing.assert_close(matrix @ matrix.mT, torch.eye(size, dtype=torch.float64))
        torch.testing.assert_close(matrix[:, 0], torch.full((size,), size**-0.5, dtype=torch.float64))


def test_both_classes_vary_alike_and_only_the_free_direction_crosses():
    sample = planted(1)
    A = unequal(FINE)(sample, ROTATION)
    moved = A @ shrunk(sample.moment) @ A.mT
    stored = HEAD_DIM - FINE
    free = torch.zeros(HEAD_DIM, dtype=torch.float64)
    free[:stored] = 1
    # Without what lies along the constant vector, which the offset takes: the mean over a class's channels is 1.
    sigma = singular_values(sample)
    height = FREE_FACTOR**2 * sigma[:, 0] / FINE / (sigma[:, 1:FINE].sum(1) / FINE)
    rest = moved - height[:, None, None] * torch.outer(free, free)
    for begin, end in ((0, FINE), (FINE, stored)):
        variances = rest.diagonal(dim1=-2, dim2=-1)[:, begin:end]
        torch.testing.assert_close(variances.mean(1), torch.ones(2, dtype=torch.float64), rtol=1e-6, atol=0)
    assert rest[:, :FINE, FINE:stored].abs().max() < 1e-6


def test_what_is_not_stored_is_what_queries_see_least():
    sample = planted(1)
    B = torch.linalg.inv(unequal(FINE)(sample, ROTATION))
    lost = B[:, :, -FINE:]
    seen = (lost.mT @ shrunk(sample.covariance) @ lost).diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(seen, singular_values(sample)[:, -FINE:], rtol=1e-6, atol=0)


def test_errs_less_than_equal_bits_where_few_directions_count():
    """Even spectra, as this project's default model has, gain nothing; steep ones do."""
    sample = planted(1, 64, aligned=True)

    def error(A, quantizer):
        stored = StoredAs(Matrix({0: A.float()}), quantizer=quantizer).roundtrip(sample.keys)
        delta = (stored - sample.keys).double()
        return (delta @ sample.covariance * delta).sum().sqrt()

    rotation = torch.linalg.qr(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))[0]
    ours = error(unequal(8)(sample, rotation), UnequalInteger(8))
    assert ours < 0.7 * error(balanced(sample, rotation), AsymmetricInteger(4))
