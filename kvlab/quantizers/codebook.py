"""Non-uniform levels: codebooks, and how two well-known ones come about."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
from scipy.special import ndtr, ndtri

from kvlab.checks import check_choice
from kvlab.quantizers.base import Quantizer
from kvlab.quantizers.granularity import Granularity, PerGroup, PerTokenHead, check_granularity
from kvlab.quantizers.rounding import divide_or_zero, to_fp16

# Lloyd's iteration is run to this step in float64 and its result rounded, to be the same on any machine.
_TOLERANCE = 1e-13
_DECIMALS = 9
_QLORA_GROUPS = PerGroup(64)


@dataclass(frozen=True, repr=False)
class Codebook(Quantizer):
    """The nearest of a few levels, times each group's largest magnitude in fp16; a tie goes up.

    Parameters
    ----------
    levels
        At least two, increasing, the largest magnitude among them 1.
    granularity
        `PerTokenHead` or `PerGroup`.

    Raises
    ------
    ValueError
        ``levels`` are not as described.
    TypeError
        ``levels`` are no numbers, or ``granularity`` is of another type.
    """

    levels: Sequence[float]
    granularity: Granularity = field(default=PerTokenHead())

    def __post_init__(self) -> None:
        try:
            levels = tuple(map(float, self.levels))
        except (TypeError, ValueError):
            raise TypeError(f"levels are {self.levels!r}; accepted: a sequence of numbers") from None
        increasing = all(low < high for low, high in itertools.pairwise(levels))
        if len(levels) < 2 or not increasing or max(map(abs, levels)) != 1:
            raise ValueError(f"levels are {levels}; accepted: at least two, increasing, largest magnitude 1")
        check_granularity(self.granularity, PerTokenHead, PerGroup)
        object.__setattr__(self, "levels", levels)

    def bits_per_number(self, head_dim: int) -> float:
        """Bits of a code and, per group, 16 for the scale."""
        return math.ceil(math.log2(len(self.levels))) + self.granularity.overhead(16, head_dim)

    def _roundtrip(self, x: torch.Tensor) -> torch.Tensor:
        groups = self.granularity.split(x)
        scale = to_fp16(self.granularity.scale(groups, 1))
        return nearest_level(divide_or_zero(groups, scale), self.levels).mul_(scale).reshape(x.shape)

    def __repr__(self) -> str:
        return f"Codebook({len(self.levels)} levels, {self.granularity!r})"


def nearest_level(x: torch.Tensor, levels: Sequence[float]) -> torch.Tensor:
    """Replace each number of float32 ``x`` by the nearest of the increasing ``levels``; a tie goes up."""
    table = x.new_tensor(levels)
    midpoints = (table[1:] + table[:-1]) / 2
    return table[torch.bucketize(x.contiguous(), midpoints, right=True)]


def nf4(granularity: Granularity = _QLORA_GROUPS) -> Codebook:
    """QLoRA's 4-bit NormalFloat (Dettmers et al. 2023, arXiv:2305.14314), by default its groups of 64.

    The levels are evenly spaced quantiles of the standard Gaussian, 8 above zero, 7 below and an exact
    zero, divided by the largest.
    """
    # The outermost quantile lies half way between what 15 and 16 evenly filled bins would leave outside.
    outermost = 1 - (1 / 30 + 1 / 32) / 2
    above = ndtri(np.linspace(outermost, 0.5, 9)[:-1])
    below = ndtri(np.linspace(outermost, 0.5, 8)[:-1])
    levels = np.concatenate([-below, [0.0], above[::-1]]) / above[0]
    return Codebook(levels.round(_DECIMALS), granularity)


@cache
def lloyd_max_levels(bits: int) -> tuple[float, ...]:
    """Levels of least mean squared error for the standard Gaussian (Max 1960; Lloyd 1982).

    Parameters
    ----------
    bits
        1 to 6.

    Returns
    -------
    tuple of float
        2^bits levels, increasing and symmetric, to nine decimals.

    Raises
    ------
    ValueError
        ``bits`` is none of these.
    """
    check_choice(bits, "bits", range(1, 7))
    half = 2 ** (bits - 1)
    # The lower half alone, where the distribution function keeps its relative precision in the tail.
    levels = np.linspace(-3.0, 0.0, half, endpoint=False)
    step = np.inf
    while step > _TOLERANCE:
        edges = np.concatenate([[-np.inf], (levels[1:] + levels[:-1]) / 2, [0.0]])
        density = np.exp(-(edges**2) / 2) / math.sqrt(2 * math.pi)
        centroids = -np.diff(density) / np.diff(ndtr(edges))
        step = np.abs(centroids - levels).max()
        levels = centroids
    return tuple(np.concatenate([levels, -levels[::-1]]).round(_DECIMALS).tolist())
