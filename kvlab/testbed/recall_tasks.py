"""Synthetic tasks that are nothing but reading the cache: names with values or passages, asked for by name.

Shaped as the tasks of `kvlab.testbed.ruler_tasks`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import chain

from kvlab.testbed.samples import END, Piece, Sample
from kvlab.testbed.task_material import (
    Material,
    TooShortError,
    between,
    draw_hexadecimal,
    draw_number,
    fill,
)

SHOW, RECALL = "Remember:", "\nRecall:"
"""Before what is to be remembered, and before what is asked."""

SHORTEST_PASSAGE = 16
"""In tokens."""


def pairs(material: Material, rng: random.Random, length: int) -> Sample:
    """Give a list of short keys and values; every value is asked for, in another order."""
    kinds = [draw_number, draw_hexadecimal, material.word]
    key, value = rng.choice(kinds), rng.choice(kinds)
    return _recall("pairs", material, rng, length, key=partial(key, rng), value=lambda: (f" {value(rng)}",))


def copy(material: Material, rng: random.Random, length: int) -> Sample:
    """Give named passages, each repeated by name: at once, or in another order after all have been shown."""
    length = material.shorter(rng, length)
    tokens = material.tokens
    size = between(rng, SHORTEST_PASSAGE, max(SHORTEST_PASSAGE, length // 2 - SHORTEST_PASSAGE))
    words = material.natural(rng, size, " ")
    common = partial(rng.choice, material.parts["words"]["common"])
    word = rng.choice([partial(next, words), common, partial(draw_number, rng), partial(draw_hexadecimal, rng)])

    def passage() -> tuple[str, ...]:
        return tuple(chain.from_iterable(fill(lambda: (f" {word()}",), size, tokens)))

    at_once = rng.random() < 1 / 2
    return _recall("copy", material, rng, length, key=partial(material.word, rng), value=passage, at_once=at_once)


def _recall(
    task: str,
    material: Material,
    rng: random.Random,
    length: int,
    *,
    key: Callable[[], str],
    value: Callable[[], tuple[str, ...]],
    at_once: bool = False,
) -> Sample:
    """Show named values and ask for all of them; ``value`` draws one as pieces, ``at_once`` asks after each."""
    names: set[str] = set()
    mark = (RECALL,) if at_once else ()

    def unit() -> tuple[str, ...]:
        name = next(name for name in iter(key, None) if name not in names)
        names.add(name)
        shown = (f"\n{name}:", *value())
        # What `fill` counts: both times, and the end.
        return (*shown, *mark, *shown, END)

    units = fill(unit, length - material.tokens.count([SHOW, RECALL]), material.tokens)
    if not units:
        raise TooShortError(task, length)
    # A unit is the name and its value twice, the mark between them, and the end.
    shown, asked = [], []
    for texts in units:
        half = (len(texts) - len(mark) - 1) // 2
        shown.append([Piece(text) for text in texts[: half + len(mark)]])
        asked.append([Piece(texts[half + len(mark)]), *(Piece(text, answer=True) for text in texts[-half:])])
    if at_once:
        blocks = [block for both in zip(shown, asked, strict=True) for block in both]
    else:
        rng.shuffle(asked)
        blocks = [*shown, [Piece(RECALL)], *asked]
    return Sample(task, (Piece(SHOW), *(piece for block in blocks for piece in block)))
