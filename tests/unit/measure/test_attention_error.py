import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvlab.measure import attention as module
from kvlab.measure import attention_error_table, attention_output_error, measure_captures
from kvlab.quantizers import AsymmetricInteger, PerChannelInteger
from kvlab.quantizers.base import Quantizer
from kvlab.recording import Capture, LayerCapture
from kvlab.schemes import Scheme, StoredAs, get_scheme
from kvlab.transforms import Center, RandomizedHadamard

pytestmark = pytest.mark.unit

HEADS, KV_HEADS, TOKENS, HEAD_DIM = 6, 2, 90, 32


def qkv(seed=0, **changes):
    shape = {"heads": HEADS, "kv_heads": KV_HEADS, "tokens": TOKENS, "head_dim": HEAD_DIM, **changes}
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(shape["heads"], shape["tokens"], shape["head_dim"], generator=generator)
    k, v = torch.randn(2, shape["kv_heads"], shape["tokens"], shape["head_dim"], generator=generator)
    k[..., 3] *= 12
    return q, k, v


def naive_output(q, k, v, positions, scaling):
    """float64, all scores at once: q [heads, tokens, d] → [heads, positions, d]."""
    q, k, v = q.double()[:, positions], k.double(), v.double()
    k, v = (x.repeat_interleave(len(q) // len(x), dim=0) for x in (k, v))
    scores = (q @ k.mT * scaling).masked_fill(torch.arange(k.shape[1]) > positions[:, None], float("-inf"))
    return scores.softmax(-1) @ v


def naive_error(q, k, v, scheme, positions, scaling, stored):
    exact = naive_output(q, k, v, positions, scaling)
    k_hat = scheme.keys.roundtrip(k) if "K" in stored else k
    v_hat = scheme.values.roundtrip(v) if "V" in stored else v
    moved = naive_output(q, k_hat, v_hat, positions, scaling)
    return ((moved - exact).norm() / exact.norm()).item()


class Exact(Quantizer):
    def bits_per_number(self, head_dim):
        return 32.0

    def _roundtrip(self, x):
        return x


KIVI = Scheme(
    "tokens-share",
    keys=StoredAs(quantizer=PerChannelInteger(2, group_tokens=8, residual=16)),
    values=StoredAs(quantizer=AsymmetricInteger(2)),
)
CENTRED = Scheme(
    "centred-per-head",
    keys=StoredAs(
        Center(torch.linspace(-1, 1, KV_HEADS * HEAD_DIM).view(KV_HEADS, -1)), quantizer=AsymmetricInteger(3)
    ),
    values=StoredAs(RandomizedHadamard(seed=3), quantizer=AsymmetricInteger(3)),
)


@pytest.mark.parametrize("stored", ["K", "V", "KV"])
@pytest.mark.parametrize("scheme", ["int4", "hadamard-int4", "fp8", KIVI, CENTRED], ids=str)
@pytest.mark.parametrize("block_scores", [1 << 24, 500, 1])
def test_equals_plain_attention_in_float64(monkeypatch, scheme, stored, block_scores):
    monkeypatch.setattr(module, "BLOCK_SCORES", block_scores)
    q, k, v = qkv()
    scheme = get_scheme(scheme)
    positions = torch.tensor([0, 1, 31, 32, 60, 89])
    error = attention_output_error(q[:, positions], k, v, scheme, stored=stored, positions=positions, scaling=0.1)
    # The difference of two outputs, each rounded to 2⁻²⁴ in some ten operations, over an error of ≥ 1%.
    assert error == pytest.approx(naive_error(q, k, v, scheme, positions, 0.1, stored), rel=1e-4)


@pytest.mark.parametrize("stored", ["K", "V", "KV"])
@pytest.mark.parametrize(("first", "recent"), [(5, 0), (0, 1), (0, 20), (3, 7), (200, 0), (0, 200)])
@pytest.mark.parametrize("block_scores", [1 << 24, 500, 1])
def test_exact_tokens_equal_plain_attention_in_float64(monkeypatch, first, recent, stored, block_scores):
    monkeypatch.setattr(module, "BLOCK_SCORES", block_scores)
    q, k, v = qkv()
    scheme, positions = get_scheme("int4"), torch.tensor([0, 1, 31, 32, 60, 89])
    layer = LayerCapture(0, "full", False, 0.1, q[None][:, :, positions], positions, k[None], v[None])
    error = module.layer_errors(layer, [scheme], [stored], exact_first=first, exact_recent=recent)["int4", stored]
    outputs = []
    for position in positions:
        index = torch.arange(TOKENS)
        kept = ((index < first) | (position - index < recent))[:, None]
        pair = [torch.where(kept, x, scheme.keys.roundtrip(x)) if n in stored else x for n, x in (("K", k), ("V", v))]
        outputs.append(naive_output(q, *pair, position[None], 0.1))
    exact, moved = naive_output(q, k, v, positions, 0.1), torch.cat(outputs, dim=1)
    # As above; where every token is exact, two running sums in float32.
    assert error == pytest.approx(((moved - exact).norm() / exact.norm()).item(), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", ["exact_first", "exact_recent"])
@pytest.mark.parametrize("value", [-1, 10**30])
def test_a_number_of_exact_tokens_that_cannot_be_is_refused(name, value):
    q, k, v = qkv()
    positions = torch.tensor([89])
    layer = LayerCapture(0, "full", False, 0.1, q[None][:, :, positions], positions, k[None], v[None])
    with pytest.raises(ValueError, match=f"^{name} is {value}; accepted: an integer from 0 to "):
        module.layer_errors(layer, ["int4"], **{name: value})


class Reads(TorchDispatchMode):
    """Counts what waits for a GPU: numbers that are read back from a tensor."""

    number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def test_attending_to_a_block_reads_nothing_back():
    q, k, v = qkv()
    with Reads() as reads:
        running = module.RunningAttention(q[:, 88:], torch.tensor([88, 89]), 0.1, KV_HEADS)
        at_first = reads.number
        for start in range(0, TOKENS, 9):
            running.update(start, k[:, start : start + 9], [v[:, start : start + 9]])
    # The one that says below which key no score is masked.
    assert (at_first, reads.number) == (1, 1)


def test_all_queries_are_sampled_from_the_last_quarter():
    q, k, v = qkv()
    positions = module.query_positions(TOKENS, 256)
    q[:, : TOKENS * 3 // 4 - 1] = float("nan")
    error = attention_output_error(q, k, v, "int4")
    assert error == attention_output_error(q[:, positions], k, v, "int4", positions=positions)


def test_exact_storage_moves_nothing():
    q, k, v = qkv()
    exact = Scheme("exact", keys=StoredAs(quantizer=Exact()), values=StoredAs(quantizer=Exact()))
    assert attention_output_error(q, k, v, exact, stored="KV") == 0.0


def test_gains_fold_on_a_layer_without_rope():
    q, k, v = qkv()
    normed = k / 12
    gain = torch.linspace(0.1, 8, HEAD_DIM)
    k = normed * gain
    scheme = get_scheme("hadamard-int4")
    error = attention_output_error(q, k, v, scheme, normed_keys=normed, k_gain=gain)
    by_hand = Scheme("by-hand", keys=StoredAs(quantizer=Exact()), values=scheme.values)
    positions = module.query_positions(TOKENS, 256)
    exact = naive_output(q, k, v, positions, HEAD_DIM**-0.5)
    moved = naive_output(q, gain * scheme.keys.roundtrip(normed), v, positions, HEAD_DIM**-0.5)
    assert error == pytest.approx(((moved - exact).norm() / exact.norm()).item(), rel=1e-4)
    assert error != attention_output_error(q, k, v, scheme)
    assert attention_output_error(q, k, v, by_hand, normed_keys=normed, k_gain=gain) == 0.0


def test_a_batch_is_one_set_of_vectors():
    one, two = qkv(0), qkv(1)
    q, k, v = (torch.stack(pair) for pair in zip(one, two, strict=True))
    errors = [attention_output_error(*item, "int4") for item in (one, two)]
    assert min(errors) < attention_output_error(q, k, v, "int4") < max(errors)


def test_one_token_attends_to_itself():
    q, k, v = qkv(tokens=1)
    assert attention_output_error(q, k, v, "int4", stored="K") == 0.0


def test_half_precision_inputs_are_computed_in_float32():
    q, k, v = (x.bfloat16() for x in qkv())
    error = attention_output_error(q, k, v, "int4")
    assert error == pytest.approx(attention_output_error(q.float(), k.float(), v.float(), "int4"), rel=1e-6)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"stored": "Q"}, ValueError, "stored is 'Q'; accepted: K, V, KV"),
        ({"scheme": "int5"}, ValueError, "scheme is 'int5'"),
        ({"q": torch.zeros(HEADS, 3, HEAD_DIM)}, ValueError, "positions is None with 3 queries for 90 keys"),
        ({"q": torch.zeros(5, TOKENS, HEAD_DIM)}, ValueError, "accepted: a multiple of k's 2 heads"),
        ({"q": torch.zeros(HEADS, TOKENS, 16)}, ValueError, "q has head_dim 16"),
        ({"v": torch.zeros(KV_HEADS, 3, HEAD_DIM)}, ValueError, r"v has shape \[2, 3, 32\]"),
        ({"k": torch.zeros(KV_HEADS, TOKENS, HEAD_DIM, dtype=torch.int64)}, TypeError, "k has dtype torch.int64"),
        ({"positions": torch.tensor([90])}, ValueError, "positions has shape"),
        ({"positions": torch.arange(TOKENS).float()}, TypeError, "positions has dtype torch.float32"),
        ({"positions": torch.ones(TOKENS, dtype=torch.bool)}, TypeError, "positions has dtype torch.bool"),
        ({"positions": torch.arange(TOKENS)[None]}, ValueError, r"positions has shape \[1, 90\]"),
        ({"positions": torch.arange(0)}, ValueError, r"positions has shape \[0\]"),
        ({"scaling": float("nan")}, ValueError, "scaling is nan; accepted: a finite number"),
        ({"scaling": "1"}, TypeError, "scaling is '1'; accepted: a finite number"),
        ({"q": torch.full((HEADS, TOKENS, HEAD_DIM), float("nan"))}, ValueError, "q has a non-finite"),
        ({"k": torch.full((KV_HEADS, TOKENS, HEAD_DIM), float("inf"))}, ValueError, "k has a non-finite"),
        ({"v": torch.full((KV_HEADS, TOKENS, HEAD_DIM), float("nan"))}, ValueError, "v has a non-finite"),
        ({"v": torch.zeros(KV_HEADS, TOKENS, HEAD_DIM)}, ValueError, "v of layer 0 gives an attention output of zero"),
        ({"k_gain": torch.ones(HEAD_DIM)}, ValueError, "normed_keys is None; accepted: .* together"),
        ({"normed_keys": torch.ones(KV_HEADS, TOKENS, HEAD_DIM)}, ValueError, "k_gain is None; accepted: .* together"),
        (
            {"normed_keys": torch.ones(1, TOKENS, HEAD_DIM), "k_gain": torch.ones(HEAD_DIM)},
            ValueError,
            r"normed_keys has shape \[1, 90, 32\]; accepted: \[2, 90, 32\]",
        ),
        (
            {"normed_keys": torch.ones(KV_HEADS, TOKENS, HEAD_DIM), "k_gain": torch.ones(1)},
            ValueError,
            r"k_gain has shape \[1\]; accepted: \[32\]",
        ),
        ({"k": torch.zeros(TOKENS, HEAD_DIM)}, ValueError, r"k has shape \[90, 32\]"),
    ],
)
def test_bad_input_is_named(change, error, message):
    q, k, v = qkv()
    arguments = {"q": q, "k": k, "v": v, "scheme": "int4", **change}
    with pytest.raises(error, match=message):
        attention_output_error(**arguments)


def test_five_dimensions_are_refused():
    q, k, v = (x[None, None] for x in qkv())
    with pytest.raises(ValueError, match=r"k has shape \[1, 1, 2, 90, 32\]; accepted: \[num_kv_heads"):
        attention_output_error(q, k, v, "int4")


def captured(positions):
    q, k, v = (x[None] for x in qkv())
    layer = LayerCapture(4, "full", rope=True, scaling=0.1, q=q[:, :, positions], positions=positions, k=k, v=v)
    return Capture("a model", "llama", read_layers=lambda: {4: layer})


def test_a_table_takes_iterators():
    table = attention_error_table(captured(torch.tensor([89])), iter(["int4", "int2"]), stored=iter(["K", "V"]))
    assert list(zip(table["scheme"], table["stored"], strict=True)) == [
        ("int4", "K"),
        ("int4", "V"),
        ("int2", "K"),
        ("int2", "V"),
    ]


def test_tables_take_exact_tokens():
    one, exact = captured(torch.tensor([60, 89])), {"exact_first": 3, "exact_recent": 40}
    expected = list(module.layer_errors(one.layers[4], ["int4"], **exact).values())
    assert attention_error_table(one, ["int4"], **exact)["error"].tolist() == expected
    assert measure_captures({"text": one}, ["int4"], **exact)["attention_error"]["error"].tolist() == expected
    assert attention_error_table(one, ["int4"])["error"].gt(expected).all()


def test_tables_of_several_texts_are_one():
    captures = {name: captured(torch.tensor([position])) for name, position in (("a", 60), ("b", 89))}
    tables = measure_captures(captures, ["int4", "fp8"], stored=["K"])
    errors = tables["attention_error"]
    assert list(errors.columns) == ["text", "layer", "scheme", "stored", "bits", "error"]
    assert errors["text"].tolist() == ["a", "a", "b", "b"] and errors.index.tolist() == [0, 1, 2, 3]
    assert errors["error"].nunique() == 4
    assert tables["outliers"]["text"].unique().tolist() == ["a", "b"]


def test_schemes_of_one_name_are_refused():
    int4 = get_scheme("int4")
    other = Scheme("int4", keys=get_scheme("int2").keys, values=int4.values)
    with pytest.raises(ValueError, match="schemes has 2 named 'int4'; accepted: one scheme per name"):
        attention_error_table(captured(torch.tensor([89])), ["fp8", int4, other])


def test_a_capture_without_sampled_positions_is_refused():
    with pytest.raises(ValueError, match=r"layer 4 has 90 tokens and no sampled query position; accepted: a capture"):
        attention_error_table(captured(torch.tensor([], dtype=torch.int64)), ["int4"])
