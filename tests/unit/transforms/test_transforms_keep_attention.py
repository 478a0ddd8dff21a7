import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.transforms import Center, Chain, ChannelScale, FoldedQKNorm, Hadamard, RandomizedHadamard

pytestmark = pytest.mark.unit

HEAD_DIMS = [64, 80, 96, 128, 192, 256]
KV_HEADS, GROUP, QUERIES, TOKENS = 2, 3, 4, 24
KINDS = ["hadamard", "randomized", "blocks", "center", "center-per-head", "scale", "scale-per-head"]
CHAINS = st.lists(st.sampled_from(KINDS), max_size=4).filter(lambda kinds: sum("scale" in k for k in kinds) <= 1)


def build(kinds, head_dim, rng):
    def normal(*shape):
        return torch.from_numpy(rng.standard_normal(shape).astype(np.float32))

    def scales(*shape):
        # Between 1/10 and 10: condition number up to 100.
        return 10 ** torch.from_numpy(rng.uniform(-1, 1, shape).astype(np.float32))

    makers = {
        "hadamard": lambda: Hadamard(),
        "randomized": lambda: RandomizedHadamard(seed=int(rng.integers(1000))),
        "blocks": lambda: RandomizedHadamard(seed=int(rng.integers(1000)), block_size=16),
        "center": lambda: Center(3 * normal(head_dim)),
        "center-per-head": lambda: Center(3 * normal(KV_HEADS, head_dim)),
        "scale": lambda: ChannelScale(scales(head_dim)),
        "scale-per-head": lambda: ChannelScale(scales(KV_HEADS, head_dim)),
    }
    return Chain(*(makers[kind]() for kind in kinds)), normal


def scores(q, k):
    return q @ k.repeat_interleave(GROUP, dim=0).mT


def assert_same_attention(actual, expected, d):
    """Equal scores up to one constant per query, so equal softmax weights."""
    error = (actual - expected).double()
    error -= error.mean(dim=-1, keepdim=True)
    # Rotating λx and x/λ rounds each to 2⁻²⁴ of its norm, ≤ 50 times too large for x at condition 100,
    # with errors of random sign: 50 · 2⁻²⁴ ≈ 3e-6 of the scores, and as much again for a product in float32.
    assert error.norm() <= 1e-5 * expected.norm().double()
    # A row of softmax's Jacobian, diag(w) − w wᵀ, sums to 2 w (1 − w) ≤ ½ in magnitude.
    weights = [(s.double() / d**0.5).softmax(dim=-1) for s in (actual, expected)]
    assert (weights[0] - weights[1]).abs().max() <= 0.5 * error.abs().max() / d**0.5 + 1e-12


@settings(derandomize=True, deadline=None, max_examples=80)
@given(kinds=CHAINS, head_dim=st.sampled_from(HEAD_DIMS), seed=st.integers(0, 2**32), layer=st.integers(0, 60))
def test_attention_is_unchanged(kinds, head_dim, seed, layer):
    transform, normal = build(kinds, head_dim, np.random.default_rng(seed))
    k, q = normal(KV_HEADS, TOKENS, head_dim), normal(KV_HEADS * GROUP, QUERIES, head_dim)
    cached = transform.forward(k, layer)
    assert_same_attention(scores(transform.query(q, layer), cached), scores(q, k), head_dim)
    back = transform.inverse(cached, layer)
    # As above for the rotations; each of up to 4 centrings rounds numbers 3 times as large (times 10 if
    # scaled), which the inverse scale may enlarge by 10 again: 300 · 2⁻²⁴ ≈ 2e-5, four times.
    assert (back - k).norm() <= 8e-5 * k.norm()


@settings(derandomize=True, deadline=None, max_examples=80)
@given(kinds=CHAINS, head_dim=st.sampled_from(HEAD_DIMS), seed=st.integers(0, 2**32), zeros=st.integers(0, 5))
def test_folding_keeps_attention(kinds, head_dim, seed, zeros):
    transform, normal = build(kinds, head_dim, np.random.default_rng(seed))
    n_k, n_q = normal(KV_HEADS, TOKENS, head_dim), normal(KV_HEADS * GROUP, QUERIES, head_dim)
    q_gain, k_gain = 1 + normal(head_dim) / 4, 1 + normal(head_dim) / 4
    k_gain[:zeros] = 0.0
    folded = FoldedQKNorm(transform, q_gain, k_gain)
    K, b, Q = folded.key_matrix(7), folded.key_bias(7), folded.query_matrix(7)
    per_head = any("per-head" in kind for kind in kinds)
    assert K.shape == Q.shape == ((KV_HEADS, head_dim, head_dim) if per_head else (head_dim, head_dim))
    assert b.shape == K.shape[:-1]

    K, b, Q = (m.expand(KV_HEADS, *m.shape[-n:]) for m, n in ((K, 2), (b, 1), (Q, 2)))
    cached, rotated = n_k @ K.mT + b[:, None], n_q @ Q.repeat_interleave(GROUP, dim=0).mT
    assert_same_attention(scores(rotated, cached), scores(n_q * q_gain, n_k * k_gain), head_dim)
    # The cached key is the transformed key without its gain.
    expected = transform.forward(n_k, 7)
    assert (cached - expected).norm() <= 1e-5 * expected.norm()


def test_empty_chain_folds_to_the_gains():
    folded = FoldedQKNorm(Chain(), torch.tensor([2.0, 3.0]), torch.tensor([5.0, 0.0]))
    assert torch.equal(folded.key_matrix(), torch.eye(2))
    assert torch.equal(folded.key_bias(), torch.zeros(2))
    assert torch.equal(folded.query_matrix(), torch.diag(torch.tensor([10.0, 0.0])))


GAIN = torch.ones(8)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: FoldedQKNorm("hadamard", GAIN, GAIN), TypeError, "transform is a str"),
        (lambda: FoldedQKNorm(Chain(), GAIN[None], GAIN), ValueError, r"q_gain has shape \[1, 8\]"),
        (lambda: FoldedQKNorm(Chain(), GAIN, GAIN[:4]), ValueError, "k_gain has head_dim 4 .*accepted: 8"),
        (lambda: FoldedQKNorm(Chain(), GAIN, GAIN / 0), ValueError, "k_gain has a non-finite component"),
        (lambda: FoldedQKNorm(Center(torch.ones(6)), GAIN, GAIN).key_bias(), ValueError, "head_dim 8"),
        (
            lambda: FoldedQKNorm(
                Chain(Center(torch.ones(2, 8)), Chain(ChannelScale(torch.ones(4, 8)))), GAIN, GAIN
            ).key_matrix(),
            ValueError,
            r"transform has parts for \[2, 4\] KV heads",
        ),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
