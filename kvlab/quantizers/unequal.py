"""The 4-bit codec's bytes with unequal bits: eight for the first channels, none for the last."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvlab.checks import check_integer
from kvlab.quantizers.base import Quantizer
from kvlab.quantizers.granularity import PerTokenHead
from kvlab.quantizers.integer import dequantize_asymmetric_, quantize_asymmetric
from kvlab.quantizers.packing import Grid, encode_vectors
from kvlab.quantizers.refit import RefitInteger, clipped_grids, refit
from kvlab.quantizers.rounding import divide, divide_or_zero_
from kvlab.quantizers.selection import least_error

_BITS = 4
_LARGEST_CODE = 2**_BITS - 1
STEPS = 2**_BITS + 1
"""Of the fine codes to one of the others: 17, since 255 of the ones are 15 of the others."""

_SEARCH = RefitInteger()
_Grid = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class UnequalInteger(Quantizer):
    """4-bit integers as `AsymmetricInteger`'s, but the first ``fine`` channels lend the last ones' codes.

    For vectors whose channels come in the order of their importance. Scale s and offset o per token and head, both
    fp16, span all channels but the last ``fine``, which are not stored and come back as 0. The first ``fine`` have 8
    bits on the same range: x̂ = o + s·code/17. Code = 16·a + b is kept as two codes of 4 bits, a in the channel's own
    place and b in the place of the channel that is not stored. Since

        o + s·(16 a + b)/17  =  (16·(o + s·a) + (o + s·b))/17,

    what comes back is linear in what `kvlab.codec.decode` reads in those places: a decode kernel that knows nothing of
    this serves it, with queries multiplied by 16/17 and 1/17 there (`expansion`).

    Parameters
    ----------
    fine
        At least 1, less than half of head_dim.

    Raises
    ------
    TypeError, ValueError
        ``fine`` is no positive integer.

    References
    ----------
    This project. What it approximates is reverse water-filling, Kolmogorov 1956.
    """

    fine: int

    def __post_init__(self) -> None:
        check_integer(self.fine, "fine", minimum=1)

    def bits_per_number(self, head_dim: int) -> float:
        """4, and 32 per vector for scale and offset; ValueError where ``fine`` is half of ``head_dim`` or more."""
        self._check(head_dim)
        return _BITS + PerTokenHead().overhead(32, head_dim)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Encode vectors to bytes that `kvlab.codec.decode` reads: ``expansion`` of what it gives is `roundtrip`'s.

        Parameters
        ----------
        x
            As `kvlab.codec.encode` takes it; its last ``fine`` channels are not looked at.

        Returns
        -------
        torch.Tensor
            uint8 ``[..., head_dim / 2 + 4]`` on the same device.

        Raises
        ------
        TypeError, ValueError
            As `kvlab.codec.encode`, or ``fine`` is half of head_dim or more.
        """
        return encode_vectors(x, self._placed_codes)

    def placement(self, head_dim: int) -> torch.Tensor:
        """Matrix that puts a copy of the first ``fine`` channels in the last ones' place, float32 on the CPU, square.

        A kernel that multiplies vectors by a matrix has each code's number where the code goes.
        """
        self._check(head_dim)
        places = [*range(head_dim - self.fine), *range(self.fine)]
        return _identity(head_dim)[places]

    def expansion(self, head_dim: int) -> torch.Tensor:
        """Matrix from what `kvlab.codec.decode` gives to what is stored, float32 on the CPU, square."""
        self._check(head_dim)
        matrix = _identity(head_dim)
        first, last = list(range(self.fine)), list(range(head_dim - self.fine, head_dim))
        matrix[last, last] = 0
        matrix[first, first], matrix[first, last] = (STEPS - 1) / STEPS, 1 / STEPS
        return matrix

    def _check(self, head_dim: int) -> None:
        if 2 * self.fine >= check_integer(head_dim, "head_dim", minimum=1):
            raise ValueError(f"fine is {self.fine}; accepted at head_dim {head_dim}: less than {head_dim / 2:g}")

    def _roundtrip(self, x: torch.Tensor) -> torch.Tensor:
        back, *_ = self._fit(self._stored(x))
        return torch.nn.functional.pad(back, (0, self.fine))

    def _placed_codes(self, x: torch.Tensor) -> Grid:
        _, codes, fine, scale, offset = self._fit(self._stored(x))
        high = (fine / 2**_BITS).floor_()
        return torch.cat([high, codes[..., self.fine :], fine - high * 2**_BITS], dim=-1), scale, offset

    def _stored(self, x: torch.Tensor) -> torch.Tensor:
        self._check(x.shape[-1])
        return x[..., : x.shape[-1] - self.fine]

    def _fit(self, x: torch.Tensor) -> _Grid:
        """Find for the channels that are stored what comes back, codes, the fine ones' in 8 bits, scale and offset."""
        return self._on(x, *quantize_asymmetric(x, _BITS))

    def _on(self, x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor) -> _Grid:
        """Complete the codes on a range by the fine ones."""
        fine = self._fine_steps(x, scale, offset).round_().clamp_(0, STEPS * _LARGEST_CODE)
        back = dequantize_asymmetric_(codes.clone(), scale, offset)
        # s·code is exact.
        back[..., : self.fine] = divide(fine * scale, STEPS) + offset
        return back, codes, fine, scale, offset

    def _fine_steps(self, x: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        """Say how many fine steps above the offset the fine channels are."""
        return divide_or_zero_(x[..., : self.fine] - offset, scale).mul_(STEPS)


class RefitUnequalInteger(UnequalInteger):
    """`UnequalInteger` whose scale and offset are searched as `RefitInteger`'s are, for the channels of four bits.

    The ranges tried are those of `RefitInteger`, the regression is of the channels of four bits; the least squared
    error of all that is stored wins. The fine channels are those that matter, so that no range is taken that cuts one
    of them off: `kvlab.calibrate.unequal` keeps them narrow enough for that to be rare. Since the unclipped range is
    the first candidate, no vector is stored worse than by `UnequalInteger`.

    References
    ----------
    This project.
    """

    def _fit(self, x: torch.Tensor) -> _Grid:
        best = least_error(x, self._clipped(x))
        for _ in range(_SEARCH.rounds):
            _, codes, _, scale, offset = best
            coarse, *grid = refit(x[..., self.fine :], codes[..., self.fine :], scale, offset)
            best = least_error(x, [best, self._holding(x, torch.cat([codes[..., : self.fine], coarse], dim=-1), *grid)])
        return best

    def _clipped(self, x: torch.Tensor) -> Iterator[_Grid]:
        grids = clipped_grids(x, _SEARCH.clips)
        yield self._on(x, *next(grids))
        for grid in grids:
            yield self._holding(x, *grid)

    def _holding(self, x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor) -> _Grid:
        """As `_on`, erring infinitely where the range does not hold the fine channels."""
        back, *grid = self._on(x, codes, scale, offset)
        steps = self._fine_steps(x, scale, offset)
        outside = (steps < -0.5) | (steps > STEPS * _LARGEST_CODE + 0.5)
        back[..., : self.fine].masked_fill_(outside, torch.inf)
        return back, *grid


def _identity(size: int) -> torch.Tensor:
    """Return the identity, the same whatever the process's default dtype and device are: a server sets its own."""
    return torch.eye(size, dtype=torch.float32, device="cpu")
