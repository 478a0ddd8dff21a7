"""The plugin is silent without its option, and with it says in one line what is in the way."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: .ci/install-serving-cpu installs its CPU build")
pytest.importorskip("aleph_alpha_inference", reason="needs the model's own plugin")

from kvlab.serving import plugin

pytestmark = pytest.mark.serving


def config(option=None, **changes):
    """What the plugin reads of vLLM's configuration."""
    values = {
        "cache_dtype": "fp8",
        "skip_layers": None,
        "hybrid_off": False,
        "pipeline": 1,
        "context": 1,
        "speculative": None,
        "connector": None,
        "sleep": False,
        "dtype": torch.bfloat16,
    } | changes
    connector = values["connector"]
    return SimpleNamespace(
        additional_config={"kolibri1": option} if option else {},
        cache_config=SimpleNamespace(
            cache_dtype=values["cache_dtype"], kv_cache_dtype_skip_layers=values["skip_layers"]
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=values["hybrid_off"]),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=values["pipeline"], decode_context_parallel_size=values["context"]
        ),
        speculative_config=values["speculative"],
        kv_transfer_config=connector and SimpleNamespace(kv_connector=connector),
        model_config=SimpleNamespace(
            enable_sleep_mode=values["sleep"],
            dtype=values["dtype"],
            hf_config=SimpleNamespace(architectures=[plugin.STOCK]),
        ),
    )


HADAMARD = {"kv_cache": "hadamard-int4"}


def test_without_the_option_nothing_changes():
    vllm_config = config(cache_dtype="auto", hybrid_off=True, pipeline=4)
    plugin.verify_and_update_config(vllm_config)
    assert vllm_config.model_config.hf_config.architectures == [plugin.STOCK]


def ngram(tokens):
    return SimpleNamespace(method="ngram", num_speculative_tokens=tokens)


@pytest.mark.parametrize(
    "changes",
    [{}, {"speculative": ngram(3)}, {"connector": "DecodeBenchConnector"}, {"connector": "FillConnector"}],
    ids=str,
)
def test_with_it_the_model_is_the_librarys(changes):
    vllm_config = config(HADAMARD, **changes)
    plugin.verify_and_update_config(vllm_config)
    assert vllm_config.model_config.hf_config.architectures == [plugin.INT4]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype is fp8_e5m2; accepted: fp8"),
        ({"dtype": torch.float32}, "--dtype is torch.float32; accepted: bfloat16"),
        ({"skip_layers": ["3"]}, "--kv-cache-dtype-skip-layers is given"),
        ({"hybrid_off": True}, "the hybrid KV cache manager is off; accepted: on"),
        ({"pipeline": 2}, "--pipeline-parallel-size is 2; accepted: 1"),
        ({"context": 2}, "--decode-context-parallel-size is 2; accepted: 1"),
        ({"speculative": SimpleNamespace(method="eagle", num_speculative_tokens=2)}, "speculative method is eagle"),
        ({"speculative": ngram(8)}, "8 speculative tokens; accepted: at most 7"),
        ({"connector": "NixlConnector"}, "the KV connector is NixlConnector"),
        ({"sleep": True}, "--enable-sleep-mode is on; accepted: off"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_is_in_the_way_is_named(changes, message):
    vllm_config = config(HADAMARD, **changes)
    with pytest.raises(ValueError, match=f"^kolibri1.kv_cache=hadamard-int4: .*{message}") as caught:
        plugin.verify_and_update_config(vllm_config)
    assert "\n" not in str(caught.value)
    assert vllm_config.model_config.hf_config.architectures == [plugin.STOCK]


def test_another_vllm_is_named(monkeypatch):
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.30.1")
    with pytest.raises(ValueError, match=r"vLLM is 0\.30\.1; accepted: 0\.29\.x"):
        plugin.verify_and_update_config(config(HADAMARD))


@pytest.mark.parametrize("times", [1, 3])
def test_registering_again_changes_nothing(times):
    from aleph_alpha_inference.config import Kolibri1ForCausalLMConfig
    from vllm.model_executor.models.registry import ModelRegistry

    for _ in range(times):
        plugin.register()
    assert Kolibri1ForCausalLMConfig.verify_and_update_config is plugin.verify_and_update_config
    assert plugin.INT4 in ModelRegistry.get_supported_archs()
