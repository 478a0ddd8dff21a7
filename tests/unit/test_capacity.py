import math

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    DeepseekV3Config,
    Gemma3Config,
    Gemma3nTextConfig,
    Gemma4TextConfig,
    LlamaConfig,
    MambaConfig,
    MiniMaxConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    WhisperConfig,
)
from transformers.models.lfm2_moe import Lfm2MoeConfig
from transformers.models.mllama.configuration_mllama import MllamaTextConfig

from kvlab import capacity, get_scheme, list_schemes
from kvlab.paging import FULL, LINEAR, SLIDING, Pages, linear_state_bytes, plan_cache
from kvlab.tables import published

pytestmark = pytest.mark.unit

GB = capacity.GB
CONTEXTS = [65_536, 262_144]
PAGED = [name for name in list_schemes() if not name.startswith("kivi")]


def changed(**fields):
    """A Llama's config whose fields were changed behind transformers' back."""
    config = LlamaConfig()
    vars(config).update(fields)
    return config


def sessions(table, column="sessions"):
    return table.set_index(["scheme", "context"])[column]


def test_stock_kolibri1_by_hand():
    """5 groups of 10 layers; pages of 16 tokens, 2 heads, 256 bytes; 513 + 1 tokens touch at most 34 blocks."""
    plan = plan_cache("fp8", tp=2)
    page = Pages(FULL, 16 * 2 * 256, 16)
    assert plan.groups.count(page) == 1
    assert plan.groups.count(Pages(SLIDING, page.page_bytes, 16, 513)) == 4
    assert plan.block_bytes == 10 * page.page_bytes
    assert plan.blocks(65_536) == 4096 + 4 * 34


def test_4_bit_kolibri1_by_hand():
    """Twice the tokens in a page that is 6% larger, to which the windows' pages are padded."""
    plan = plan_cache("hadamard-int4", tp=2)
    page = Pages(FULL, 32 * 2 * 136, 32)
    assert plan.groups.count(page) == 1
    assert plan.groups.count(Pages(SLIDING, page.page_bytes, 16, 513)) == 4
    assert plan.blocks(65_536) == 2048 + 4 * 34


def test_30_gb_hold_the_sessions_that_the_allocator_was_seen_to_give():
    held = sessions(capacity.capacity_table(CONTEXTS, 30 * GB, tp=2))
    ratios = [held["hadamard-int4", context] / held["fp8", context] for context in CONTEXTS]
    assert ratios[0] >= 1.82
    assert ratios[1] >= 1.86
    assert held.round(1).tolist() == [86.5, 157.8, 22.2, 41.4]


def test_a_session_is_bytes_on_all_its_gpus():
    one, two, eight = (
        sessions(capacity.session_table(CONTEXTS, tp=tp), "bytes_per_session").to_numpy() for tp in (1, 2, 8)
    )
    assert (one == two).all()
    # 4 KV heads on 8 GPUs: each twice.
    assert (eight == 2 * one).all()


@pytest.mark.parametrize("scheme", PAGED)
def test_every_scheme_that_stores_tokens_can_be_paged(scheme):
    table = capacity.session_table([262_144], [scheme])
    kolibri1 = {"layers": 10, "heads": 4, "head_dim": 128}
    stored = get_scheme(scheme).bits_per_number(128) / 8 * 2 * 262_144 * math.prod(kolibri1.values())
    # Windows and padding come on top, and neither is large at such a context.
    assert stored < table["bytes_per_session"].item() < 1.25 * stored


@given(
    context=st.integers(1, 2**21),
    block_size=st.sampled_from([1, 16, 32, 48, 128]),
    window=st.integers(1, 5000),
)
def test_a_window_never_holds_more_than_full_attention_nor_less_than_its_tokens(context, block_size, window):
    full, sliding = Pages(FULL, 1, block_size), Pages(SLIDING, 1, block_size, window)
    assert sliding.blocks(context) <= full.blocks(context)
    assert sliding.blocks(context) * block_size >= min(window, context)
    assert sliding.blocks(context) <= sliding.blocks(context + 1)
    # A prefill holds no less.
    assert sliding.blocks(context) <= sliding.blocks_reserved(context, 8192)


@settings(deadline=None)
@given(memory=st.integers(1, 10**12), more=st.integers(0, 10**10), scheme=st.sampled_from(PAGED))
def test_more_memory_never_holds_less(memory, more, scheme):
    first, second = (capacity.capacity_table([4096], size, [scheme]).iloc[0] for size in (memory, memory + more))
    assert first["sessions"] <= second["sessions"]
    assert first["sessions_whole"] == math.floor(first["sessions"])
    assert first["sessions_admitted"] <= second["sessions_admitted"]


def test_replicas_hold_whole_sessions_each():
    one, three = (capacity.capacity_table([262_144], 30 * GB, ["int4"], tp=2, replicas=n).iloc[0] for n in (1, 3))
    assert three["sessions"] == 3 * one["sessions"]
    assert three["sessions_whole"] == 3 * one["sessions_whole"] < math.floor(three["sessions"])


def test_nearly_as_many_layers_of_two_kinds_share_groups_of_the_larger_number():
    kinds = [FULL] * 12 + [SLIDING] * 13
    config = Qwen3Config(num_hidden_layers=25, layer_types=kinds, use_sliding_window=True, sliding_window=128)
    plan = plan_cache("fp8", config)
    assert [pages.kind for pages in plan.groups] == [FULL, SLIDING]
    assert plan.block_bytes == 13 * plan.groups[0].page_bytes


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (LlamaConfig(), FULL),
        (MixtralConfig(), FULL),
        (Phi3Config(), FULL),
        (Qwen3MoeConfig(), FULL),
        (Qwen3MoeConfig(use_sliding_window=False, sliding_window=4096), FULL),
        (MistralConfig(sliding_window=None), FULL),
        (MistralConfig(sliding_window=0), FULL),
        (changed(sliding_window=4096, use_sliding_window=False), FULL),
        (MistralConfig(), SLIDING),
        (MixtralConfig(sliding_window=4096), SLIDING),
        (Phi3Config(sliding_window=2047), SLIDING),
        (Qwen3MoeConfig(use_sliding_window=True, sliding_window=4096), SLIDING),
    ],
    ids=lambda x: type(x).__name__ if not isinstance(x, str) else x,
)
@pytest.mark.parametrize("scheme", ["bf16", "fp8", "hadamard-int4"])
def test_without_layer_types_all_layers_are_alike(config, kind, scheme):
    """The same plan as of a config that names each layer."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    named = Qwen3Config(
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=head_dim,
        layer_types=[kind] * config.num_hidden_layers,
    )
    named.sliding_window = getattr(config, "sliding_window", None)
    plan = plan_cache(scheme, config)
    assert plan == plan_cache(scheme, named)
    assert {pages.kind for pages in plan.groups} == {kind}


def test_mistrals_window_by_hand():
    """32 layers, 8 KV heads of 128 numbers, K and V, 2 bytes; 4,097 tokens less one touch at most 257 blocks."""
    plan = plan_cache("bf16", MistralConfig())
    assert plan.block_bytes == 32 * 16 * 8 * 128 * 2 * 2
    assert plan.blocks(10**6) == 257
    assert plan_cache("bf16", MistralConfig(sliding_window=None)).blocks(10**6) == 62_500


def test_a_vision_models_text_layers_are_counted():
    plan = plan_cache("fp8", Gemma3Config())
    assert {pages.kind for pages in plan.groups} == {FULL, SLIDING}


def test_linear_attention_keeps_two_states_whatever_the_context():
    config = Qwen3NextConfig()
    # Convolution: 3 inputs of 8,192 channels; matrices: 32 of 128×128; all BF16.
    assert linear_state_bytes(config, 1) == 2 * (3 * 8192 + 32 * 128 * 128)
    plan = plan_cache("bf16", config)
    state = next(pages for pages in plan.groups if pages.kind == LINEAR)
    assert state.blocks(1) == state.blocks(10**6) == 2
    assert state.page_bytes >= linear_state_bytes(config, 1)
    config.mamba_ssm_dtype = "float32"
    assert linear_state_bytes(config, 1) == 2 * 3 * 8192 + 4 * 32 * 128 * 128


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DeepseekV3Config(), "kv_lora_rank 512; accepted"),
        (MambaConfig(), "MambaConfig without num_attention_heads; accepted"),
        (MllamaTextConfig(), "cross_attention_layers .*; accepted"),
        (Lfm2MoeConfig(), "conv_L_cache 3; accepted"),
        (WhisperConfig(), "is_encoder_decoder True; accepted"),
        (
            changed(num_key_value_heads=0),
            r"config\.num_key_value_heads is 0; accepted: an integer from 1 to 1000000000",
        ),
        (changed(num_attention_heads=0), r"config\.num_attention_heads is 0"),
        (changed(num_key_value_heads=7), r"num_key_value_heads is 7; accepted: a divisor of 32 query heads"),
        (changed(num_key_value_heads="8"), r"num_key_value_heads is '8'; accepted: an integer"),
        (changed(head_dim=0), r"config\.head_dim is 0; accepted: an integer from 1 to 1000000000"),
        # More than any model has: what would not fit in memory, or in a float, or takes for ever.
        (changed(num_hidden_layers=10**9), r"config\.num_hidden_layers is 1000000000; accepted: .* to 10000"),
        (changed(head_dim=10**30), r"config\.head_dim is 10*; accepted"),
        (changed(head_dim=None, hidden_size=10**400), r"config\.hidden_size is 10*\.\.\.0*; accepted"),
        (
            Qwen3Config(layer_types=[SLIDING], num_hidden_layers=1, use_sliding_window=True, sliding_window=10**30),
            "window is 10*; accepted",
        ),
        (changed(head_dim=None, hidden_size=8), r"config\.head_dim is 0"),
        (changed(num_hidden_layers=0), r"config\.num_hidden_layers is 0"),
        (
            changed(layer_types=[FULL]),
            r"config\.layer_types is of length 1; accepted: a list of num_hidden_layers = 32",
        ),
        (changed(layer_types=FULL), r"config\.layer_types is 'full_attention'; accepted: a list"),
        (Gemma3nTextConfig(), "num_kv_shared_layers 15; accepted"),
        (Gemma4TextConfig(), "config has head_dim by layer; accepted"),
        (MiniMaxConfig(), "no linear_num_key_heads, .*; accepted: gated delta nets"),
        (Qwen3Config(layer_types=[SLIDING], num_hidden_layers=1), r"config\.sliding_window is None; accepted"),
        (Qwen3Config(layer_types=["chunked_attention"], num_hidden_layers=1), "'chunked_attention'; accepted"),
    ],
    ids=lambda x: type(x).__name__ if not isinstance(x, str) else "",
)
def test_a_config_that_does_not_say_what_its_layers_keep_is_refused(config, message):
    with pytest.raises((TypeError, ValueError), match=message) as caught:
        plan_cache("fp8", config)
    assert "\n" not in str(caught.value)


def test_something_else_than_a_config_is_refused():
    with pytest.raises(TypeError, match="config is a dict; accepted: a transformers config"):
        plan_cache("fp8", {})


def test_tp_that_does_not_divide_linear_heads_is_refused():
    config = Qwen3NextConfig(linear_num_key_heads=3, linear_num_value_heads=6)
    with pytest.raises(ValueError, match="tp is 2; accepted: a divisor of 3 key heads"):
        plan_cache("fp8", config, tp=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"contexts": []}, "contexts is empty"),
        ({"contexts": 65_536}, "contexts is 65536; accepted: several contexts"),
        ({"schemes": []}, "schemes is empty; accepted: at least one"),
        (
            {"cache_bytes": -3e9},
            r"cache_bytes is -3000000000\.0; accepted: a positive number, at most 1e\+18, in bytes",
        ),
        ({"cache_bytes": 1e300}, r"cache_bytes is 1e\+300; accepted"),
        ({"contexts": [0]}, "context is 0; accepted: an integer from 1 to 1000000000"),
        ({"contexts": [1.5]}, r"context is 1\.5"),
        ({"cache_bytes": 0}, "cache_bytes is 0; accepted: a positive number"),
        ({"cache_bytes": math.inf}, "cache_bytes is inf"),
        ({"schemes": ["int5"]}, "scheme is 'int5'"),
        ({"schemes": ["kivi-int4"]}, "'kivi-int4', whose scales belong to several tokens; accepted"),
        ({"schemes": ["fp8", "fp8"]}, "schemes has 2 named 'fp8'"),
        ({"tp": 3}, "tp is 3; accepted: a divisor of 48 query heads that divides 4 KV heads or is a multiple"),
        ({"tp": 5}, "tp is 5"),
        ({"tp": 0}, "tp is 0"),
        ({"replicas": 0}, "replicas is 0"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0"),
    ],
    ids=str,
)
def test_what_is_refused_is_named(changes, message):
    arguments = {"contexts": [4096], "cache_bytes": GB} | changes
    with pytest.raises((TypeError, ValueError), match=message):
        capacity.capacity_table(**arguments)


def test_weights_are_those_of_the_release():
    # 79 GB on disk; 73.55 GiB were measured in vLLM.
    assert capacity.kolibri1_weight_bytes() / 2**30 == pytest.approx(73.55, rel=0.003)


def test_memory_for_the_cache_is_what_weights_leave():
    left = capacity.cache_bytes_per_gpu(80 * GB, 78 * GB, tp=2, utilization=0.9)
    assert left == pytest.approx(72 * GB - 39 * GB)
    with pytest.raises(ValueError, match=r"gpu memory is 24 GB.*more than the 39\.0 GB of weights on each of 2 GPUs"):
        capacity.cache_bytes_per_gpu(24 * GB, 78 * GB, tp=2)
    with pytest.raises(ValueError, match=r"utilization is 1\.1; accepted"):
        capacity.cache_bytes_per_gpu(80 * GB, 78 * GB, tp=2, utilization=1.1)
    with pytest.raises(ValueError, match="weight_bytes is 0; accepted: a positive number"):
        capacity.cache_bytes_per_gpu(80 * GB, 0, tp=2)


def test_gains_are_those_of_the_capacity_in_every_interval():
    gains = capacity.gain_table(CONTEXTS, (26, 28), tp=2)
    for context, rows in gains.groupby("context"):
        assert (rows["from_gb"].iloc[0], rows["to_gb"].iloc[-1]) == (26, 28)
        assert rows["to_gb"].tolist()[:-1] == rows["from_gb"].tolist()[1:]
        for row in rows.to_dict("records"):
            # Just inside both ends, so that a missed jump shows.
            width = row["to_gb"] - row["from_gb"]
            for memory in (row["from_gb"] + 1e-3 * width, row["to_gb"] - 1e-3 * width):
                held = sessions(capacity.capacity_table([context], memory * GB, tp=2), "sessions_whole")
                assert held.tolist() == [row["sessions_stock"], row["sessions"]]
                assert row["gain"] == row["sessions"] / row["sessions_stock"] - 1


def test_the_published_gains_arise_together_in_one_narrow_interval():
    gains = capacity.gain_table(CONTEXTS, (20, 45), tp=2)
    ((start, end),) = capacity.memory_that_gives(gains, published("capacity"))
    held = sessions(capacity.capacity_table(CONTEXTS, (start + end) / 2 * GB, tp=2), "sessions_whole")
    assert held.tolist() == [78, 142, 19, 37]
    assert end - start < 0.03


@pytest.mark.parametrize(
    ("contexts", "memory", "message"),
    [
        ([100], 5, "cache_gb is 5; accepted: two positive numbers"),
        ([100], (1, 2, 3), r"cache_gb is \(1, 2, 3\); accepted: two positive numbers"),
        ([], (1, 2), "contexts is empty"),
        (5, (1, 2), "contexts is 5"),
    ],
)
def test_gains_of_nothing_are_refused(contexts, memory, message):
    with pytest.raises((TypeError, ValueError), match=message):
        capacity.gain_table(contexts, memory)


@pytest.mark.parametrize(
    ("contexts", "config", "message"),
    [
        ([1], 5, "config is a int; accepted: a transformers config"),
        (1, None, "contexts is 1"),
        ([1], changed(max_position_embeddings="long"), r"config\.max_position_embeddings is 'long'"),
    ],
)
def test_beyond_what_is_refused(contexts, config, message):
    with pytest.raises((TypeError, ValueError), match=message):
        capacity.beyond_model(contexts, config)


def test_gains_that_never_arise_give_no_interval():
    gains = capacity.gain_table([65_536], (20, 22), tp=2)
    assert capacity.memory_that_gives(gains, pd.DataFrame({"context": [65_536], "gain": [3.0]})) == []


@pytest.mark.parametrize("memory", [(0, 1), (2, 1), (1, 1), (1, math.inf)])
def test_a_range_that_is_none_is_refused(memory):
    with pytest.raises(ValueError, match=r"cache_gb is .*; accepted: two positive numbers"):
        capacity.gain_table([4096], memory)


def test_without_a_stock_session_there_is_no_gain():
    gains = capacity.gain_table([262_144], (0.5, 4), tp=1)
    assert gains["gain"].isna().iloc[0]
    assert gains["gain"].notna().iloc[-1]
