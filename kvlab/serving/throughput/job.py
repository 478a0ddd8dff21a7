"""What one engine is to measure, and vLLM's arguments for it."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvlab.checks import check_choice, check_integer
from kvlab.serving import server
from kvlab.serving.options import SCHEMES
from kvlab.serving.server import STOCK

FULL = "full"
"""The point with as many sessions as the cache holds."""
PER_TOKEN_HEAD = {
    "int4-per-token-head": (
        *("--kv-cache-dtype", "int4_per_token_head", "--kv-cache-dtype-skip-layers", "sliding_window"),
        # The one backend that has it.
        *("--attention-backend", "TRITON_ATTN"),
    )
}
"""vLLM's own 4-bit cache, for the full-attention layers as ours is."""
ALL_SCHEMES = (*STOCK, *SCHEMES, *PER_TOKEN_HEAD)

WARM_UP_STEPS = 16
SLACK_STEPS = 8
"""By how much sessions outlive the timed steps, so that none ends in them."""
MAX_SESSIONS = 512
"""Of the point with a full cache, unless ``--max-num-seqs`` says otherwise."""
SESSIONS_LIMIT = 65_536
"""Of any point: eight times as many as a step has tokens for, unless a user gives it more."""
MAX_REPEATS = 100
"""Of a curve: its points are handed to the engine in one argument, which Linux limits to 128 KiB."""
GRAPH_STEP, COARSE_GRAPH_STEP, COARSE_GRAPHS = 8, 16, 256
"""Batches of a full cache run in the next larger multiple's CUDA graph, beyond so many sessions in coarser ones."""
BATCHED_TOKENS = 8192
"""Of a step at most, as vLLM's server has it on large GPUs; it sets aside memory for that many."""
CONNECTOR = {
    "kv_connector": "FillConnector",
    "kv_role": "kv_both",
    "kv_connector_module_path": "kvlab.serving.throughput.fill",
}
SECRETS, SECRET = re.compile("-(token|key)$"), "…"
"""Options whose values are nobody's but the user's, and what a table shows for them."""
WEIGHTS = "kvlab.serving.throughput.weights"


@dataclass(frozen=True)
class Job:
    """One engine's work.

    Attributes
    ----------
    kind
        ``"throughput"`` or ``"first-token"``.
    points
        What to measure, in order: ``scheme``, ``tensor_parallel``, ``context``, and for throughput ``point`` (a number
        of sessions or ``"full"``) and ``repeat``.
    engine_arguments
        vLLM's, as on its command line.
    steps
        Timed per point, for throughput.
    requests
        Timed per point, for first tokens.
    random_weights
        Draw the weights.
    """

    kind: str
    points: list[dict[str, object]]
    engine_arguments: list[str]
    steps: int = 0
    requests: int = 0
    random_weights: bool = False

    @property
    def growth(self) -> int:
        """Tokens that a session decodes at most."""
        return WARM_UP_STEPS + self.steps + SLACK_STEPS


def cache_arguments(scheme: str, calibration: Path | None = None) -> list[str]:
    """Return vLLM's arguments for a scheme, as ``kvlab serve`` gives them.

    Raises
    ------
    TypeError, ValueError
        There is no such scheme, or it needs a calibration.
    """
    check_choice(scheme, "scheme", ALL_SCHEMES)
    if scheme in PER_TOKEN_HEAD:
        return list(PER_TOKEN_HEAD[scheme])
    return server.cache_arguments(scheme, calibration=calibration if scheme == "calibrated" else None)


def engine_arguments(
    model: str,
    scheme: str,
    tensor_parallel: int,
    max_tokens: int,
    *,
    calibration: Path | None = None,
    random_weights: bool = False,
    cache_gb: float | None = None,
) -> list[str]:
    """Return what every engine is started with.

    Parameters
    ----------
    model
        A folder or a hub name.
    scheme, calibration
        What the cache stores.
    tensor_parallel
        GPUs.
    max_tokens
        Of the longest session.
    random_weights
        Draw the weights.
    cache_gb
        Cache per GPU in 1e9 bytes; None leaves it to vLLM.
    """
    arguments = [
        *("--model", model, "--skip-tokenizer-init", "--tensor-parallel-size", str(tensor_parallel)),
        *("--max-model-len", str(max_tokens), "--max-num-batched-tokens", str(BATCHED_TOKENS)),
        *("--no-enable-prefix-caching", "--disable-log-stats", *cache_arguments(scheme, calibration)),
    ]
    if random_weights:
        arguments += ["--load-format", "kvlab-random", "--worker-extension-cls", f"{WEIGHTS}.WorkerExtension"]
    if cache_gb is not None:
        arguments += ["--kv-cache-memory-bytes", str(round(cache_gb * 1e9))]
    return arguments


def max_num_seqs(arguments: Sequence[str]) -> int | None:
    """Return the ``--max-num-seqs`` among a user's arguments for vLLM, or None.

    Raises
    ------
    ValueError
        Its value is no number of sessions.
    """
    # It completes what is cut short, as vLLM's own does.
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--max-num-seqs", "--max_num_seqs", type=int)
    try:
        most = parser.parse_known_args(list(arguments))[0].max_num_seqs
    except argparse.ArgumentError as error:
        raise ValueError(f"arguments have a wrong --max-num-seqs ({error.message}); accepted: an integer") from None
    return None if most is None else check_integer(most, "--max-num-seqs", minimum=1, maximum=SESSIONS_LIMIT)


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """Return vLLM's arguments as a table may show them: values of options named after a token or a key are dots."""
    shown, is_secret = [], False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        is_option = name.startswith("--")
        if is_secret and not is_option:
            shown.append(SECRET)
            continue
        is_secret = is_option and bool(SECRETS.search(name))
        shown.append(f"{name}={SECRET}" if is_secret and equals else argument)
    return shown


def decode_arguments(sessions: Sequence[int | str], *, most: int | None = None) -> list[str]:
    """Return what an engine needs beside to decode these numbers of sessions in full CUDA graphs, filled by us.

    Parameters
    ----------
    sessions
        Numbers, and ``"full"``.
    most
        Sessions at a time, where a user has said so.
    """
    numbers = [number for number in sessions if number != FULL]
    most = max([*numbers, most or MAX_SESSIONS] if FULL in sessions else numbers)
    sizes = set(numbers)
    if FULL in sessions:
        sizes |= {*range(GRAPH_STEP, min(COARSE_GRAPHS, most) + 1, GRAPH_STEP), most}
        sizes |= {*range(COARSE_GRAPHS, most, COARSE_GRAPH_STEP)}
    return [
        *("--max-num-seqs", str(most), "--kv-transfer-config", json.dumps(CONNECTOR)),
        # With a dot, so that a user's own key of the same option is added and does not replace these.
        "--compilation-config.cudagraph_mode=FULL_DECODE_ONLY",
        f"--compilation-config.cudagraph_capture_sizes={json.dumps(sorted(sizes))}",
    ]
