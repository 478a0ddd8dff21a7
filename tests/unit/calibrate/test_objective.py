import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.calibrate import KeyObjective, calibrated_scheme, query_covariance, weighted_key_error
from kvlab.calibrate import objective as module
from kvlab.quantizers import AsymmetricInteger, PerChannelInteger
from kvlab.quantizers.base import Quantizer
from kvlab.schemes import StoredAs, get_scheme
from kvlab.transforms import Center, RandomizedHadamard

pytestmark = pytest.mark.unit


class PlusConstant(Quantizer):
    """Errs by the same vector at every token."""

    def bits_per_number(self, head_dim):
        return 32.0

    def _roundtrip(self, x):
        return x + torch.arange(x.shape[-1], dtype=torch.float32)


class Rounded(Quantizer):
    """Rounds to a fixed grid of steps 1/4, whatever the range of a vector."""

    def bits_per_number(self, head_dim):
        return 32.0

    def _roundtrip(self, x):
        return (x * 4).round() / 4


def naive_covariance(layer, *, fold):
    """One query at a time, in float64."""
    heads, kv_heads = layer.q.shape[1], layer.k.shape[1]
    total = torch.zeros(kv_heads, layer.k.shape[-1], layer.k.shape[-1], dtype=torch.float64)
    for item in layer.q.double():
        for head, queries in enumerate(item):
            for q in queries:
                met = q * layer.k_gain if fold else q
                total[head // (heads // kv_heads)] += torch.outer(met, met)
    return total / (layer.q.shape[0] * heads // kv_heads * layer.q.shape[2])


def naive_error(side, keys, covariance, layer):
    """Mean square of q · difference over tokens, by loops over heads and tokens in float64, per head."""
    stored = side.roundtrip(keys, layer).double()
    result = []
    for head in range(keys.shape[1]):
        weight, sums = covariance[head].double(), [0.0, 0.0]
        for sequence in range(keys.shape[0]):
            exact = keys[sequence, head].double()
            for which, x in enumerate((stored[sequence, head] - exact, exact)):
                for token in x - x.mean(0):
                    sums[which] += (token @ weight @ token).item()
        result.append((sums[0] / sums[1]) ** 0.5)
    return torch.tensor(result, dtype=torch.float64)


@pytest.mark.parametrize("gain", [True, False])
def test_covariance_equals_one_query_at_a_time(layer_of, gain):
    layer = layer_of(4, gain=gain, batch=2)
    covariance = query_covariance(layer)
    assert covariance.dtype == torch.float32
    # Sums in float64, rounded once to float32.
    torch.testing.assert_close(covariance.double(), naive_covariance(layer, fold=gain), rtol=2**-23, atol=1e-12)


def test_covariance_leaves_the_gain_where_the_scheme_does(layer_of):
    layer = layer_of(4)
    covariance = query_covariance(layer, "hadamard-int4-with-gain")
    torch.testing.assert_close(covariance.double(), naive_covariance(layer, fold=False), rtol=2**-23, atol=1e-12)


@pytest.mark.parametrize("block", [4096, 60, 1])
@pytest.mark.parametrize("centre", [False, True])
def test_error_equals_a_loop_in_float64(monkeypatch, layer_of, block, centre):
    monkeypatch.setattr(module, "BLOCK_VECTORS", block)
    layer = layer_of(9, offset=1.0, batch=2, tokens=40)
    means = {9: torch.linspace(-1, 1, 32).view(2, 16)} if centre else None
    side = calibrated_scheme("hadamard-int4", 5, means).keys
    covariance = query_covariance(layer)
    error = weighted_key_error(side, layer.normed_keys, covariance, 9)
    # Float32 rotations and sums of 16 products of 80 terms: some 10 roundings of 2⁻²⁴ on numbers up to 10 times an
    # error of 10% each.
    torch.testing.assert_close(error, naive_error(side, layer.normed_keys, covariance, 9), rtol=1e-4, atol=0)


def test_the_objective_is_the_error_of_the_scores(layer_of):
    layer = layer_of(4)
    side = get_scheme("hadamard-int4").keys
    q = (layer.q * layer.k_gain).double().reshape(1, 2, -1, 16)
    exact = layer.normed_keys.double()
    moved = q @ (side.roundtrip(layer.normed_keys, 4).double() - exact).mT
    scores = q @ exact.mT
    # What softmax sees of the scores: differences between tokens.
    expected = moved.var(-1, correction=0).mean((0, 2)) / scores.var(-1, correction=0).mean((0, 2))
    error = weighted_key_error(side, layer.normed_keys, query_covariance(layer), 4)
    torch.testing.assert_close(error, expected.sqrt(), rtol=1e-4, atol=0)


def test_an_error_common_to_all_tokens_counts_nothing(layer_of):
    layer = layer_of(4)
    side = StoredAs(RandomizedHadamard(3), quantizer=PlusConstant())
    # x + c − x leaves float32 roundings of c ≤ 15: 15 · 2⁻²⁴ against keys of size one.
    assert weighted_key_error(side, layer.normed_keys, query_covariance(layer), 4).max() < 1e-5


@settings(max_examples=20, deadline=None)
@given(constant=st.lists(st.integers(-8, 8), min_size=16, max_size=16))
def test_a_constant_added_to_all_keys_changes_nothing_once_centred(layer_of, constant):
    layer = layer_of(4)
    # Keys on a grid of 1/64, so that adding and subtracting integers is exact.
    keys = (layer.normed_keys * 64).round() / 64
    mean, shift = torch.ones(2, 16), torch.tensor(constant, dtype=torch.float32)
    errors = [
        weighted_key_error(
            StoredAs(Center(mean + added), RandomizedHadamard(1), quantizer=AsymmetricInteger(4)),
            keys + added,
            query_covariance(layer),
            4,
        )
        for added in (torch.zeros(16), shift)
    ]
    # The rounding is the same bit for bit; the energy of the keys is summed around another shift in float32.
    torch.testing.assert_close(*errors, rtol=1e-5, atol=0)


def test_a_large_common_part_costs_no_digits(layer_of):
    layer = layer_of(4)
    keys = (layer.normed_keys * 64).round() / 64
    side = StoredAs(quantizer=Rounded())
    covariance = query_covariance(layer)
    near, far = (weighted_key_error(side, keys + shift, covariance) for shift in (0.0, 1024.0))
    torch.testing.assert_close(near, far, rtol=1e-5, atol=0)


def test_heads_are_weighted_by_their_own_queries(layer_of):
    layer = layer_of(4)
    covariance = query_covariance(layer)
    other = covariance.clone()
    other[1] = torch.diag(torch.linspace(0.1, 9, 16))
    side = get_scheme("hadamard-int4").keys
    one, two = (weighted_key_error(side, layer.normed_keys, c, 4) for c in (covariance, other))
    assert one[0] == two[0]
    assert one[1] != two[1]


@pytest.mark.parametrize(
    ("keys", "covariance", "message"),
    [
        (torch.randn(2, 9, 16), torch.zeros(2, 16, 8), r"covariance has shape \[2, 16, 8\]; accepted: \[2, 16, 16\]"),
        (torch.randn(9, 16), torch.zeros(1, 16, 16), r"keys has shape \[9, 16\]"),
        (torch.ones(2, 9, 16), torch.eye(16).expand(2, 16, 16), "score variance per head of 0, 0"),
        (torch.full((2, 9, 16), torch.nan), torch.eye(16).expand(2, 16, 16), "score variance per head of nan"),
    ],
)
def test_bad_input_is_named(keys, covariance, message):
    with pytest.raises(ValueError, match=message):
        KeyObjective(keys, covariance)


def test_a_quantizer_that_shares_between_tokens_is_refused(layer_of):
    layer = layer_of(4)
    side = StoredAs(quantizer=PerChannelInteger(4))
    with pytest.raises(ValueError, match="stores each token by itself"):
        weighted_key_error(side, layer.k, query_covariance(layer, "int4"))
