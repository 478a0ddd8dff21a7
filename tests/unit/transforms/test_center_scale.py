import pytest
import torch

from kvlab.transforms import Center, ChannelScale

pytestmark = pytest.mark.unit

HEAD_DIM, KV_HEADS, HEADS = 6, 2, 4
SHARED = torch.arange(1.0, 1 + HEAD_DIM)
PER_HEAD = torch.arange(1.0, 1 + KV_HEADS * HEAD_DIM).view(KV_HEADS, HEAD_DIM)
X = torch.linspace(-3, 3, 3 * KV_HEADS * 5 * HEAD_DIM).view(3, KV_HEADS, 5, HEAD_DIM)
Q = torch.linspace(-2, 2, 3 * HEADS * 5 * HEAD_DIM).view(3, HEADS, 5, HEAD_DIM)


@pytest.mark.parametrize("parameters", [SHARED, PER_HEAD], ids=["shared", "per-head"])
def test_formulas_head_by_head(parameters):
    center, scale = Center(parameters), ChannelScale(parameters)
    for head in range(KV_HEADS):
        p = parameters.expand(KV_HEADS, HEAD_DIM)[head]
        assert torch.equal(center.forward(X)[:, head], X[:, head] - p)
        assert torch.equal(center.inverse(X)[:, head], X[:, head] + p)
        assert torch.equal(scale.forward(X)[:, head], X[:, head] * p)
        assert torch.equal(scale.inverse(X)[:, head], X[:, head] / p)
    for head in range(HEADS):
        p = parameters.expand(KV_HEADS, HEAD_DIM)[head // (HEADS // KV_HEADS)]
        assert torch.equal(center.query(Q)[:, head], Q[:, head])
        assert torch.equal(scale.query(Q)[:, head], Q[:, head] / p)


@pytest.mark.parametrize("transform", [Center(PER_HEAD), ChannelScale(PER_HEAD)], ids=["center", "scale"])
def test_inputs_stay_and_results_are_new_float32(transform):
    for method, x in ((transform.forward, X), (transform.inverse, X), (transform.query, Q)):
        kept = x.clone()
        method(x).zero_()
        assert torch.equal(x, kept)
        assert method(x.bfloat16()).dtype == torch.float32
        assert torch.equal(method(x.bfloat16()), method(x.bfloat16().float()))


def test_parameters_are_copied():
    means = SHARED.clone()
    center = Center(means)
    means.zero_()
    assert torch.equal(center.forward(X), X - SHARED)


@pytest.mark.parametrize("make", [Center, ChannelScale])
def test_parameters_per_layer(make):
    transform = make({4: SHARED, 9: PER_HEAD})
    assert torch.equal(transform.forward(X, layer=4), make(SHARED).forward(X))
    assert torch.equal(transform.forward(X, layer=9), make(PER_HEAD).forward(X))
    assert (transform.num_kv_heads(4), transform.num_kv_heads(9)) == (None, KV_HEADS)
    with pytest.raises(ValueError, match=r"layer is 0, which .* lacks; accepted: 4, 9"):
        transform.forward(X)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: Center([1.0]), TypeError, "means is a list"),
        (
            lambda: Center(torch.ones(2, 2, 2)),
            ValueError,
            r"means has shape \[2, 2, 2\]; accepted: \[head_dim\]",
        ),
        (
            lambda: Center({3: torch.tensor([float("nan")])}),
            ValueError,
            r"means\[3\] has a non-finite component",
        ),
        (lambda: Center({}), ValueError, "means is an empty mapping"),
        (lambda: ChannelScale(torch.tensor([1.0, 0.0])), ValueError, "component of scales is 0.0; .*positive"),
        (lambda: ChannelScale({1: SHARED, 2: -SHARED}), ValueError, "component of scales is -6"),
        (
            lambda: ChannelScale(torch.tensor([1.0, float("inf")])),
            ValueError,
            "scales has a non-finite component",
        ),
        (lambda: Center(SHARED).forward(X[..., :4]), ValueError, "x has head_dim 4 .*accepted: 6"),
        (lambda: ChannelScale(PER_HEAD).forward(Q), ValueError, "x has 4 heads .*accepted: 2"),
        (
            lambda: ChannelScale(PER_HEAD).query(Q[:, :3]),
            ValueError,
            "q has 3 heads .*a multiple of the 2 KV heads",
        ),
        (lambda: ChannelScale(PER_HEAD).forward(X[0, 0]), ValueError, "x has shape .*at least 3 dimensions"),
        (lambda: Center(SHARED).query(Q.int()), TypeError, "q has dtype torch.int32"),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_scales_without_a_finite_reciprocal_are_refused():
    with pytest.raises(ValueError, match=r"component of scales is .*e-39; accepted"):
        ChannelScale(torch.tensor([1.0, 1e-39]))
