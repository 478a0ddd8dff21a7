import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.transforms import (
    Center,
    Chain,
    ChannelScale,
    FoldedQKNorm,
    Matrix,
    OrthogonalMatrix,
    RandomizedHadamard,
    randomized_hadamard,
)

pytestmark = pytest.mark.unit

KV_HEADS, GROUP, TOKENS, QUERIES = 2, 3, 20, 5


def orthogonal(rng, *shape):
    return torch.from_numpy(np.linalg.qr(rng.standard_normal(shape))[0])


def invertible(rng, heads, head_dim, spread):
    """Singular values between 10^-spread and 10^spread."""
    shape = (*heads, head_dim, head_dim)
    sizes = torch.from_numpy(10 ** rng.uniform(-spread, spread, shape[:-1]))
    return (orthogonal(rng, *shape) * sizes[..., None, :] @ orthogonal(rng, *shape)).float()


def normal(rng, *shape):
    return torch.from_numpy(rng.standard_normal(shape)).float()


def scores(q, k):
    return q.double() @ k.double().repeat_interleave(GROUP, dim=0).mT


def lengths(q, k):
    """‖q‖ ‖k‖ for each score."""
    norms = [x.double().norm(dim=-1) for x in (q, k.repeat_interleave(GROUP, dim=0))]
    return norms[0][..., :, None] * norms[1][..., None, :]


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    head_dim=st.sampled_from([64, 80, 128, 256]),
    heads=st.sampled_from([(), (KV_HEADS,)]),
    spread=st.floats(0, 1.5),
    seed=st.integers(0, 2**32),
    size=st.integers(-20, 12),
)
def test_every_score_is_kept(head_dim, heads, spread, seed, size):
    rng = np.random.default_rng(seed)
    matrix = invertible(rng, heads, head_dim, spread)
    transform = Matrix({7: matrix})
    k, q = 2.0**size * normal(rng, KV_HEADS, TOKENS, head_dim), normal(rng, KV_HEADS * GROUP, QUERIES, head_dim)
    k[..., 3] *= 50
    cached, asked = transform.forward(k, 7), transform.query(q, 7)
    # Rounding A x and A⁻ᵀ q to float32 costs 2⁻²⁴ of a length each; rounding the components of x and q to 2⁻²⁸ of the
    # largest, √256 · 2⁻²⁸ = 2⁻²⁴ each; A, at most condition, multiplies all four.
    condition = torch.linalg.cond(matrix.double()).max()
    assert ((scores(asked, cached) - scores(q, k)).abs() <= 2**-22 * condition * lengths(q, k)).all()
    # Back again: the rounding of A x and its grid, of the inverse and of the result.
    back = (transform.inverse(cached, 7) - k).double()
    assert (back.norm(dim=-1) <= 2**-22 * condition * k.double().norm(dim=-1)).all()


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    order=st.permutations(["matrix", "center", "scale", "rotation", "orthogonal"]),
    head_dim=st.sampled_from([64, 80, 128]),
    seed=st.integers(0, 2**32),
    zeros=st.integers(0, 5),
)
def test_chained_and_folded_into_the_gains_attention_is_kept(order, head_dim, seed, zeros):
    rng = np.random.default_rng(seed)
    parts = {
        "matrix": Matrix(invertible(rng, (KV_HEADS,), head_dim, 0.5)),
        "center": Center(normal(rng, KV_HEADS, head_dim)),
        "scale": ChannelScale(10 ** torch.from_numpy(rng.uniform(-0.5, 0.5, head_dim))),
        "rotation": RandomizedHadamard(seed % 100),
        "orthogonal": OrthogonalMatrix(orthogonal(rng, KV_HEADS, head_dim, head_dim)),
    }
    transform = Chain(*(parts[name] for name in order))
    q_gain, k_gain = 1 + normal(rng, head_dim) / 4, 1 + normal(rng, head_dim) / 4
    k_gain[:zeros] = 0.0
    n_k, n_q = normal(rng, KV_HEADS, TOKENS, head_dim), normal(rng, KV_HEADS * GROUP, QUERIES, head_dim)
    folded = FoldedQKNorm(transform, q_gain, k_gain)
    K, b, Q = folded.key_matrix(4), folded.key_bias(4), folded.query_matrix(4)
    assert K.shape == Q.shape == (KV_HEADS, head_dim, head_dim)
    cached, asked = n_k @ K.mT + b[:, None], n_q @ Q.repeat_interleave(GROUP, dim=0).mT
    moved = scores(asked, cached) - scores(n_q * q_gain, n_k * k_gain)
    moved -= moved.mean(-1, keepdim=True)
    # Ten roundings of sums of d terms, √d · 2⁻²⁴ each, at most 10² times too large (two conditions of 10); the means,
    # as long as a key, double that. The gains enter both sides.
    longest = lengths(n_q * q_gain * k_gain, n_k).max()
    assert moved.abs().max() <= 20 * math.sqrt(head_dim) * 100 * 2**-24 * longest


def test_a_sum_is_the_same_bits_in_any_order():
    rng = np.random.default_rng(0)
    matrix, x = invertible(rng, (KV_HEADS,), 128, 1.0), normal(rng, KV_HEADS, 300, 128)
    x *= torch.logspace(-4, 4, 128)
    expected = Matrix(matrix).forward(x)
    for _ in range(3):
        order = torch.from_numpy(rng.permutation(128))
        assert torch.equal(Matrix(matrix[:, :, order]).forward(x[..., order]), expected)
    # Not so in float32, or this test would show nothing.
    assert not torch.equal(x[..., order] @ matrix[:, :, order].mT, x @ matrix.mT)


def test_tokens_do_not_depend_on_each_other():
    rng = np.random.default_rng(1)
    transform, x = Matrix(invertible(rng, (), 64, 1.0)), normal(rng, 2, 33, 64)
    whole = transform.forward(x)
    assert torch.equal(transform.forward(x[:, 5:6]), whole[:, 5:6])
    assert torch.equal(transform.forward(x[1, 8]), whole[1, 8])


def test_integers_are_exact():
    matrix = torch.tensor([[2.0, 1.0], [1.0, 1.0]])
    x = torch.tensor([[3.0, -5.0], [0.0, 0.0], [2.0**20, 1.0]])
    assert torch.equal(Matrix(matrix).forward(x), x @ matrix.T)
    assert torch.equal(Matrix(matrix).inverse(x), x @ torch.tensor([[1.0, -1.0], [-1.0, 2.0]]).T)


def test_a_hadamard_matrix_is_the_rotation():
    x = normal(np.random.default_rng(2), 3, 40, 128)
    matrix, rotation = OrthogonalMatrix(randomized_hadamard(128, 5, 9)), RandomizedHadamard(5)
    for ours, theirs in ((matrix.forward(x), rotation.forward(x, 9)), (matrix.inverse(x), rotation.inverse(x, 9))):
        # Seven butterflies in float32.
        torch.testing.assert_close(ours, theirs, rtol=0, atol=7 * 2**-24 * x.norm(dim=-1).max().item())
    assert torch.equal(matrix.query(x), matrix.forward(x))


def test_heads_have_their_own_and_query_heads_that_of_their_group():
    rng = np.random.default_rng(3)
    matrices = invertible(rng, (KV_HEADS,), 64, 0.5)
    x, q = normal(rng, 2, KV_HEADS, 4, 64), normal(rng, 2, KV_HEADS * GROUP, 4, 64)
    transform = Matrix({4: matrices, 9: matrices[0]})
    assert (transform.num_kv_heads(4), transform.num_kv_heads(9)) == (KV_HEADS, None)
    # Alone a matrix is on its own grid, as in the stack.
    for head in range(KV_HEADS):
        assert torch.equal(transform.forward(x, 4)[:, head], Matrix(matrices[head]).forward(x[:, head]))
    for head in range(KV_HEADS * GROUP):
        assert torch.equal(transform.query(q, 4)[:, head], Matrix(matrices[head // GROUP]).query(q[:, head]))
    transform.check_head_dim(64)


def test_inputs_stay_and_results_are_float32():
    rng = np.random.default_rng(4)
    transform, x = Matrix(invertible(rng, (), 64, 0.5)), normal(rng, 3, 64)
    kept = x.clone()
    for method in (transform.forward, transform.inverse, transform.query):
        assert method(x.bfloat16()).dtype == torch.float32
        method(x).zero_()
        assert torch.equal(x, kept)


EYE = torch.eye(8)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: Matrix([[1.0]]), TypeError, "matrices is a list"),
        (lambda: Matrix(EYE[:4]), ValueError, r"matrices has shape \[4, 8\]; accepted: \[head_dim, head_dim\]"),
        (lambda: Matrix(EYE.expand(2, 2, 8, 8)), ValueError, r"matrices has shape \[2, 2, 8, 8\]"),
        (lambda: Matrix(torch.eye(513)), ValueError, "head_dim at most 512"),
        (lambda: Matrix({3: EYE * torch.nan}), ValueError, r"matrices\[3\] has a non-finite component"),
        (lambda: Matrix(torch.ones(8, 8)), ValueError, "matrices has condition number .*; accepted: at most 8192"),
        (lambda: Matrix(EYE * torch.logspace(0, 4, 8)), ValueError, "condition number 1e\\+04"),
        (lambda: Matrix({3: EYE * 0}, "maps"), ValueError, r"maps\[3\] has condition number"),
        (lambda: Matrix({3: EYE}, "maps").forward(torch.ones(8)), ValueError, "layer is 0, which maps lacks"),
        (lambda: Matrix({}), ValueError, "matrices is an empty mapping"),
        (lambda: OrthogonalMatrix(EYE * (1 + 2**-22)), ValueError, "matrices has an entry of Q Qᵀ − I of 4.77e-07"),
        (lambda: Matrix(EYE).forward(torch.ones(3, 4)), ValueError, "x has head_dim 4 .*accepted: 8"),
        (lambda: Matrix(EYE).check_head_dim(4), ValueError, "head_dim is 4; accepted: that of matrices, 8"),
        (lambda: Matrix({4: EYE}).forward(torch.ones(8)), ValueError, "layer is 0, which matrices lacks; accepted: 4"),
        (
            lambda: Matrix(EYE.expand(2, 8, 8)).forward(torch.ones(4, 3, 8)),
            ValueError,
            "x has 4 heads .*accepted: the 2 KV heads",
        ),
        (
            lambda: Matrix(EYE.expand(2, 8, 8)).query(torch.ones(3, 3, 8)),
            ValueError,
            "q has 3 heads .*accepted: a multiple of the 2 KV heads",
        ),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
