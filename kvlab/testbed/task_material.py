"""What synthetic tasks are made of: parts of RULER's prompts, a tokenizer, natural text, random numbers."""

from __future__ import annotations

import math
import random
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from kvlab.testbed.samples import PieceTokenizer

Passages = Callable[[random.Random, int], str | Sequence[int]]
"""Natural text of about so many tokens, as text or as tokens."""

ALONE = 0.3
"""Share of training's samples with exactly one question, or, where a task has no more, of the whole length."""

SHORTEST = 1024
"""Tokens that every task fits into."""


class TooShortError(ValueError):
    """A task does not fit into a length."""

    def __init__(self, task: str, length: int) -> None:
        super().__init__(f"length is {length}; accepted for {task}: more, it has no room for its questions and answers")


@dataclass(frozen=True)
class Material:
    """What samples are made of.

    Attributes
    ----------
    parts
        From `kvlab.testbed.task_parts.read_parts`.
    tokens
        What counts tokens.
    passages
        Natural text, for `niah_essay` and `copy`.
    alone
        Share of samples with exactly one question, or, where a task has no more, of the whole length; 1 for scoring.
    """

    parts: Mapping[str, Any]
    tokens: PieceTokenizer
    passages: Passages
    alone: float = ALONE

    def shorter(self, rng: random.Random, length: int) -> int:
        """Return a length for a task with one question: shorter samples are answered more often per token."""
        if length <= SHORTEST or rng.random() < self.alone:
            return length
        return between(rng, SHORTEST, length)

    def word(self, rng: random.Random) -> str:
        """Return a key as the needle tasks have them: an adjective and a noun."""
        words = self.parts["words"]
        return f"{rng.choice(words['adjectives'])}-{rng.choice(words['nouns'])}"

    def natural(self, rng: random.Random, size: int, separator: str) -> Iterator[str]:
        """Yield natural text without end, split at a regular expression; passages are of about ``size`` tokens.

        Raises
        ------
        ValueError
            A passage is empty.
        """
        while True:
            text = self.tokens.text(self.passages(rng, size))
            if not text:
                raise ValueError("passages gave no text; accepted: about as many tokens of text as asked for")
            yield from re.split(separator, text)


def draw_number(rng: random.Random) -> str:
    """Return seven digits."""
    return str(rng.randint(10**6, 10**7 - 1))


def draw_uuid(rng: random.Random) -> str:
    """Return a uuid, version 4."""
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def draw_hexadecimal(rng: random.Random) -> str:
    """Return eight hexadecimal digits."""
    return f"{rng.getrandbits(32):08x}"


def draw_letters(rng: random.Random, alphabet: str, size: int) -> str:
    """Return letters of an alphabet."""
    return "".join(rng.choices(alphabet, k=size))


VALUES = {"numbers": draw_number, "uuids": draw_uuid}
"""What needles hide."""


def distinct(number: int, draw: Callable[[], str]) -> list[str]:
    """Return so many different draws, in the order in which they came."""
    found: dict[str, None] = {}
    while len(found) < number:
        found[draw()] = None
    return list(found)


def between(rng: random.Random, low: int, high: int) -> int:
    """Return a random size, even in its logarithm."""
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


def fill(unit: Callable[[], tuple[str, ...]], room: int, tokens: PieceTokenizer) -> list[tuple[str, ...]]:
    """Draw units, each of some pieces, until the next one has no room."""
    units: list[tuple[str, ...]] = []
    used, number = 0, 1
    while True:
        batch = [unit() for _ in range(number)]
        # All at once: the tokenizer is slow on single texts.
        sizes = iter(tokens.counts(chain.from_iterable(batch)))
        for pieces in batch:
            used += sum(islice(sizes, len(pieces)))
            if used > room:
                return units
            units.append(pieces)
        number = 1 + (room - used) * len(units) // used
