"""What kvlab must know of each decoder attention layer: its kind, its heads, its QK-norm gains."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from kvlab.checks import check_choice, check_integer


class _Family(NamedTuple):
    """How one attention class of transformers departs from the common shape."""

    name: str
    gain_offset: float = 0.0
    """What is added to a QK-norm's weight to give its gain."""
    full_layers_rotate: bool = True
    """Whether full-attention layers use RoPE beside sliding ones."""


_FAMILIES = {
    "Gemma3Attention": _Family("Gemma 3", gain_offset=1.0),
    "Kolibri1Attention": _Family("Kolibri-1", full_layers_rotate=False),
    "LlamaAttention": _Family("Llama"),
    "MistralAttention": _Family("Mistral"),
    "Qwen2Attention": _Family("Qwen2"),
    "Qwen3Attention": _Family("Qwen3"),
}


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """One decoder attention layer.

    Attributes
    ----------
    index
        Absolute index of the decoder layer.
    module
        The attention module of the model.
    kind
        "full" or "sliding".
    rope
        Whether this layer rotates positions into its queries and keys.
    num_heads, num_kv_heads, head_dim
        Query heads, key-value heads, numbers per head.
    scaling
        What attention scores are multiplied by.
    q_gain, k_gain
        Effective QK-norm gains, float32 ``[head_dim]`` (Gemma's is 1 + w); None without QK-norm.
    norm_eps
        The QK-norm's epsilon; None without QK-norm.
    """

    index: int
    module: nn.Module
    kind: str
    rope: bool
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scaling: float
    q_gain: torch.Tensor | None
    k_gain: torch.Tensor | None
    norm_eps: float | None

    @property
    def folds_gain(self) -> bool:
        """Whether the key's gain can move into the query: QK-norm and no RoPE in between."""
        return self.k_gain is not None and not self.rope

    def normed_keys(self, projected: torch.Tensor) -> torch.Tensor:
        """RMS-normalise keys before their gain.

        Parameters
        ----------
        projected
            Output of ``k_proj``, ``[batch, tokens, num_kv_heads · head_dim]``, any float dtype.

        Returns
        -------
        torch.Tensor
            n(W_k x), float32 ``[batch, num_kv_heads, tokens, head_dim]``.
        """
        x = projected.unflatten(-1, (self.num_kv_heads, self.head_dim)).transpose(1, 2).float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.norm_eps)

    def rotate(self, x: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Apply the model's own RoPE to ``x``, ``[batch, heads, tokens, head_dim]``, given its cos and sin."""
        cos, sin = (table.to(x.device) for table in position_embeddings)
        return modelling_file(self.module).apply_rotary_pos_emb(x, x, cos, sin)[1]


def modelling_file(module: nn.Module) -> object:
    """Return the Python module of ``module``'s class, which has its RoPE and its eager attention."""
    return sys.modules[type(module).__module__]


def attention_layers(model: nn.Module) -> dict[int, AttentionLayer]:
    """Describe every decoder attention layer of ``model``.

    Parameters
    ----------
    model
        A transformers model: Gemma 3 (also inside its multimodal wrapper), Kolibri-1, Llama, Mistral,
        Qwen2 or Qwen3.

    Returns
    -------
    dict of int to AttentionLayer
        By absolute decoder index, in order.

    Raises
    ------
    TypeError
        ``model`` is no torch module.
    ValueError
        ``model`` has no attention layer of a supported class.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; accepted: a transformers model")
    layers = [_describe(module) for module in model.modules() if _is_supported(module)]
    if not layers:
        supported = ", ".join(family.name for family in _FAMILIES.values())
        raise ValueError(f"model is a {type(model).__name__}; accepted: {supported} models of transformers")
    return {layer.index: layer for layer in layers}


def model_layers(model: PreTrainedModel) -> dict[int, AttentionLayer]:
    """Describe the layers of a whole model, as `attention_layers` does those of any part of one.

    Raises
    ------
    TypeError, ValueError
        ``model`` is no transformers model, or as `attention_layers`.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model is a {type(model).__name__}; accepted: a transformers PreTrainedModel")
    return attention_layers(model)


def select_layers(
    layers: Mapping[int, AttentionLayer], which: str | Iterable[int] | None = None
) -> dict[int, AttentionLayer]:
    """Choose among the layers of a model.

    Parameters
    ----------
    layers
        What `attention_layers` returned.
    which
        "full", "sliding", "all" or absolute decoder indices; None means "full".

    Returns
    -------
    dict of int to AttentionLayer
        The chosen layers, by index, in the model's order.

    Raises
    ------
    TypeError
        ``which`` is neither a string nor an iterable of integers.
    ValueError
        An unknown word or index, or a kind of layer that this model has none of.
    """
    if which is None or isinstance(which, str):
        kind = check_choice("full" if which is None else which, "layers", ("full", "sliding", "all"))
        chosen = {index: layer for index, layer in layers.items() if kind in ("all", layer.kind)}
        if not chosen:
            (other,) = {layer.kind for layer in layers.values()}
            family = _FAMILIES[type(next(iter(layers.values())).module).__name__].name
            raise ValueError(
                f"layers is {kind!r}, but this {family} model has only {other} attention layers; "
                f"accepted: {other!r}, 'all' or indices"
            )
        return chosen
    if not isinstance(which, Iterable):
        raise TypeError(f"layers is a {type(which).__name__}; accepted: 'full', 'sliding', 'all' or indices")
    indices = [check_integer(index, "an entry of layers", minimum=0) for index in which]
    wanted = {check_choice(index, "layers", layers) for index in indices}
    if not wanted:
        raise ValueError("layers is empty; accepted: 'full', 'sliding', 'all' or indices")
    return {index: layer for index, layer in layers.items() if index in wanted}


def _is_supported(module: nn.Module) -> bool:
    cls = type(module)
    return cls.__name__ in _FAMILIES and cls.__module__.startswith("transformers.models.")


def _describe(module: nn.Module) -> AttentionLayer:
    family = _FAMILIES[type(module).__name__]
    config = module.config
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    sliding = types[module.layer_idx] == "sliding_attention" if types else window is not None
    normed = hasattr(module, "k_norm")

    def gain(norm: nn.Module) -> torch.Tensor:
        return family.gain_offset + norm.weight.detach().float()

    return AttentionLayer(
        index=module.layer_idx,
        module=module,
        kind="sliding" if sliding else "full",
        rope=sliding or window is None or family.full_layers_rotate,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=module.head_dim,
        scaling=module.scaling,
        q_gain=gain(module.q_norm) if normed else None,
        k_gain=gain(module.k_norm) if normed else None,
        norm_eps=config.rms_norm_eps if normed else None,
    )
