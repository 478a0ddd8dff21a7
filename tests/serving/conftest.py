import importlib.util
from contextlib import contextmanager
from functools import partial

import openai_client
import pytest
import torch
from served_checkpoint import MAX_TOKENS, write_served_checkpoint

from kvlab.serving import launch

# vLLM's FP8 cache needs a GPU or AVX-512. On other CPUs BF16 stands in, for stock and in the sliding-window layers.
HAS_FP8 = torch.cuda.is_available() or torch.backends.cpu.get_cpu_capability().startswith("AVX512")
STOCK = "fp8" if HAS_FP8 else "bf16"
SCHEMES = (STOCK, "hadamard-int4")

START_SECONDS = 300
# Prompts of more than 256 tokens come in chunks; 32 requests at once have to queue.
ARGUMENTS = [
    *("--served-model-name", openai_client.MODEL, "--max-model-len", str(MAX_TOKENS), "--enforce-eager"),
    *("--max-num-seqs", "16", "--max-num-batched-tokens", "256", "--enable-prompt-tokens-details"),
    # Replies are forced by a grammar, thoughts and tool calls among them: a random model has none of its own.
    "--structured-outputs-config",
    '{"backend": "xgrammar", "enable_in_reasoning": true}',
]
# The CPU build's: GB of cache, and no cores of its own, since two servers share them.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory):
    return write_served_checkpoint(tmp_path_factory.mktemp("kolibri1"))


@pytest.fixture(scope="session")
def start_server(tiny_checkpoint):
    """A context manager of a scheme's name, and of what `launch` takes beside it."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is missing; without a GPU .ci/install-serving-cpu installs it")

    @contextmanager
    def start(scheme, arguments=(), **options):
        cache = [] if HAS_FP8 or scheme == STOCK else ["--kv-cache-dtype", "auto"]
        run = partial(launch, tiny_checkpoint, scheme=scheme, environment=ENVIRONMENT, timeout=START_SECONDS)
        with run(arguments=[*ARGUMENTS, *cache, *arguments], **options) as server:
            yield server

    return start


@pytest.fixture(scope="session", params=SCHEMES)
def server(request, start_server, tmp_path_factory):
    with start_server(request.param, log_path=tmp_path_factory.mktemp("server") / f"{request.param}.log") as running:
        yield running


@pytest.fixture(scope="session")
def client(server):
    return openai_client.connect(server)
