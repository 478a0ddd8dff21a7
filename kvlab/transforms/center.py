"""Centring: a constant per channel taken off the keys."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvlab.checks import check_vectors
from kvlab.transforms.base import Transform
from kvlab.transforms.parameters import ChannelParameter


class Center(Transform):
    """Keys minus a constant vector: y = x − μ.

    q · (x − μ) = q · x − q · μ, and q · μ is one constant per query, which softmax ignores: queries
    stay as they are.

    Parameters
    ----------
    means
        μ: ``[head_dim]`` or ``[num_kv_heads, head_dim]``, any float dtype, finite; or a mapping from
        layer to such tensors. Per head, keys are ``[..., num_kv_heads, tokens, head_dim]``.

    Raises
    ------
    TypeError, ValueError
        ``means`` is of another type or shape, or has a non-finite component.

    References
    ----------
    Zhang et al. 2024, arXiv:2410.02367 (SageAttention: smoothing K by its mean over tokens).
    """

    def __init__(self, means: torch.Tensor | Mapping[int, torch.Tensor]) -> None:
        self.means = ChannelParameter(means, "means")

    def num_kv_heads(self, layer: int = 0) -> int | None:
        """Heads that the means of ``layer`` tell apart; None where all heads share them."""
        return self.means.num_kv_heads(layer)

    def forward(self, x: torch.Tensor, layer: int = 0) -> torch.Tensor:
        """Subtract the means."""
        return check_vectors(x).float() - self.means.for_keys(x, layer)

    def inverse(self, y: torch.Tensor, layer: int = 0) -> torch.Tensor:
        """Add the means."""
        return check_vectors(y).float() + self.means.for_keys(y, layer)

    def query(self, q: torch.Tensor, layer: int = 0) -> torch.Tensor:
        """Copy the queries as they are."""
        return check_vectors(q, "q").to(torch.float32, copy=True)

    def check_head_dim(self, head_dim: int) -> None:
        """Raise ValueError where the means have another head_dim."""
        self.means.check_head_dim(head_dim)

    def __repr__(self) -> str:
        return f"Center(means={self.means!r})"
