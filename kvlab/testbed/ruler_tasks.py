"""Synthetic long-context tasks in RULER's manner, worded as the harness words them.

Every task is a function ``task(material, rng, length)`` that returns a `Sample` of at most ``length`` tokens. The loss
comes from answers, so most samples ask many questions about one context, each worded as the harness's only one; the
rest are exactly the harness's prompts. Numbers of words, hops and repeats are those of RULER's tasks in lm-eval 0.4.13.

The source is Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?" (2024).
"""

from __future__ import annotations

import bisect
import math
import random
import string
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, islice, pairwise

import numpy as np

from kvlab.testbed.samples import END, Piece, Sample
from kvlab.testbed.task_material import (
    VALUES,
    Material,
    TooShortError,
    distinct,
    draw_letters,
    draw_uuid,
    fill,
)

MOST_QUESTIONS = 64
"""About one context."""

SENTENCE_END = r"(?<=[.!?]) "

HOPS = 4
"""Of a chain of variables: five names, one value."""

COMMON = 10
"""Words that appear most often in a list."""

REPEATS = {4096: (30, 3), 0: (6, 1)}
"""From which length on how often a list has its common words and the others."""

WORDS_PER_TOKEN = 1 / 50
"""Different coded words by the length of a sample."""


def _questions(material: Material, rng: random.Random, length: int, every: int) -> int:
    """How many questions to ask: one, or up to one for ``every`` so many tokens."""
    most = min(MOST_QUESTIONS, length // every)
    return 1 if most < 2 or rng.random() < material.alone else rng.randint(-(-most // 2), most)


def _hidden(
    task: str,
    material: Material,
    rng: random.Random,
    length: int,
    *,
    head: str,
    separators: tuple[str, str],
    chains: Sequence[Sequence[str]],
    unit: Callable[[], str],
    asked: Sequence[Sequence[Piece]],
) -> Sample:
    """Hide chains of sentences in a haystack and ask about them.

    Parameters
    ----------
    task, material, rng, length
        As of every task.
    head
        Before the context.
    separators
        Before the context's first sentence, and before each other one.
    chains
        Sentences that stay in their order; the haystack has the last word, as in the harness.
    unit
        Draws a sentence of the haystack.
    asked
        Question and answer, each.
    """
    tokens = material.tokens
    first, other = separators
    hidden = [[other + sentence for sentence in sentences] for sentences in chains]
    number = sum(map(len, hidden))
    questions = [piece for pieces in asked for piece in pieces]
    room = length - tokens.count([head, *(piece.text for piece in questions)])
    left = room - tokens.count(chain.from_iterable(hidden))
    hay = [text for (text,) in fill(lambda: (other + unit(),), left, tokens)] if left > 0 else []
    while hay:
        places = iter(rng.sample(range(number + len(hay) - 1), number))
        at: dict[int, str] = {}
        for texts in hidden:
            at.update(zip(sorted(islice(places, len(texts))), texts, strict=True))
        rest = iter(hay)
        context = [at.get(place) or next(rest) for place in range(number + len(hay))]
        context[0] = first + context[0].removeprefix(other)
        if tokens.count(context) <= room:
            return Sample(task, (Piece(head), *map(Piece, context), *questions))
        # The first sentence takes more tokens there than elsewhere.
        hay.pop()
    raise TooShortError(task, length)


def _ask(ask: str, answer: str) -> tuple[Piece, Piece]:
    return Piece(ask), Piece(f" {answer}{END}", answer=True)


def _needles(
    task: str,
    material: Material,
    rng: random.Random,
    length: int,
    *,
    kind: str,
    key: Callable[[random.Random], str],
    unit: Callable[[], str] | None = None,
    between: str = "\n",
    others: int = 0,
) -> Sample:
    """Hide needles and ask for their values.

    Parameters
    ----------
    task, material, rng, length
        As of every task.
    kind
        Of the values.
    key
        Draws a key.
    unit
        Draws a sentence of the haystack; needles where it is left out.
    between
        Sentences.
    others
        How many more needles than questions there are when there is one question.
    """
    wording = material.parts[kind]
    questions = _questions(material, rng, length, every=256)
    keys = distinct(questions + (others if questions == 1 else 0), partial(key, rng))
    values = {name: VALUES[kind](rng) for name in keys}

    def another() -> str:
        name = next(name for name in iter(partial(key, rng), None) if name not in values)
        return wording["needle"].format(key=name, value=VALUES[kind](rng))

    return _hidden(
        task,
        material,
        rng,
        length,
        head=wording["head"],
        separators=("\n", between),
        chains=[[wording["needle"].format(key=name, value=value)] for name, value in values.items()],
        unit=unit or another,
        asked=[_ask("\n" + wording["ask"].format(key=name), f"{values[name]}.") for name in keys[:questions]],
    )


def niah_single(material: Material, rng: random.Random, length: int) -> Sample:
    """Hide numbers of words in sentences that repeat."""
    noise = material.parts["numbers"]["noise"]
    return _needles("niah_single", material, rng, length, kind="numbers", key=material.word, unit=lambda: noise)


def niah_essay(material: Material, rng: random.Random, length: int) -> Sample:
    """Hide numbers or uuids of words in natural text; with one question up to three more needles."""
    return _needles(
        "niah_essay",
        material,
        rng,
        length,
        kind=rng.choice(sorted(VALUES)),
        key=material.word,
        unit=partial(next, material.natural(rng, length, SENTENCE_END)),
        between=" ",
        others=rng.randrange(4),
    )


def niah_multikey(material: Material, rng: random.Random, length: int) -> Sample:
    """Hide numbers of words among nothing but others."""
    return _needles("niah_multikey", material, rng, length, kind="numbers", key=material.word)


def niah_uuid(material: Material, rng: random.Random, length: int) -> Sample:
    """Hide uuids of uuids among nothing but others."""
    return _needles("niah_uuid", material, rng, length, kind="uuids", key=draw_uuid)


def vt(material: Material, rng: random.Random, length: int) -> Sample:
    """Ask which variables are assigned a value, one through the other, after an example as the harness makes it."""
    wording = material.parts["vt"]
    # The head's second line break begins the context.
    head, first = wording["head"][:-1], wording["head"][-1]
    noise = wording["noise"] + "\n"
    begun = _example(material, rng) + head
    chains, asked = _chains(material, rng, _questions(material, rng, length, every=1024), letters=5)
    return _hidden(
        "vt", material, rng, length, head=begun, separators=(first, " "), chains=chains, unit=lambda: noise, asked=asked
    )


def _chains(
    material: Material, rng: random.Random, number: int, letters: int
) -> tuple[list[list[str]], list[tuple[Piece, Piece]]]:
    """Draw chains of assignments, and a question and its answer for each."""
    wording, size = material.parts["vt"], HOPS + 1
    names = distinct(number * size, partial(draw_letters, rng, string.ascii_uppercase, letters))
    values = distinct(number, lambda: str(rng.randrange(10_000, 99_999)))
    groups = [names[start : start + size] for start in range(0, len(names), size)]
    chains = [
        [
            wording["first"].format(name=group[0], value=value),
            *(wording["then"].format(name=name, of=of) for of, name in pairwise(group)),
        ]
        for group, value in zip(groups, values, strict=True)
    ]
    asks = [wording["ask"].format(query=value, num_v=size) for value in values]
    return chains, [_ask(ask, " ".join(group)) for ask, group in zip(asks, groups, strict=True)]


def _example(material: Material, rng: random.Random) -> str:
    """Return the answered prompt that the harness shows first, as long as it would be with this tokenizer."""
    wording, tokens = material.parts["vt"], material.tokens
    [chain_of], [(ask, answer)] = _chains(material, rng, 1, letters=3)
    names = answer.text.removesuffix(END)
    noise = wording["noise"] + "\n"
    # At most 500 tokens with the 30 of an answer; the answer that is there is counted as Python prints a list.
    fixed = tokens.count([wording["head"], ask.text, f" {names.split()}", *(" " + sentence for sentence in chain_of)])
    lines = max(1, (500 - 30 - fixed) // tokens.count([" " + noise]) // 5) * 5
    sentences = [noise] * lines
    if lines <= len(chain_of):
        # Too few to hide in, so that they are parted.
        parted = [part for line in sentences for part in line.split(".")]
        sentences = [part + "." if part.strip() else part for part in parted]
    places = sorted(rng.sample(range(len(sentences)), len(chain_of)), reverse=True)
    for place, sentence in zip(places, reversed(chain_of), strict=True):
        sentences.insert(place, sentence)
    context = " ".join(sentences).replace(". \n", ".\n")
    # Two spaces before the answer and twice two line breaks after it are the harness's.
    return f"{wording['head']}{context}{ask.text} {names}\n\n\n\n"


def cwe(material: Material, rng: random.Random, length: int) -> Sample:
    """Ask for the most common words of a numbered list; they are answered in a random order, as any is right."""
    length = material.shorter(rng, length)
    wording, tokens = material.parts["cwe"], material.tokens
    head, first = wording["head"][:-1], wording["head"][-1]
    often, seldom = next(repeats for least, repeats in REPEATS.items() if length >= least)
    every = material.parts["words"]["common"]
    words = rng.sample(every, min(len(every), COMMON + length // seldom // 4))
    most = COMMON * often + (len(words) - COMMON) * seldom
    numbers = [f"{first}1.", *(f" {number}." for number in range(2, most + 1))]
    answers = [f" {number}." for number in range(1, COMMON + 1)]
    common = words[:COMMON]
    of_words = tokens.counts(" " + word for word in words)
    fixed = tokens.count([head, wording["ask"], *answers, END]) + (often + 1) * sum(of_words[:COMMON])
    # What a list of the common words and 0, 1, 2, … others takes.
    of_numbers = np.cumsum(tokens.counts(numbers))[COMMON * often - 1 :: seldom]
    sizes = fixed + of_numbers + np.cumsum([0, *(seldom * size for size in of_words[COMMON:])])
    others = int(np.searchsorted(sizes, length, side="right")) - 1
    if others < 0:
        raise TooShortError("cwe", length)
    listed = common * often + words[COMMON : COMMON + others] * seldom
    rng.shuffle(listed)
    # `listed` is as long as its numbers are needed.
    context = chain.from_iterable((number, f" {word}") for number, word in zip(numbers, listed, strict=False))
    # Already in random order, of which `listed` tells nothing.
    answer = chain.from_iterable((number, f" {word}") for number, word in zip(answers, common, strict=True))
    return Sample("cwe", _counted(head, context, wording["ask"], [*answer, END]))


def fwe(material: Material, rng: random.Random, length: int) -> Sample:
    """Ask for the three most frequent coded words; their numbers fall with the square of the rank."""
    length = material.shorter(rng, length)
    wording, tokens = material.parts["fwe"], material.tokens
    draw = partial(draw_letters, rng, string.ascii_lowercase, 6)
    # The most frequent is noise; five are needed to tell the third of the others from the fourth.
    words = ["...", *distinct(max(4, int(length * WORDS_PER_TOKEN) - 1), draw)]
    texts = [" " + word for word in words]
    answer = [*texts[1:4], END]
    # The space after the head is the first word's.
    head = wording["head"].removesuffix(" ")
    room = length - tokens.count([head, wording["ask"], *answer])
    shares = 6 / math.pi**2 / np.arange(1, len(words) + 1) ** 2
    sizes = np.array(tokens.counts(texts))

    def repeats(number: int) -> np.ndarray:
        return (number * shares).astype(int)

    number = bisect.bisect_right(range(length), room, key=lambda number: int(repeats(number) @ sizes)) - 1
    times = repeats(max(number, 0))
    if not np.all(np.diff(times[:5]) < 0):
        raise TooShortError("fwe", length)
    context = [text for text, time in zip(texts, times.tolist(), strict=True) for _ in range(time)]
    rng.shuffle(context)
    return Sample("fwe", _counted(head, context, wording["ask"], answer))


def _counted(head: str, context: Iterable[str], ask: str, answer: Iterable[str]) -> tuple[Piece, ...]:
    return (*map(Piece, (head, *context, ask)), *(Piece(text, answer=True) for text in answer))
