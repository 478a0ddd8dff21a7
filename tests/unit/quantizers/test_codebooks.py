import numpy as np
import pytest
import torch
from scipy.stats import norm

from kvlab.quantizers import Codebook, PerTokenHead, TurboQuant, lloyd_max_levels, nf4

pytestmark = pytest.mark.unit

# Max 1960, table I, and QLoRA's published constants.
MAX_16 = [0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733]
MAX_DISTORTION = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497}
NF4_BELOW = [-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500]
NF4_ABOVE = [0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0]


def edges(levels: np.ndarray) -> np.ndarray:
    return np.concatenate([[-np.inf], (levels[1:] + levels[:-1]) / 2, [np.inf]])


def gaussian(*shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).standard_normal(shape).astype(np.float32))


def test_lloyd_max_levels_are_the_published_ones():
    # Four digits were published.
    assert lloyd_max_levels(4)[8:] == pytest.approx(MAX_16, abs=6e-4)
    assert lloyd_max_levels(1) == pytest.approx([-np.sqrt(2 / np.pi), np.sqrt(2 / np.pi)], abs=1e-9)


@pytest.mark.parametrize("bits", MAX_DISTORTION)
def test_lloyd_max_distortion_is_the_published_one(bits):
    levels = np.array(lloyd_max_levels(bits))
    # At the optimum the levels are centroids and the distortion is 1 − E[level²]. The published
    # figures were computed from levels of four digits: at 16 of them 0.009497 for 0.009501.
    distortion = 1 - np.sum(levels**2 * np.diff(norm.cdf(edges(levels))))
    assert distortion == pytest.approx(MAX_DISTORTION[bits], rel=5e-4)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6])
def test_lloyd_max_levels_are_symmetric_centroids(bits):
    levels = np.array(lloyd_max_levels(bits))
    assert np.array_equal(levels, -levels[::-1])
    assert np.all(np.diff(levels) > 0)
    boundaries = edges(levels)
    centroids = -np.diff(norm.pdf(boundaries)) / np.diff(norm.cdf(boundaries))
    # Nine decimals are kept; near the optimum Lloyd's map moves a centroid by less than its level's error.
    assert np.abs(centroids - levels).max() < 2e-9


def test_lloyd_max_refuses_other_bits():
    with pytest.raises(ValueError, match="bits is 7; accepted: 1, 2, 3, 4, 5, 6"):
        lloyd_max_levels(7)


def test_nf4_levels_are_the_published_ones():
    # The published constants carry the float32 error of their quantiles, up to 2e-7.
    assert nf4().levels == pytest.approx([*NF4_BELOW, 0.0, *NF4_ABOVE], abs=3e-7)


def test_codebook_takes_the_nearest_level():
    levels = np.array(nf4().levels, dtype=np.float32)
    x = torch.linspace(-1, 1, 1001)
    nearest = levels[np.abs(x.numpy()[:, None] - levels).argmin(axis=1)]
    assert np.array_equal(nf4(PerTokenHead()).roundtrip(x).numpy(), nearest)


def test_codebook_tie_goes_up():
    assert Codebook((-1, 0, 1)).roundtrip(torch.tensor([1.0, 0.5, -0.5])).tolist() == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("levels", [(1.0,), (-1.0, 0.5, 0.2, 1.0), (-0.5, 0.5), (0.0, 2.0), (-1.0, float("nan"))])
def test_codebook_refuses_other_levels(levels):
    with pytest.raises(ValueError, match="accepted: at least two, increasing, largest magnitude 1"):
        Codebook(levels)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_turboquant_error_is_that_of_its_levels(bits):
    # With centroids, restoring the norm turns a relative squared error of D into 2 − 2√(1 − D) in the
    # limit of long vectors; at 128 the norms' spread is normalised away and changes it by less than 1%.
    x = gaussian(4000, 128)
    error = (TurboQuant(bits).roundtrip(x) - x).norm() / x.norm()
    assert error.item() == pytest.approx(np.sqrt(2 - 2 * np.sqrt(1 - MAX_DISTORTION[bits])), rel=0.02)


def test_turboquant_keeps_the_norm_in_fp16():
    x = 40 * gaussian(500, 96)
    stored = TurboQuant(4).roundtrip(x).double().norm(dim=-1)
    norm16 = x.double().norm(dim=-1).half().double()
    # fp16's rounding is decided on a float32 norm, which may fall to the other side: one fp16 spacing, 2⁻¹⁰.
    assert ((stored - norm16).abs() <= norm16 * 2.0**-10).all()
    # Elsewhere only the float32 rounding of the product remains; sides are changed by less than 1 in 100.
    assert ((stored - norm16).abs() <= norm16 * 2.0**-21).double().mean() > 0.99


def test_turboquant_direction_ignores_the_length():
    x = gaussian(50, 64)
    assert torch.equal(TurboQuant(4).roundtrip(8 * x), 8 * TurboQuant(4).roundtrip(x))


def test_turboquant_norm_saturates():
    stored = TurboQuant(4).roundtrip(torch.full((128,), 65_504.0))
    assert stored.norm().item() == pytest.approx(65_504.0, rel=1e-6)
