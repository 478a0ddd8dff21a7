"""8-bit floats."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from kvlab.checks import check_choice
from kvlab.quantizers.base import Quantizer
from kvlab.quantizers.granularity import Granularity, PerTensor, PerTokenHead, check_granularity
from kvlab.quantizers.rounding import FP8_TYPES, divide_or_zero, to_fp8


@dataclass(frozen=True)
class Float8(Quantizer):
    """8-bit floats, rounded to nearest even and saturating (Micikevicius et al. 2022, arXiv:2209.05433).

    Parameters
    ----------
    kind
        ``"e4m3"`` (largest magnitude 448) or ``"e5m2"`` (57,344).
    granularity
        `PerTensor`, a constant scale: with its default of 1, the stock cache. Or `PerTokenHead`,
        an fp32 scale that maps each vector's largest magnitude to the format's.

    Raises
    ------
    ValueError
        ``kind`` is none of these.
    TypeError
        ``granularity`` is of another type.
    """

    kind: str = "e4m3"
    granularity: Granularity = field(default=PerTensor())

    limit = math.inf

    def __post_init__(self) -> None:
        check_choice(self.kind, "kind", FP8_TYPES)
        check_granularity(self.granularity, PerTensor, PerTokenHead)

    def bits_per_number(self, head_dim: int) -> float:
        """8 and, with a scale per vector, its 32."""
        return 8 + self.granularity.overhead(32, head_dim)

    def _roundtrip(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.granularity.scale(x, torch.finfo(FP8_TYPES[self.kind]).max)
        return to_fp8(divide_or_zero(x, scale), self.kind).mul_(scale)
