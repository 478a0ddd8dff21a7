"""What the transforms share: checks of integers, values per layer, and numbers per channel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch

from kvlab.checks import check_finite, check_integer, check_vectors

T = TypeVar("T")


def check_layers(values: Mapping[int, T], name: str) -> dict[int, T]:
    """Check that ``values`` is a non-empty mapping from layer indices and copy it.

    Raises
    ------
    TypeError, ValueError
        ``values`` is empty, or a key is no integer ≥ 0.
    """
    if not values:
        raise ValueError(f"{name} is an empty mapping; accepted: one entry per layer, at least one")
    return {check_integer(layer, f"a layer of {name}", minimum=0): value for layer, value in values.items()}


def of_layer(values: T | Mapping[int, T], layer: int, name: str) -> T:
    """Look ``layer`` up in a mapping; what is no mapping holds for every layer.

    Raises
    ------
    TypeError, ValueError
        ``layer`` is no integer ≥ 0, or the mapping lacks it.
    """
    layer = check_integer(layer, "layer", minimum=0)
    if not isinstance(values, Mapping):
        return values
    if layer not in values:
        raise ValueError(f"layer is {layer}, which {name} lacks; accepted: {', '.join(map(str, sorted(values)))}")
    return values[layer]


class ChannelParameter:
    """One number per channel, shared by all heads or per KV head, for all layers or per layer.

    Parameters
    ----------
    values
        ``[head_dim]`` or ``[num_kv_heads, head_dim]``, any float dtype, finite; or a mapping from
        layer to such tensors.
    name
        The argument's name in errors.

    Raises
    ------
    TypeError, ValueError
        A tensor has another dtype or shape, or a non-finite component; a layer is no integer ≥ 0.
    """

    def __init__(self, values: torch.Tensor | Mapping[int, torch.Tensor], name: str) -> None:
        self.name = name
        if isinstance(values, Mapping):
            layers = check_layers(values, name)
            self.values = {layer: self._check(value, f"{name}[{layer}]") for layer, value in layers.items()}
        else:
            self.values = self._check(values, name)

    @staticmethod
    def _check(value: torch.Tensor, name: str) -> torch.Tensor:
        if check_vectors(value, name).ndim > 2:
            accepted = "[head_dim] or [num_kv_heads, head_dim]"
            raise ValueError(f"{name} has shape {list(value.shape)}; accepted: {accepted}")
        # A copy, so that what the caller later writes to their tensor does not reach this one.
        return check_finite(value.detach().to(torch.float32, copy=True), name)

    def __repr__(self) -> str:
        if isinstance(self.values, dict):
            return f"<layers {', '.join(map(str, self.values))}>"
        return f"<{list(self.values.shape)}>"

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors of all layers, float32."""
        return list(self.values.values()) if isinstance(self.values, dict) else [self.values]

    def check_head_dim(self, head_dim: int) -> None:
        """Raise ValueError where no layer's values have ``head_dim`` channels."""
        known = sorted({tensor.shape[-1] for tensor in self.tensors})
        if head_dim not in known:
            raise ValueError(f"head_dim is {head_dim}; accepted: that of {self.name}, {', '.join(map(str, known))}")

    def num_kv_heads(self, layer: int = 0) -> int | None:
        """Heads that the values of ``layer`` tell apart; None where all heads share them."""
        value = of_layer(self.values, layer, self.name)
        return value.shape[0] if value.ndim == 2 else None

    def for_keys(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        """Values that broadcast against keys.

        Parameters
        ----------
        x
            ``[..., tokens, head_dim]``; with values per head ``[..., num_kv_heads, tokens, head_dim]``.
        layer
            Absolute index of the decoder layer.

        Returns
        -------
        torch.Tensor
            float32 ``[head_dim]`` or ``[num_kv_heads, 1, head_dim]``, on ``x``'s device.

        Raises
        ------
        TypeError, ValueError
            ``x``'s shape or dtype does not fit, or there is nothing for ``layer``.
        """
        num_kv_heads = self.num_kv_heads(layer)
        value = self._for_vectors(x, "x", layer)
        if num_kv_heads is not None and x.shape[-3] != num_kv_heads:
            raise ValueError(f"x has {x.shape[-3]} heads (its third-last dimension); accepted: {num_kv_heads}")
        return value

    def for_queries(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        """Values that broadcast against queries; head h reads KV head h // (num_heads // num_kv_heads).

        Parameters
        ----------
        q
            ``[..., tokens, head_dim]``; with values per head ``[..., num_heads, tokens, head_dim]``.
        layer
            Absolute index of the decoder layer.

        Returns
        -------
        torch.Tensor
            float32 ``[head_dim]`` or ``[num_heads, 1, head_dim]``, on ``q``'s device.

        Raises
        ------
        TypeError, ValueError
            ``q``'s shape or dtype does not fit, or there is nothing for ``layer``.
        """
        return self._for_vectors(q, "q", layer)

    def _for_vectors(self, x: torch.Tensor, name: str, layer: int) -> torch.Tensor:
        value = of_layer(self.values, layer, self.name)
        check_vectors(x, name, head_dim=value.shape[-1], min_ndim=1 if value.ndim == 1 else 3)
        value = value.to(x.device)
        if value.ndim == 1:
            return value
        num_kv_heads = value.shape[0]
        group_size, rest = divmod(x.shape[-3], num_kv_heads)
        if rest:
            raise ValueError(
                f"{name} has {x.shape[-3]} heads (its third-last dimension); "
                f"accepted: a multiple of the {num_kv_heads} KV heads of {self.name}"
            )
        return value.repeat_interleave(group_size, dim=0)[:, None]
