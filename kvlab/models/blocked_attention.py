"""Causal attention of a chunk over its whole past, in blocks of queries and never as a T×T matrix."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

NAME, UNATTENDED = "kvlab_blocked", "kvlab_unattended"
QUERY_BLOCK = 1024
"""Queries per call: where no fused kernel takes a causal bias, a mask of 1,024 × 131,072 takes 134 MB."""


def blocked_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    sliding_window: int | None = None,
    **_kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attend with torch's own kernels, as an attention function of transformers.

    Parameters
    ----------
    module
        The attention module; unused.
    query
        ``[1, num_heads, new tokens, head_dim]``: the newest tokens of the context.
    key, value
        ``[1, num_kv_heads, tokens, head_dim]``, ending with the new tokens. On a sliding layer they may
        start as late as the oldest key that the first query sees.
    attention_mask
        None: one sequence without padding.
    scaling
        Factor on the scores.
    sliding_window
        How many tokens a query sees, itself included; None for all.

    Returns
    -------
    torch.Tensor, None
        ``[1, new tokens, num_heads, head_dim]``, and no weights.

    Raises
    ------
    ValueError
        There is an attention mask.
    """
    if attention_mask is not None:
        raise ValueError("attention_mask is a mask; accepted: None, one sequence without padding")
    past = key.shape[2] - query.shape[2]
    outputs = []
    for start in range(0, query.shape[2], QUERY_BLOCK):
        q = query[:, :, start : start + QUERY_BLOCK]
        end = past + start + q.shape[2]
        first = 0 if sliding_window is None else max(0, past + start - sliding_window + 1)
        k, v = key[:, :, first:end], value[:, :, first:end]
        if sliding_window is None:
            outputs.append(_attend(q, k, v, causal_lower_right(q.shape[2], end), scaling))
        else:
            # The fused kernel that takes a mask wants a key head per query head; a window of them is small.
            group = query.shape[1] // key.shape[1]
            k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
            outputs.append(_attend(q, k, v, _band(q.shape[2], end - first, sliding_window, q.device), scaling))
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scaling: float) -> torch.Tensor:
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=q.shape[1] != k.shape[1])


def _band(queries: int, keys: int, window: int, device: torch.device) -> torch.Tensor:
    """Boolean ``[queries, keys]``: the last keys are the queries' own, each sees ``window`` of them."""
    own = torch.arange(keys - queries, keys, device=device)[:, None]
    seen = torch.arange(keys, device=device)
    return (seen <= own) & (seen > own - window)


def unattended(module: nn.Module, query: torch.Tensor, *_args: object, **_kwargs: object) -> tuple[torch.Tensor, None]:
    """Attend to nothing: zeros in the place of `blocked_attention`'s output, where no layer follows that reads it."""
    return torch.zeros_like(query.transpose(1, 2)), None


def register() -> str:
    """Register `blocked_attention` with transformers; return its name."""
    AttentionInterface.register(NAME, blocked_attention)
    return NAME


def register_unattended() -> str:
    """Register `unattended` with transformers; return its name."""
    AttentionInterface.register(UNATTENDED, unattended)
    return UNATTENDED
