"""The values' mean and map: best for what an error of a value does, kept where held-out text gains, in the file."""

import dataclasses

import pytest
import torch

from kvlab.calibrate import (
    Calibration,
    calibrate,
    calibrated_scheme,
    fit_transforms,
    fit_value_transforms,
    fit_values,
    fitted_scheme,
)
from kvlab.measure.attention import layer_errors
from kvlab.schemes import get_scheme
from kvlab.transforms import RandomizedHadamard

pytestmark = pytest.mark.unit

HEAD_DIM, KV_HEADS = 16, 2


def uneven(capture):
    """The same capture with values of uneven channels, in a basis of its own, about a mean."""
    generator = torch.Generator().manual_seed(5)
    basis = torch.linalg.qr(torch.randn(KV_HEADS, HEAD_DIM, HEAD_DIM, generator=generator)).Q
    mixed = torch.logspace(-1, 1, HEAD_DIM)[:, None] * basis
    mean = torch.randn(KV_HEADS, 1, HEAD_DIM, generator=generator)
    layers = {index: dataclasses.replace(layer, v=layer.v @ mixed + mean) for index, layer in capture.layers.items()}
    capture.layers.update(layers)
    return capture


@pytest.fixture
def captures(capture_of):
    return [uneven(capture_of(seed=seed)) for seed in (0, 1)]


@pytest.fixture
def holdout(capture_of):
    return uneven(capture_of(seed=2))


def rotation(layer, seed=0):
    return RandomizedHadamard(seed).forward(torch.eye(HEAD_DIM), layer).mT


def weights(layer):
    """Half of each token's share of the squared attention weights, half of 1 / tokens, by hand."""
    group = layer.q.shape[1] // KV_HEADS
    scores = layer.q[0].double() @ layer.k[0].double().repeat_interleave(group, dim=0).mT * layer.scaling
    future = torch.arange(layer.k.shape[2]) > layer.positions[:, None]
    squares = scores.masked_fill(future, -torch.inf).softmax(-1).square().unflatten(0, (KV_HEADS, group)).sum((1, 2))
    return (squares / squares.sum(-1, keepdim=True) + 1 / layer.k.shape[2]) / 2


def test_the_map_balances_variance_against_noise(captures):
    layer = captures[0].layers[4]
    mean, matrix = fit_values([layer], rotation(4))
    w, v, a = weights(layer)[..., None], layer.v[0].double(), matrix.double()
    torch.testing.assert_close(mean.double(), (w * v).sum(1), rtol=1e-4, atol=1e-4)
    centred = v - mean.double()[:, None]
    moment = a @ (centred * w).mT @ centred @ a.mT
    noise = torch.linalg.inv(a).mT @ torch.linalg.inv(a)
    # B M Bᵀ and B⁻ᵀ B⁻¹ are the same diagonal matrix σ, here turned by one orthogonal matrix; a thousandth of the mean
    # variance, about 25 times the smallest, is added to all.
    for head in range(KV_HEADS):
        turned, diagonal = torch.linalg.eigh(noise[head]).eigenvectors, torch.linalg.eigvalsh(noise[head])
        balanced = turned.mT @ moment[head] @ turned
        large = diagonal > diagonal.max() / 8
        torch.testing.assert_close(balanced.diagonal()[large], diagonal[large], rtol=0.1, atol=0)
        assert (balanced - torch.diag(balanced.diagonal())).abs().max() < 1e-4 * balanced.max()
    # The direction of the largest variance goes where the offset takes it.
    ones = torch.full((HEAD_DIM,), HEAD_DIM**-0.5, dtype=torch.float64)
    for head in range(KV_HEADS):
        along = ones @ moment[head] @ ones
        torch.testing.assert_close(along, torch.linalg.eigvalsh(moment[head]).max(), rtol=1e-4, atol=0)


def test_the_error_of_values_falls_on_other_text(captures, holdout):
    base = get_scheme("hadamard-int4")
    for index in (4, 9):
        mean, matrix = fit_values([captured.layers[index] for captured in captures], rotation(index))
        mapped = calibrated_scheme(base, 0, value_means={index: mean}, value_maps={index: matrix}, name="mapped")
        assert mapped.keys.transform.query(torch.ones(4, 3, HEAD_DIM), index).isfinite().all()
        errors = layer_errors(holdout.layers[index], [mapped, base], ["V"])
        assert errors["mapped", "V"] < 0.6 * errors["hadamard-int4", "V"]


def test_transforms_of_all_layers_make_a_scheme(captures):
    values = fit_value_transforms(captures)
    keys = fit_transforms(captures)
    scheme = fitted_scheme("hadamard-int4", keys, values=values)
    assert scheme.keys.transform.transforms == keys.transforms
    for index in (4, 9):
        mean, matrix = fit_values([captured.layers[index] for captured in captures], rotation(index))
        centring, mapping = scheme.values.transform.transforms
        assert torch.equal(centring.means.values[index], mean) and torch.equal(mapping.matrices[index], matrix)


def test_calibrate_takes_them_and_the_file_keeps_them(captures, holdout, tmp_path):
    plain, found = (calibrate(captures, holdout, seeds=2, values=values) for values in (False, True))
    assert found.manifest["ingredients"] == ["rotation_seeds", "key_means", "value_means", "value_maps"]
    loaded = Calibration.load(found.save(tmp_path / "values.safetensors"))
    for index, layer in holdout.layers.items():
        entry = loaded.manifest["layers"][str(index)]
        errors = layer_errors(layer, [loaded.scheme(), "hadamard-int4"], ["K", "V"])
        assert errors["calibrated", "V"] == pytest.approx(entry["value_error_after"], rel=1e-4)
        assert errors["hadamard-int4", "V"] == pytest.approx(entry["value_error_before"], rel=1e-4)
        assert entry["value_error_after"] < 0.6 * entry["value_error_before"]
        assert errors["calibrated", "K"] == layer_errors(layer, [plain.scheme()], ["K"])["calibrated", "K"]
    assert list(loaded.table.columns[-2:]) == ["value_error_before", "value_error_after"]


def test_values_that_gain_nothing_are_left_alone(captures, holdout, monkeypatch):
    def useless(layers, rotation):
        return torch.zeros(KV_HEADS, HEAD_DIM), torch.diag(torch.logspace(0, 3, HEAD_DIM)).expand(KV_HEADS, -1, -1)

    monkeypatch.setattr("kvlab.calibrate.calibrating.fit_values", useless)
    found = calibrate(captures, holdout, seeds=2, values=True)
    for index, layer in holdout.layers.items():
        assert torch.equal(found.value_maps[index], torch.eye(HEAD_DIM).expand(KV_HEADS, -1, -1))
        errors = layer_errors(layer, [found.scheme(), "hadamard-int4"], ["V"])
        assert errors["calibrated", "V"] == pytest.approx(errors["hadamard-int4", "V"], rel=1e-6)


def test_values_that_a_scheme_transforms_already_are_refused():
    maps = {4: torch.eye(HEAD_DIM).expand(KV_HEADS, -1, -1)}
    with pytest.raises(ValueError, match=r"^base is 'hadamard-int4-refit-kv'; accepted with .* one that has none"):
        calibrated_scheme("hadamard-int4-refit-kv", 0, value_maps=maps)


def test_values_without_energy_are_refused(captures):
    layer = captures[0].layers[4]
    with pytest.raises(ValueError, match="energy"):
        fit_values([dataclasses.replace(layer, v=torch.zeros_like(layer.v))], rotation(4))
