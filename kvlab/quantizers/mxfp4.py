"""The Open Compute Project's 4-bit float: blocks of 32 with a power of two as scale."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kvlab.quantizers.base import Quantizer
from kvlab.quantizers.granularity import PerGroup
from kvlab.quantizers.rounding import divide_or_zero, to_e2m1

_BLOCK = PerGroup(32)
_SMALLEST_SCALE = 2.0**-127


@dataclass(frozen=True)
class MXFP4(Quantizer):
    """e2m1 numbers in blocks of 32 along head_dim, one e8m0 scale each.

    From Rouhani et al. 2023, arXiv:2310.10537. The scale 2^(⌊log2 absmax⌋ − 2) puts the largest number
    between 4 and 8; beyond 6 it saturates. head_dim must be a multiple of 32 (ValueError otherwise).
    """

    limit = math.inf

    def bits_per_number(self, head_dim: int) -> float:
        """4, and 8 per block of 32."""
        return 4 + _BLOCK.overhead(8, head_dim)

    def _roundtrip(self, x: torch.Tensor) -> torch.Tensor:
        blocks = _BLOCK.split(x)
        absmax = blocks.abs().amax(dim=-1, keepdim=True)
        # absmax = m·2^e with ½ ≤ m < 1, so absmax/8m is 2^(⌊log2 absmax⌋ − 2) exactly, without a logarithm.
        mantissa = torch.frexp(absmax).mantissa
        scale = divide_or_zero(absmax, 8 * mantissa).clamp_(min=_SMALLEST_SCALE)
        return to_e2m1(blocks / scale).mul_(scale).reshape(x.shape)
