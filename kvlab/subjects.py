"""Whose figures are drawn: the trained models that come with kvlab, and what was measured on one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlab.models import default
from kvlab.testbed import loading

if TYPE_CHECKING:
    import pandas as pd
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Subject:
    """A trained model whose keys and values are looked at.

    Attributes
    ----------
    model
        Its name.
    prefix
        What its figures' names begin with.
    details
        What a caption says of it behind its name.
    load
        Returns the model, in float32, and its tokenizer.
    note
        What else a caption has to say.
    longest
        The longest context that is captured, in tokens; None for any.
    """

    model: str
    prefix: str
    details: str
    load: Callable[[], tuple[PreTrainedModel, PreTrainedTokenizerBase]]
    note: str = ""
    longest: int | None = None


@dataclass(frozen=True)
class Study:
    """What was measured on one model.

    Attributes
    ----------
    tables
        ``rounding``, ``outliers``, ``attention_error`` and, where it was measured, ``loss``.
    where
        Model, text, machine and date, for captions.
    model
        Its name, for titles; empty where ``where`` has to do.
    prefix
        What its figures' names begin with.
    """

    tables: dict[str, pd.DataFrame]
    where: str
    model: str = ""
    prefix: str = ""


DEFAULT = Subject(default.MODEL_NAME, "", "weights from Q4_1", default.default_model)
TESTBED = Subject(
    loading.MODEL_NAME,
    "testbed_",
    "18 M parameters, weights from FP8, Kolibri-1's architecture, not Kolibri-1",
    loading.load_testbed,
    # corpus.csv has python3.11-doc, whose pages of the language reference are all on the training's side of the split.
    "Its training text has Debian's Python 3.11 documentation, where help topics are from: this text is not new to it.",
    # transformers computes all of 8,192² scores in its sliding layers, too: 51 s of one core, against 15 s.
    longest=4096,
)
SUBJECTS = (DEFAULT, TESTBED)
"""In the order in which they are measured; the first is the embedded default."""
