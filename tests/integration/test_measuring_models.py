import pytest
import torch

import kvlab
from kvlab.measure import STORED

pytestmark = pytest.mark.integration

SCHEMES = ("fp8", "int4", "hadamard-int4", "hadamard-int4-with-gain", "turboquant-4bit")


@pytest.fixture
def captured(model, ids):
    with kvlab.capture(model, num_queries=8) as captured, torch.no_grad():
        model(ids[:1])
    return captured


def test_outliers_of_every_family(captured):
    table = kvlab.outlier_table(captured)
    forms = ["raw", "rotated"]
    if captured.model_type in ("kolibri1", "qwen3", "gemma3_text"):
        forms += ["without gain", "without gain, rotated"]
    assert table["form"].unique().tolist() == forms
    assert table["layer"].unique().tolist() == list(captured.layers)
    assert table["ratio"].between(1, next(iter(captured.layers.values())).k.shape[-1]).all()


def test_attention_error_of_every_family(captured):
    table = kvlab.attention_error_table(captured, SCHEMES)
    assert len(table) == len(captured.layers) * len(SCHEMES) * len(STORED)
    errors = table.pivot_table(index="scheme", columns="stored", values="error")
    assert (errors.loc["fp8"] < errors.loc["int4"]).all()
    folds = next(iter(captured.layers.values())).folds_gain
    assert (errors.loc["hadamard-int4", "K"] != errors.loc["hadamard-int4-with-gain", "K"]) == folds
    assert folds == (captured.model_type == "kolibri1")


def test_loss_of_every_family(model, ids):
    table = kvlab.loss_table(model, ids, ["bf16", "int2"]).set_index("scheme")
    labels = model(ids, labels=ids).loss.item()
    # The same mean over the same float32 losses, in another order.
    assert table.loc["exact", "loss"] == pytest.approx(labels, rel=1e-5)
    assert table.loc["exact", "increase"] == 0
    assert abs(table.loc["bf16", "increase"]) < abs(table.loc["int2", "increase"])


def test_measuring_what_is_applied_is_measuring_what_is_captured(kolibri, ids):
    """The error measured from a capture is that of the layer's real output under `apply`."""
    outputs = []
    layer = kolibri.model.layers[4].self_attn
    hook = layer.o_proj.register_forward_pre_hook(lambda _module, args: outputs.append(args[0]))
    with kvlab.capture(kolibri, num_queries=10) as captured, torch.no_grad():
        kolibri(ids[:1])
    with kvlab.apply(kolibri, "hadamard-int4"), torch.no_grad():
        kolibri(ids[:1])
    hook.remove()
    exact, moved = (output[:, captured.layers[4].positions].double() for output in outputs)
    expected = ((moved - exact).norm() / exact.norm()).item()
    table = kvlab.attention_error_table(captured, ["hadamard-int4"], stored=["KV"])
    # Two float32 attentions whose difference is some 10% of them: 1e-6 / 0.1, with room for tens of operations.
    assert table["error"].item() == pytest.approx(expected, rel=1e-4)


def test_padding_is_refused(llama, ids):
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with kvlab.capture(llama) as captured, torch.no_grad():
        llama(ids, attention_mask=mask)
    for measure in (kvlab.outlier_table, lambda c: kvlab.attention_error_table(c, ["int4"])):
        with pytest.raises(ValueError, match="capture holds padding"):
            measure(captured)


def test_too_few_tokens_for_a_loss(llama, ids):
    with pytest.raises(ValueError, match=r"input_ids has shape \[2, 1\]; accepted: \[batch, tokens\], tokens ≥ 2"):
        kvlab.loss_table(llama, ids[:, :1], ["int4"])


def test_one_token_is_captured_and_measured(llama, ids):
    with kvlab.capture(llama) as captured, torch.no_grad():
        llama(ids[:1, :1])
    assert captured.tokens == 1
    assert kvlab.attention_error_table(captured, ["int4"], stored=["K"])["error"].eq(0).all()


def test_a_loss_needs_a_tensor_of_ids_and_schemes_of_different_names(model, ids):
    with pytest.raises(TypeError, match="input_ids is a list; accepted: an int64"):
        kvlab.loss_table(model, ids.tolist(), ["int4"])
    with pytest.raises(ValueError, match="schemes has 2 named 'int4'"):
        kvlab.loss_table(model, ids, ["int4", "int4"])
