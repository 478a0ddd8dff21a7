"""What every transform is: an invertible map on keys and what it asks of the queries."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch


class Transform(ABC):
    """An invertible map applied to keys (or values) before quantizing.

    One object holds both sides, so they cannot disagree: for every key x and query q,
    ``query(q) · forward(x) = q · x`` up to one constant per query, which softmax ignores.

    All three maps take float32 ``[..., tokens, head_dim]`` (with per-head parameters
    ``[..., heads, tokens, head_dim]``) and return a new tensor of that shape. ``layer`` is the
    absolute index of the decoder layer, for transforms that differ between layers. Tensors are data:
    no gradient passes through.
    """

    @abstractmethod
    def forward(self, x: torch.Tensor, layer: int = 0) -> torch.Tensor:
        """Map keys (or values) to what is quantized."""

    @abstractmethod
    def inverse(self, y: torch.Tensor, layer: int = 0) -> torch.Tensor:
        """Undo `forward`."""

    @abstractmethod
    def query(self, q: torch.Tensor, layer: int = 0) -> torch.Tensor:
        """Map queries so that their products with transformed keys are unchanged."""

    def check_head_dim(self, head_dim: int) -> None:  # noqa: B027 (a transform may be defined for all)
        """Raise ValueError where the maps are not defined for ``head_dim``; by default they always are."""


class Chain(Transform):
    """Transforms applied one after the other; the empty chain is the identity.

    Parameters
    ----------
    *transforms
        In the order in which keys meet them.
    """

    def __init__(self, *transforms: Transform) -> None:
        for transform in transforms:
            if not isinstance(transform, Transform):
                raise TypeError(f"transforms has a {type(transform).__name__}; accepted: kvlab transforms")
        self.transforms = transforms

    def forward(self, x: torch.Tensor, layer: int = 0) -> torch.Tensor:
        """Map keys through every transform in order."""
        for transform in self.transforms:
            x = transform.forward(x, layer)
        return x

    def inverse(self, y: torch.Tensor, layer: int = 0) -> torch.Tensor:
        """Undo every transform, last first."""
        for transform in reversed(self.transforms):
            y = transform.inverse(y, layer)
        return y

    def query(self, q: torch.Tensor, layer: int = 0) -> torch.Tensor:
        """Map queries through every transform in order."""
        for transform in self.transforms:
            q = transform.query(q, layer)
        return q

    def check_head_dim(self, head_dim: int) -> None:
        """Raise ValueError where one of the transforms is not defined for ``head_dim``."""
        for transform in self.transforms:
            transform.check_head_dim(head_dim)

    def __repr__(self) -> str:
        return f"Chain({', '.join(map(repr, self.transforms))})"
