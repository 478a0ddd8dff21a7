"""Logged samples: one JSON line for each prompt of a task, with its scores and a hash that says which prompt it was."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from kvlab.paths import written_whole

ENDING = ".jsonl"


@dataclass(frozen=True)
class Sample:
    """What one set-up answered to one prompt.

    Attributes
    ----------
    task
        Name of the task.
    length
        RULER's context length, in tokens; None where a task has none.
    run
        Which run, from 1.
    prompt
        Index of the prompt within its task and length.
    prompt_hash
        SHA-256 of the whole prompt, hexadecimal.
    scores
        Metric → score, from 0 to 1.
    target
        The right answer, as the harness has it.
    response
        What the model answered.
    """

    task: str
    length: int | None
    run: int
    prompt: int
    prompt_hash: str
    scores: dict[str, float]
    target: object
    response: str


TYPES = {"task": str, "length": (int, type(None)), "run": int, "prompt": int, "prompt_hash": str, "scores": dict}
"""What `kvlab.compare` relies on, and of which types it has to be."""

LARGEST = 2**63 - 1
"""What tables hold of whole numbers."""


def write_samples(path: Path, samples: Iterable[Sample]) -> None:
    """Write samples as JSON lines; the file appears whole or not at all."""
    with written_whole(path) as scratch, scratch.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(sample), ensure_ascii=False) + "\n" for sample in samples)


def read_samples(path: Path) -> list[Sample]:
    """Read the samples of a file, or of all ``.jsonl`` files in a folder.

    Raises
    ------
    ValueError
        There is no such file, a line is cut off or is no sample, a score is not from 0 to 1, or there are no samples.
    """
    if path.is_dir():
        files = sorted(file for file in path.glob(f"*{ENDING}") if file.is_file() and not file.name.startswith("."))
    else:
        files = [path] if path.is_file() else []
    if not files:
        accepted = f"a file of samples, or a folder with {ENDING} files, as kvlab eval writes them"
        raise ValueError(f"samples is {str(path)!r}, where there are none; accepted: {accepted}")
    samples = [sample for file in files for sample in _read_file(file)]
    if not samples:
        raise ValueError(f"samples is {str(path)!r}, which is empty; accepted: at least one sample")
    return samples


def _read_file(path: Path) -> list[Sample]:
    try:
        # With a byte order mark or without.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError:
        raise ValueError(f"samples file {path} is no UTF-8 text; accepted: JSON lines of kvlab eval") from None
    except OSError as error:
        raise ValueError(f"samples file {path} cannot be read ({error.strerror}); accepted: a readable file") from None
    # Whole files end in a line break; without one the last line may be cut off and still be valid JSON.
    if lines.pop():
        raise ValueError(f"samples file {path} is cut off in line {len(lines) + 1}; accepted: a whole file")
    return [_parse(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1)]


def _parse(line: str, where: str) -> Sample:
    try:
        record = json.loads(line)
        json.dumps(record, ensure_ascii=False).encode()
    # Beside what is no JSON: numbers of thousands of digits, brackets as deep, halves of surrogate pairs.
    except (ValueError, RecursionError):
        raise ValueError(f"samples file {where} is no JSON; accepted: a whole file of kvlab eval") from None
    names = [field.name for field in fields(Sample)]
    if not isinstance(record, dict) or set(record) != set(names):
        raise ValueError(f"samples file {where} is no sample; accepted: an object with {', '.join(names)}")
    for name, accepted in TYPES.items():
        if not isinstance(record[name], accepted):
            found = reprlib.repr(record[name])
            raise ValueError(f"samples file {where} has {name} {found}; accepted: as kvlab eval writes it")
        if isinstance(record[name], int) and not 0 <= record[name] <= LARGEST:
            found = reprlib.repr(record[name])
            raise ValueError(f"samples file {where} has {name} {found}; accepted: 0 to 2**63 - 1")
    if not record["scores"]:
        raise ValueError(f"samples file {where} has no score; accepted: one metric at least")
    for metric, score in record["scores"].items():
        # NaN and infinity are not JSON's, but Python reads and writes them.
        if not isinstance(score, int | float) or not 0 <= score <= 1:
            raise ValueError(f"samples file {where} has {metric} {reprlib.repr(score)}; accepted: a score from 0 to 1")
    return Sample(**record)
