"""Capacity as vLLM's own allocator has it: real attention layers' specs, its configuration, its block tables."""

import json
import random
from collections import Counter
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="needs vLLM: .ci/install-serving-cpu installs its CPU build")
pytest.importorskip("aleph_alpha_inference", reason="needs the model's own plugin")

import transformers
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models import ModelRegistry
from vllm.platforms.interface import Platform
from vllm.sampling_params import SamplingParams
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    get_kv_cache_configs,
    get_max_concurrency_for_kv_cache_config,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.request import Request

from kvlab.capacity import GB, capacity_table
from kvlab.models.kolibri1_config import disk_config, kolibri1_config
from kvlab.paging import FULL, LINEAR, SLIDING, plan_cache
from kvlab.serving.attention import Int4Attention
from kvlab.serving.backend import Int4Backend
from kvlab.serving.capacity import describe_capacity, session_blocks, sessions_while_decoding

pytestmark = pytest.mark.serving

BATCHED_TOKENS = 8192
CACHE_TYPES = {"bf16": "auto", "fp8": "fp8", "hadamard-int4": "fp8"}
CONTEXTS = (65_536, 262_144)


def as_on_a_gpu(vllm_config):
    """What vLLM's CUDA platform chooses and its CPU platform does not."""
    vllm_config.scheduler_config.async_scheduling = True
    vllm_config.cache_config.block_size = 16
    vllm_config.cache_config.kv_cache_layout = "LBNHC"
    return vllm_config


def engine_config(folder, fields):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    arguments = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        kv_cache_dtype="fp8",
        max_num_batched_tokens=BATCHED_TOKENS,
        max_num_seqs=256,
    )
    return arguments.create_engine_config()


@pytest.fixture(scope="module")
def kolibri1(tmp_path_factory):
    return as_on_a_gpu(engine_config(tmp_path_factory.mktemp("kolibri1"), disk_config(kolibri1_config())))


def layer_specs(vllm_config, config, scheme, tp):
    """The specs of real attention layers of a rank, one built for each kind, by the names of a model's layers."""
    queries, heads = config.num_attention_heads // tp, max(1, config.num_key_value_heads // tp)
    vllm_config.cache_config.cache_dtype = CACHE_TYPES[scheme]
    context = vllm_config.compilation_config.static_forward_context
    context.clear()

    def build(kind):
        four_bit = kind == FULL and scheme == "hadamard-int4"
        with set_current_vllm_config(vllm_config):
            layer = (Int4Attention if four_bit else Attention)(
                queries,
                config.head_dim,
                config.head_dim**-0.5,
                num_kv_heads=heads,
                cache_config=vllm_config.cache_config,
                prefix=f"model.layers.{len(context)}.self_attn.attn",
                per_layer_sliding_window=config.sliding_window if kind == SLIDING else None,
                **({"attn_backend": Int4Backend} if four_bit else {}),
            )
        if not four_bit:
            # Its kernels refuse FP8 on a CPU; what they ask of pages is said without them.
            layer.attn_backend = FlashAttentionBackend
        return layer

    kinds = set(config.layer_types)
    layers = {kind: build(kind) for kind in kinds - {LINEAR}}
    specs = {kind: layer.get_kv_cache_spec(vllm_config) for kind, layer in layers.items()}
    if LINEAR in kinds:
        specs[LINEAR] = state_spec(vllm_config)
    return {f"model.layers.{index}.self_attn.attn": specs[kind] for index, kind in enumerate(config.layer_types)}


def state_spec(vllm_config):
    model, _ = ModelRegistry.resolve_model_cls(vllm_config.model_config.architecture, vllm_config.model_config)
    cache = vllm_config.cache_config
    return MambaSpec(
        shapes=model.get_mamba_state_shape_from_config(vllm_config),
        dtypes=model.get_mamba_state_dtype_from_config(vllm_config),
        block_size=cache.mamba_block_size,
        page_size_padded=cache.mamba_page_size_padded,
        mamba_cache_mode=cache.mamba_cache_mode,
    )


def allocate(vllm_config, specs, context, memory):
    vllm_config.model_config.max_model_len = context
    return get_kv_cache_configs(vllm_config, [dict(specs)], [memory])[0]


def test_4_bits_hold_82_percent_more_sessions_of_kolibri1(kolibri1):
    config, memory = kolibri1_config(), 30 * GB
    ours = capacity_table(CONTEXTS, memory, tp=2).set_index(["scheme", "context"])["sessions"]
    held = {}
    for scheme in ("fp8", "hadamard-int4"):
        specs = layer_specs(kolibri1, config, scheme, tp=2)
        for context in CONTEXTS:
            allocated = allocate(kolibri1, specs, context, memory)
            held[scheme, context] = sessions_while_decoding(kolibri1, allocated, context)
            assert held[scheme, context] == ours[scheme, context]
    ratios = [held["hadamard-int4", context] / held["fp8", context] for context in CONTEXTS]
    assert ratios[0] >= 1.82
    assert ratios[1] >= 1.86
    # More than the cells' own ratio no page can give.
    assert max(ratios) < 256 / 136


def test_the_log_names_both_contexts(kolibri1):
    specs = layer_specs(kolibri1, kolibri1_config(), "hadamard-int4", tp=2)
    allocated = allocate(kolibri1, specs, 262_144, 30 * GB)
    longest, shorter = (sessions_while_decoding(kolibri1, allocated, context) for context in (262_144, 65_536))
    assert describe_capacity(kolibri1, allocated) == (
        f"capacity while decoding: {longest:.1f} sessions of 262,144 tokens ({shorter:.1f} of 65,536)"
    )
    kolibri1.model_config.max_model_len = 4096
    assert describe_capacity(kolibri1, allocated).endswith("sessions of 4,096 tokens")
    with pytest.raises(ValueError, match="context is 0; accepted: an integer of at least 1"):
        sessions_while_decoding(kolibri1, allocated, 0)


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("scheme", ["fp8", "hadamard-int4"])
def test_a_session_that_decodes_holds_what_is_said(kolibri1, monkeypatch, scheme, is_async, drafts):
    """Decode past the window with vLLM's block manager and count the blocks that are really held."""
    context = 1200
    monkeypatch.setattr(kolibri1.scheduler_config, "async_scheduling", is_async)
    # All that the code reads of a speculative configuration that drafts by n-grams.
    ngram = SimpleNamespace(
        num_speculative_tokens=drafts,
        use_dflash=lambda: False,
        use_eagle=lambda: False,
        uses_draft_model=lambda: False,
        use_multi_module_mtp=lambda: False,
    )
    specs = layer_specs(kolibri1, kolibri1_config(), scheme, tp=2)
    allocated = allocate(kolibri1, specs, context, GB)
    monkeypatch.setattr(kolibri1, "speculative_config", ngram if drafts else None)
    held = blocks_held(kolibri1, allocated, context, step=1 + drafts, in_flight=is_async * (1 + drafts))
    assert max(held) == session_blocks(kolibri1, allocated, context)


def blocks_held(vllm_config, allocated, context, *, step, in_flight):
    """Blocks of one request at every step of its decoding; drafts are rejected, so that it passes all alignments."""
    scheduler_block, hash_block = resolve_kv_cache_block_sizes(allocated, vllm_config)
    manager = KVCacheManager(
        allocated,
        max_model_len=context,
        scheduler_block_size=scheduler_block,
        hash_block_size=hash_block,
        max_in_flight_tokens=vllm_config.max_in_flight_tokens,
        enable_caching=False,
    )
    request = Request("session", [1], SamplingParams(max_tokens=context), None)
    held = []
    for processed in range(context - in_flight - step + 1):
        request.num_computed_tokens = processed + in_flight
        request.num_in_flight_tokens = in_flight
        assert manager.allocate_slots(request, step) is not None
        blocks = (block for group in manager.get_blocks("session").blocks for block in group)
        held.append(sum(not block.is_null for block in blocks))
    return held


def random_config(seed):
    """A model of full and sliding-window layers, in whatever order and number."""
    draw = random.Random(seed)
    heads = draw.choice([1, 2, 3, 4, 8])
    layers = draw.choices([FULL, SLIDING], weights=[1, draw.choice([0, 1, 4])], k=draw.randint(1, 60))
    return transformers.Qwen3Config(
        head_dim=draw.choice([64, 128, 256]),
        num_key_value_heads=heads,
        num_attention_heads=heads * draw.choice([4, 8]),
        num_hidden_layers=len(layers),
        layer_types=layers,
        use_sliding_window=True,
        sliding_window=draw.choice([1, 2, 128, 513, 1024, 4096, 5000]),
    )


def check_to_the_block(vllm_config, specs, config, scheme, tp, seed):
    """Compare blocks, what one takes, and both counts of sessions, with vLLM's for a random context and memory."""
    draw = random.Random(-seed)
    context = draw.randint(1, 300_000)
    plan = plan_cache(scheme, config, tp=tp)
    # Two sessions in prefill at least, so that vLLM allocates at all, and some odd bytes.
    blocks = 2 * plan.blocks_reserved(context, BATCHED_TOKENS) + draw.randint(2, 10_000)
    memory = blocks * plan.block_bytes + draw.randrange(plan.block_bytes)
    allocated = allocate(vllm_config, specs, context, memory)
    assert allocated.kv_cache_tensors[0].size == allocated.num_blocks * plan.block_bytes
    assert allocated.num_blocks == blocks
    assert Counter(group.kv_cache_spec.page_size_bytes for group in allocated.kv_cache_groups) == Counter(
        pages.page_bytes for pages in plan.groups
    )
    assert session_blocks(vllm_config, allocated, context) == plan.blocks(context)
    (row,) = capacity_table([context], memory, [scheme], config, tp=tp).to_dict("records")
    assert row["sessions"] == sessions_while_decoding(vllm_config, allocated, context)
    assert row["sessions_admitted"] == get_max_concurrency_for_kv_cache_config(vllm_config, allocated)


@pytest.mark.parametrize("seed", range(20))
def test_random_configurations_agree_to_the_block(kolibri1, seed):
    config = random_config(seed)
    draw = random.Random(1000 + seed)
    heads = config.num_key_value_heads
    tp = draw.choice([tp for tp in (1, 2, 4) if heads % tp == 0 or tp % heads == 0])
    # The served 4-bit cache takes its page from a window's.
    schemes = ["bf16", "fp8"] + ["hadamard-int4"] * (len(set(config.layer_types)) == 2)
    scheme = draw.choice(schemes)
    check_to_the_block(kolibri1, layer_specs(kolibri1, config, scheme, tp), config, scheme, tp, seed)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """Qwen3-Next's configuration, whose fields vLLM's model class reads anew for every case."""
    config = transformers.Qwen3NextConfig(architectures=["Qwen3NextForCausalLM"], tie_word_embeddings=False)
    return engine_config(tmp_path_factory.mktemp("hybrid"), config.to_dict())


@pytest.mark.parametrize("seed", range(8))
def test_random_hybrids_agree_to_the_block(hybrid, seed):
    draw = random.Random(2000 + seed)
    config, tp, scheme = hybrid.model_config.hf_text_config, draw.choice([1, 2]), draw.choice(["bf16", "fp8"])
    layers = draw.choices([FULL, LINEAR], weights=[1, draw.choice([1, 3])], k=draw.randint(2, 48))
    config.layer_types = [FULL, LINEAR, *layers]
    config.num_hidden_layers = len(config.layer_types)
    config.num_key_value_heads, config.head_dim = draw.choice([2, 4]), draw.choice([128, 256])
    # Where vLLM keeps what it has read of them.
    shape = hybrid.model_config.model_arch_config
    shape.total_num_kv_heads, shape.head_size = config.num_key_value_heads, config.head_dim
    config.linear_num_key_heads = draw.choice([8, 16])
    config.linear_num_value_heads = config.linear_num_key_heads * draw.choice([1, 2])
    config.linear_conv_kernel_dim = draw.choice([2, 4])
    hybrid.parallel_config.tensor_parallel_size = tp
    cache = as_on_a_gpu(hybrid).cache_config
    cache.cache_dtype, cache.mamba_page_size_padded = CACHE_TYPES[scheme], None
    Platform._align_hybrid_block_size(hybrid, FlashAttentionBackend)
    check_to_the_block(hybrid, layer_specs(hybrid, config, scheme, tp), config, scheme, tp, seed)
