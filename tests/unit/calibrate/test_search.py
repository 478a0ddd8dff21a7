import pytest
import torch

from kvlab.calibrate import key_means, query_covariance, ranking_agreement, search_seeds, weighted_key_error
from kvlab.calibrate import means as means_module
from kvlab.quantizers import AsymmetricInteger
from kvlab.schemes import StoredAs
from kvlab.transforms import Center, RandomizedHadamard

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("block", [8192, 7])
def test_means_are_over_all_tokens_of_all_captures(monkeypatch, capture_of, block):
    monkeypatch.setattr(means_module, "BLOCK_TOKENS", block)
    captures = [capture_of(seed=0, batch=2, offset=3.0), capture_of(seed=1, tokens=31, offset=3.0)]
    means = key_means(captures)
    assert list(means) == [4, 9]
    for index, mean in means.items():
        rows = [c.layers[index].normed_keys.movedim(1, 0).reshape(2, -1, 16) for c in captures]
        expected = torch.cat(rows, dim=1).double().mean(1)
        # Both are float64 sums, rounded once.
        torch.testing.assert_close(mean.double(), expected, rtol=2**-23, atol=1e-9)


def test_means_keep_the_gain_where_the_scheme_does(capture_of):
    captured = capture_of(offset=3.0)
    plain, folded = key_means(captured, "hadamard-int4-with-gain")[4], key_means(captured)[4]
    # k is n · gain, rounded: 2⁻²⁴ of components up to some ten.
    torch.testing.assert_close(plain, folded * captured.layers[4].k_gain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("centre", [False, True])
def test_search_equals_storing_under_each_seed(capture_of, centre):
    captures = [capture_of(seed=0, offset=1.0), capture_of(seed=1, offset=1.0, tokens=90)]
    means = key_means(captures) if centre else None
    table = search_seeds(captures, seeds=[3, 0, 3, 8], means=means)
    assert table["layer"].tolist() == [4] * 3 + [9] * 3
    assert table["seed"].tolist() == [0, 3, 8] * 2
    for row in table.itertuples():
        centring = [Center(means)] if centre else []
        quantizer = AsymmetricInteger(4)
        side = StoredAs(*centring, RandomizedHadamard(row.seed), quantizer=quantizer)
        errors = [
            weighted_key_error(side, layer.normed_keys, query_covariance(layer), row.layer)
            for layer in (captured.layers[row.layer] for captured in captures)
        ]
        # The same operations, but for the energy of keys before or after centring (float32 sums).
        assert row.objective == pytest.approx(torch.stack(errors).mean().item(), rel=1e-5)
    assert table["objective"].nunique() == len(table)


def test_a_subsample_is_evenly_strided(capture_of):
    captured = capture_of(tokens=100)
    strided = capture_of(tokens=100)
    layers = strided.layers
    for index, layer in layers.items():
        normed = layer.normed_keys[:, :, ::4].contiguous()
        layers[index] = type(layer)(**{**vars(layer), "normed_keys": normed, "k": normed, "v": normed})
    sample, expected = search_seeds(captured, seeds=3, tokens=30), search_seeds(strided, seeds=3)
    assert sample.equals(expected)


def test_ranking_agreement_is_one_for_all_tokens_and_less_for_few(capture_of):
    captured = capture_of()
    assert ranking_agreement(captured, tokens=200, seeds=8)["spearman"].tolist() == [1.0, 1.0]
    few = ranking_agreement(captured, tokens=4, seeds=8)
    assert few["layer"].tolist() == [4, 9]
    assert few["spearman"].between(-1, 0.999).all()


def test_sliding_layers_are_ignored(capture_of):
    assert set(search_seeds(capture_of(sliding=(0, 1)), seeds=1)["layer"]) == {4, 9}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"scheme": "int4"}, ValueError, "scheme is 'int4'; accepted: one whose keys have a randomized Hadamard"),
        ({"scheme": "turboquant-4bit"}, ValueError, "scheme is 'turboquant-4bit'"),
        ({"seeds": []}, ValueError, "seeds is empty"),
        ({"seeds": [-1]}, ValueError, "a seed of seeds is -1"),
        ({"seeds": 1.5}, TypeError, "seeds is 1.5"),
        ({"tokens": 1}, ValueError, "tokens is 1; accepted: an integer of at least 2"),
        ({"means": {4: torch.zeros(2, 16)}}, ValueError, "layer is 9, which means lacks"),
    ],
)
def test_bad_arguments_are_named(capture_of, arguments, error, message):
    with pytest.raises(error, match=message):
        search_seeds(capture_of(), **{"seeds": 2, **arguments})


def test_captures_must_fit_together(capture_of):
    with pytest.raises(ValueError, match="captures is empty"):
        search_seeds([])
    with pytest.raises(ValueError, match=r"captures\[1\] has other layers or heads"):
        search_seeds([capture_of(), capture_of(layers=(4,))])
    with pytest.raises(ValueError, match="no full-attention layer"):
        search_seeds(capture_of(layers=(), sliding=(1,)))


def test_agreement_needs_three_seeds(capture_of):
    with pytest.raises(ValueError, match="seeds has 2; accepted: at least three"):
        ranking_agreement(capture_of(), tokens=20, seeds=2)


def test_non_finite_keys_are_named(capture_of):
    captured = capture_of()
    captured.layers[9].normed_keys[0, 1, 7, 3] = float("inf")
    with pytest.raises(ValueError, match="non-finite key in layer 9"):
        key_means(captured)
