"""How many sessions vLLM's cache holds while they decode.

The concurrency that vLLM logs reserves for every sliding-window layer what a prefill may have in flight
(``SlidingWindowSpec.max_admission_blocks_per_request``, v1/kv_cache_interface.py:704). A session that decodes holds
less, and how many of those fit is what bounds throughput. File and line are those of vLLM 0.29.0.
"""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    RSWASpec,
    SlidingWindowSpec,
    iter_layer_specs,
)

from kvlab.checks import check_integer

WRITE_UP_CONTEXT = 65_536
"""The shorter of the two contexts at which the write-up counts sessions, in tokens."""


def decoding_blocks(spec: KVCacheSpec, context: int, vllm_config: VllmConfig) -> int:
    """Return the most blocks that one session holds in one cache group while it decodes up to ``context`` tokens.

    Full attention keeps every token. Of a sliding window, ``SlidingWindowManager.get_num_skipped_tokens``
    (v1/core/single_type_kv_cache_manager.py:1071) gives up what lies ``window - 1`` tokens before the first token that
    is not processed yet, in whole blocks (``remove_skipped_blocks``, :632), and ``KVCacheManager.allocate_slots``
    (v1/core/kv_cache_manager.py:503) does so before it allocates the tokens to be computed and the look-ahead slots.
    Tokens of a step that is still running are not processed, so with asynchronous scheduling a session keeps those of
    ``max_concurrent_batches`` steps (config/vllm.py:559) beside the window. A run of n tokens touches at most
    ``ceil((n - 1) / block_size) + 1`` blocks, once in a block's length of steps; a session that is to decode on needs
    them then.

    Parameters
    ----------
    spec
        A group's, after vLLM has unified the pages.
    context
        Tokens, the one being computed included.
    vllm_config
        The server's.

    Returns
    -------
    int
        Blocks. For a kind of layer that is neither, a recurrent state for instance, what vLLM itself reserves.
    """
    if isinstance(spec, SlidingWindowSpec):
        step = vllm_config.uniform_decode_query_len
        unprocessed = vllm_config.max_concurrent_batches * step + vllm_config.num_lookahead_tokens
        kept = spec.sliding_window - 1 + spec.extra_retained_tokens + unprocessed
        return min(cdiv(context, spec.block_size), cdiv(kept - 1, spec.block_size) + 1)
    # Its window counts generated tokens only, which a context alone does not tell apart.
    if isinstance(spec, FullAttentionSpec) and not isinstance(spec, RSWASpec):
        # Decode context parallelism spreads a block over the ranks (SingleTypeKVCacheManager.__init__, :103).
        return cdiv(context, spec.block_size * vllm_config.parallel_config.decode_context_parallel_size)
    return cdiv(spec.max_memory_usage_bytes(vllm_config), spec.page_size_bytes)


def session_blocks(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, context: int) -> int:
    """Return the blocks that one session of ``context`` tokens holds in all cache groups while it decodes.

    Raises
    ------
    TypeError, ValueError
        ``context`` is no positive integer.
    """
    context = check_integer(context, "context", minimum=1)
    return sum(
        # Layers of one group share a block table; where they differ, the largest decides.
        max(decoding_blocks(spec, context, vllm_config) for spec in iter_layer_specs(group.kv_cache_spec))
        for group in kv_cache_config.kv_cache_groups
    )


def sessions_while_decoding(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, context: int) -> float:
    """Return how many sessions of ``context`` tokens the cache holds while all of them decode.

    Parameters
    ----------
    vllm_config
        The server's.
    kv_cache_config
        What ``vllm.v1.core.kv_cache_utils.get_kv_cache_configs`` made of the layers' specs and the memory.
    context
        Tokens of each session, the one being computed included.

    Returns
    -------
    float
        Sessions; the whole ones are its floor. All groups draw blocks from one pool, of which the null block
        (v1/core/block_pool.py:190) is never handed out.

    Raises
    ------
    TypeError, ValueError
        ``context`` is no positive integer.
    """
    blocks = session_blocks(vllm_config, kv_cache_config, context)
    return (kv_cache_config.num_blocks - 1) / blocks if blocks else float("inf")


def describe_capacity(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """Return one line for the server's log: sessions of the longest context it takes, and of the write-up's 64k."""
    longest = vllm_config.model_config.max_model_len
    sessions = sessions_while_decoding(vllm_config, kv_cache_config, longest)
    line = f"capacity while decoding: {sessions:.1f} sessions of {longest:,} tokens"
    if longest > WRITE_UP_CONTEXT:
        shorter = sessions_while_decoding(vllm_config, kv_cache_config, WRITE_UP_CONTEXT)
        line += f" ({shorter:.1f} of {WRITE_UP_CONTEXT:,})"
    return line
