"""4-bit integers in groups whose metadata are two bytes: an e4m3 scale and an 8-bit offset."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from kvlab.checks import FLOAT32, check_scale
from kvlab.quantizers.base import Quantizer
from kvlab.quantizers.granularity import Granularity, PerGroup, PerTokenHead, check_granularity
from kvlab.quantizers.rounding import divide, divide_or_zero, to_fp8
from kvlab.quantizers.selection import check_clips, clipped_ranges, least_error, ordered_sum

_STEPS = 15
# The offset is an int8 in sixteenths of a step: with ±8 steps the middle of the levels can lie wherever a range
# that contains zero has its own, and rounding the offset adds 1/256 to the squared error of rounding the numbers.
_PER_STEP = 16
_OFFSETS = torch.iinfo(torch.int8)
_GROUPS = PerGroup(64)
_Grid = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Float8ScaledInteger(Quantizer):
    """4-bit integers with an e4m3 scale s and an int8 offset z per group, x̂ = s·(code − 7½ + z/16).

    The range of a group, extended to contain zero, is drawn in at either end by each of ``clips``, in all
    combinations; s is its e4m3-rounded fifteenth and z puts the levels in its middle. The least squared error
    wins; then z follows the mean of what the codes leave, codes anew, kept where the squared error falls.

    Parameters
    ----------
    granularity
        `PerGroup` or `PerTokenHead`; groups of 64 cost 4.25 bits.
    clips
        Shares of the range, 0 first: n of them make n² candidates.
    global_scale
        One fp32 scale for the whole cache, fixed beforehand as in `NVFP4`. The scale is in units of it:
        below 2⁻⁶ e4m3 gets coarser and ends at 2⁻⁹, and ranges beyond 15·448 saturate.

    Raises
    ------
    TypeError
        ``granularity`` is of another type, ``clips`` no sequence of numbers, ``global_scale`` no number.
    ValueError
        The first clip is not 0 or one is not in [0, ½); ``global_scale`` is not positive and finite.

    References
    ----------
    This project; e4m3 scales of small groups are NVFP4's idea (NVIDIA 2025, arXiv:2509.25149).
    """

    granularity: Granularity = field(default=_GROUPS)
    # As for `RefitInteger`: on Gaussian groups of 64, too, one share besides 0 errs least near 0.04.
    clips: Sequence[float] = (0.0, 5 / 128)
    global_scale: float = 1.0

    limit = math.inf

    def __post_init__(self) -> None:
        check_granularity(self.granularity, PerGroup, PerTokenHead)
        object.__setattr__(self, "clips", check_clips(self.clips))
        check_scale(self.global_scale, "global_scale")

    def bits_per_number(self, head_dim: int) -> float:
        """4, and 16 per group for scale and offset."""
        return 4 + self.granularity.overhead(16, head_dim)

    def _roundtrip(self, x: torch.Tensor) -> torch.Tensor:
        # A tiny global scale makes infinities, which have no range.
        units = divide(x, self.global_scale).clamp_(-FLOAT32.max, FLOAT32.max)
        groups = self.granularity.split(units)
        best = least_error(groups, self._clipped(groups))
        stored, *_ = least_error(groups, [best, _recentre(groups, *best)])
        return (stored * self.global_scale).reshape(x.shape)

    def _clipped(self, groups: torch.Tensor) -> Iterator[_Grid]:
        # Halved, so that no range overflows.
        half = groups / 2
        lowest = half.amin(dim=-1, keepdim=True).clamp_(max=0)
        highest = half.amax(dim=-1, keepdim=True).clamp_(min=0)
        for low, high in clipped_ranges(lowest, highest, self.clips):
            yield _store(groups, to_fp8(divide(high - low, _STEPS / 2), "e4m3"), low + high)


def _store(groups: torch.Tensor, scale: torch.Tensor, middle: torch.Tensor) -> _Grid:
    """Round groups to 16 levels ``scale`` apart, their middle as near to ``middle`` as an offset can put it."""
    offset = (divide_or_zero(middle, scale) * _PER_STEP).round_().clamp_(_OFFSETS.min, _OFFSETS.max) / _PER_STEP
    # Levels lie at odd halves around the middle. s has four significant bits, so s·(level + offset) is exact.
    level = (divide_or_zero(groups, scale) - offset).sub_(0.5).round_().clamp_(-8, 7).add_(0.5)
    return level.add_(offset).mul_(scale), scale, offset


def _recentre(groups: torch.Tensor, stored: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor) -> _Grid:
    """Move the middle of the levels by the mean of what they leave: the best offset for these codes."""
    mean_left = divide(ordered_sum(groups - stored), groups.shape[-1])
    return _store(groups, scale, offset * scale + mean_left)
