"""What a training step reads: natural text and synthetic tasks, the same for the same seed on any machine."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from kvlab.testbed.config import Stage, TrainingPlan
from kvlab.testbed.prepared import Prepared, read_prepared
from kvlab.testbed.tasks import TaskMixture

CONTEXT, TEXT, ANSWER = 0, 1, 2
"""What a token is to the loss: a task's context, natural text, or a task's answer."""


@dataclass(frozen=True)
class Sequences(Dataset):
    """A stage's sequences by their number.

    Attributes
    ----------
    folder
        Written by `kvlab.testbed.prepared.prepare`.
    plan
        The training's: seed and share of tasks.
    length
        Tokens of a sequence.
    first
        Number of the first one.
    count
        How many there are.
    """

    folder: Path
    plan: TrainingPlan
    length: int
    first: int
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return int64 token ids ``[length + 1]`` and int8 kinds of the tokens to predict ``[length]``."""
        if not 0 <= index < self.count:
            raise IndexError(index)
        return draw_sequence(_opened(self.folder), self.plan, self.length, self.first + index)


# One for each worker process, and each folder that it reads.
_OPEN: dict[Path, tuple[Prepared, TaskMixture]] = {}


def _opened(folder: Path) -> tuple[Prepared, TaskMixture]:
    if folder not in _OPEN:
        prepared = read_prepared(folder)
        _OPEN[folder] = prepared, TaskMixture(prepared.parts, prepared.tokenizer, prepared.passage)
    return _OPEN[folder]


def _begin_worker(_number: int) -> None:
    # Workers are processes already.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)


def draw_sequence(
    opened: tuple[Prepared, TaskMixture], plan: TrainingPlan, length: int, number: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a sequence of a stage by its number; see `Sequences`."""
    prepared, mixture = opened
    rng = random.Random(f"kvlab/testbed/{plan.seed}/{length}/{number}")
    if rng.random() < plan.task_share:
        ids, answers = mixture.draw(rng, length + 1)
        kinds = np.where(answers[1:], ANSWER, CONTEXT).astype(np.int8)
    else:
        ids = prepared.text(rng, length + 1)
        kinds = np.full(length, TEXT, dtype=np.int8)
    return torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(kinds)


def batches(
    folder: Path, plan: TrainingPlan, *, first_step: int, workers: int
) -> Iterator[tuple[Stage, Mapping[str, torch.Tensor]]]:
    """Yield the batches of all steps from ``first_step`` on.

    Parameters
    ----------
    folder
        Written by `kvlab.testbed.prepared.prepare`.
    plan
        Of the training.
    first_step
        0, or where an earlier run stopped.
    workers
        Processes that draw sequences; what they draw does not depend on their number.

    Yields
    ------
    stage, batch
        ``ids`` int64 ``[sequences, length + 1]``, ``kinds`` int8 ``[sequences, length]``.
    """
    begin = 0
    for stage, end in zip(plan.stages, plan.ends(), strict=True):
        start = max(begin, first_step)
        if start < end:
            size = plan.tokens_per_step // stage.length
            sequences = Sequences(folder, plan, stage.length, (start - begin) * size, (end - start) * size)
            loader = DataLoader(
                sequences,
                batch_size=size,
                num_workers=workers,
                pin_memory=torch.cuda.is_available(),
                prefetch_factor=8 if workers else None,
                multiprocessing_context="spawn" if workers else None,
                worker_init_fn=_begin_worker,
            )
            for ids, kinds in loader:
                yield stage, {"ids": ids, "kinds": kinds}
        begin = end


def held_out_batch(prepared: Prepared, plan: TrainingPlan, length: int, language: str) -> dict[str, torch.Tensor]:
    """Return a batch of held-out text, shaped as the plan's at a length.

    Stretches of the longest stage's length, evenly spread, are cut into rows: whatever the length, the same tokens are
    to be predicted. Text that is shorter than a stretch is repeated.

    Parameters
    ----------
    prepared
        Whose text is read.
    plan
        Of the training; every stage's length has to divide the longest, or rows are left out.
    length
        Tokens of a row.
    language
        "en" or "de".

    Returns
    -------
    dict
        As of `batches`; every token is natural text.
    """
    tokens, longest = prepared.tokens("held_out", language), max(stage.length for stage in plan.stages)
    starts = np.linspace(0, max(0, len(tokens) - longest - 1), plan.tokens_per_step // longest).astype(int)
    stretches = [np.resize(tokens[start : start + longest + 1], longest + 1) for start in starts]
    rows = [s[begin : begin + length + 1] for s in stretches for begin in range(0, longest - length + 1, length)]
    ids = torch.from_numpy(np.stack(rows).astype(np.int64))
    return {"ids": ids, "kinds": torch.full((len(rows), length), TEXT, dtype=torch.int8)}
