"""Key maps for unequal bits: the directions that queries see most in eight bits, the least in none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from scipy.fft import dct

from kvlab.calibrate.closed_forms import FREE_FACTOR, balance
from kvlab.calibrate.sample import KeySample
from kvlab.checks import check_integer
from kvlab.quantizers import UnequalInteger
from kvlab.transforms import Matrix

FINE_COUNTS = (8, 16, 24)
"""Directions with eight bits that a calibration tries. On the keys of small models errors hardly differ between two
neighbours of these, and beyond a quarter of head_dim what is not stored costs more than what is stored finely gains."""

FINE_SPREAD = 0.5
"""How widely the fine channels vary, of the others' spread, so that few ranges that are drawn in would cut one off. On
the keys of a small model (16,384 tokens of one text) errors with searched ranges are within 2% of each other from 1 to
0.5, and 3% larger at 0.35."""


class UnequalMatrix(Matrix):
    """Matrices whose vectors are for `kvlab.quantizers.UnequalInteger`, which makes their scheme store them so.

    Parameters
    ----------
    matrices, name
        As in `kvlab.transforms.Matrix`.
    fine
        How many channels are for eight bits, and how many for none.

    Raises
    ------
    TypeError, ValueError
        As in `kvlab.transforms.Matrix`, or ``fine`` is no positive integer.
    """

    def __init__(self, matrices: torch.Tensor | Mapping[int, torch.Tensor], fine: int, name: str = "matrices") -> None:
        super().__init__(matrices, name)
        self.fine = check_integer(fine, "fine", minimum=1)


@dataclass(frozen=True)
class UnequalFinder:
    """What `unequal` returns: a finder that knows the number of fine channels that its maps are for."""

    fine: int

    def __post_init__(self) -> None:
        check_integer(self.fine, "fine", minimum=2)

    def __call__(self, sample: KeySample, _rotation: torch.Tensor) -> torch.Tensor:
        """Find A, as every `kvlab.calibrate.closed_forms.Finder`."""
        head_dim = sample.keys.shape[-1]
        # Refuses half of it or more.
        UnequalInteger(self.fine).bits_per_number(head_dim)
        balancing, sigma = balance(sample)
        stored = head_dim - self.fine
        spread = torch.eye(head_dim, dtype=torch.float64).repeat(len(sigma), 1, 1)
        # The free direction takes the constant vector of the first class, which so has one direction less.
        for begin, end, first in ((0, self.fine, 1), (self.fine, stored, self.fine)):
            variance = sigma[:, first:end].sum(-1) / (end - begin)
            spread[:, begin:end, begin:end] = cosines(end - begin) * variance.rsqrt()[:, None, None]
        spread[:, :stored, 0] = FREE_FACTOR * spread[:, :1, 0]
        spread[:, : self.fine, 1 : self.fine] *= FINE_SPREAD
        return spread @ balancing


def unequal(fine: int) -> UnequalFinder:
    """Return a finder of key maps for `kvlab.quantizers.UnequalInteger`: A = S B, B the balancing map of `balanced`.

    Directions come by decreasing σ, how much keys vary times how much queries look. The first ``fine`` are spread over
    the channels of eight bits, the last ``fine`` are not stored, those between are spread over the channels of four
    bits: each of the two by a cosine transform, scaled so that channels of the first vary `FINE_SPREAD` times as widely
    as those of the second, with which they share a range. The first direction of all goes where the offset takes it,
    enlarged as in `balanced`. No rotation has a part in it.

    Parameters
    ----------
    fine
        At least 2, since the first direction takes none of the eight bits' range; less than half of head_dim.

    Raises
    ------
    TypeError, ValueError
        ``fine`` is no integer of at least 2. What is returned raises ValueError where it is half of head_dim or more.

    References
    ----------
    This project. The bits are those of reverse water-filling (Kolmogorov 1956), rounded to 8, 4 and 0.
    """
    return UnequalFinder(fine)


def cosines(size: int) -> torch.Tensor:
    """Orthonormal matrix whose columns are cosines (DCT-II), the first constant, float64 ``[size, size]``."""
    return torch.from_numpy(dct(torch.eye(size, dtype=torch.float64).numpy(), norm="ortho", axis=0)).mT
