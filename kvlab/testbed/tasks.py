"""The synthetic long-context tasks of the testbed's training, mixed and as tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from kvlab.testbed import recall_tasks, ruler_tasks
from kvlab.testbed.samples import Piece, PieceTokenizer, Sample, encode
from kvlab.testbed.task_material import SHORTEST, Material, Passages, TooShortError

Task = Callable[[Material, random.Random, int], Sample]

TASKS: dict[str, Task] = {
    "niah_single": ruler_tasks.niah_single,
    "niah_essay": ruler_tasks.niah_essay,
    "niah_multikey": ruler_tasks.niah_multikey,
    "niah_uuid": ruler_tasks.niah_uuid,
    "vt": ruler_tasks.vt,
    "cwe": ruler_tasks.cwe,
    "fwe": ruler_tasks.fwe,
    "copy": recall_tasks.copy,
    "pairs": recall_tasks.pairs,
}
"""Every task by its name."""

WEIGHTS = {
    "niah_single": 1,
    "niah_essay": 1,
    "niah_multikey": 2,
    "niah_uuid": 2,
    "vt": 6,
    "cwe": 4,
    "fwe": 4,
    "copy": 3,
    "pairs": 3,
}
"""How often each is drawn: needles are learnt soon, tracking and counting late, and with few answers a sample."""

FILLER = "pairs"
"""Fits where nothing else does."""

SMALLEST = 128
"""Tokens that a pair fits into, with any tokenizer that knows words."""


class TaskMixture:
    """Draws samples of the tasks.

    Parameters
    ----------
    parts
        From `kvlab.testbed.task_parts.read_parts`.
    tokenizer
        Byte-level, with `kvlab.testbed.samples.END` as a special token.
    passages
        ``passages(rng, tokens)`` gives about so many tokens of natural text, as text or as tokens.
    weights
        How often each task is drawn, relative to the others; those left out are not. `WEIGHTS` where it is not given.

    Raises
    ------
    TypeError, ValueError
        The tokenizer is of no use, or the weights are no weights of tasks.
    """

    def __init__(
        self,
        parts: Mapping[str, Any],
        tokenizer: Tokenizer,
        passages: Passages,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        self.material = Material(parts, PieceTokenizer(tokenizer), passages)
        self.weights = dict(WEIGHTS if weights is None else weights)
        for name, weight in self.weights.items():
            if name not in TASKS:
                raise ValueError(f"weights has task {name!r}; accepted: {', '.join(TASKS)}")
            # A NaN compares false.
            if not 0 <= weight < float("inf"):
                raise ValueError(f"weights has {weight} for {name}; accepted: finite numbers of at least 0")
        if not sum(self.weights.values()):
            raise ValueError("weights are all 0; accepted: one task at least with more")

    def draw(self, rng: random.Random, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw a task and return a sample of it, filled up by further samples of it and by `FILLER`.

        Parameters
        ----------
        rng
            Decides everything; the same state gives the same sample.
        length
            In tokens.

        Returns
        -------
        ids : numpy.ndarray
            ``[length]`` uint16.
        answer : numpy.ndarray
            ``[length]`` bool, whether the token belongs to an answer.

        Raises
        ------
        ValueError
            ``length`` is below `SMALLEST`.
        """
        if length < SMALLEST:
            raise ValueError(f"length is {length}; accepted: at least {SMALLEST} tokens")
        [name] = rng.choices(list(self.weights), list(self.weights.values()))
        tokens = self.material.tokens
        pieces: list[Piece] = []
        room = length
        task = TASKS[name]
        while room > 0:
            try:
                sample = task(self.material, rng, room)
            except TooShortError:
                if task is TASKS[FILLER]:
                    break
                task = TASKS[FILLER]
                continue
            pieces.extend(sample.pieces)
            room -= tokens.count(piece.text for piece in sample.pieces)
            # Most tasks fill their room, so that another sample is tried only where any fits.
            if room < SHORTEST:
                task = TASKS[FILLER]
        return encode(Sample(name, tuple(pieces)), tokens, length)
