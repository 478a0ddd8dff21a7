"""Which numbers share one scale: a type handed to a quantizer, not a flag."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from kvlab.checks import check_integer, check_scale
from kvlab.quantizers.rounding import divide


class Granularity(ABC):
    """Which numbers of a vector share one scale."""

    @abstractmethod
    def overhead(self, bits: int, head_dim: int) -> float:
        """Bits per number that ``bits`` of metadata per group cost, for vectors of ``head_dim``.

        Raises
        ------
        TypeError, ValueError
            ``head_dim`` is no positive integer, or does not fill groups.
        """

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """View ``[..., head_dim]`` as ``[..., group]``, whose last dimension shares one scale."""
        return x

    def scale(self, groups: torch.Tensor, largest: float) -> torch.Tensor:
        """Scale ``[..., 1]`` that maps each group's largest magnitude to ``largest``; 0 for a zero group."""
        return divide(groups.abs().amax(dim=-1, keepdim=True), largest)


@dataclass(frozen=True)
class PerTokenHead(Granularity):
    """One scale for the whole vector of one token and head."""

    def overhead(self, bits: int, head_dim: int) -> float:
        """``bits`` once per vector."""
        return bits / check_integer(head_dim, "head_dim", minimum=1)


@dataclass(frozen=True)
class PerGroup(Granularity):
    """One scale for every ``size`` neighbouring channels of a vector.

    Parameters
    ----------
    size
        Channels in a group; head_dim must be a multiple of it.

    Raises
    ------
    ValueError
        ``size`` is not a positive integer, or (when used) does not divide head_dim.
    """

    size: int

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 1:
            raise ValueError(f"size is {self.size!r}; accepted: a positive integer that divides head_dim")

    def overhead(self, bits: int, head_dim: int) -> float:
        """``bits`` once per group."""
        self._check(check_integer(head_dim, "head_dim", minimum=1))
        return bits / self.size

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """View ``[..., head_dim]`` as ``[..., head_dim / size, size]``."""
        self._check(x.shape[-1])
        return x.unflatten(-1, (-1, self.size))

    def _check(self, head_dim: int) -> None:
        if head_dim % self.size:
            raise ValueError(f"head_dim is {head_dim}; accepted: a multiple of the group size {self.size}")


@dataclass(frozen=True)
class PerTensor(Granularity):
    """One constant scale for the whole cache, given beforehand and never measured from the data.

    Parameters
    ----------
    value
        The scale; 1 is what a server uses when its checkpoint brings none.

    Raises
    ------
    TypeError, ValueError
        ``value`` is no positive finite number, or so small that float32 holds it only in part.
    """

    value: float = 1.0

    def __post_init__(self) -> None:
        check_scale(self.value, "value")

    def overhead(self, bits: int, head_dim: int) -> float:
        """Nothing: one scale for a whole cache does not count."""
        return 0.0

    def scale(self, groups: torch.Tensor, largest: float) -> torch.Tensor:
        """Return the constant scale, whatever ``largest`` is."""
        return groups.new_full((1,), self.value)


def check_granularity(granularity: object, *accepted: type[Granularity]) -> None:
    """Check that ``granularity`` is an instance of one of ``accepted``; the error lists them.

    Raises
    ------
    TypeError
        It is not.
    """
    if not isinstance(granularity, accepted):
        names = ", ".join(f"{kind.__name__}()" for kind in accepted)
        raise TypeError(f"granularity is {granularity!r}; accepted: {names}")
