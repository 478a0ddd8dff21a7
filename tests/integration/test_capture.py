import numpy as np
import pytest
import torch
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GPT2Config,
    GPT2Model,
    SiglipVisionConfig,
    StaticCache,
)

from kvlab.applying import apply
from kvlab.measure import attention_error_table
from kvlab.models.attention import attention_layers
from kvlab.quantizers import PerChannelInteger
from kvlab.recording import capture
from kvlab.schemes import Scheme, StoredAs, get_scheme

pytestmark = pytest.mark.integration

EPS = torch.finfo(torch.float32).eps
# KIVI with blocks that fill within these short texts.
KIVI = Scheme(
    "kivi-short", StoredAs(quantizer=PerChannelInteger(4, group_tokens=4, residual=4)), get_scheme("int4").values
)


def attend(layer, module):
    """Causal attention at the sampled positions, float64 ``[batch, sampled, heads · head_dim]``."""
    groups = layer.q.shape[1] // layer.k.shape[1]
    k, v = (x.double().repeat_interleave(groups, dim=1) for x in (layer.k, layer.v))
    scores = layer.q.double() @ k.transpose(2, 3) * layer.scaling
    distance = layer.positions[:, None] - torch.arange(k.shape[2])
    window = module.config.sliding_window if layer.kind == "sliding" else k.shape[2]
    scores = scores.masked_fill((distance < 0) | (distance >= window), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2), scores


def test_capture_sees_what_attention_sees_and_changes_nothing(model, ids, traces):
    before, plain = traces(model), model(ids).logits
    layers = attention_layers(model)
    outputs = {}
    watch = [
        layer.module.o_proj.register_forward_pre_hook(lambda _, args, i=i: outputs.update({i: args[0]}))
        for i, layer in layers.items()
    ]
    with capture(model, layers="all", num_queries=4) as captured:
        assert torch.equal(model(ids).logits, plain)
    for handle in watch:
        handle.remove()

    assert (captured.tokens, captured.padded) == (40, False)
    assert captured.model_type == model.config.model_type
    assert list(captured.layers) == list(range(model.config.num_hidden_layers))
    for i, layer in captured.layers.items():
        assert layer.q.shape == (2, 4, 4, layers[i].head_dim)
        assert layer.k.shape == layer.v.shape == (2, 2, 40, layers[i].head_dim)
        assert not layer.k.requires_grad
        recomputed, scores = attend(layer, layers[i].module)
        # A score is head_dim products, each rounded; an output is a mean of 40 values, each rounded.
        largest = scores[scores.isfinite()].abs().max()
        tolerance = (layers[i].head_dim * largest + 40) * EPS * layer.v.abs().max()
        torch.testing.assert_close(outputs[i][:, layer.positions].double(), recomputed, rtol=0, atol=tolerance.item())
    assert traces(model) == before
    assert torch.equal(model(ids).logits, plain)


def test_normed_keys_times_gain_are_the_keys(model, ids):
    with capture(model, layers="all") as captured:
        model(ids)
    for layer in captured.layers.values():
        if layer.k_gain is None:
            assert layer.normed_keys is None
            continue
        assert layer.normed_keys.dtype == torch.float32
        if not layer.rope:
            # The model multiplies the same two numbers, after normalising with a sum in another order.
            torch.testing.assert_close(layer.k_gain * layer.normed_keys, layer.k, rtol=32 * EPS, atol=0)
        # RoPE preserves norms, and RMS normalisation makes every norm √head_dim, but for its epsilon.
        norms = layer.normed_keys.norm(dim=-1)
        torch.testing.assert_close(norms, torch.full_like(norms, layer.k.shape[-1] ** 0.5), rtol=1e-3, atol=0)


def test_normed_keys_are_rotated_like_the_keys(build, ids):
    """With all gains 1 the keys before their gain are the keys, RoPE included."""
    model = build("qwen3", "sdpa")
    for layer in attention_layers(model).values():
        layer.module.k_norm.weight.fill_(1)
    with capture(model) as captured:
        model(ids)
    for layer in captured.layers.values():
        torch.testing.assert_close(layer.normed_keys, layer.k, rtol=0, atol=32 * EPS * layer.k.abs().max().item())


def test_only_full_layers_by_default_and_others_by_name(kolibri, ids):
    chosen = {None: [4], "sliding": [0, 1, 2, 3], "all": [0, 1, 2, 3, 4], (1, 4): [1, 4]}
    for which, expected in chosen.items():
        with capture(kolibri, layers=which) as captured:
            kolibri(ids)
        assert list(captured.layers) == expected


def test_kolibri_rotates_only_sliding_layers(kolibri):
    layers = attention_layers(kolibri).values()
    assert [layer.kind for layer in layers] == ["sliding"] * 4 + ["full"]
    assert [layer.rope for layer in layers] == [True] * 4 + [False]
    assert [layer.folds_gain for layer in layers] == [False] * 4 + [True]


def test_gemma_gain_is_one_plus_weight_and_does_not_fold(build):
    for layer in attention_layers(build("gemma3", "sdpa")).values():
        assert torch.equal(layer.k_gain, 1 + layer.module.k_norm.weight)
        assert not layer.folds_gain


def test_multimodal_gemma_gives_its_text_layers(build):
    text = build("gemma3", "sdpa").config
    vision = SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=1, image_size=28
    )
    model = Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision)).eval()
    ids = torch.arange(2, 22)[None]
    plain = model(ids).logits
    with capture(model, layers="all") as captured:
        assert torch.equal(model(ids).logits, plain)
    assert [layer.kind for layer in captured.layers.values()] == ["sliding", "full", "sliding"]


@pytest.mark.parametrize("step", [1, 7, 16])
def test_chunks_give_the_capture_of_one_pass(kolibri, ids, step):
    with capture(kolibri, layers="all", num_queries=5) as whole:
        kolibri(ids)
    cache = None
    with capture(kolibri, layers="all", num_queries=5, context=40) as chunked:
        for chunk in ids.split(step, dim=1):
            cache = kolibri(chunk, cache=cache, use_cache=True).cache
    for i, layer in whole.layers.items():
        other = chunked.layers[i]
        assert torch.equal(other.positions, layer.positions)
        for name in ("q", "k", "v", "normed_keys"):
            a, b = getattr(other, name), getattr(layer, name)
            # Five layers of sums over up to 64 terms, each of which chunks may order differently.
            torch.testing.assert_close(a, b, rtol=0, atol=5 * 64 * EPS * b.abs().max().item())


def test_generate_appends_and_keeps_the_sampled_positions(llama, ids):
    with capture(llama, num_queries=3) as captured:
        out = llama.generate(ids, max_new_tokens=6, do_sample=False)
    assert out.shape == (2, 46)
    # The last token generated is never fed back.
    assert captured.tokens == 45
    assert captured.layers[0].positions.tolist() == [33, 36, 39]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_masks_survive(model, ids, side):
    """The mask function is looked up by the attention function's name: an unknown name drops it."""
    mask = torch.ones_like(ids)
    mask[1, slice(None, 6) if side == "left" else slice(-6, None)] = 0
    plain = model(ids, attention_mask=mask).logits
    real = mask.bool()
    if side == "left":
        assert not torch.equal(model(ids).logits[real], plain[real])
    with capture(model, layers="all") as captured:
        assert torch.equal(model(ids, attention_mask=mask).logits, plain)
    assert captured.padded


def test_padding_is_seen_without_the_head(llama, ids):
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    with capture(llama) as captured:
        llama.model(ids, mask)
    assert captured.padded


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_nested_contexts_leave_in_any_order(kolibri, ids, traces, order):
    before, plain = traces(kolibri), kolibri(ids).logits
    contexts = capture(kolibri), capture(kolibri, layers="all")
    captured = [context.__enter__() for context in contexts]
    first, last = order
    contexts[first].__exit__(None, None, None)
    assert torch.equal(kolibri(ids).logits, plain)
    contexts[last].__exit__(None, None, None)
    assert traces(kolibri) == before
    assert captured[last].layers[4].k.shape == (2, 2, 40, 16)
    with pytest.raises(ValueError, match="nothing was captured"):
        captured[first].layers  # noqa: B018


def test_models_may_share_a_config(build, ids):
    one = build("llama", "sdpa")
    two = type(one)(one.config).eval()
    assert two.config is one.config
    with capture(one) as first:
        with capture(two) as second:
            one(ids)
        two(ids)
        assert one.config._attn_implementation == "kvlab_sdpa"
    assert one.config._attn_implementation == "sdpa"
    assert first.tokens == 40
    with pytest.raises(ValueError, match="nothing was captured"):
        second.tokens  # noqa: B018


def test_hooks_sit_on_the_layer_only_inside(kolibri):
    module = attention_layers(kolibri)[4].module
    with capture(kolibri):
        assert len(module._forward_pre_hooks) == len(module.k_proj._forward_hooks) == 1
        assert len(kolibri.model._forward_pre_hooks) == 1
    assert len(module._forward_pre_hooks) == len(module.k_proj._forward_hooks) == 0
    assert len(kolibri.model._forward_pre_hooks) == 0


def test_an_error_inside_leaves_nothing_behind(kolibri, ids, traces):
    before, plain = traces(kolibri), kolibri(ids).logits
    with pytest.raises(RuntimeError, match="mine"), capture(kolibri):
        kolibri(ids)
        raise RuntimeError("mine")
    assert traces(kolibri) == before
    assert torch.equal(kolibri(ids).logits, plain)


def test_recorded_tensors_carry_no_graph(build, ids):
    model = build("llama", "sdpa").requires_grad_(True)
    with capture(model) as captured:
        assert model(ids).logits.requires_grad
    assert not any(x.requires_grad for layer in captured.layers.values() for x in (layer.q, layer.k, layer.v))


def test_bfloat16_is_kept_and_normed_keys_are_float32(build, ids):
    model = build("kolibri1", "sdpa", torch.bfloat16)
    with capture(model) as captured:
        model(ids)
    layer = captured.layers[4]
    assert layer.q.dtype == layer.k.dtype == layer.v.dtype == torch.bfloat16
    assert layer.normed_keys.dtype == torch.float32
    # The model rounds n and then the product to bfloat16: twice half of 2⁻⁷, rounded up.
    torch.testing.assert_close(layer.k_gain * layer.normed_keys, layer.k.float(), rtol=2**-6, atol=0)


def test_nothing_run_is_an_error(llama):
    with capture(llama) as captured:
        pass
    with pytest.raises(ValueError, match="nothing was captured: run the model inside the context"):
        captured.layers  # noqa: B018


def test_another_sequence_needs_another_capture(llama, ids):
    with capture(llama), pytest.raises(ValueError, match="attends to 40 tokens where the capture has seen 80"):
        llama(ids)
        llama(ids)


def test_static_caches_are_refused(llama, ids):
    cache = StaticCache(config=llama.config, max_cache_len=64)
    with capture(llama), pytest.raises(ValueError, match=r"cache is a static one; accepted by capture"):
        llama(ids, cache=cache)


def test_a_model_with_only_sliding_layers_needs_its_layers_named(build, ids):
    model = build("mistral", "sdpa", sliding_window=9)
    with pytest.raises(ValueError, match=r"this Mistral model has only sliding attention layers; accepted"):
        capture(model).__enter__()
    with capture(model, layers="sliding") as captured:
        model(ids)
    assert captured.layers[0].kind == "sliding"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"layers": "fulll"}, ValueError, r"layers is 'fulll'; accepted: full, sliding, all"),
        ({"layers": [0, 99]}, ValueError, r"layers is 99; accepted: 0, 1, 2"),
        ({"layers": []}, ValueError, r"layers is empty; accepted"),
        ({"layers": "sliding"}, ValueError, r"this Llama model has only full attention layers; accepted"),
        ({"layers": 4}, TypeError, r"layers is a int; accepted"),
        ({"num_queries": 0}, ValueError, r"num_queries is 0; accepted: an integer of at least 1"),
        ({"context": -1}, ValueError, r"context is -1; accepted: an integer of at least 1"),
    ],
)
def test_bad_arguments_are_named(llama, arguments, error, message):
    with pytest.raises(error, match=message):
        capture(llama, **arguments).__enter__()


def test_unsupported_models_are_named():
    model = GPT2Model(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=5))
    with pytest.raises(ValueError, match=r"model is a GPT2Model; accepted: Gemma 3, Kolibri-1, Llama"):
        capture(model).__enter__()
    with pytest.raises(TypeError, match=r"model is a str; accepted"):
        capture("gpt2").__enter__()


@pytest.mark.parametrize("indices", [torch.tensor([0, 2]), np.array([0, 2]), [torch.tensor(0), np.int64(2)]])
def test_indices_of_every_library(llama, ids, indices):
    with capture(llama, layers=indices) as captured:
        llama(ids)
    assert list(captured.layers) == [0, 2]


@pytest.mark.parametrize(
    ("layers", "error", "message"),
    [
        ("", ValueError, "layers is ''; accepted: full, sliding, all"),
        ([1.0], TypeError, "an entry of layers is 1.0; accepted: an integer"),
        ([True], TypeError, "an entry of layers is True; accepted: an integer"),
        (torch.tensor([True, False]), TypeError, r"an entry of layers is tensor\(True\); accepted: an integer"),
    ],
)
def test_what_is_no_index_is_named(llama, layers, error, message):
    with pytest.raises(error, match=message):
        capture(llama, layers=layers).__enter__()


def test_parts_of_models_and_wrappers_are_named(llama):
    for part in (torch.nn.Sequential(llama), llama.model.layers[0]):
        assert attention_layers(part)
        with pytest.raises(TypeError, match="accepted: a transformers PreTrainedModel"):
            capture(part).__enter__()


@pytest.mark.parametrize("use_cache", [True, False])
def test_another_sequence_needs_another_capture_on_sliding_layers_too(kolibri, ids, use_cache):
    with capture(kolibri, layers="sliding"):
        kolibri(ids, use_cache=use_cache)
        with pytest.raises(ValueError, match="layer 0 attends to 40 tokens where the capture has seen 80; accepted"):
            kolibri(ids, use_cache=use_cache)


@pytest.mark.parametrize("layers", ["sliding", "full"])
def test_a_context_is_captured_from_its_first_token_and_continued_by_its_own_cache(kolibri, ids, layers):
    own, other = (kolibri(part, use_cache=True).cache for part in (ids[:, :30], ids[:, :30].flip(1)))
    with capture(kolibri, layers=layers), pytest.raises(ValueError, match="accepted: one context from its first token"):
        kolibri(ids[:, 30:], cache=own)
    with capture(kolibri, layers=layers):
        kolibri(ids[:, :30])
        with pytest.raises(ValueError, match="attends to another history than the one captured"):
            kolibri(ids[:, 30:], cache=other)


@pytest.mark.parametrize("layers", ["sliding", "full"])
def test_one_batch_size_throughout(kolibri, ids, layers):
    cache = kolibri(ids[:, :30], use_cache=True).cache
    with capture(kolibri, layers=layers):
        kolibri(ids[:1, :30])
        with pytest.raises(ValueError, match="the batch size is 2 after 1; accepted: one batch throughout a capture"):
            kolibri(ids[:, 30:], cache=cache)


@pytest.mark.parametrize("scheme", ["bf16", KIVI], ids=["bf16", "kivi"])
def test_beam_search_is_refused(llama, ids, scheme):
    with (
        apply(llama, scheme),
        capture(llama),
        pytest.raises(ValueError, match=r"the cache was reordered \(beam search\)"),
    ):
        llama.generate(ids, max_new_tokens=12, num_beams=4, do_sample=False)


def test_sharing_scales_between_tokens_is_no_reordering(llama, ids):
    """Keys, or both sides, are stored anew at each step."""
    for scheme in (KIVI, Scheme("both", keys=KIVI.keys, values=KIVI.keys)):
        with apply(llama, scheme), capture(llama) as captured:
            llama.generate(ids, max_new_tokens=12, do_sample=False)
        assert captured.tokens == 51


def test_a_context_that_was_not_reached_cannot_be_measured(llama, ids):
    with capture(llama, context=2000) as captured:
        llama(ids)
    with pytest.raises(ValueError, match="layer 0 has 40 tokens and no sampled query position"):
        attention_error_table(captured, ["int4"])
