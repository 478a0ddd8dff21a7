"""The process of an engine: started, read row by row, ended."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from kvlab.serving import server
from kvlab.serving.throughput.job import Job

ENGINE = "kvlab.serving.throughput.engine"

Rows = list[dict[str, object]]


def run_job(job: Job, name: str, logs: Path | None = None) -> Iterator[Rows]:
    """Run a job in a process of its own, which is ended with all that it started when the iteration ends.

    Parameters
    ----------
    job
        What to measure.
    name
        What it is called in errors and in the log's name.
    logs
        A folder that keeps what it prints; None keeps only the log of one that fails, in the temporary folder.

    Yields
    ------
    list of dict
        The rows of one point, as soon as it is measured.

    Raises
    ------
    ChildProcessError
        It failed, or ended before its last point.
    """
    handle, path = tempfile.mkstemp(prefix=f"kvlab-{name}-", suffix=".log", dir=logs)
    log = Path(path)
    process = subprocess.Popen(
        # -P: a folder called vllm in the working directory is not taken for the package.
        [sys.executable, "-P", "-m", ENGINE, json.dumps(dataclasses.asdict(job))],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=handle,
        text=True,
        # A group of its own: it is ended as a whole.
        start_new_session=True,
    )
    os.close(handle)
    measured = 0
    try:
        with closing(process.stdout):
            for line in process.stdout:
                yield json.loads(line)
                measured += 1
        code = process.wait()
    except (GeneratorExit, KeyboardInterrupt):
        if logs is None:
            log.unlink()
        raise
    finally:
        server.stop(process)
    if measured < len(job.points):
        raise ChildProcessError(
            f"the engine of {name} ended with exit code {code} after {measured} of {len(job.points)} points: "
            f"{_cause(log)} (its log: {log})"
        )
    if logs is None:
        log.unlink()


def _cause(log: Path) -> str:
    """Return the first error of a log, which those of other processes follow, or its last line."""
    end = deque(maxlen=1)
    with log.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if error := server.ERROR_LINE.match(line):
                return error["error"]
            if line.strip():
                end.append(line.strip())
    return "".join(end) or "it printed nothing"
