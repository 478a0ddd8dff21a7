"""Choosing, vector by vector, the candidate of least squared error: the same choice on every machine."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from numbers import Real

import torch

from kvlab.quantizers.rounding import ordered_sum

# A squared error is a rounded difference, its rounded square and log2(n) levels of rounded sums, so two of them
# compare right if they differ by 2·(3 + log2 n)·2⁻²⁴: less than this for any n that fits in memory.
CLEARLY_LESS = 1 - 2.0**-18


def least_error(x: torch.Tensor, candidates: Iterable[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    """Take for each vector of ``x`` the candidate that returns it with the least squared error.

    Parameters
    ----------
    x
        Float32 ``[..., n]``.
    candidates
        Tuples of tensors ``[..., n]`` or ``[..., 1]``, the first being what comes back for ``x``. A later one
        wins where its error is less by more than rounding, so none is worse than the first, exactly.

    Returns
    -------
    tuple of torch.Tensor
        One candidate's layout, each vector's entries from the candidate chosen for it.
    """
    first, *others = candidates
    best, least = first, _squared_error(first[0], x)
    for candidate in others:
        error = _squared_error(candidate[0], x)
        better = error < least * CLEARLY_LESS
        best = tuple(torch.where(better, new, old) for new, old in zip(candidate, best, strict=True))
        least = torch.where(better, error, least)
    return best


def _squared_error(stored: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return ordered_sum((stored - x).square_())


def clipped_ranges(
    lowest: torch.Tensor, highest: torch.Tensor, clips: Sequence[float]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Ranges from ``lowest`` to ``highest`` with a share of them cut from either end: all pairs of ``clips``."""
    span = highest - lowest
    for below, above in itertools.product(clips, repeat=2):
        yield lowest + span * below, highest - span * above


def check_clips(clips: object) -> tuple[float, ...]:
    """Check that ``clips`` are shares to cut from an end of a range, the first one 0, and return them.

    Raises
    ------
    TypeError
        ``clips`` is no sequence of numbers.
    ValueError
        The first is not 0, or one is negative or ½ and more.
    """
    accepted = "accepted: 0 and then any shares from 0 to below 0.5"
    if not isinstance(clips, Sequence) or not all(isinstance(clip, Real) for clip in clips):
        raise TypeError(f"clips is {clips!r}; {accepted}")
    if not clips or clips[0] != 0 or not all(0 <= clip < 0.5 for clip in clips):
        raise ValueError(f"clips is {clips!r}; {accepted}")
    return tuple(map(float, clips))
