import pytest
import torch
from test_closed_forms import HEAD_DIM, ROTATION, planted, shrunk, singular_values

from kvlab.calibrate import balanced, calibrated_scheme, fit_transforms, fitted_scheme, unequal
from kvlab.calibrate.closed_forms import FREE_FACTOR
from kvlab.calibrate.unequal import FINE_SPREAD, cosines
from kvlab.quantizers import AsymmetricInteger, RefitUnequalInteger, UnequalInteger
from kvlab.schemes import StoredAs
from kvlab.transforms import Chain, Matrix

pytestmark = pytest.mark.unit

FINE = 4


def test_cosines_are_orthonormal_and_begin_constant():
    for size in (1, 2, 5, 24):
        matrix = cosines(size)
        torch.testing.assert_close(matrix @ matrix.mT, torch.eye(size, dtype=torch.float64))
        torch.testing.assert_close(matrix[:, 0], torch.full((size,), size**-0.5, dtype=torch.float64))


def test_each_class_varies_evenly_and_only_the_free_direction_crosses():
    sample = planted(1)
    A = unequal(FINE)(sample, ROTATION)
    moved = A @ shrunk(sample.moment) @ A.mT
    stored = HEAD_DIM - FINE
    free = torch.zeros(HEAD_DIM, dtype=torch.float64)
    free[:stored] = 1
    # Without what lies along the constant vector, which the offset takes: the mean over a class's channels is the
    # square of its spread.
    sigma = singular_values(sample)
    height = FREE_FACTOR**2 * sigma[:, 0] / FINE / (sigma[:, 1:FINE].sum(1) / FINE)
    rest = moved - height[:, None, None] * torch.outer(free, free)
    for begin, end, spread in ((0, FINE, FINE_SPREAD), (FINE, stored, 1)):
        variances = rest.diagonal(dim1=-2, dim2=-1)[:, begin:end]
        expected = torch.full((2,), spread**2, dtype=torch.float64)
        torch.testing.assert_close(variances.mean(1), expected, rtol=1e-6, atol=0)
    assert rest[:, :FINE, FINE:stored].abs().max() < 1e-6


def test_what_is_not_stored_is_what_queries_see_least():
    sample = planted(1)
    B = torch.linalg.inv(unequal(FINE)(sample, ROTATION))
    lost = B[:, :, -FINE:]
    seen = (lost.mT @ shrunk(sample.covariance) @ lost).diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(seen, singular_values(sample)[:, -FINE:], rtol=1e-6, atol=0)


@pytest.mark.parametrize("fine", [1, -1, 2.0, "2", True, None])
def test_fine_channels_that_cannot_be_are_named(fine):
    with pytest.raises((TypeError, ValueError), match=f"^fine is {fine!r}; accepted: an integer of at least 2$"):
        unequal(fine)
    if fine != 1:
        with pytest.raises((TypeError, ValueError), match=f"^fine is {fine!r}; accepted: an integer of at least 0$"):
            calibrated_scheme("hadamard-int4", 0, fine=fine)


def test_fine_channels_need_maps():
    with pytest.raises(ValueError, match=r"^fine is 2 without maps; accepted: both, or 0$"):
        calibrated_scheme("hadamard-int4", 0, fine=2)


def test_two_fine_channels_are_the_fewest():
    assert unequal(2)(planted(1), ROTATION).isfinite().all()


def test_half_of_the_channels_is_too_many():
    with pytest.raises(ValueError, match=rf"^fine is {HEAD_DIM // 2}; accepted at head_dim {HEAD_DIM}: less than "):
        unequal(HEAD_DIM // 2)(planted(1), ROTATION)


def test_a_fitted_scheme_knows_the_bits_that_its_transforms_are_for(capture_of):
    captured, fine = capture_of(), 2
    transforms = fit_transforms(captured, unequal(fine), centre=False)
    fitted = fitted_scheme("hadamard-int4", transforms)
    assert fitted.keys.quantizer == UnequalInteger(fine) and fitted.values.quantizer == AsymmetricInteger(4)
    # As a calibration file, which has maps and this number apart.
    (matrix,) = transforms.transforms
    apart = calibrated_scheme("hadamard-int4", 0, maps=matrix.matrices, fine=fine)
    keys = captured.layers[4].k.float()
    assert torch.equal(fitted.keys.roundtrip(keys, 4), apart.keys.roundtrip(keys, 4))
    assert fitted_scheme("hadamard-int4-refit", transforms).keys.quantizer == RefitUnequalInteger(fine)
    with pytest.raises(ValueError, match=r"^base is 'hadamard-int3'; accepted with fine channels: one with"):
        fitted_scheme("hadamard-int3", transforms)


@pytest.mark.parametrize(("argument", "value"), [("transforms", None), ("values", "balanced")])
def test_what_is_no_chain_is_named(argument, value):
    with pytest.raises(TypeError, match=rf"^{argument} is a {type(value).__name__}; accepted: a kvlab.transforms"):
        fitted_scheme("hadamard-int4", **{"transforms": Chain(), argument: value})


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
