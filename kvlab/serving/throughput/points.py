"""When a decode point counts, and what is reported of it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

TENTH = 10


@dataclass(frozen=True)
class Step:
    """One step of the engine.

    Attributes
    ----------
    seconds
        From the end of the step before to its own.
    tokens
        How many each session got that got any.
    ended
        Sessions that ended with it.
    """

    seconds: float
    tokens: tuple[int, ...]
    ended: int = 0


def why_not(sessions: int, step: Step, *, waiting: int, preempted: int) -> str | None:
    """Return why a step disqualifies its point, or None: exactly one token for each session, and none of them ends.

    Parameters
    ----------
    sessions
        How many decode.
    step
        What it brought.
    waiting
        Sessions that the scheduler has in its queue.
    preempted
        How often it has thrown one out of the cache.
    """
    if preempted:
        return f"evicted: {preempted} of {sessions} sessions lost their cache while they grew"
    if waiting:
        return f"queued: {waiting} of {sessions} sessions waited for room in the cache"
    if step.ended:
        return f"ended early: {step.ended} of {sessions} sessions"
    if step.tokens != (1,) * sessions:
        return f"a step brought {sum(step.tokens)} tokens to {len(step.tokens)} of {sessions} sessions; counted: 1 each"
    return None


def summary(sessions: int, seconds: Sequence[float]) -> dict[str, float]:
    """Condense the times of a point's steps.

    Parameters
    ----------
    sessions
        How many got one token in each step.
    seconds
        Of each step.

    Returns
    -------
    dict
        ``median_ms``; ``slowest_tenth``, the mean of the slowest tenth of the steps (at least one) over the median;
        ``tokens_per_s``, all tokens over the time of all steps; ``tokens_per_s_per_session``.
    """
    median = statistics.median(seconds)
    slowest = sorted(seconds)[-max(len(seconds) // TENTH, 1) :]
    rate = len(seconds) / sum(seconds)
    return {
        "median_ms": 1e3 * median,
        "slowest_tenth": statistics.fmean(slowest) / median,
        "tokens_per_s": sessions * rate,
        "tokens_per_s_per_session": rate,
    }
