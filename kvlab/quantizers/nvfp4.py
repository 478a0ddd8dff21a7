"""NVIDIA's 4-bit float: blocks of 16 with an e4m3 scale."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kvlab.checks import check_scale
from kvlab.quantizers.base import Quantizer
from kvlab.quantizers.granularity import PerGroup
from kvlab.quantizers.rounding import E2M1_MAX, divide, divide_or_zero, to_e2m1, to_fp8

_BLOCK = PerGroup(16)


@dataclass(frozen=True)
class NVFP4(Quantizer):
    """e2m1 numbers in blocks of 16 along head_dim, one e4m3 scale each (NVIDIA 2025, arXiv:2509.25149).

    The block scale is absmax/6 in units of ``global_scale``, rounded to e4m3 and saturating at 448, so
    magnitudes beyond 2688·``global_scale`` saturate.

    Parameters
    ----------
    global_scale
        The format's one fp32 scale per tensor. A cache fills token by token and cannot rescale what
        it holds, so it is fixed beforehand and a token's stored form depends on that token alone.

    Raises
    ------
    TypeError, ValueError
        ``global_scale`` is no positive finite number, or so small that float32 holds it only in part; or
        (when used) head_dim is no multiple of 16.
    """

    global_scale: float = 1.0

    limit = math.inf

    def __post_init__(self) -> None:
        check_scale(self.global_scale, "global_scale")

    def bits_per_number(self, head_dim: int) -> float:
        """4, and 8 per block of 16."""
        return 4 + _BLOCK.overhead(8, head_dim)

    def _roundtrip(self, x: torch.Tensor) -> torch.Tensor:
        blocks = _BLOCK.split(x)
        units = divide(_BLOCK.scale(blocks, E2M1_MAX), self.global_scale)
        scale = to_fp8(units, "e4m3").mul_(self.global_scale)
        return to_e2m1(divide_or_zero(blocks, scale)).mul_(scale).reshape(x.shape)
