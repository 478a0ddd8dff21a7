"""What a server says of its cache once it has one, read from the tensors that vLLM allocated."""

from __future__ import annotations

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvlab.serving.capacity import describe_capacity, sessions_while_decoding

# Within vLLM's own names, whose handlers and level it configures.
logger = init_logger("vllm.kvlab")


def announce(vllm_config: VllmConfig, layer: torch.nn.Module, cache: torch.Tensor) -> None:
    """Log, for all ranks, what a layer stores in how many bytes and, for all layers, how many sessions the cache holds.

    Parameters
    ----------
    vllm_config
        The server's.
    layer
        An `kvlab.serving.attention.Int4Attention`.
    cache
        Its pages, uint8 ``[num_blocks, num_kv_heads, block_size, head_dim + 8]``.
    """
    if get_tensor_model_parallel_rank():
        return
    layers = vllm_config.compilation_config.static_forward_context
    config = allocated(vllm_config, len(cache))
    # vLLM starts no server that holds less than one session: this is the small cache it tries CUDA graphs with.
    if sessions_while_decoding(vllm_config, config, vllm_config.model_config.max_model_len) < 1:
        return
    logger.info(
        "kvlab: %s stores %s in %d bytes per token and KV head, blocks of %d tokens, on %s",
        layer.layer_name,
        layer.store.scheme.name,
        cache.shape[3] * cache.element_size(),
        cache.shape[2],
        cache.device,
    )
    if layer is next(other for other in layers.values() if isinstance(other, type(layer))):
        logger.info("kvlab: %s", describe_capacity(vllm_config, config))


def allocated(vllm_config: VllmConfig, num_blocks: int) -> KVCacheConfig:
    """Return vLLM's description of a cache of so many blocks for the layers of a server."""
    layers = vllm_config.compilation_config.static_forward_context
    specs = {
        name: layer.get_attn_backend().customize_spec(layer.get_kv_cache_spec(vllm_config))
        for name, layer in layers.items()
        if isinstance(layer, AttentionLayerBase)
    }
    return KVCacheConfig(num_blocks, kv_cache_tensors=[], kv_cache_groups=get_kv_cache_groups(vllm_config, specs))
