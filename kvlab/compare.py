"""Two set-ups on the same prompts, from their logged samples: differences with intervals, task by task."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from kvlab import stats
from kvlab.checks import check_number
from kvlab.evaluation.samples import Sample, read_samples

ALL_TASKS = "all"
"""What the row with the mean over tasks is called."""

SMALLEST_DIFFERENCE = 1e-6
"""Of scores from 0 to 1: what is smaller is rounding, or takes more prompts than there are."""

POINTS = 100
"""Of a whole score."""

COLUMNS = (
    "task",
    "length",
    "metric",
    "prompts",
    "runs",
    "mean_a",
    "mean_b",
    "difference",
    "low",
    "high",
    "only_a",
    "only_b",
    "p_value",
    "prompts_needed",
)


class Group(NamedTuple):
    """What is compared at a time: the prompts of a task at a length."""

    task: str
    length: int | None

    def __str__(self) -> str:
        return self.task if self.length is None else f"{self.task} at {self.length:,} tokens"


class Pair(NamedTuple):
    """Scores of both set-ups, ``[prompts, runs]`` each."""

    a: np.ndarray
    b: np.ndarray


def compare(a: Path, b: Path, *, detect: float | None = None, seed: int = 0) -> pd.DataFrame:
    """Compare two sets of logged samples of the same prompts.

    Parameters
    ----------
    a, b
        Files or folders that ``kvlab eval`` wrote.
    detect
        The difference that ``prompts_needed`` is for, as `check_detect` takes it; default: the one observed.
    seed
        Of the bootstrap.

    Returns
    -------
    pandas.DataFrame
        One row per task, length and metric and, where there are several tasks of a length and metric, one for their
        mean, task ``all``. ``difference`` is b − a, ``low`` and ``high`` its 95% interval: `kvlab.paired_bootstrap`
        over prompts, a prompt's runs kept together. ``only_a``, ``only_b`` and ``p_value`` are the exact McNemar
        test, for a single run of binary scores (runs of a prompt are not independent). ``prompts_needed`` is how
        many prompts detect the difference four times in five; missing where there is none to detect.

    Raises
    ------
    TypeError, ValueError
        Samples that cannot be read, or are not of the same prompts and runs, a task named ``all``, a difference that
        `check_detect` refuses.
    """
    detect = None if detect is None else check_detect(detect)
    pairs = match(read_samples(a), read_samples(b), str(a), str(b))
    if any(group.task == ALL_TASKS for group in pairs):
        raise ValueError(
            f"{a} has a task named {ALL_TASKS!r}; accepted: other names, since this one is the mean over tasks"
        )
    rows = []
    by_length: dict[tuple[int | None, str], dict[str, Pair]] = defaultdict(dict)
    for group, metrics in pairs.items():
        for metric, pair in metrics.items():
            rows.append(_row(group, metric, [pair], detect, seed))
            by_length[group.length, metric][group.task] = pair
    for (length, metric), tasks in by_length.items():
        if len(tasks) > 1:
            rows.append(_row(Group(ALL_TASKS, length), metric, list(tasks.values()), detect, seed))
    # Counts stay whole numbers beside missing ones.
    counts = dict.fromkeys(("length", "only_a", "only_b", "prompts_needed"), "Int64")
    return pd.DataFrame(rows, columns=COLUMNS).astype({**counts, "p_value": "float64"})


def check_detect(detect: float, unit: int = 1) -> float:
    """Check a difference that is to be detected, of either sign, and return it as one of scores from 0 to 1.

    Parameters
    ----------
    detect
        The difference.
    unit
        What a whole score counts: 1, or `POINTS`.

    Raises
    ------
    TypeError, ValueError
        It is no number, smaller than `SMALLEST_DIFFERENCE` or larger than a whole score.
    """
    smallest = f"{SMALLEST_DIFFERENCE * unit:g}"
    accepted = f"a difference of {smallest} to {unit}{' points' if unit == POINTS else ''}, or minus that"
    difference = check_number(detect, "detect", accepted) / unit
    if not SMALLEST_DIFFERENCE <= abs(difference) <= 1:
        raise ValueError(f"detect is {detect!r}; accepted: {accepted}")
    return difference


def match(a: list[Sample], b: list[Sample], name_a: str = "a", name_b: str = "b") -> dict[Group, dict[str, Pair]]:
    """Pair the scores of two set-ups prompt by prompt, checking that the prompts are the same.

    Parameters
    ----------
    a, b
        Samples.
    name_a, name_b
        What errors call them.

    Returns
    -------
    dict
        Group → metric → scores, by task and length.

    Raises
    ------
    ValueError
        A task, prompt, run or metric that only one of them has, a prompt with another hash (the first is named), or
        a prompt twice.
    """
    groups_a, groups_b = _by_group(a, name_a), _by_group(b, name_b)
    for one, other, name in ((groups_a, groups_b, name_b), (groups_b, groups_a, name_a)):
        if missing := [group for group in one if group not in other]:
            raise ValueError(f"{name} has no samples of {missing[0]}; accepted: the same tasks and lengths in both")
    return {
        group: _match_group(group, groups_a[group], groups_b[group], name_a, name_b)
        for group in sorted(groups_a, key=lambda group: (group.length or 0, group.task))
    }


Answers = dict[tuple[int, int], Sample]
"""(prompt, run) → sample."""


def _by_group(samples: list[Sample], name: str) -> dict[Group, Answers]:
    groups: dict[Group, Answers] = defaultdict(dict)
    for sample in samples:
        answers = groups[Group(sample.task, sample.length)]
        if (sample.prompt, sample.run) in answers:
            where = f"prompt {sample.prompt}, run {sample.run} of {Group(sample.task, sample.length)}"
            raise ValueError(f"{name} has {where} twice; accepted: once")
        answers[sample.prompt, sample.run] = sample
    return groups


def _match_group(group: Group, a: Answers, b: Answers, name_a: str, name_b: str) -> dict[str, Pair]:
    runs_a, runs_b = ({run for _, run in answers} for answers in (a, b))
    if runs_a != runs_b:
        counts = f"{len(runs_a)} of {group} and {name_b} {len(runs_b)}"
        raise ValueError(f"runs differ: {name_a} has {counts}; accepted: the same runs in both")
    prompts_a, prompts_b = ({prompt for prompt, _ in answers} for answers in (a, b))
    if len(prompts_a) != len(prompts_b):
        counts = f"{len(prompts_a)} of {group} and {name_b} {len(prompts_b)}"
        raise ValueError(f"prompts differ in number: {name_a} has {counts}; accepted: the same prompts in both")
    prompts, runs = sorted(prompts_a), sorted(runs_a)
    if len(prompts) < 2:
        raise ValueError(f"{name_a} has 1 prompt of {group}; accepted: at least 2, of which to form an interval")
    for key in [(prompt, run) for prompt in prompts for run in runs]:
        where = f"prompt {key[0]}, run {key[1]} of {group}"
        for answers, name in ((a, name_a), (b, name_b)):
            if key not in answers:
                raise ValueError(f"{name} lacks {where}; accepted: the same prompts and runs in both")
        if a[key].prompt_hash != b[key].prompt_hash:
            hashes = f"{a[key].prompt_hash[:12]} in {name_a}, {b[key].prompt_hash[:12]} in {name_b}"
            raise ValueError(f"{where} differs: hash {hashes}; accepted: the same prompts in both")
        if a[key].scores.keys() != b[key].scores.keys():
            metrics = f"{', '.join(a[key].scores)} in {name_a}, {', '.join(b[key].scores)} in {name_b}"
            raise ValueError(f"{where} has other metrics: {metrics}; accepted: the same in both")
    return {
        metric: Pair(*(_scores(answers, metric, prompts, runs) for answers in (a, b))) for metric in _metrics(group, a)
    }


def _metrics(group: Group, answers: Answers) -> list[str]:
    first, *others = answers.values()
    for other in others:
        if other.scores.keys() != first.scores.keys():
            raise ValueError(
                f"prompt {other.prompt} of {group} has other metrics than prompt {first.prompt}; accepted: the same"
            )
    return list(first.scores)


def _scores(answers: Answers, metric: str, prompts: list[int], runs: list[int]) -> np.ndarray:
    return np.array([[answers[prompt, run].scores[metric] for run in runs] for prompt in prompts], dtype=np.float64)


def _row(group: Group, metric: str, pairs: list[Pair], detect: float | None, seed: int) -> dict[str, object]:
    difference, low, high = stats.stratified_bootstrap(pairs, seed=seed)
    row = {
        **group._asdict(),
        "metric": metric,
        "prompts": sum(len(pair.a) for pair in pairs),
        "runs": pairs[0].a.shape[1],
        "mean_a": float(np.mean([pair.a.mean() for pair in pairs])),
        "mean_b": float(np.mean([pair.b.mean() for pair in pairs])),
        "difference": difference,
        "low": low,
        "high": high,
        "prompts_needed": _prompts_needed(pairs, difference if detect is None else detect),
    }
    (a, b), *others = pairs
    if not others and a.shape[1] == 1 and stats.is_binary(a) and stats.is_binary(b):
        row |= stats.mcnemar(a[:, 0], b[:, 0])._asdict()
    return row


def _prompts_needed(pairs: list[Pair], difference: float) -> int | None:
    """Of all tasks together, where they share the prompts evenly."""
    variances = [stats.paired_differences(*pair).var(ddof=1) for pair in pairs]
    deviation = math.sqrt(np.mean(variances))
    if not deviation or abs(difference) < SMALLEST_DIFFERENCE:
        return None
    return stats.prompts_needed(difference, deviation)


def as_document(table: pd.DataFrame, a: Path, b: Path) -> dict[str, object]:
    """Return the comparison as one JSON document: where the samples lie, and the rows, missing values as null."""
    rows = [
        {name: None if pd.isna(value) else value for name, value in row.items()} for row in table.to_dict("records")
    ]
    return {"a": str(a), "b": str(b), "rows": rows}


def as_text(table: pd.DataFrame, a: Path, b: Path) -> str:
    """Return what people read, scores in percent and differences in points."""
    lines = [f"a: {a}", f"b: {b}", "Scores in %, differences b − a in points with 95% intervals.", ""]
    return "\n".join([*lines, _for_people(table).to_string(index=False)])


def _for_people(table: pd.DataFrame) -> pd.DataFrame:
    def column(name: str, text: str) -> list[str]:
        return ["–" if pd.isna(value) else text.format(value) for value in table[name]]

    def points(name: str) -> list[str]:
        return [f"{100 * value:+.1f}".replace("-", "−") for value in table[name]]

    shown: Mapping[str, list[str]] = {
        "task": list(table["task"]),
        "length": column("length", "{:,}"),
        "metric": list(table["metric"]),
        "prompts": column("prompts", "{:,}"),
        "runs": column("runs", "{}"),
        "a": [f"{100 * value:.1f}" for value in table["mean_a"]],
        "b": [f"{100 * value:.1f}" for value in table["mean_b"]],
        "b − a": points("difference"),
        "interval": [f"{low} to {high}" for low, high in zip(points("low"), points("high"), strict=True)],
        "only a": column("only_a", "{}"),
        "only b": column("only_b", "{}"),
        "McNemar p": column("p_value", "{:.3g}"),
        "prompts needed": column("prompts_needed", "{:,}"),
    }
    return pd.DataFrame(shown)
