"""A full-attention layer of Kolibri-1 whose keys and values vLLM keeps in 4 bits."""

from __future__ import annotations

import torch
from aleph_alpha_inference.kolibri1 import Kolibri1Attention
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.attention import unified_attention_with_output
from vllm.model_executor.models.utils import extract_layer_index
from vllm.utils.torch_utils import _encode_layer_name
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, KVQuantMode

from kvlab.kernels.layout import REGION_TOKENS, cell_bytes
from kvlab.kernels.store import norm_rotate_store
from kvlab.schemes import Scheme
from kvlab.serving.backend import Int4Backend
from kvlab.serving.schemes import layer_folding, value_map


class Int4Attention(Attention):
    """vLLM's attention layer with pages of 4-bit cells, straight from the projection."""

    def forward(self, qkv: torch.Tensor) -> torch.Tensor:
        """Norm, rotate, store and attend: ``[tokens, (num_heads + 2 num_kv_heads) head_size]`` → all heads' output.

        All of it is vLLM's one attention operator, before which it cuts its piecewise CUDA graphs: where the tokens are
        stored is a batch's own, and no graph may keep it.
        """
        output = qkv.new_empty(len(qkv), self.num_heads, self.head_size)
        if self.use_direct_call:
            unified_attention_with_output(qkv, qkv, qkv, output, self.layer_name)
        else:
            name = _encode_layer_name(self.layer_name)
            torch.ops.vllm.unified_attention_with_output(qkv, qkv, qkv, output, name)
        return output.flatten(1)

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """Return the layer's pages: the smallest block of whole regions that is no smaller than a sliding-window page.

        vLLM pads smaller pages up to the largest, so a page of this size wastes least of the others.
        """
        layers = vllm_config.compilation_config.static_forward_context.values()
        window = next(x for x in layers if isinstance(x, Attention) and x.sliding_window is not None)
        least = window.get_kv_cache_spec(vllm_config).page_size_bytes
        cell = cell_bytes(self.head_size)
        block_size = REGION_TOKENS
        while block_size * self.num_kv_heads * cell < least:
            block_size *= 2
        return FullAttentionSpec(
            block_size=block_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            dtype=torch.uint8,
            # Another mode than FP8's makes vLLM zero blocks that it reuses: stale 4-bit bytes read as FP8 can be NaN.
            kv_quant_mode=KVQuantMode.INT4_PER_TOKEN_HEAD,
            state_content_bytes=cell,
        )

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Fold the gains, which are loaded now."""
        super().process_weights_after_loading(act_dtype)
        self.store.fold()


class Int4FullAttention(nn.Module):
    """Takes the place of a stock full-attention module and over its projections and norms.

    Parameters
    ----------
    stock
        The module as aleph-alpha-inference built it, without RoPE.
    scheme
        What the layer stores.
    vllm_config
        The server's.
    """

    def __init__(self, stock: Kolibri1Attention, scheme: Scheme, vllm_config: VllmConfig):
        super().__init__()
        self.qkv_proj, self.o_proj, self.q_norm, self.k_norm = stock.qkv_proj, stock.o_proj, stock.q_norm, stock.k_norm
        context, name = vllm_config.compilation_config.static_forward_context, stock.attn.layer_name
        order = list(context)
        del context[name]
        self.attn = Int4Attention(
            stock.num_heads,
            stock.head_dim,
            stock.head_dim**-0.5,
            num_kv_heads=stock.num_kv_heads,
            cache_config=vllm_config.cache_config,
            quant_config=vllm_config.quant_config,
            prefix=name,
            attn_backend=Int4Backend,
        )
        # vLLM numbers its cache groups by this order.
        layers = {key: context[key] for key in order}
        context.clear()
        context.update(layers)
        self.attn.store = Store(stock, scheme, extract_layer_index(name))

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Attend; full-attention layers of Kolibri-1 have no positions."""
        qkv, _ = self.qkv_proj(hidden_states)
        out, _ = self.o_proj(self.attn(qkv))
        return out


class Store:
    """What stands between a layer's projection and its cache; the matrices are folded once the weights are loaded."""

    def __init__(self, stock: Kolibri1Attention, scheme: Scheme, layer: int):
        self.scheme, self.layer = scheme, layer
        self.q_norm, self.k_norm, self.eps = stock.q_norm, stock.k_norm, stock.q_norm.variance_epsilon
        self.num_heads, self.num_kv_heads = stock.num_heads, stock.num_kv_heads
        self.total_num_kv_heads = stock.total_num_kv_heads
        rank, size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        first = rank * stock.total_num_kv_heads // size
        self.heads = list(range(first, first + self.num_kv_heads))
        self.folding = self.values = None

    def fold(self) -> None:
        """Fold the norms' gains, as they are now, into the matrices."""
        gains = self.q_norm.weight, self.k_norm.weight
        sizes = {"num_kv_heads": self.total_num_kv_heads, "head_dim": len(gains[0])}
        self.values = value_map(self.scheme, self.layer, self.heads, **sizes, device=gains[0].device)
        self.folding = layer_folding(self.scheme, self.layer, *gains, self.heads, self.values)

    def __call__(self, qkv: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Store the tokens that have a slot and return all rotated queries, ``[tokens, num_heads, head_size]``."""
        return norm_rotate_store(
            qkv,
            cache,
            slots[: len(qkv)],
            self.folding,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            eps=self.eps,
        )

    def restore(self, output: torch.Tensor) -> None:
        """Bring outputs back to where values came from, ``[tokens, num_heads, head_size]``, in place."""
        if self.values is not None:
            self.values.restore(output)
