import importlib.util
from contextlib import contextmanager
from functools import cache, partial

import openai_client
import pytest
from engines import CACHE_DTYPE, ENVIRONMENT, STOCK, run_engine, write_calibration
from served_checkpoint import MAX_TOKENS, write_served_checkpoint

from kvlab.serving import launch

SCHEMES = (STOCK, "hadamard-int4")

START_SECONDS = 300
# Prompts of more than 256 tokens come in chunks; 32 requests at once have to queue.
ARGUMENTS = [
    *("--served-model-name", openai_client.MODEL, "--max-model-len", str(MAX_TOKENS), "--enforce-eager"),
    *("--max-num-seqs", "16", "--max-num-batched-tokens", "256", "--enable-prompt-tokens-details"),
    # A cache of a few thousand tokens, whose blocks are used again and again.
    *("--num-gpu-blocks-override", "100"),
    # Replies are forced by a grammar, thoughts and tool calls among them: a random model has none of its own.
    "--structured-outputs-config",
    '{"backend": "xgrammar", "enable_in_reasoning": true}',
]


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory):
    return write_served_checkpoint(tmp_path_factory.mktemp("kolibri1"))


@pytest.fixture(scope="session")
def calibration(tmp_path_factory):
    return write_calibration(tmp_path_factory.mktemp("calibration") / "tiny.safetensors")


@pytest.fixture(scope="session")
def answers(tiny_checkpoint, calibration, tmp_path_factory):
    """What an engine of `engines.ENGINES` answers, by its name."""
    folder = tmp_path_factory.mktemp("engines")
    return cache(lambda name: run_engine(name, tiny_checkpoint, calibration, folder))


@pytest.fixture(scope="session")
def start_server(tiny_checkpoint):
    """A context manager of a scheme's name, and of what `launch` takes beside it."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is missing; without a GPU .ci/install-serving-cpu installs it")

    @contextmanager
    def start(scheme, arguments=(), **options):
        dtype = [] if scheme == STOCK else ["--kv-cache-dtype", CACHE_DTYPE]
        run = partial(launch, tiny_checkpoint, scheme=scheme, environment=ENVIRONMENT, timeout=START_SECONDS)
        with run(arguments=[*ARGUMENTS, *dtype, *arguments], **options) as server:
            yield server

    return start


@pytest.fixture(scope="session", params=SCHEMES)
def server(request, start_server, tmp_path_factory):
    with start_server(request.param, log_path=tmp_path_factory.mktemp("server") / f"{request.param}.log") as running:
        yield running


@pytest.fixture(scope="session")
def client(server):
    return openai_client.connect(server)
