"""The vLLM plugin: with the option it serves the 4-bit cache or says why it cannot, without it it does nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlab.serving.options import SECTION, Options

if TYPE_CHECKING:
    from vllm.config import VllmConfig

VLLM_VERSION = "0.29."
STOCK, INT4 = "Kolibri1ForCausalLM", "Kolibri1Int4ForCausalLM"


def register() -> None:
    """Register the model and its attention backend; vLLM calls this in every process it starts.

    Nothing changes for a server that does not ask: the model is one more name in vLLM's registry, and the hook that
    looks at the options returns at once.
    """
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    ModelRegistry.register_model(INT4, f"kvlab.serving.model:{INT4}")
    register_backend(AttentionBackendEnum.CUSTOM, "kvlab.serving.backend.Int4Backend")
    try:
        from aleph_alpha_inference.config import Kolibri1ForCausalLMConfig
    except ImportError:
        # Then vLLM does not know Kolibri-1 either, and says so when it is asked to serve it.
        return
    # The plugin of the model puts this very class into vLLM's table, before this one runs or after.
    Kolibri1ForCausalLMConfig.verify_and_update_config = staticmethod(verify_and_update_config)


def verify_and_update_config(vllm_config: VllmConfig) -> None:
    """Switch a server to the 4-bit cache if its options ask for it.

    Raises
    ------
    TypeError, ValueError
        The options are not what is accepted, or the server cannot do what they ask; one line says what to change.
    """
    options = Options.read(vllm_config.additional_config)
    if options is None:
        return
    if reason := why_not(vllm_config):
        raise ValueError(f"{SECTION}.kv_cache={options.kv_cache}: {reason}")
    # It travels to the engine core and the workers, which resolve this library's model by it.
    vllm_config.model_config.hf_config.architectures = [INT4]


def why_not(vllm_config: VllmConfig) -> str | None:
    """Return what is in the way of the 4-bit cache, in one line, or None."""
    import torch
    import vllm
    from vllm.platforms import current_platform

    # vLLM's FP8 cache on a CPU needs AVX-512; without it the sliding-window layers may stay BF16 there.
    cache_dtype = vllm_config.cache_config.cache_dtype
    accepted = ("fp8", "fp8_e4m3") + (("auto", "bfloat16") if current_platform.is_cpu() else ())
    parallel, speculative = vllm_config.parallel_config, vllm_config.speculative_config
    connector = vllm_config.kv_transfer_config and vllm_config.kv_transfer_config.kv_connector
    reasons = (
        (not vllm.__version__.startswith(VLLM_VERSION), f"vLLM is {vllm.__version__}; accepted: {VLLM_VERSION}x"),
        (
            vllm_config.model_config.dtype != torch.bfloat16,
            f"--dtype is {vllm_config.model_config.dtype}; accepted: bfloat16, which the kernels read",
        ),
        (
            cache_dtype not in accepted,
            f"--kv-cache-dtype is {cache_dtype}; accepted: {' or '.join(accepted)}, for the sliding-window layers",
        ),
        (
            bool(vllm_config.cache_config.kv_cache_dtype_skip_layers),
            "--kv-cache-dtype-skip-layers is given; accepted: without it, the scheme says what each layer stores",
        ),
        (
            bool(vllm_config.scheduler_config.disable_hybrid_kv_cache_manager),
            "the hybrid KV cache manager is off; accepted: on (without --disable-hybrid-kv-cache-manager)",
        ),
        (
            parallel.pipeline_parallel_size > 1,
            f"--pipeline-parallel-size is {parallel.pipeline_parallel_size}; accepted: 1",
        ),
        (
            parallel.decode_context_parallel_size > 1,
            f"--decode-context-parallel-size is {parallel.decode_context_parallel_size}; accepted: 1",
        ),
        (
            speculative is not None and speculative.method != "ngram",
            f"the speculative method is {speculative and speculative.method}; accepted: ngram (no draft model)",
        ),
        (
            speculative is not None and speculative.num_speculative_tokens > 7,
            f"{speculative and speculative.num_speculative_tokens} speculative tokens; accepted: at most 7",
        ),
        (
            connector not in (None, "DecodeBenchConnector", "FillConnector"),
            f"the KV connector is {connector}; accepted: none (others do not know these pages)",
        ),
        (
            bool(vllm_config.model_config.enable_sleep_mode),
            "--enable-sleep-mode is on; accepted: off",
        ),
    )
    return next((reason for applies, reason in reasons if applies), None)
