"""Seeing q, k, v as attention sees them, without changing what attention computes.

transformers looks its attention function up by the name in the model's config. Inside `tapped`,
that name is one of ours: a function that shows q, k, v to the taps of the very module and then calls
the function that was configured. Masks are looked up by the same name, so the original's mask
function is registered beside it: without it padding masks would silently be dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from kvlab.models.attention import modelling_file

Tap = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]

_taps: WeakKeyDictionary[nn.Module, list[Tap]] = WeakKeyDictionary()
# By id, because configs compare by content and cannot be hashed: what was configured, and how many use ours.
_original: dict[int, str] = {}
_users: dict[int, int] = {}


@contextmanager
def tapped(module: nn.Module, tap: Tap) -> Iterator[None]:
    """Show q, k, v of every attention call of ``module`` to ``tap``.

    Parameters
    ----------
    module
        An attention module of transformers.
    tap
        Called with q ``[batch, num_heads, new tokens, head_dim]`` and k, v ``[batch, num_kv_heads,
        all tokens, head_dim]`` before attention is computed; what it returns is ignored.
    """
    _enter(module.config)
    _taps.setdefault(module, []).append(tap)
    try:
        yield
    finally:
        _taps[module].remove(tap)
        _leave(module.config)


def _enter(config: PreTrainedConfig) -> None:
    if id(config) not in _users:
        _original[id(config)] = config._attn_implementation
        config._attn_implementation = _register(config._attn_implementation or "eager")
    _users[id(config)] = _users.get(id(config), 0) + 1


def _leave(config: PreTrainedConfig) -> None:
    _users[id(config)] -= 1
    if not _users[id(config)]:
        del _users[id(config)]
        config._attn_implementation = _original.pop(id(config))


def _register(implementation: str) -> str:
    """Register the tapping twin of an attention implementation and of its mask; return its name."""

    def attention(module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args, **kwargs):
        for tap in _taps.get(module, ()):
            tap(query, key, value)
        file = modelling_file(module)
        compute = file.ALL_ATTENTION_FUNCTIONS.get_interface(implementation, file.eager_attention_forward)
        return compute(module, query, key, value, *args, **kwargs)

    name = f"kvlab_{implementation}"
    AttentionInterface.register(name, attention)
    if implementation in ALL_MASK_ATTENTION_FUNCTIONS:
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[implementation])
    return name
