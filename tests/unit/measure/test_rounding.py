import pytest
import torch

from kvlab.measure import median_token, relative_error, rounding_table
from kvlab.quantizers import AsymmetricInteger
from kvlab.transforms import RandomizedHadamard

pytestmark = pytest.mark.unit


def outlier_keys(tokens=101, head_dim=64):
    x = torch.randn(tokens, head_dim, generator=torch.Generator().manual_seed(0))
    x[:, 45] += 20
    return x


def test_relative_error_of_known_vectors():
    # ‖(0.3, 0.4)‖ / ‖(3, 4)‖ = 0.1; differences in float64 of float32 numbers.
    assert relative_error(torch.tensor([3.0, 4.0]), torch.tensor([3.3, 4.4])) == pytest.approx(0.1, rel=1e-6)


def test_median_token_is_in_the_middle():
    x, quantizer = outlier_keys(), AsymmetricInteger(4)
    chosen = median_token(x, quantizer)
    errors = [relative_error(row, quantizer.roundtrip(row)) for row in x]
    assert sorted(errors).index(errors[chosen]) == 50


def test_table_shows_the_window_of_the_largest_component():
    x = outlier_keys()
    table = rounding_table(x, layer=7)
    assert list(dict.fromkeys(table["state"])) == ["before rotation", "after rotation"]
    before = table[table["state"] == "before rotation"]
    assert before["dimension"].tolist() == list(range(32, 64))
    assert (table["error"] == table["rounded"] - table["original"]).all()
    token = table["token"].iloc[0]
    assert before["original"].tolist() == x[token, 32:].tolist()
    after = table[table["state"] == "after rotation"]
    rotated = RandomizedHadamard(seed=0).forward(x[token : token + 1], 7)[0]
    assert after["original"].tolist() == rotated[32:].tolist()
    assert after["relative_error"].iloc[0] < before["relative_error"].iloc[0]


def test_small_heads_are_shown_whole():
    assert len(rounding_table(outlier_keys()[:, 40:56])) == 2 * 16


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.zeros(2, 3, 8), ValueError, r"x has shape \[2, 3, 8\]; accepted: \[tokens, head_dim\]"),
        (torch.zeros(0, 8), ValueError, r"x has shape \[0, 8\]"),
        (torch.zeros(3, 8, dtype=torch.int8), TypeError, "x has dtype torch.int8"),
    ],
)
def test_bad_input_is_named(x, error, message):
    with pytest.raises(error, match=message):
        rounding_table(x)


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"stored has shape \[2, 4\]; accepted: original's, \[3, 4\]"):
        relative_error(torch.ones(3, 4), torch.ones(2, 4))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dimensions": 0}, ValueError, "dimensions is 0; accepted: an integer of at least 1"),
        ({"dimensions": 2.5}, TypeError, "dimensions is 2.5; accepted: an integer"),
        ({"quantizer": "int4"}, TypeError, "quantizer is a str; accepted: a kvlab quantizer"),
        ({"transform": 0}, TypeError, "transform is a int; accepted: a kvlab transform"),
    ],
)
def test_bad_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        rounding_table(torch.ones(3, 4), **arguments)
