import pytest
import torch

from kvlab.calibrate import KeySample, attention_sample, mixed_sample, query_covariance, uniform_sample
from kvlab.calibrate import sample as module

pytestmark = pytest.mark.unit


def naive(layers, *, fold):
    """Keys, weights and covariance of one pair of query and token at a time, in float64."""
    keys, weights, covariance = [], [], 0
    for layer in layers:
        batch, heads, _, head_dim = layer.q.shape
        kv_heads, tokens = layer.k.shape[1:3]
        per_token, moment = torch.zeros(batch, kv_heads, tokens).double(), torch.zeros(kv_heads, head_dim, head_dim)
        moment, energy = moment.double(), 0.0
        for item in range(batch):
            for head in range(heads):
                group = head // (heads // kv_heads)
                k, v = layer.k[item, group].double(), layer.v[item, group].double()
                for q, position in zip(layer.q[item, head].double(), layer.positions.tolist(), strict=True):
                    w = (layer.scaling * k[: position + 1] @ q).softmax(0)
                    o = w @ v[: position + 1]
                    energy += o.square().sum()
                    pairs = w**2 * (v[: position + 1] - o).square().sum(1)
                    per_token[item, group, : position + 1] += pairs
                    met = q * layer.k_gain if fold else q
                    moment[group] += pairs.sum() * torch.outer(met, met)
        keys += list(layer.normed_keys if fold else layer.k)
        weights += list(per_token / energy)
        covariance = covariance + moment / energy
    weights = torch.cat(weights, dim=1)
    total = weights.sum(1, keepdim=True)
    return torch.cat(keys, dim=1), weights / total, covariance / total[..., None]


@pytest.mark.parametrize("block", [1 << 24, 900])
@pytest.mark.parametrize("gain", [True, False])
def test_pairs_are_weighed_one_by_one(monkeypatch, layer_of, block, gain):
    monkeypatch.setattr(module, "BLOCK_SCORES", block)
    layers = [layer_of(4, seed=0, gain=gain, batch=2, tokens=60), layer_of(4, seed=1, gain=gain, tokens=50)]
    sample = attention_sample(layers)
    keys, weights, covariance = naive(layers, fold=gain)
    assert torch.equal(sample.keys, keys)
    # Softmax, outputs and distances in float32, where v − o may cancel to a tenth.
    torch.testing.assert_close(sample.weights, weights, rtol=1e-4, atol=1e-9)
    torch.testing.assert_close(sample.covariance, covariance, rtol=1e-4, atol=1e-4)


def test_the_gain_stays_where_the_scheme_leaves_it(layer_of):
    layer = layer_of(4, tokens=60)
    sample = attention_sample([layer], "hadamard-int4-with-gain")
    keys, weights, covariance = naive([layer], fold=False)
    assert torch.equal(sample.keys, keys[:, :60])
    torch.testing.assert_close(sample.weights, weights, rtol=1e-4, atol=1e-9)
    torch.testing.assert_close(sample.covariance, covariance, rtol=1e-4, atol=1e-4)


def test_uniform_is_what_the_objective_sees(layer_of):
    layer = layer_of(4, batch=2)
    sample = uniform_sample([layer])
    torch.testing.assert_close(sample.covariance.float(), query_covariance(layer), rtol=1e-5, atol=1e-5)
    assert torch.equal(sample.weights, torch.full((2, 400), 1 / 400, dtype=torch.float64))
    # A float64 mean of float32 keys.
    torch.testing.assert_close(sample.mean, layer.normed_keys.double().mean((0, 2)), rtol=0, atol=1e-12)


def test_mixed_is_half_of_each(layer_of):
    layers = [layer_of(4, seed=0), layer_of(4, seed=1, tokens=50)]
    mixed, *halves = (find(iter(layers)) for find in (mixed_sample, attention_sample, uniform_sample))
    assert torch.equal(mixed.keys, halves[0].keys)
    for name in ("weights", "covariance"):
        torch.testing.assert_close(getattr(mixed, name), sum(getattr(half, name) for half in halves) / 2)


def test_moments_are_weighted_and_about_zero():
    keys = torch.tensor([[[1.0, 2.0], [3.0, -1.0]]])
    sample = KeySample(keys, torch.tensor([[0.25, 0.75]], dtype=torch.float64), torch.eye(2).double()[None])
    assert sample.mean.tolist() == [[2.5, -0.25]]
    assert sample.moment.tolist() == [[[7.0, -1.75], [-1.75, 1.75]]]
    centred = sample.minus(sample.mean)
    assert centred.mean.tolist() == [[0.0, 0.0]]
    assert torch.equal(sample.keys, keys)


@pytest.mark.parametrize(
    ("weights", "covariance", "message"),
    [
        (torch.ones(1, 2), torch.eye(3)[None], r"weights has shape \[1, 2\]; accepted: \[1, 4\]"),
        (torch.ones(1, 4), torch.eye(2)[None], r"covariance has shape \[1, 2, 2\]; accepted: \[1, 3, 3\]"),
        (torch.zeros(1, 4), torch.eye(3)[None], "weights add up to 0 per KV head; accepted: positive"),
        (torch.ones(1, 4), torch.eye(3)[None] * torch.inf, "covariance add up to inf"),
    ],
)
def test_bad_input_is_named(weights, covariance, message):
    with pytest.raises(ValueError, match=message):
        KeySample(torch.ones(1, 4, 3), weights.double(), covariance.double())
