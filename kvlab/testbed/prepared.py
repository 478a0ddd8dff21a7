"""Text and tasks made ready for training: a tokenizer, token ids, and what tasks are made of."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlab.paths import check_out, written_whole
from kvlab.testbed.config import VOCABULARY, default_config
from kvlab.testbed.samples import END
from kvlab.testbed.tokenizer import train_tokenizer, write_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LANGUAGES = ("en", "de")
SPLITS = ("train", "held_out")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
PARTS = "task_parts.json"
PART_NAMES = {"numbers", "uuids", "vt", "cwe", "fwe", "words"}
"""Of what `kvlab.testbed.task_parts.read_parts` returns, what tasks are made of."""
BATCH = 256
"""Texts that are tokenized at once."""


@dataclass(frozen=True)
class Prepared:
    """A prepared folder, opened.

    Attributes
    ----------
    folder
        From `prepare`.
    """

    folder: Path

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer."""
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    @cached_property
    def parts(self) -> dict[str, Any]:
        """What synthetic tasks are made of."""
        return json.loads((self.folder / PARTS).read_text(encoding="utf-8"))

    @cached_property
    def _tokens(self) -> dict[str, np.ndarray]:
        return {
            f"{split}-{language}": np.load(self.folder / f"{split}-{language}.npy", mmap_mode="r")
            for split in SPLITS
            for language in LANGUAGES
        }

    def tokens(self, split: str, language: str) -> np.ndarray:
        """Return all tokens of a language, uint16; documents end with the end token."""
        return self._tokens[f"{split}-{language}"]

    def shortest(self, split: str) -> int:
        """Return the tokens of the language that has fewer."""
        return min(len(self.tokens(split, language)) for language in LANGUAGES)

    def text(self, rng: random.Random, length: int, split: str = "train") -> np.ndarray:
        """Draw a stretch of ``length`` tokens of natural text, uint16.

        Languages are drawn by the square roots of their sizes: equally often, the smaller one would soon be known by
        heart; by their sizes, it would hardly be learnt.
        """
        sizes = [len(self.tokens(split, language)) for language in LANGUAGES]
        [language] = rng.choices(LANGUAGES, [size**0.5 for size in sizes])
        tokens = self.tokens(split, language)
        start = rng.randrange(len(tokens) - length)
        return np.asarray(tokens[start : start + length])

    def passage(self, rng: random.Random, tokens: int) -> str:
        """Draw a stretch of natural text of about as many tokens, as text."""
        ids = self.text(rng, tokens)
        # An end of a text within a passage would end the task.
        return self.tokenizer.decode(ids[ids != self.tokenizer.token_to_id(END)].tolist())

    def copy_tokenizer(self, out: Path) -> None:
        """Copy the tokenizer's files to a checkpoint's folder."""
        for name in TOKENIZER_FILES:
            shutil.copyfile(self.folder / name, out / name)


def prepare(text: Path, out: Path, parts: dict[str, Any]) -> None:
    """Train the tokenizer and tokenize the text.

    Parameters
    ----------
    text
        JSON lines from `kvlab.testbed.corpus.write_text`.
    out
        A folder; gets the tokenizer's two files, ``{train,held_out}-{en,de}.npy`` (uint16) and ``task_parts.json``.
    parts
        From `kvlab.testbed.task_parts.read_parts`.

    Raises
    ------
    ValueError
        `check_text` refuses the file, it lacks a language or has too little text for the vocabulary, or ``out``
        cannot be written.
    """
    check_text(text)
    check_out(out)
    tokenizer = train_tokenizer(_training_texts(text, parts), VOCABULARY)
    tokens = {
        f"{split}-{language}.npy": _tokenized(tokenizer, text, split, language)
        for split in SPLITS
        for language in LANGUAGES
    }
    out.mkdir(parents=True, exist_ok=True)
    write_tokenizer(tokenizer, out, longest=default_config().max_position_embeddings)
    for name, ids in tokens.items():
        with written_whole(out / name) as scratch, scratch.open("wb") as file:
            np.save(file, ids)
    # Last: a folder without it is not finished.
    with written_whole(out / PARTS) as scratch:
        scratch.write_text(json.dumps(parts, ensure_ascii=False), encoding="utf-8")


def check_text(text: Path) -> None:
    """Check that a file holds documents of `kvlab.testbed.corpus.write_text`, by its first line.

    Raises
    ------
    ValueError
        There is no such file, or it holds something else.
    """
    wanted = {"language", "held_out", "text"}
    try:
        first = next(read_documents(text), None)
    except OSError as error:
        raise ValueError(f"text is {str(text)!r} ({error.strerror}); accepted: a file of kvlab testbed text") from None
    except ValueError:
        first = None
    if not isinstance(first, dict) or not wanted <= first.keys():
        raise ValueError(f"text is {str(text)!r}, which holds no documents; accepted: a file of kvlab testbed text")


def _training_texts(text: Path, parts: dict[str, Any]) -> Iterator[str]:
    for document in read_documents(text):
        if not document["held_out"]:
            yield document["text"]
    # What tasks take their keys from, so that the frequent pieces of these words are tokens.
    yield from (" ".join(words) for words in parts["words"].values())


def read_documents(text: Path) -> Iterator[dict[str, Any]]:
    """Yield the documents of a file of JSON lines."""
    with text.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def _tokenized(tokenizer: Tokenizer, text: Path, split: str, language: str) -> np.ndarray:
    end = np.array([tokenizer.token_to_id(END)], dtype=np.uint16)
    chosen = [
        document["text"]
        for document in read_documents(text)
        if document["language"] == language and document["held_out"] == (split == "held_out")
    ]
    if not chosen:
        raise ValueError(
            f"text is {str(text)!r}, which has no {split} documents of language {language!r}; "
            "accepted: a file of kvlab testbed text"
        )
    pieces = []
    for start in range(0, len(chosen), BATCH):
        for encoding in tokenizer.encode_batch(chosen[start : start + BATCH]):
            # As numbers of two bytes at once: lists of so many tokens would take gigabytes.
            pieces += [np.asarray(encoding.ids, dtype=np.uint16), end]
    return np.concatenate(pieces)


def read_prepared(prepared: Path) -> Prepared:
    """Open a folder from `prepare`.

    Raises
    ------
    ValueError
        A file is missing in it, or is not what `prepare` writes.
    """
    opened, accepted = Prepared(prepared), "accepted: a folder that kvlab testbed prepare wrote"
    wanted = [*TOKENIZER_FILES, PARTS, *(f"{split}-{language}.npy" for split in SPLITS for language in LANGUAGES)]
    if missing := [name for name in wanted if not (prepared / name).is_file()]:
        raise ValueError(f"prepared is {str(prepared)!r}, which lacks {', '.join(missing)}; {accepted}")
    for name in wanted:
        try:
            whole = _is_whole(opened, name)
        except Exception:
            # A damaged file fails in one of many ways, and the tokenizer's library raises nothing narrower.
            whole = False
        if not whole:
            raise ValueError(f"prepared is {str(prepared)!r}, whose {name} is damaged; {accepted}")
    return opened


def _is_whole(opened: Prepared, name: str) -> bool:
    """Whether a file reads as one that `prepare` wrote."""
    if name.endswith(".npy"):
        tokens = np.load(opened.folder / name, mmap_mode="r")
        known = opened.tokenizer.get_vocab_size()
        return tokens.dtype == np.uint16 and tokens.ndim == 1 and tokens.max(initial=0) < known
    if name == "tokenizer.json":
        return opened.tokenizer.token_to_id(END) is not None
    content = json.loads((opened.folder / name).read_text(encoding="utf-8"))
    return (PART_NAMES if name == PARTS else {"eos_token"}) <= content.keys()
