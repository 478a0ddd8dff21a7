"""lm-evaluation-harness (lm-eval), called for one task at a time.

The harness owns the tasks: prompts, generation settings, scores. Here it is made repeatable (the same prompts whatever
was run before) and quiet, and what it logs becomes `Sample`.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sqlite3
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from kvlab.evaluation.samples import Sample

INSTALL = "pip install 'kvlab[eval]'"
NO_FILTER = "none"
"""What the harness calls answers that are scored as they are."""

CWE = "lm_eval.tasks.ruler.cwe_utils"
"""RULER's only module that keeps a random state of its own."""


def harness() -> ModuleType:
    """Return lm-evaluation-harness.

    Raises
    ------
    ModuleNotFoundError
        It is not installed; the message gives the command.
    """
    try:
        import lm_eval
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"kvlab eval needs lm-evaluation-harness ({error}); {INSTALL}") from None
    return lm_eval


def evaluate(
    task: str,
    family: str,
    lm: Any,
    *,
    metadata: Mapping[str, object],
    prompts: int | None,
    prompt_seed: int,
    sampling_seed: int,
    generation: Mapping[str, object],
    chat: bool,
    cache: Path,
) -> list[dict[str, Any]]:
    """Run a task of the harness on a model and return the samples that the harness logs.

    Parameters
    ----------
    task, family
        The harness's name of the task, and the folder of its tasks that has it.
    lm
        A model of the harness.
    metadata
        What a task that makes its own prompts is told: tokenizer, lengths.
    prompts
        How many of the task's prompts; None takes all.
    prompt_seed, sampling_seed
        Of what is random in the prompts, and in the answers of a model that samples in this process.
    generation
        Generation settings over the task's own.
    chat
        Whether prompts go through the model's chat template.
    cache
        Where answers are kept until all are there, so that an interrupted task goes on; removed at the end, or where
        it is damaged.

    Returns
    -------
    list of dict
        One per prompt and filter, in the harness's form.
    """
    lm_eval = harness()
    from lm_eval.tasks import TaskManager

    # A module imported anew starts from its own seed, so that prompts do not depend on the tasks before.
    sys.modules.pop(CWE, None)
    folder = Path(lm_eval.__file__).parent / "tasks" / family
    for file in _cached(cache):
        if _is_damaged(file):
            file.unlink()
    with _quiet():
        # The index of this one family; that of all takes half a minute.
        manager = TaskManager(include_path=folder, include_defaults=False, metadata=dict(metadata))
        results = lm_eval.simple_evaluate(
            model=lm,
            tasks=[task],
            task_manager=manager,
            limit=prompts,
            gen_kwargs=dict(generation) or None,
            apply_chat_template=chat,
            use_cache=str(cache),
            bootstrap_iters=0,
            random_seed=prompt_seed,
            numpy_random_seed=prompt_seed,
            fewshot_random_seed=prompt_seed,
            torch_random_seed=sampling_seed,
        )
    for file in _cached(cache):
        file.unlink()
    return results["samples"][task]


def _cached(cache: Path) -> list[Path]:
    """Return the databases that the harness keeps answers in, one a rank."""
    return list(cache.parent.glob(f"{cache.name}_rank*"))


def _is_damaged(database: Path) -> bool:
    with contextlib.closing(sqlite3.connect(database)) as connection:
        try:
            return connection.execute("PRAGMA quick_check").fetchone() != ("ok",)
        except sqlite3.DatabaseError:
            return True


def to_samples(logged: list[dict[str, Any]], task: str, *, length: int | None = None, run: int = 1) -> list[Sample]:
    """Turn what the harness logged of a task into samples, all filters of a prompt in one.

    Parameters
    ----------
    logged
        From `evaluate`.
    task
        What the task is called in the samples.
    length
        RULER's context length, in tokens: the harness has one metric a length, of which this one is the score.
    run
        Which run, from 1.
    """
    scores: dict[int, dict[str, float]] = {}
    for entry in logged:
        metrics = {"score": str(length)} if length else {name: name for name in entry["metrics"]}
        of_prompt = scores.setdefault(entry["doc_id"], {})
        for name, metric in metrics.items():
            filtered = "" if entry["filter"] == NO_FILTER else f", {entry['filter']}"
            of_prompt[f"{name}{filtered}"] = float(entry[metric])
    first = {entry["doc_id"]: entry for entry in reversed(logged)}
    return [
        Sample(
            task=task,
            length=length,
            run=run,
            prompt=prompt,
            prompt_hash=first[prompt]["prompt_hash"],
            scores=scores[prompt],
            target=first[prompt]["target"],
            response=first[prompt]["resps"][0][0],
        )
        for prompt in sorted(first)
    ]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the harness's prints off standard output, which is ours, and its log to what went wrong.

    A progress bar that an error left open is closed, which ends its line.
    """
    from tqdm import tqdm

    log = logging.getLogger("lm_eval")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        log.setLevel(level)
        # The attribute is there from the first bar on.
        for bar in list(getattr(tqdm, "_instances", ())):
            bar.close()
