"""vLLM's FlashAttention 3, for prefill."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvlab.kernels.prefill import Flash

FLASH_ATTENTION = 3


def flash_attention_3() -> Flash | None:
    """Return vLLM's FlashAttention 3 as `kvlab.kernels.prefill` takes it, or None where it is missing."""
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func, is_fa_version_supported
    except ImportError:
        return None
    if not is_fa_version_supported(FLASH_ATTENTION):
        return None
    return partial(flash_attn_varlen_func, fa_version=FLASH_ATTENTION, return_softmax_lse=True)
