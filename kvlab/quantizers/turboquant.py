"""TurboQuant: the direction of a vector on Gaussian levels, its norm in fp16."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kvlab.checks import FP16_MAX, check_choice
from kvlab.quantizers.base import Quantizer
from kvlab.quantizers.codebook import lloyd_max_levels, nearest_level
from kvlab.quantizers.granularity import PerTokenHead
from kvlab.quantizers.rounding import divide_or_zero, to_fp16, vector_norm


@dataclass(frozen=True)
class TurboQuant(Quantizer):
    """Lloyd–Max levels for the direction, fp16 for the norm (Zandieh et al. 2025, arXiv:2504.19874).

    With ‖x‖ the norm and c the nearest levels to √head_dim·x/‖x‖, whose RMS is 1:
    x̂ = fp16(‖x‖)·c/‖c‖, so that x̂ has the stored norm ("norm correction"). This is the key side of
    vLLM's ``turboquant_4bit_nc``, whose levels come from a numerical integral (outermost 2.731 for
    2.733). It presumes rotated vectors; the rotation is a separate transform. A norm beyond 65,504
    saturates.

    Parameters
    ----------
    bits
        2, 3 or 4.

    Raises
    ------
    ValueError
        ``bits`` is none of these.
    """

    bits: int = 4

    def __post_init__(self) -> None:
        check_choice(self.bits, "bits", (2, 3, 4))

    def bits_per_number(self, head_dim: int) -> float:
        """``bits`` and 16 per vector for its norm."""
        return self.bits + PerTokenHead().overhead(16, head_dim)

    def _roundtrip(self, x: torch.Tensor) -> torch.Tensor:
        norm = vector_norm(x)
        direction = divide_or_zero(x, norm).mul_(math.sqrt(x.shape[-1]))
        levels = nearest_level(direction, lloyd_max_levels(self.bits))
        return levels.mul_(to_fp16(norm.clamp(max=FP16_MAX)) / vector_norm(levels))
