"""The process that measures: one engine of vLLM, driven step by step; its rows go to standard output as JSON lines.

It is started as a module with its `Job` as a JSON argument, and ends with the last point. What vLLM prints goes to
standard error.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from typing import TextIO

import numpy as np

from kvlab import provenance
from kvlab.serving.throughput.job import FULL, WARM_UP_STEPS, Job
from kvlab.serving.throughput.points import Step, summary, why_not

MAX_TEMPLATE_TOKENS = 4096
"""Of the request whose pages fill the others: some hundred pages of every layer to choose from."""
ADMISSION_STEPS = 2
"""After which the scheduler has admitted what fits (it works one step ahead)."""
STAGGER = 64
"""Lengths that sessions begin with: ``tokens`` and up to so many fewer, a multiple of the usual block sizes."""
QUIET_STEPS = 4
"""After which nothing of dropped sessions is under way."""


class Driver:
    """Builds vLLM's engine in this process and measures with it.

    Parameters
    ----------
    job
        What to measure.
    """

    def __init__(self, job: Job):
        # Before vLLM is imported, which reads it: the engine in this process, so that steps are its steps.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import SamplingParams
        from vllm.engine.arg_utils import EngineArgs
        from vllm.sampling_params import RequestOutputKind
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.v1.engine.llm_engine import LLMEngine

        if job.random_weights:
            # Registers the load format in this process; the workers import it as their extension.
            import kvlab.serving.throughput.weights  # noqa: F401

        started = time.perf_counter()
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        arguments = EngineArgs.from_cli_args(parser.parse_args(job.engine_arguments))
        self.engine = LLMEngine.from_engine_args(arguments)
        self.start_seconds = time.perf_counter() - started
        self.job = job
        # It is in this process, and says what no output does: who waits, who was thrown out.
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        config = self.engine.vllm_config
        self.scheduler_config, self.max_model_len = config.scheduler_config, config.model_config.max_model_len
        self.draw = np.random.default_rng(0)
        self.added, self.ended = 0, time.perf_counter()
        self.vocabulary = config.model_config.get_vocab_size()
        self.sampling = lambda tokens: SamplingParams(
            max_tokens=tokens,
            ignore_eos=True,
            # Random tokens, as random weights give them: greedy ones repeat, and repeated ones meet the same experts.
            temperature=1.0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )

    def columns(self) -> dict[str, object]:
        """Return what all rows of this engine share."""
        cache = self.scheduler.kv_cache_manager.kv_cache_config
        versions = f"{provenance.versions()}, vllm {importlib.metadata.version('vllm')}"
        return {
            # All tensors lie in one allocation.
            "cache_gb": cache.kv_cache_tensors[0].size / 1e9,
            "num_blocks": cache.num_blocks,
            "start_seconds": self.start_seconds,
            "machine": provenance.machine(),
            "versions": versions,
            "date": provenance.today(),
        }

    def prompt(self, tokens: int) -> list[int]:
        """Draw random tokens."""
        return self.draw.integers(self.vocabulary, size=tokens).tolist()

    def add(self, prompt: list[int], max_tokens: int) -> str:
        """Add a session; returns its name."""
        self.added += 1
        self.engine.add_request(str(self.added), {"prompt_token_ids": prompt}, self.sampling(max_tokens))
        return str(self.added)

    def step(self) -> Step:
        """Run one step of the engine; its time includes what was done since the last one."""
        outputs = self.engine.step()
        before, self.ended = self.ended, time.perf_counter()
        tokens = tuple(len(output.outputs[0].token_ids) for output in outputs)
        return Step(self.ended - before, tokens, sum(output.finished for output in outputs))

    def drop(self, names: list[str]) -> None:
        """End sessions and let the step that is still under way run out."""
        self.engine.abort_request(names)
        for _ in range(QUIET_STEPS):
            self.engine.step()

    def running(self) -> int:
        """Return how many sessions the scheduler has taken in."""
        return self.scheduler.get_request_counts()[0]

    def waiting(self) -> int:
        """Return how many sessions are in the scheduler's queue."""
        return self.scheduler.get_request_counts()[1]

    def preempted(self) -> int:
        """Return how often sessions that are alive were thrown out of the cache."""
        return sum(request.num_preemptions for request in self.scheduler.requests.values())


class Throughput(Driver):
    """Decode-only points."""

    def rows(self) -> Iterator[list[dict[str, object]]]:
        """Measure the job's points; a point may have several rows."""
        self.prefill_template()
        for point in self.job.points:
            tokens = min(point["context"], self.max_model_len - self.job.growth)
            measured = self._full(tokens) if point["point"] == FULL else [self._measure(int(point["point"]), tokens)]
            yield [{**point, "first_tokens": tokens, **row} for row in measured]

    def prefill_template(self) -> None:
        """Prefill the request whose pages fill all others, in one step."""
        room = min(self.scheduler_config.max_num_batched_tokens, self.max_model_len - 1, MAX_TEMPLATE_TOKENS)
        self.add(self.prompt(room), 1)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        self.drop([])

    def _full(self, tokens: int) -> list[dict[str, object]]:
        """Measure as many sessions as the cache holds to the end, and fewer should one be evicted as they grow."""
        rows, fit, limit = [], self._fill(tokens), self.scheduler_config.max_num_seqs
        if fit == limit:
            reason = f"limited: --max-num-seqs is {limit}, and as many sessions fit"
            return [{"fit": fit, "sessions": fit, "steps": 0, "counts": False, "reason": reason}]
        most = min(fit, self._expected(tokens + self.job.growth))
        for sessions in range(max(most, 1), 0, -1):
            rows.append({"fit": fit, **self._measure(sessions, tokens)})
            if rows[-1]["counts"]:
                break
        return rows

    def _expected(self, tokens: int) -> int:
        # Imports vLLM, which must not come before the environment is set.
        from kvlab.serving.capacity import sessions_while_decoding

        config = self.engine.vllm_config
        return int(sessions_while_decoding(config, self.scheduler.kv_cache_manager.kv_cache_config, tokens))

    def _fill(self, tokens: int) -> int:
        """Return how many sessions fit: offer more than that until the scheduler queues some."""
        most, offered = self.scheduler_config.max_num_seqs, self._expected(tokens) + 2
        names, fit = [], 0
        while len(names) < most and not self.waiting():
            names += [self.add(self.prompt(tokens), self.job.growth) for _ in range(min(offered, most) - len(names))]
            # A scheduler that works ahead brings nothing in the first step. In the second one sessions may grow by a
            # block that is not there, and one that works ahead evicts far more of them than it needs room for.
            for _ in range(2):
                self.engine.step()
                fit = max(fit, self.running())
            offered = len(names) + 1
        self.drop(names)
        return fit

    def _measure(self, sessions: int, tokens: int) -> dict[str, object]:
        # As sessions that came at different times: they do not all begin a new block in the same step.
        names = [self.add(self.prompt(tokens - i % min(STAGGER, tokens)), self.job.growth) for i in range(sessions)]
        seconds, reason = [], None
        for index in range(-WARM_UP_STEPS, self.job.steps):
            if index == 0:
                # Millions of numbers in lists of prompts, which Python's collector would walk every few dozen steps.
                gc.freeze()
            step = self.step()
            waiting, preempted = self.waiting(), self.preempted()
            # Who waits once sessions are admitted, waits for one to end; what a step brings is judged from the last
            # one before those that are timed.
            is_lost = index >= ADMISSION_STEPS - WARM_UP_STEPS and (waiting or preempted)
            if is_lost or index >= -1:
                reason = why_not(sessions, step, waiting=waiting, preempted=preempted)
            if reason:
                break
            if index >= 0:
                seconds.append(step.seconds)
        gc.unfreeze()
        self.drop(names)
        row = {"sessions": sessions, "steps": len(seconds), "counts": reason is None, "reason": reason}
        return {**row, **(summary(sessions, seconds) if reason is None else {})}


class FirstToken(Driver):
    """Time to first token."""

    def rows(self) -> Iterator[list[dict[str, object]]]:
        """Measure the job's points: one request at a time, after one that warms up."""
        for point in self.job.points:
            tokens = min(point["context"], self.max_model_len - 1)
            self._seconds(tokens)
            seconds = [self._seconds(tokens) for _ in range(self.job.requests)]
            row = {"first_tokens": tokens, "requests": self.job.requests}
            times = {"median_s": statistics.median(seconds), "fastest_s": min(seconds), "slowest_s": max(seconds)}
            yield [{**point, **row, **times}]

    def _seconds(self, tokens: int) -> float:
        prompt = self.prompt(tokens)
        started = time.perf_counter()
        self.add(prompt, 1)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        seconds = time.perf_counter() - started
        self.drop([])
        return seconds


def main(argument: str, out: TextIO) -> None:
    """Run the job and write a line per point."""
    job = Job(**json.loads(argument))
    driver = (Throughput if job.kind == "throughput" else FirstToken)(job)
    shared = driver.columns()
    for rows in driver.rows():
        print(json.dumps([{**row, **shared} for row in rows]), file=out, flush=True)
    driver.engine.engine_core.shutdown()


if __name__ == "__main__":
    # vLLM prints to standard output too; that goes to the log.
    pipe = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    main(sys.argv[1], pipe)
