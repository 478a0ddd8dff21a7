import pytest
import torch

from kvlab.calibrate import (
    balanced,
    fit_transforms,
    fitted_scheme,
    learned_matrix,
    mixed_sample,
    plain,
    query_basis,
    uniform_sample,
)
from kvlab.measure import layer_errors
from kvlab.schemes import get_scheme
from kvlab.transforms import Center, Matrix, RandomizedHadamard

pytestmark = pytest.mark.unit


def test_each_layer_and_head_gets_its_mean_and_matrix(capture_of):
    captures = [capture_of(seed=0, offset=2.0, batch=2), capture_of(seed=1, offset=2.0, tokens=90)]
    centring, matrix = fit_transforms(captures).transforms
    for index in (4, 9):
        sample = mixed_sample([captured.layers[index] for captured in captures])
        mean = sample.mean.float()
        assert torch.equal(centring.means.values[index], mean)
        rotation = RandomizedHadamard(0).forward(torch.eye(16), index).mT
        assert torch.equal(matrix.matrices[index], balanced(sample.minus(mean), rotation).float())


def test_the_choices_are_the_callers(capture_of):
    captured = capture_of(offset=2.0)
    (matrix,) = fit_transforms(captured, query_basis, sampler=uniform_sample, centre=False).transforms
    rotation = RandomizedHadamard(0).forward(torch.eye(16), 4).mT
    assert torch.equal(matrix.matrices[4], query_basis(uniform_sample([captured.layers[4]]), rotation).float())


def test_plain_without_centring_is_the_scheme(capture_of):
    captured = capture_of(offset=1.0)
    fitted = fitted_scheme("hadamard-int4", fit_transforms(captured, plain, centre=False), name="again")
    keys = captured.layers[4].normed_keys
    stored, expected = (scheme.keys.roundtrip(keys, 4) for scheme in (fitted, get_scheme("hadamard-int4")))
    # Rounded differently by 2⁻²⁴, hardly a number falls to another code: a step is a fifteenth of a range.
    assert ((stored - expected).abs() > 1e-4).double().mean() < 0.01


@pytest.mark.parametrize("gain", [True, False])
def test_the_error_on_other_text_falls(capture_of, gain):
    captured, other = (capture_of(seed=seed, offset=2.0, gain=gain) for seed in (0, 1))
    fitted = fitted_scheme("hadamard-int4", fit_transforms(captured))
    for index in (4, 9):
        errors = layer_errors(other.layers[index], [fitted, "hadamard-int4"], ["K"])
        assert errors["fitted", "K"] < 0.8 * errors["hadamard-int4", "K"]


def test_the_scheme_is_the_base_but_for_its_keys(capture_of):
    transforms, base = fit_transforms(capture_of()), get_scheme("hadamard-int4")
    scheme = fitted_scheme(base, transforms, name="new")
    assert [type(part) for part in scheme.keys.transform.transforms] == [Center, Matrix]
    assert (scheme.name, scheme.fold_gain, scheme.values) == ("new", True, base.values)
    assert scheme.bits_per_number(16) == base.bits_per_number(16)


def test_same_captures_same_bits(capture_of):
    def learn(sample, rotation):
        return learned_matrix(sample, rotation, steps=5)

    first, second = (fit_transforms(capture_of(), learn).transforms[1].matrices for _ in range(2))
    assert all(torch.equal(first[index], second[index]) for index in (4, 9))


def test_sliding_layers_are_ignored(capture_of):
    assert set(fit_transforms(capture_of(sliding=(0, 1))).transforms[1].matrices) == {4, 9}


def test_a_progress_bar_where_asked(capture_of, capsys):
    fit_transforms(capture_of(), progress=True)
    assert "fit" in capsys.readouterr().err


@pytest.mark.parametrize(
    "call", [lambda c: fit_transforms(c, scheme="int4"), lambda c: fitted_scheme("int4", fit_transforms(c))]
)
def test_a_scheme_without_a_rotation_is_refused(capture_of, call):
    with pytest.raises(ValueError, match="scheme is 'int4'; accepted: one whose keys have a randomized Hadamard"):
        call(capture_of())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([5],), "capture is a int; accepted: what kvlab.capture or open_capture gives"),
        (("folder",), "capture is a str; accepted"),
        (([], "balanced"), "finder is 'balanced'; accepted: a function of kvlab.calibrate"),
    ],
)
def test_what_is_no_capture_or_finder_is_refused(arguments, message):
    with pytest.raises(TypeError, match=f"^{message}"):
        fit_transforms(*arguments)
