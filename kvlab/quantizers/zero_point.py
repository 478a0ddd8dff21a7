"""vLLM's 4-bit cache: an integer zero-point hidden in the scale."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvlab.quantizers.base import Quantizer
from kvlab.quantizers.granularity import PerTokenHead
from kvlab.quantizers.rounding import divide

_LARGEST_CODE = 15
_SMALLEST_SCALE = 1e-6


@dataclass(frozen=True)
class IntegerZeroPoint(Quantizer):
    """4-bit integers with an integer zero-point, as in vLLM 0.29's ``int4_per_token_head`` cache.

    s = max((max x − min x)/15, 10⁻⁶); zero-point z = ⌊−min x/s + ½⌋ and code = ⌊x·(1/s) + z + ½⌋, both
    clamped to 0 … 15; x̂ = s′·(code − z). The four lowest mantissa bits of the fp32 scale hold z, so
    the scale read back is s′ = s with these bits 0. The rotation before it is a separate transform.

    As z stays within 0 … 15, numbers far from zero on one side are lost: a constant vector returns as
    nearly 0. The compiled kernel may fuse x·(1/s) + z, which can move a number on a rounding boundary.
    """

    def bits_per_number(self, head_dim: int) -> float:
        """4, and the 32-bit scale that contains the zero-point."""
        return 4 + PerTokenHead().overhead(32, head_dim)

    def _roundtrip(self, x: torch.Tensor) -> torch.Tensor:
        lowest, highest = x.amin(dim=-1, keepdim=True), x.amax(dim=-1, keepdim=True)
        scale = divide(highest - lowest, _LARGEST_CODE).clamp_(min=_SMALLEST_SCALE)
        zero_point = _round_half_up_(-lowest / scale)
        codes = _round_half_up_((x * scale.reciprocal()).add_(zero_point))
        stored_scale = (scale.view(torch.int32) & ~0xF).view(torch.float32)
        return codes.sub_(zero_point).mul_(stored_scale)


def _round_half_up_(x: torch.Tensor) -> torch.Tensor:
    return x.add_(0.5).floor_().clamp_(0, _LARGEST_CODE)
