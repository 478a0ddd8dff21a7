"""transformers' Kolibri-1, prepared for training: fast attention, all experts at once, a balanced router."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

if TYPE_CHECKING:
    from transformers import Kolibri1Config, Kolibri1ForCausalLM

NAME = "kvlab-training"
"""Under which attention and experts are registered with transformers."""

LOAD = "tokens_per_expert"


def training_model(config: Kolibri1Config, seed: int) -> Kolibri1ForCausalLM:
    """Build the model with its first weights, in float32 on the CPU.

    The norms behind attention and experts begin at 1/√(2·layers), so that the hidden states keep the embeddings'
    size whatever the depth; embeddings begin at a standard deviation of 1.

    Parameters
    ----------
    config
        The model's; its attention and experts implementations are set.
    seed
        Of the weights.
    """
    from transformers import AttentionInterface, AttentionMaskInterface, Kolibri1ForCausalLM
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    AttentionInterface.register(NAME, _attend)
    # Without a mask function transformers would drop the window, and say nothing.
    AttentionMaskInterface.register(NAME, _no_mask)
    ALL_EXPERTS_FUNCTIONS.register(NAME, _all_experts)
    config._attn_implementation = config._experts_implementation = NAME
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Kolibri1ForCausalLM(config)
        nn.init.normal_(model.model.embed_tokens.weight)
    for layer in model.model.layers:
        for norm in (layer.post_self_attn_layernorm, layer.post_mlp_layernorm):
            nn.init.constant_(norm.weight, 1 / math.sqrt(2 * config.num_hidden_layers))
        layer.mlp.experts.register_buffer(LOAD, torch.zeros(config.num_experts), persistent=False)
    return model


@cache
def attention_masks(window: int, tokens: int, device: torch.device) -> dict[str, BlockMask | torch.Tensor | None]:
    """Return the masks that transformers' model takes in place of a padding mask, by the kind of layer.

    Parameters
    ----------
    window
        Tokens that sliding-window layers see, the token itself among them.
    tokens
        Of a sequence.
    device
        On CUDA the sliding window's mask is flex attention's, elsewhere a boolean ``[tokens, tokens]``. Full attention
        needs none: its function is causal by itself.
    """
    if window >= tokens:
        sliding = None
    elif device.type == "cuda":

        def within(_batch: Any, _head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return (key <= query) & (query - key < window)

        # Compiled, it never holds all pairs of tokens.
        sliding = create_block_mask(within, None, None, tokens, tokens, device=device, _compile=True)
    else:
        position = torch.arange(tokens, device=device)
        distance = position[:, None] - position
        sliding = (distance >= 0) & (distance < window)
    return {"full_attention": None, "sliding_attention": sliding}


def compile_layers(model: nn.Module) -> None:
    """Compile each layer's forward pass; layers are of two kinds, so a length compiles in seconds.

    Parameters
    ----------
    model
        From `training_model`.
    """
    torch._dynamo.config.cache_size_limit = 64
    for layer in model.model.layers:
        layer.compile(dynamic=False, fullgraph=True)


def _no_mask(*_args: Any, **_kwargs: Any) -> None:
    raise ValueError("attention_mask is missing; accepted: what attention_masks returns")


def _attend(
    _module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: BlockMask | torch.Tensor | None,
    *,
    scaling: float,
    **_kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over ``[batch, heads, tokens, head_dim]`` under a mask of `attention_masks`."""
    query, key = query.to(value.dtype), key.to(value.dtype)
    if attention_mask is None or isinstance(attention_mask, torch.Tensor):
        out = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attention_mask,
            is_causal=attention_mask is None,
            scale=scaling,
            enable_gqa=True,
        )
    else:
        out = flex_attention(query, key, value, block_mask=attention_mask, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


def _all_experts(
    self: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Compute every expert for every token, and weigh those that the router did not choose with 0.

    The same sum as of the chosen ones alone. Experts this small cost less as one large matrix than gathered.

    Parameters
    ----------
    self
        transformers' experts: ``gate_up_proj`` ``[experts, 2·width, hidden]``, ``down_proj``
        ``[experts, hidden, width]``; counts the tokens that each expert was chosen for.
    hidden_states
        ``[tokens, hidden]``.
    top_k_index, top_k_weights
        ``[tokens, top_k]``.
    """
    experts, hidden, width = self.down_proj.shape
    tokens = hidden_states.shape[0]
    gate_up = functional.linear(hidden_states, self.gate_up_proj.reshape(experts * 2 * width, hidden))
    gate, up = gate_up.view(tokens, experts, 2 * width).chunk(2, dim=-1)
    weights = torch.zeros(tokens, experts, dtype=top_k_weights.dtype, device=hidden_states.device)
    weights = weights.scatter(1, top_k_index, top_k_weights)
    with torch.no_grad():
        getattr(self, LOAD).add_((weights > 0).sum(dim=0))
    inner = self.act_fn(gate) * up * weights.to(gate.dtype)[..., None]
    down = self.down_proj.permute(1, 0, 2).reshape(hidden, experts * width)
    return functional.linear(inner.reshape(tokens, experts * width), down).to(hidden_states.dtype)


def routers(model: nn.Module) -> Iterator[tuple[nn.Module, torch.Tensor]]:
    """Yield each layer's router, and how many tokens each of its experts had since the counts were last reset."""
    for layer in model.model.layers:
        yield layer.mlp.gate, getattr(layer.mlp.experts, LOAD)


@torch.no_grad()
def balance(model: nn.Module, rate: float) -> torch.Tensor:
    """Move each router's bias against its load, reset the counts.

    Parameters
    ----------
    model
        From `training_model`.
    rate
        What a bias moves by, in the router's logits.

    Returns
    -------
    torch.Tensor
        Load of the busiest expert over the mean, the largest of all layers; a scalar on the model's device.

    References
    ----------
    Wang et al. 2024, arXiv:2408.15664 (balancing by bias, without an auxiliary loss).
    """
    worst = []
    for gate, load in routers(model):
        mean = load.mean()
        worst.append(load.max() / mean)
        gate.e_score_correction_bias.add_(torch.sign(mean - load), alpha=rate)
        # Only differences choose experts.
        gate.e_score_correction_bias.sub_(gate.e_score_correction_bias.mean())
        load.zero_()
    return torch.stack(worst).max()
