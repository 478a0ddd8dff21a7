"""Symmetric integers: one scale and no offset."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kvlab.checks import check_choice
from kvlab.quantizers.base import Quantizer
from kvlab.quantizers.granularity import Granularity, PerGroup, PerTokenHead, check_granularity
from kvlab.quantizers.integer import INTEGER_BITS
from kvlab.quantizers.rounding import divide_or_zero, to_fp16

# With h = 2^(bits − 1): absmax is mapped to h − a, levels are code + shift, codes run from c − h to h − 1.
_GRIDS = {"restricted": (1.0, 0.0, 1), "midrise": (0.5, 0.5, 0), "full": (0.0, 0.0, 0)}


@dataclass(frozen=True)
class SymmetricInteger(Quantizer):
    """Integer multiples of one fp16 scale per group, symmetric about zero.

    Parameters
    ----------
    bits
        2, 3, 4 or 8.
    granularity
        `PerTokenHead` or `PerGroup`.
    grid
        With h = 2^(bits − 1), so 8 for 4 bits:
        ``"restricted"`` – levels −(h − 1) … h − 1, scale absmax/(h − 1); one code is never used.
        ``"midrise"`` – the half-integers −(h − ½) … h − ½, scale absmax/(h − ½); no level at zero.
        ``"full"`` – levels −h … h − 1, scale absmax/h; a positive extreme saturates at h − 1.

    Raises
    ------
    ValueError
        ``bits`` or ``grid`` is none of these.
    TypeError
        ``granularity`` is of another type.
    """

    bits: int = 4
    granularity: Granularity = field(default=PerTokenHead())
    grid: str = "restricted"

    def __post_init__(self) -> None:
        check_choice(self.bits, "bits", INTEGER_BITS)
        check_granularity(self.granularity, PerTokenHead, PerGroup)
        check_choice(self.grid, "grid", _GRIDS)

    def bits_per_number(self, head_dim: int) -> float:
        """``bits`` and, per group, 16 for the scale."""
        return self.bits + self.granularity.overhead(16, head_dim)

    def _roundtrip(self, x: torch.Tensor) -> torch.Tensor:
        half = 2 ** (self.bits - 1)
        inset, shift, unused = _GRIDS[self.grid]
        groups = self.granularity.split(x)
        scale = to_fp16(self.granularity.scale(groups, half - inset))
        codes = divide_or_zero(groups, scale).sub_(shift).round_().clamp_(unused - half, half - 1)
        return codes.add_(shift).mul_(scale).reshape(x.shape)
