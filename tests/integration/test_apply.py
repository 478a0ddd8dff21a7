from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import StaticCache

from kvlab.applying import apply
from kvlab.models.attention import attention_layers
from kvlab.recording import capture
from kvlab.schemes import list_schemes

pytestmark = pytest.mark.integration

EPS = torch.finfo(torch.float32).eps


def test_exact_storage_changes_nothing_and_coarse_storage_does(model, ids, exact, exact_folded, coarse, traces):
    before, plain = traces(model), model(ids).logits
    for scheme in (exact, exact_folded):
        with apply(model, scheme, layers="all"):
            for use_cache in (True, False):
                assert torch.equal(model(ids, use_cache=use_cache).logits, plain)
    with apply(model, coarse):
        stored = model(ids).logits
    assert stored.isfinite().all()
    assert (stored - plain).norm() > 1e-3 * plain.norm()
    assert traces(model) == before
    assert torch.equal(model(ids).logits, plain)


@pytest.mark.parametrize("name", list_schemes())
def test_every_scheme_runs_in_prefill_and_decoding(wide_kolibri, ids, name):
    """Even two bits keep the only full layer of five from moving the logits by half of their norm."""
    plain = wide_kolibri(ids).logits
    with apply(wide_kolibri, name):
        cache = wide_kolibri(ids[:, :39], use_cache=True).cache
        stored = wide_kolibri(ids[:, 39:], cache=cache).logits[:, 0]
    assert stored.isfinite().all()
    assert not torch.equal(stored, plain[:, -1])
    assert (stored - plain[:, -1]).norm() < 0.5 * plain[:, -1].norm()


def test_attention_sees_and_the_cache_holds_the_stored_vectors(kolibri, ids, coarse):
    with capture(kolibri) as plain:
        kolibri(ids)
    with apply(kolibri, coarse), capture(kolibri) as stored:
        cache = kolibri(ids, use_cache=True).cache
    # Layer 4 is the only full one, and nothing before it was stored: the same vectors arrive there.
    assert torch.equal(stored.layers[4].k, coarse.keys.roundtrip(plain.layers[4].k))
    assert torch.equal(stored.layers[4].v, coarse.values.roundtrip(plain.layers[4].v))
    assert torch.equal(cache.layers[4].keys, stored.layers[4].k)
    assert torch.equal(stored.layers[4].normed_keys, plain.layers[4].normed_keys)


def test_capture_sees_the_same_whichever_context_came_first(kolibri, ids, coarse):
    with apply(kolibri, coarse), capture(kolibri) as inside:
        kolibri(ids)
    with capture(kolibri) as outside, apply(kolibri, coarse):
        kolibri(ids)
    assert torch.equal(inside.layers[4].k, outside.layers[4].k)
    assert torch.equal(inside.layers[4].v, outside.layers[4].v)


def test_folding_stores_keys_without_their_gain(kolibri, ids, coarse_folded):
    with apply(kolibri, coarse_folded), capture(kolibri, layers="all") as captured:
        kolibri(ids)
    layer = captured.layers[4]
    assert torch.equal(layer.k, layer.k_gain * coarse_folded.keys.roundtrip(layer.normed_keys, layer=4))


def test_folding_is_left_out_where_rope_stands_between(build, ids, coarse_folded):
    model = build("qwen3", "sdpa")
    with apply(model, replace(coarse_folded, fold_gain=False)):
        plain = model(ids).logits
    with apply(model, coarse_folded):
        assert torch.equal(model(ids).logits, plain)


@pytest.mark.parametrize("which", ["full", "sliding", "all"])
@pytest.mark.parametrize("scheme", ["coarse", "coarse_folded"])
def test_generating_stores_every_token_as_prefilling_does(build, ids, request, scheme, which):
    """In float64, since the float32 sums of one token and of many differ by enough to change a code.

    The router sums in float32 all the same; with one expert, normalised, its weight is 1 exactly.
    """
    model = build("kolibri1", "sdpa", torch.float64, num_experts_per_tok=1, norm_topk_prob=True)
    scheme = request.getfixturevalue(scheme)
    with apply(model, scheme, layers=which):
        out = model.generate(
            ids[:1, :20], max_new_tokens=20, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        prefilled = model(out.sequences).logits[:, 19:-1]
    assert torch.equal(prefilled.argmax(-1), out.sequences[:, 20:])
    generated = torch.stack(out.logits, dim=1)
    # `generate` hands logits out in float32, half an EPS away from what they were.
    atol = EPS * prefilled.abs().max().item()
    torch.testing.assert_close(generated.double(), prefilled, rtol=0, atol=atol)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_masks_survive(model, ids, exact, coarse, side):
    mask = torch.ones_like(ids)
    mask[1, slice(None, 6) if side == "left" else slice(-6, None)] = 0
    plain = model(ids, attention_mask=mask).logits
    with apply(model, exact, layers="all"):
        assert torch.equal(model(ids, attention_mask=mask).logits, plain)
    with apply(model, coarse, layers="all"):
        stored = model(ids, attention_mask=mask).logits[mask.bool()]
        if side == "left":
            assert not torch.equal(stored, model(ids).logits[mask.bool()])


def test_schemes_by_kind_and_by_layer(kolibri, ids, exact, coarse):
    mapping = {2: exact, "sliding": coarse, "full": exact}
    with capture(kolibri, layers="all") as plain:
        kolibri(ids)
    with apply(kolibri, mapping), capture(kolibri, layers="all") as stored:
        kolibri(ids)
    # Values on the grid of their own token come back as they are, up to the rounding of the grid itself.
    for i, layer in stored.layers.items():
        again = coarse.values.roundtrip(layer.v)
        on_grid = (again - layer.v).abs().max() <= 32 * EPS * layer.v.abs().max()
        assert on_grid == (i in (0, 1, 3))
    assert torch.equal(stored.layers[0].v, coarse.values.roundtrip(plain.layers[0].v))


def test_scales_shared_between_tokens_see_the_whole_history(kolibri, ids, shared):
    with capture(kolibri) as plain:
        kolibri(ids)
    exact_keys = plain.layers[4].k
    with apply(kolibri, shared), capture(kolibri) as stored:
        cache = kolibri(ids[:, :39], use_cache=True).cache
        kolibri(ids[:, 39:], cache=cache, use_cache=True)
        k = stored.layers[4].k
    # Another split of the same sums, as in capture's test of chunks.
    torch.testing.assert_close(cache.layers[4].keys, exact_keys, rtol=0, atol=5 * 64 * EPS * exact_keys.abs().max())
    history = cache.layers[4].keys
    assert torch.equal(k[:, :, :39], shared.keys.roundtrip(history[:, :, :39]))
    assert torch.equal(k[:, :, 39:], shared.keys.roundtrip(history)[:, :, 39:])
    with apply(kolibri, shared), capture(kolibri) as uncached:
        kolibri(ids, use_cache=False)
    assert torch.equal(uncached.layers[4].k, shared.keys.roundtrip(exact_keys))


def test_nested_schemes_store_in_order(kolibri, ids, traces, coarse, coarse_folded):
    before = traces(kolibri)
    with apply(kolibri, coarse_folded), capture(kolibri) as outer:
        kolibri(ids)
    with apply(kolibri, coarse_folded), apply(kolibri, coarse), capture(kolibri) as both:
        kolibri(ids)
    assert torch.equal(both.layers[4].k, coarse.keys.roundtrip(outer.layers[4].k))
    with (
        apply(kolibri, coarse),
        apply(kolibri, coarse_folded),
        pytest.raises(ValueError, match=r"'hadamard-int4' stores the keys of layer 4 .* accepted: as the outermost"),
    ):
        kolibri(ids)
    assert traces(kolibri) == before


def test_nested_schemes_remove_their_own(kolibri, ids, exact, coarse, traces):
    before, plain = traces(kolibri), kolibri(ids).logits
    first, second = apply(kolibri, coarse), apply(kolibri, exact)
    first.__enter__()
    second.__enter__()
    assert not torch.equal(kolibri(ids).logits, plain)
    first.__exit__(None, None, None)
    assert torch.equal(kolibri(ids).logits, plain)
    second.__exit__(None, None, None)
    assert traces(kolibri) == before


def test_hooks_sit_on_the_layer_only_inside(kolibri, coarse_folded):
    module = attention_layers(kolibri)[4].module
    with apply(kolibri, coarse_folded):
        assert len(module._forward_pre_hooks) == len(module.k_proj._forward_hooks) == 1
    assert len(module._forward_pre_hooks) == len(module.k_proj._forward_hooks) == 0


def test_an_error_inside_leaves_nothing_behind(kolibri, ids, coarse_folded, traces):
    before, plain = traces(kolibri), kolibri(ids).logits
    with pytest.raises(RuntimeError, match="mine"), apply(kolibri, coarse_folded, layers="all"):
        kolibri(ids)
        raise RuntimeError("mine")
    assert traces(kolibri) == before
    assert torch.equal(kolibri(ids).logits, plain)


def test_bfloat16_stays_bfloat16(build, ids, coarse_folded):
    model = build("kolibri1", "sdpa", torch.bfloat16)
    with apply(model, coarse_folded, layers="all"):
        out = model(ids, use_cache=True)
    assert out.logits.dtype == out.cache.layers[4].keys.dtype == out.cache.layers[0].values.dtype == torch.bfloat16


def test_static_caches_hold_what_each_token_stores(build, ids, coarse, shared):
    model = build("llama", "sdpa", torch.float64)

    def cache():
        return StaticCache(config=model.config, max_cache_len=64)

    with apply(model, coarse):
        plain = model(ids).logits
        stored = model(ids, cache=cache()).logits
    # Sums in float64 in another order, of numbers that were stored as the same float32.
    torch.testing.assert_close(stored, plain, rtol=0, atol=EPS * plain.abs().max().item())
    with apply(model, shared), pytest.raises(ValueError, match=r"cache is a static one and scheme 'shared'"):
        model(ids, cache=cache())


def test_schemes_that_cannot_work_on_a_layer_are_refused(kolibri, shared):
    with pytest.raises(ValueError, match=r"'shared' shares scales .* layer 0 is a sliding one"):
        apply(kolibri, shared, layers="all").__enter__()
    with pytest.raises(ValueError, match=r"'shared' folds the gain; accepted: keys stored token by token"):
        apply(kolibri, replace(shared, fold_gain=True)).__enter__()


def test_bad_schemes_are_named(llama, coarse):
    with pytest.raises(TypeError, match=r"scheme is a int; accepted"):
        apply(llama, 4).__enter__()
    with pytest.raises(ValueError, match=r"scheme is 'nonesuch'"):
        apply(llama, "nonesuch").__enter__()
    with pytest.raises(ValueError, match=r"a key of scheme is 'ful'; accepted: full, sliding, 0, 1, 2"):
        apply(llama, {"ful": coarse}).__enter__()
    with pytest.raises(ValueError, match=r"a key of scheme is 7; accepted: full, sliding, 0, 1, 2"):
        apply(llama, {7: coarse}).__enter__()
    with pytest.raises(ValueError, match=r"only full attention layers"):
        apply(llama, {"sliding": coarse}).__enter__()
    with pytest.raises(ValueError, match=r"layers is \[0\] beside a mapping"):
        apply(llama, {"full": coarse}, layers=[0]).__enter__()


def test_what_selects_no_layer_is_named(llama, coarse):
    with pytest.raises(ValueError, match="scheme is an empty mapping; accepted"):
        apply(llama, {}).__enter__()
    with pytest.raises(TypeError, match=r"a key of scheme is 1\.0; accepted: an integer"):
        apply(llama, {1.0: coarse}).__enter__()
    with pytest.raises(TypeError, match="model is a Sequential; accepted: a transformers PreTrainedModel"):
        apply(torch.nn.Sequential(llama), coarse).__enter__()


def test_indices_may_be_tensors(llama, ids, coarse):
    with apply(llama, coarse, layers=[0, 1]):
        expected = llama(ids).logits
    with apply(llama, coarse, layers=torch.tensor([0, 1])):
        assert torch.equal(llama(ids).logits, expected)
    with apply(llama, {torch.tensor(0): coarse, np.int64(1): coarse}):
        assert torch.equal(llama(ids).logits, expected)
