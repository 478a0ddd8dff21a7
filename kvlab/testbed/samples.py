"""A sample of a task as pieces of text, and as tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

END = "<|endoftext|>"
"""Ends every answer; a special token of the tokenizer."""

REMEMBERED = 2**16
"""Pieces whose tokens are kept: the most numbers and words that lists of a 131,072-token sample have, and room."""


class Piece(NamedTuple):
    """A piece of a sample's text.

    Pieces begin where a byte-level tokenizer that splits at spaces begins a token anyway (before a single space or line
    break, or after `END`), so that their tokens, joined, are those of the whole text.
    """

    text: str
    answer: bool = False


@dataclass(frozen=True)
class Sample:
    """One text of a task.

    Attributes
    ----------
    task
        The task's name.
    pieces
        The text in order; pieces that are answers begin right after the beginning of the answer that the harness puts
        into its prompt, and end with `END`.
    """

    task: str
    pieces: tuple[Piece, ...]

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(piece.text for piece in self.pieces)


class PieceTokenizer:
    """Tokenizes pieces, each text once while it is remembered: prompts repeat most of theirs.

    Attributes
    ----------
    end
        The token of `END`.

    Raises
    ------
    TypeError, ValueError
        ``tokenizer`` is no ``tokenizers.Tokenizer``, lacks `END`, or has tokens beyond 16 bits.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not isinstance(tokenizer, Tokenizer):
            raise TypeError(f"tokenizer is a {type(tokenizer).__name__}; accepted: a tokenizers.Tokenizer")
        size = tokenizer.get_vocab_size()
        if size > np.iinfo(np.uint16).max + 1:
            raise ValueError(f"tokenizer has {size} tokens; accepted: at most {np.iinfo(np.uint16).max + 1}")
        if tokenizer.token_to_id(END) is None:
            raise ValueError(f"tokenizer has no token {END}; accepted: one that has it as a special token")
        self.tokenizer = tokenizer
        self.end = tokenizer.token_to_id(END)
        self._known: dict[str, list[int]] = {}

    def ids(self, texts: Iterable[str]) -> list[list[int]]:
        """Tokens of each text."""
        texts = list(texts)
        unknown = [text for text in dict.fromkeys(texts) if text not in self._known]
        encodings = self.tokenizer.encode_batch_fast(unknown, add_special_tokens=False) if unknown else []
        self._known.update((text, encoding.ids) for text, encoding in zip(unknown, encodings, strict=True))
        ids = [self._known[text] for text in texts]
        if len(self._known) > REMEMBERED:
            self._known.clear()
        return ids

    def counts(self, texts: Iterable[str]) -> list[int]:
        """How many tokens each text has."""
        return [len(ids) for ids in self.ids(texts)]

    def count(self, texts: Iterable[str]) -> int:
        """How many tokens the texts have together."""
        return sum(self.counts(texts))

    def text(self, passage: str | Sequence[int]) -> str:
        """Return a passage as text of single spaces, whether it is given as text or as tokens."""
        text = passage if isinstance(passage, str) else self.tokenizer.decode([int(token) for token in passage])
        return " ".join(text.split())


def encode(sample: Sample, tokens: PieceTokenizer, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Turn a sample into tokens, filled up with the end token.

    Returns
    -------
    ids : numpy.ndarray
        ``[length]`` uint16.
    answer : numpy.ndarray
        ``[length]`` bool, whether the token belongs to an answer; false where it was filled up.

    Raises
    ------
    ValueError
        The sample is longer; nothing is cut off.
    """
    pieces = tokens.ids(piece.text for piece in sample.pieces)
    sizes = [len(ids) for ids in pieces]
    used = sum(sizes)
    if used > length:
        raise ValueError(f"length is {length}; accepted for this sample of {sample.task}: at least {used} tokens")
    ids = np.full(length, tokens.end, dtype=np.uint16)
    ids[:used] = np.fromiter(chain.from_iterable(pieces), dtype=np.uint16, count=used)
    answer = np.zeros(length, dtype=bool)
    answer[:used] = np.repeat([piece.answer for piece in sample.pieces], sizes)
    return ids, answer
