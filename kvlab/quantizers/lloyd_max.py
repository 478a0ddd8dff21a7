"""Levels of least error for a Gaussian, in groups whose e4m3 scale is searched."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from kvlab.checks import check_choice, check_integer, check_scale
from kvlab.quantizers.base import Quantizer
from kvlab.quantizers.codebook import lloyd_max_levels, nearest_level
from kvlab.quantizers.granularity import Granularity, PerGroup, PerTokenHead, check_granularity
from kvlab.quantizers.rounding import divide, divide_or_zero, to_fp8
from kvlab.quantizers.selection import least_error

_GROUPS = PerGroup(32)
# 448, e4m3's largest number, is the 126th of its non-negative ones in order of their bits; 0 is the 0th.
_LARGEST_E4M3 = 126


@dataclass(frozen=True)
class LloydMax(Quantizer):
    """Lloyd–Max levels times an e4m3 scale per group, the scale being the best of a few neighbours.

    The first candidate maps the group's largest magnitude to the outermost level; the others are the ``reach``
    next smaller and the ``reach`` next larger e4m3 numbers. The least squared error wins. It presumes Gaussian
    numbers, so rotated vectors; the rotation is a separate transform.

    Parameters
    ----------
    bits
        2, 3 or 4.
    granularity
        `PerGroup` or `PerTokenHead`; with 4 bits, groups of 32 cost 4.25.
    reach
        At least 0: 2·reach + 1 candidates.
    global_scale
        One fp32 scale for the whole cache, fixed beforehand as in `NVFP4`. The scale is in units of it:
        below 2⁻⁶ e4m3 gets coarser and ends at 2⁻⁹, and groups beyond 448 times the outermost level saturate.

    Raises
    ------
    TypeError
        ``granularity`` is of another type, ``reach`` no integer, ``global_scale`` no number.
    ValueError
        ``bits`` is none of these, ``reach`` negative, ``global_scale`` not positive and finite.

    References
    ----------
    The levels: Max 1960; Lloyd 1982. Small groups and the search: this project.
    """

    bits: int = 4
    granularity: Granularity = field(default=_GROUPS)
    reach: int = 1
    global_scale: float = 1.0

    limit = math.inf

    def __post_init__(self) -> None:
        check_choice(self.bits, "bits", (2, 3, 4))
        check_granularity(self.granularity, PerGroup, PerTokenHead)
        check_integer(self.reach, "reach", minimum=0)
        check_scale(self.global_scale, "global_scale")

    def bits_per_number(self, head_dim: int) -> float:
        """``bits`` and, per group, 8 for the scale."""
        return self.bits + self.granularity.overhead(8, head_dim)

    def _roundtrip(self, x: torch.Tensor) -> torch.Tensor:
        groups = self.granularity.split(divide(x, self.global_scale))
        (stored,) = least_error(groups, self._scaled(groups))
        return (stored * self.global_scale).reshape(x.shape)

    def _scaled(self, groups: torch.Tensor) -> Iterator[tuple[torch.Tensor]]:
        levels = lloyd_max_levels(self.bits)
        first = to_fp8(self.granularity.scale(groups, levels[-1]), "e4m3")
        # By distance, the first candidate first: on a tie it stays.
        for steps in sorted(range(-self.reach, self.reach + 1), key=abs):
            scale = _e4m3_neighbour(first, steps)
            yield (nearest_level(divide_or_zero(groups, scale), levels).mul_(scale),)


def _e4m3_neighbour(x: torch.Tensor, steps: int) -> torch.Tensor:
    """Return the e4m3 number ``steps`` above (below, where negative) non-negative e4m3 numbers held in float32."""
    # Bits of non-negative floats are ordered as their numbers are.
    order = x.to(torch.float8_e4m3fn).view(torch.int8).int() + steps
    return order.clamp_(0, _LARGEST_E4M3).to(torch.int8).view(torch.float8_e4m3fn).float()
