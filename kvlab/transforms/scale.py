"""Channel scaling: large channels of the keys made smaller, the queries compensating."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvlab.checks import check_scale, check_vectors
from kvlab.transforms.base import Transform
from kvlab.transforms.parameters import ChannelParameter


class ChannelScale(Transform):
    """Keys times a positive factor per channel, queries divided by it: y = λ ⊙ x, q / λ.

    Parameters
    ----------
    scales
        λ: ``[head_dim]`` or ``[num_kv_heads, head_dim]``, any float dtype, positive and finite; or a
        mapping from layer to such tensors. Per head, keys are ``[..., num_kv_heads, tokens, head_dim]``
        and queries ``[..., num_heads, tokens, head_dim]``, num_heads a multiple of num_kv_heads.

    Raises
    ------
    TypeError, ValueError
        ``scales`` is of another type or shape, or has a component that is not positive and finite, or
        so small that float32 holds it only in part.

    References
    ----------
    Xiao et al. 2022, arXiv:2211.10438 (SmoothQuant: the same exchange between activations and weights).
    """

    def __init__(self, scales: torch.Tensor | Mapping[int, torch.Tensor]) -> None:
        self.scales = ChannelParameter(scales, "scales")
        check_scale(min(scale.min().item() for scale in self.scales.tensors), "the smallest component of scales")

    def num_kv_heads(self, layer: int = 0) -> int | None:
        """Heads that the scales of ``layer`` tell apart; None where all heads share them."""
        return self.scales.num_kv_heads(layer)

    def forward(self, x: torch.Tensor, layer: int = 0) -> torch.Tensor:
        """Multiply keys by the scales."""
        return check_vectors(x).float() * self.scales.for_keys(x, layer)

    def inverse(self, y: torch.Tensor, layer: int = 0) -> torch.Tensor:
        """Divide keys by the scales."""
        return check_vectors(y).float() / self.scales.for_keys(y, layer)

    def query(self, q: torch.Tensor, layer: int = 0) -> torch.Tensor:
        """Divide queries by the scales of the KV head that they read."""
        return check_vectors(q, "q").float() / self.scales.for_queries(q, layer)

    def check_head_dim(self, head_dim: int) -> None:
        """Raise ValueError where the scales have another head_dim."""
        self.scales.check_head_dim(head_dim)

    def __repr__(self) -> str:
        return f"ChannelScale(scales={self.scales!r})"
