"""Key maps by descent on what a min/max quantizer's steps do to scores."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from tqdm import tqdm

from kvlab.calibrate.closed_forms import Finder, balanced, plain, query_basis
from kvlab.calibrate.sample import KeySample
from kvlab.transforms.parameters import check_integer

STEPS = 150
LEARNING_RATE = 3e-3
"""Of Adam, on entries of a matrix near the identity; falls to 0 as a half cosine."""

CODES = 2**4 - 1
OFFSET_ROUNDING = 2.0**-11
"""fp16 rounds an offset by up to half its unit, 2⁻¹¹ of it, by which the range can grow."""


def expected_error(sample: KeySample, matrix: torch.Tensor) -> torch.Tensor:
    """Relative score error that 4-bit min/max codes of A x are expected to make.

    The step of a vector y = A x is (max y − min y)/15, its rounding errors are uniform in it and independent: a
    mean square of step²/12 per component, which a query sees through A⁻ᵀ. Hence, M and C as in `KeySample`::

        √( E[step²]/12 · tr(C A⁻¹ A⁻ᵀ) / tr(C M) )

    Parameters
    ----------
    sample
        Keys, their weights, and the queries' moment.
    matrix
        A: ``[num_kv_heads, head_dim, head_dim]``, float; gradients pass.

    Returns
    -------
    torch.Tensor
        float64 ``[num_kv_heads]``.
    """
    y = sample.keys @ matrix.float().mT
    lowest = y.amin(-1)
    steps = (y.amax(-1) - lowest + OFFSET_ROUNDING * lowest.abs()) / CODES
    energy = (sample.weights * steps.square().double()).sum(-1) / 12
    inverse = torch.linalg.inv(matrix.double())
    seen = (sample.covariance @ inverse * inverse).sum((-2, -1))
    return (energy * seen / sample.score_energy).sqrt()


def learned_rotation(
    sample: KeySample,
    rotation: torch.Tensor,
    *,
    starts: Iterable[Finder] = (plain, query_basis),
    steps: int = STEPS,
    progress: bool = False,
) -> torch.Tensor:
    """Descend over orthogonal matrices Q from A = Q A₀, by Cayley's transform Q = (I + S)⁻¹ (I − S), S = −Sᵀ.

    Parameters
    ----------
    sample, rotation
        As every `Finder` takes them.
    starts
        What A₀ is found by; from `plain` and `query_basis` A is orthogonal, from `balanced` it keeps that map's
        noise and narrows its range.
    steps
        Steps of Adam from each start.
    progress
        Show a progress bar on standard error.

    Returns
    -------
    torch.Tensor
        A: float64 holding float32 values; per head the least `expected_error` met, that of the starts included.

    Raises
    ------
    TypeError, ValueError
        ``steps`` is no integer ≥ 0, or there is no start.

    References
    ----------
    Liu et al. 2024, arXiv:2405.16406 (SpinQuant: learned rotations, by the same transform).
    """
    return _descend(sample, rotation, starts, _cayley, steps, progress=progress)


def learned_matrix(
    sample: KeySample,
    rotation: torch.Tensor,
    *,
    starts: Iterable[Finder] = (balanced,),
    steps: int = STEPS,
    progress: bool = False,
) -> torch.Tensor:
    """Descend over all invertible matrices, A = (I + S) A₀; otherwise as `learned_rotation`."""
    return _descend(sample, rotation, starts, _near_identity, steps, progress=progress)


def _descend(
    sample: KeySample,
    rotation: torch.Tensor,
    starts: Iterable[Finder],
    change: Callable[[torch.Tensor], torch.Tensor],
    steps: int,
    *,
    progress: bool,
) -> torch.Tensor:
    steps, starts = check_integer(steps, "steps", minimum=0), list(starts)
    if not starts:
        raise ValueError("starts is empty; accepted: at least one finder")
    least = best = None
    with tqdm(total=len(starts) * (steps + 1), desc="descent", unit="step", disable=not progress) as bar:
        for start in (find(sample, rotation).float() for find in starts):
            free = torch.zeros_like(start, requires_grad=True)
            optimizer = torch.optim.Adam([free], lr=LEARNING_RATE)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps))
            for _ in range(steps + 1):
                matrix = change(free) @ start
                error = expected_error(sample, matrix)
                found, reached = matrix.detach().clone(), error.detach()
                if best is None:
                    best, least = found, reached
                better = reached < least
                best, least = torch.where(better[:, None, None], found, best), torch.where(better, reached, least)
                optimizer.zero_grad()
                # The logarithm makes every head's descent its own, whatever its error's size.
                error.log().sum().backward()
                optimizer.step()
                schedule.step()
                bar.update()
    return best.double()


def _cayley(free: torch.Tensor) -> torch.Tensor:
    skew = (free - free.mT) / 2
    identity = torch.eye(free.shape[-1])
    return torch.linalg.solve(identity + skew, identity - skew)


def _near_identity(free: torch.Tensor) -> torch.Tensor:
    return torch.eye(free.shape[-1]) + free
