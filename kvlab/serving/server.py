"""Start vLLM's server, stock and with the 4-bit cache alike: its command line, and a server as a context manager."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from kvlab.checks import check_choice, check_integer, check_number
from kvlab.paths import check_path
from kvlab.serving.arguments import ADDITIONAL_CONFIG, check_arguments, check_calibration, check_model, refuse
from kvlab.serving.options import SCHEMES, SECTION, Options

LOOPBACK = "127.0.0.1"
PORT = 8000
MAX_PORT = 65_535
STOCK = {"bf16": "auto", "fp8": "fp8"}
"""Schemes that vLLM has itself → its ``--kv-cache-dtype``; its CPU build knows BF16 as ``auto`` only."""

PARSERS = ("--reasoning-parser", "kolibri1", "--tool-call-parser", "kolibri1", "--enable-auto-tool-choice")
"""How Kolibri-1's replies are read, by the names that the model's plugin registers."""

INSTALL = "pip install 'kvlab[serving]'"
PLUGIN_GROUP = "vllm.general_plugins"
MODEL_PLUGIN, CACHE_PLUGIN = "aleph_alpha_inference", "kvlab"

START_SECONDS = 1800.0
"""78 B parameters from a slow disk, and CUDA graphs."""
STOP_SECONDS = 30.0
"""For the server to end by itself when it is asked to."""
CLEAN_UP_SECONDS = 5.0
"""For the processes it started, which free shared memory after it has ended."""
POLL_SECONDS = 0.2
LOG_LINES = 60
"""Of a server that failed: the last traceback."""
ERROR_LINE = re.compile(r"(\([^)]*\) )?(\[rank\d+\]: )?(ERROR [^\]]*\] )?(?P<error>[\w.]*(Error|Exception): .*)")
"""The last line of a traceback, as Python prints it, behind what vLLM and torch put before it."""


@dataclass(frozen=True)
class Server:
    """A server that answers.

    Attributes
    ----------
    url
        Where: ``http://127.0.0.1:8000``.
    log_path
        The file with what it prints.
    process
        The first of its processes, leader of their group.
    """

    url: str
    log_path: Path
    process: subprocess.Popen

    @property
    def base_url(self) -> str:
        """What ``openai.OpenAI(base_url=…, api_key=…)`` takes."""
        return f"{self.url}/v1"


def serve_command(
    model: str | Path,
    *,
    scheme: str | None = None,
    calibration: str | Path | None = None,
    rotation_seed: int | None = None,
    host: str = LOOPBACK,
    port: int = PORT,
    arguments: Sequence[str] = (),
) -> list[str]:
    """Return the command that serves Kolibri-1, as one would type it.

    Parameters
    ----------
    model
        A checkpoint folder or a hub name.
    scheme
        What the cache stores: ``"bf16"``, ``"fp8"`` (stock), or 4 bits in the full-attention layers and FP8 in the
        others: ``"hadamard-int4"`` (the default), ``"hadamard-int4-refit"``, ``"hadamard-int4-refit-kv"``, ``"int4"``,
        ``"calibrated"`` (the default with ``calibration``).
    calibration
        A file that ``kvlab calibrate`` wrote.
    rotation_seed
        Of the rotation of keys; None is the library's.
    host, port
        Where it listens. Nothing but this machine reaches the default; before widening it, see vLLM's ``--api-key``.
    arguments
        vLLM's own, after all others, so that they win.

    Raises
    ------
    TypeError, ValueError
        A value is none of these, the options do not go together, the calibration cannot be read, has what is not
        served or does not fit a ``model`` that is here, or ``arguments`` would replace the one that asks for the 4-bit
        cache.
    """
    cache = cache_arguments(scheme, calibration=calibration, rotation_seed=rotation_seed)
    model, arguments = check_model(model), check_arguments(arguments, cache=cache)
    if calibration is not None:
        check_calibration(calibration, model)
    listen = ["--host", _check_host(host), "--port", str(_check_port(port))]
    return ["vllm", "serve", model, *listen, *cache, *PARSERS, *arguments]


def cache_arguments(
    scheme: str | None = None, *, calibration: str | Path | None = None, rotation_seed: int | None = None
) -> list[str]:
    """Return vLLM's arguments for what the cache stores; parameters and errors as for `serve_command`."""
    if scheme is None:
        scheme = "hadamard-int4" if calibration is None else "calibrated"
    check_choice(scheme, "scheme", [*STOCK, *SCHEMES])
    if scheme in STOCK:
        for name, value in (("calibration", calibration), ("rotation_seed", rotation_seed)):
            if value is not None:
                raise ValueError(f"{name} is {str(value)!r} with scheme {scheme!r}; accepted: with a 4-bit scheme")
        return ["--kv-cache-dtype", STOCK[scheme]]
    path = None if calibration is None else str(check_path(calibration, "calibration").absolute())
    options = Options(kv_cache=scheme, rotation_seed=rotation_seed, calibration=path)
    if path is not None:
        from kvlab.serving.schemes import served_scheme

        # Refuses here, in a line, what every worker of the server would end on.
        served_scheme(options)
    section = {name: value for name, value in vars(options).items() if value is not None}
    # default: NumPy's integers are accepted, and no JSON.
    return ["--kv-cache-dtype", "fp8", ADDITIONAL_CONFIG, json.dumps({SECTION: section}, default=int)]


def runnable(command: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return the command as this interpreter runs it, once vLLM and the plugins it needs are known to be found.

    Parameters
    ----------
    command
        Of `serve_command`.
    environment
        The variables it will run with.

    Raises
    ------
    ImportError, ValueError
        As for `check_plugins`.
    """
    check_plugins(environment, with_cache=ADDITIONAL_CONFIG in command)
    # -P: a folder called vllm in the working directory is not taken for the package.
    return [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", *command[1:]]


def check_plugins(environment: Mapping[str, str], *, with_cache: bool) -> None:
    """Check that vLLM is there and finds the model's plugin.

    vLLM ignores ``--additional-config`` that no plugin reads: it would serve stock and say nothing.

    Parameters
    ----------
    environment
        The variables that vLLM will run with.
    with_cache
        And this library's plugin, for the 4-bit cache.

    Raises
    ------
    ImportError
        vLLM or a plugin is missing.
    ValueError
        ``VLLM_PLUGINS`` excludes a plugin.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ImportError(f"vLLM is missing; install it with: {INSTALL}")
    installed = {plugin.name for plugin in entry_points(group=PLUGIN_GROUP)}
    chosen = environment.get("VLLM_PLUGINS")
    for name in (MODEL_PLUGIN, CACHE_PLUGIN) if with_cache else (MODEL_PLUGIN,):
        if name not in installed:
            raise ImportError(f"vLLM finds no plugin {name!r}; install it with: {INSTALL}")
        if chosen is not None and name not in chosen.split(","):
            raise ValueError(f"VLLM_PLUGINS is {chosen!r}; accepted: a list with {name!r} in it, or unset")


@contextmanager
def launch(
    model: str | Path,
    *,
    scheme: str | None = None,
    calibration: str | Path | None = None,
    rotation_seed: int | None = None,
    host: str = LOOPBACK,
    port: int | None = None,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    log_path: str | Path | None = None,
    timeout: float = START_SECONDS,
) -> Iterator[Server]:
    """Run a server as long as the ``with`` block: ``with launch("Aleph-Alpha/Kolibri-1") as server: …``.

    It is stopped with all its processes when the block ends, whatever ends it.

    Parameters
    ----------
    model, scheme, calibration, rotation_seed, host, arguments
        As for `serve_command`.
    port
        Where it listens; None is a free one.
    environment
        Variables beside those of this process.
    log_path
        Where it prints to; None is a new file in the temporary folder, which stays.
    timeout
        Seconds until it has to answer.

    Yields
    ------
    Server
        Ready for requests.

    Raises
    ------
    TypeError, ValueError
        As for `serve_command`; ``port`` is in use, or given among ``arguments``; ``environment``, ``log_path`` or
        ``timeout`` cannot be.
    ImportError
        vLLM or a plugin is missing.
    RuntimeError
        The server ended before it answered; the first error of its log and the end are in the message.
    TimeoutError
        It did not answer in time; likewise.
    """
    if check_number(timeout, "timeout") <= 0:
        raise ValueError(f"timeout is {timeout}; accepted: more than 0 seconds")
    variables = {**os.environ, **_check_environment(environment or {})}
    arguments = check_arguments(arguments)
    for option in ("--host", "--port"):
        refuse(arguments, option, f"without it, as {option[2:]}=…")
    port = _find_port(_check_host(host), port)
    command = serve_command(
        model,
        scheme=scheme,
        calibration=calibration,
        rotation_seed=rotation_seed,
        host=host,
        port=port,
        arguments=arguments,
    )
    program = runnable(command, variables)
    if log_path is None:
        handle, log_path = tempfile.mkstemp(prefix="kvlab-serve-", suffix=".log")
        os.close(handle)
    with _open_log(log_path) as log:
        process = subprocess.Popen(
            program,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # A group of its own: it is stopped as a whole, and Ctrl-C in a terminal reaches it through us only.
            start_new_session=True,
        )
    try:
        server = Server(_url(host, port), Path(log.name), process)
        _wait_until_healthy(server, timeout)
        yield server
    finally:
        stop(process)


def _check_host(host: str) -> str:
    # An empty one would be every address.
    if not isinstance(host, str) or not host:
        raise ValueError(f"host is {host!r}; accepted: an address or a name, 127.0.0.1 for this machine only")
    return host


def _check_port(port: int) -> int:
    return check_integer(port, "port", minimum=1, maximum=MAX_PORT)


def _check_environment(environment: Mapping[str, str]) -> Mapping[str, str]:
    if not isinstance(environment, Mapping) or not all(isinstance(text, str) for text in chain(*environment.items())):
        # Without its values, which may be secret.
        kind = type(environment).__name__
        raise TypeError(f"environment is a {kind}, not of strings only; accepted: a dict of names and their values")
    return environment


def _open_log(log_path: str | Path) -> BinaryIO:
    try:
        return check_path(log_path, "log_path").open("wb")
    except OSError as error:
        raise ValueError(f"log_path is {str(log_path)!r} ({error.strerror}); accepted: a file to write to") from None


def _find_port(host: str, port: int | None) -> int:
    """Return ``port`` if nothing listens there, whose health would be taken for the server's; for None a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, 0 if port is None else _check_port(port)), family=family) as probe:
            return probe.getsockname()[1]
    except OSError as error:
        where = "host" if port is None else f"port is {port}, host"
        raise ValueError(f"{where} is {host!r} ({error.strerror}); accepted: where a server can listen") from None


def _url(host: str, port: int) -> str:
    """Return where to reach a server that listens on ``host``, which may be all addresses."""
    reached = {"0.0.0.0": LOOPBACK, "": LOOPBACK, "::": "::1"}.get(host, host)
    return f"http://[{reached}]:{port}" if ":" in reached else f"http://{reached}:{port}"


def _wait_until_healthy(server: Server, timeout: float) -> None:
    import httpx

    deadline = time.monotonic() + timeout
    # No proxy of the environment comes between this process and a server that it started.
    with httpx.Client(trust_env=False) as client:
        while time.monotonic() < deadline:
            code = server.process.poll()
            if code is not None:
                raise RuntimeError(f"the server ended with exit code {code} before it answered{_log_says(server)}")
            with suppress(httpx.TransportError):
                if client.get(f"{server.url}/health").is_success:
                    return
            time.sleep(POLL_SECONDS)
    raise TimeoutError(f"the server did not answer within {timeout:g} s{_log_says(server)}")


def _log_says(server: Server) -> str:
    """Return the first error of the log, which those of the waiting processes follow, and the log's end."""
    cause, end = None, deque(maxlen=LOG_LINES)
    with server.log_path.open(encoding="utf-8", errors="replace") as log:
        for line in log:
            cause = cause or ERROR_LINE.match(line)
            end.append(line)
    first = f": {cause['error']}" if cause else ""
    return f"{first}; the end of its log ({server.log_path}):\n{''.join(end)}"


def stop(process: subprocess.Popen) -> None:
    """Ask the whole group to end, give it time, end what is left."""
    try:
        if _signal_group(process, signal.SIGTERM):
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
            deadline = time.monotonic() + CLEAN_UP_SECONDS
            while process.returncode is not None and _signal_group(process, 0) and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
    finally:
        _signal_group(process, signal.SIGKILL)
        process.wait()


def _signal_group(process: subprocess.Popen, number: int) -> bool:
    """Send a signal to all processes of the server; False if there are none."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return False
    return True
