"""Decode throughput and time to first token: an engine per scheme and number of GPUs, one table of all."""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from tqdm import tqdm

from kvlab.checks import check_integer, check_list, check_number
from kvlab.defaults import DECODE_STEPS, REQUESTS
from kvlab.models.model_config import read_model_config
from kvlab.paths import check_path
from kvlab.point_table import PointTable
from kvlab.serving import server
from kvlab.serving.arguments import ADDITIONAL_CONFIG, check_arguments, check_model
from kvlab.serving.throughput.job import (
    FULL,
    MAX_REPEATS,
    SESSIONS_LIMIT,
    Job,
    cache_arguments,
    decode_arguments,
    engine_arguments,
    max_num_seqs,
    without_secrets,
)
from kvlab.serving.throughput.process import run_job

ORIGIN = ("cache_gb", "num_blocks", "start_seconds", "weights", "machine", "versions", "date", "command")
NAMES = ("scheme", "tensor_parallel", "context")
TIMES = ("median_ms", "slowest_tenth", "tokens_per_s", "tokens_per_s_per_session")
THROUGHPUT_KEY = (*NAMES, "point", "repeat")
THROUGHPUT_COLUMNS = (*THROUGHPUT_KEY, "first_tokens", "fit", "sessions", "steps", *TIMES, "counts", "reason", *ORIGIN)
FIRST_TOKEN_COLUMNS = (*NAMES, "first_tokens", "requests", "median_s", "fastest_s", "slowest_s", *ORIGIN)
WORDS = ("scheme", "point", "counts", "reason", "weights", "machine", "versions", "date", "command")
"""Of all columns, those that are no numbers."""
FEWEST_TOKENS = 2
"""Of a context: one in the cache, and the last one, which is not."""
MAX_CACHE_GB = 1e9
"""More than any GPU has; as bytes, a number of 64 bits."""
ORIGIN_NOTE = "cache_gb: 1e9 bytes of cache per GPU, allocated. start_seconds: building the engine until it is ready."
THROUGHPUT_NOTES = (
    "Decode only: sessions begin with first_tokens tokens or up to 63 fewer, all but the last in the cache, and get",
    "one with every step.",
    "slowest_tenth: mean of the slowest tenth of the steps over the median. tokens_per_s: over all timed steps.",
    "counts: every timed step brought exactly one token to every session; else reason says why not, without a time.",
    "point full: as many sessions as the cache holds to the last step; fit: as many as it takes in before one queues.",
    ORIGIN_NOTE,
)
FIRST_TOKEN_NOTES = (
    "From adding one request of random tokens to its first token, nothing else running, after one that warms up.",
    ORIGIN_NOTE,
)


@dataclass(frozen=True)
class Setup:
    """What both benchmarks are told.

    Attributes
    ----------
    model
        A checkpoint folder or a hub name.
    schemes
        Names of ``kvlab serve``, or ``"int4-per-token-head"`` (vLLM's own).
    contexts
        In tokens.
    tensor_parallel
        Numbers of GPUs.
    cache_gb
        Cache per GPU in 1e9 bytes; None leaves it to vLLM (``--gpu-memory-utilization``).
    calibration
        The file of scheme ``"calibrated"``.
    random_weights
        Draw the weights; the folder needs a ``config.json`` only.
    arguments
        vLLM's own, after all others, so that they win; of ``--compilation-config`` as ``--compilation-config.key``.
    out
        A CSV file that is written point by point. One of the same settings is continued.
    logs
        A folder that keeps what vLLM prints; None keeps only the log of an engine that fails.
    command
        What the table names as its command.
    progress
        Show a progress bar on standard error.

    Raises
    ------
    TypeError, ValueError
        A value is not what is accepted.
    """

    model: str | Path
    schemes: Sequence[str]
    contexts: Sequence[int]
    tensor_parallel: Sequence[int] = (1,)
    cache_gb: float | None = None
    calibration: Path | None = None
    random_weights: bool = False
    arguments: Sequence[str] = ()
    out: Path | None = None
    logs: Path | None = None
    command: str = ""
    progress: bool = True

    def __post_init__(self) -> None:
        check_model(self.model)
        for name in ("schemes", "contexts", "tensor_parallel"):
            object.__setattr__(self, name, tuple(_check_some(getattr(self, name), name)))
        for name in ("calibration", "out", "logs"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, check_path(getattr(self, name), name))
        if self.calibration is not None and "calibrated" not in self.schemes:
            raise ValueError(f"calibration is {str(self.calibration)!r}; accepted: with scheme 'calibrated'")
        cache = [argument for scheme in self.schemes for argument in cache_arguments(scheme, self.calibration)]
        object.__setattr__(self, "arguments", tuple(check_arguments(self.arguments, cache=cache)))
        if self.cache_gb is not None and not 1e-9 <= check_number(self.cache_gb, "cache_gb") <= MAX_CACHE_GB:
            raise ValueError(f"cache_gb is {self.cache_gb}; accepted: from 1e-9, a byte, to {MAX_CACHE_GB:g}")
        if self.logs is not None and not self.logs.is_dir():
            raise ValueError(f"logs is {str(self.logs)!r}; accepted: a folder that exists")
        for context in self.contexts:
            check_integer(context, "context", minimum=FEWEST_TOKENS)
        gpus = torch.cuda.device_count()
        for number in self.tensor_parallel:
            # vLLM's CPU build has ranks without GPUs.
            if check_integer(number, "tensor_parallel", minimum=1) > gpus > 0:
                raise ValueError(f"tensor_parallel is {number}; accepted: at most the {gpus} GPUs of this machine")

    @property
    def positions(self) -> int:
        """Of the model."""
        config = read_model_config(str(self.model)).get_text_config()
        number = getattr(config, "max_position_embeddings", None)
        return check_integer(number, f"max_position_embeddings of model {str(self.model)!r}", minimum=1)

    def table(
        self, bench: str, columns: Sequence[str], key: Sequence[str], notes: Sequence[str], **settings: object
    ) -> PointTable:
        """Open the benchmark's table, whose rows share these settings and this setup's."""
        shared = {
            "bench": bench,
            "model": str(self.model),
            "weights": self.weights,
            "cache_gb": self.cache_gb,
            "calibration": None if self.calibration is None else str(self.calibration),
            "arguments": without_secrets(self.arguments),
        }
        numbers = [name for name in columns if name not in WORDS]
        return PointTable(self.out, columns=columns, key=key, numbers=numbers, settings=shared | settings, notes=notes)

    @property
    def weights(self) -> str:
        """How the table calls them."""
        return "random" if self.random_weights else Path(self.model).name


def bench_throughput(
    setup: Setup, *, sessions: Sequence[int | str], steps: int = DECODE_STEPS, repeats: int = 1
) -> pd.DataFrame:
    """Time decode steps of a filled engine at each number of sessions, from the most down.

    Parameters
    ----------
    setup
        Its contexts are the tokens with which sessions begin; where the model's positions would not do for the steps,
        as many fewer (``first_tokens`` in the table).
    sessions
        Numbers of sessions; ``"full"`` is as many as the cache holds, found by filling it.
    steps
        Timed for each point.
    repeats
        Of each curve, in the same engine.

    Returns
    -------
    pandas.DataFrame
        One row per point, those that do not count included with their reason.

    Raises
    ------
    TypeError, ValueError
        An argument is not what is accepted, there is no such model, or the table's file was not written with the same
        ones.
    ImportError
        vLLM or a plugin is missing.
    ChildProcessError
        An engine ended before its time; the points before are kept.
    """
    check_integer(steps, "steps", minimum=1)
    check_integer(repeats, "repeats", minimum=1, maximum=MAX_REPEATS)
    sessions = _check_some(sessions, "sessions")
    for number in sessions:
        if isinstance(number, str) and number != FULL:
            raise ValueError(f"sessions is {number!r}; accepted: an integer of at least 1, or {FULL!r}")
    most = max_num_seqs(setup.arguments)
    numbers = {
        # More than vLLM takes in would wait, and not for room in the cache.
        check_integer(number, "sessions", minimum=1, maximum=most or SESSIONS_LIMIT)
        for number in sessions
        if number != FULL
    }
    order = [*([FULL] if FULL in sessions else []), *sorted(numbers, reverse=True)]
    table = setup.table("throughput", THROUGHPUT_COLUMNS, THROUGHPUT_KEY, THROUGHPUT_NOTES, steps=steps)
    points = [
        {"context": context, "point": str(point), "repeat": repeat}
        for context in setup.contexts
        for repeat in range(1, repeats + 1)
        for point in order
    ]
    arguments = decode_arguments(order, most=most)
    job = Job("throughput", points, steps=steps, engine_arguments=arguments)
    return _run(setup, table, job)


def bench_first_token(setup: Setup, *, requests: int = REQUESTS) -> pd.DataFrame:
    """Time from adding one request of random tokens to its first token, really prefilled.

    Parameters
    ----------
    setup
        Its contexts are the tokens of the request (one fewer where they are all positions of the model).
    requests
        Of each context, after one that warms up.

    Returns
    -------
    pandas.DataFrame
        One row per scheme, number of GPUs and context.

    Raises
    ------
    TypeError, ValueError, ImportError
        As for `bench_throughput`; ChildProcessError is one.
    """
    check_integer(requests, "requests", minimum=1)
    table = setup.table("first-token", FIRST_TOKEN_COLUMNS, NAMES, FIRST_TOKEN_NOTES, requests=requests)
    points = [{"context": context} for context in setup.contexts]
    return _run(setup, table, Job("first-token", points, requests=requests, engine_arguments=["--max-num-seqs", "1"]))


def _run(setup: Setup, table: PointTable, job: Job) -> pd.DataFrame:
    """Measure what the table lacks, an engine after the other."""
    # Last of all checks, since the model may have to be asked for.
    positions = setup.positions
    if max(setup.contexts) > positions:
        raise ValueError(f"context is {max(setup.contexts)}; accepted: at most the model's {positions} positions")
    room = max(positions - FEWEST_TOKENS + job.steps - job.growth, 0)
    if job.steps > room:
        raise ValueError(f"steps is {job.steps}; accepted: at most {room}, as the model has {positions} positions")
    jobs = list(_jobs(setup, table, job, longest=min(max(setup.contexts) + job.growth, positions)))
    if jobs:
        # Says in one line what is missing, before any engine starts.
        asked = any(ADDITIONAL_CONFIG in each.engine_arguments for each in jobs)
        server.check_plugins(os.environ, with_cache=asked)
    every = len(setup.schemes) * len(setup.tensor_parallel) * len(job.points)
    left = sum(len(each.points) for each in jobs)
    with tqdm(total=every, initial=every - left, unit="point", disable=not setup.progress) as bar:
        for each in jobs:
            first = each.points[0]
            name = f"{first['scheme']}-tp{first['tensor_parallel']}"
            bar.set_description(name)
            for rows in run_job(each, name, setup.logs):
                table.append([{**row, "weights": setup.weights, "command": setup.command} for row in rows])
                bar.update()
    # Rows that were read are text still.
    return pd.read_csv(io.StringIO(table.frame.to_csv(index=False)))


def _jobs(setup: Setup, table: PointTable, job: Job, *, longest: int) -> Iterator[Job]:
    """Return the job of each engine, with the points that are not in the table."""
    for scheme in dict.fromkeys(setup.schemes):
        for number in dict.fromkeys(setup.tensor_parallel):
            points = table.lacking({"scheme": scheme, "tensor_parallel": number, **point} for point in job.points)
            arguments = engine_arguments(
                str(setup.model),
                scheme,
                number,
                longest,
                calibration=setup.calibration,
                random_weights=setup.random_weights,
                cache_gb=setup.cache_gb,
            )
            if points:
                every = [*arguments, *job.engine_arguments, *setup.arguments]
                yield dataclasses.replace(
                    job, points=points, random_weights=setup.random_weights, engine_arguments=every
                )


def _check_some(values: object, name: str) -> list:
    several = check_list(values, name)
    if not several:
        raise ValueError(f"{name} is {values!r}; accepted: a list of at least one")
    return several
