"""The engines that are started, each once, and all that each is asked; `engine_job` runs one of them."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import torch
from served_checkpoint import FULL, served_config

from kvlab.calibrate import Calibration

JOB = Path(__file__).with_name("engine_job.py")
SECONDS = 600

# On a CPU vLLM's FP8 cache needs AVX-512. So that every CPU tests the same, BF16 stands in there, for stock and in the
# sliding-window layers; with FP8 beside it the engine is tested on GPUs (tests/gpu/serving).
HAS_FP8 = torch.cuda.is_available()
STOCK = "fp8" if HAS_FP8 else "bf16"
CACHE_DTYPE = "fp8" if HAS_FP8 else "auto"

# The CPU build's: GB of cache, and no cores of its own, which servers and ranks share. On tensors this small threads
# only wait for each other.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # Seconds; by default a server closes a connection that was idle for 5, on a slow machine just as a client uses it.
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",
    # glibc keeps a freed buffer of up to 32 MB where it was mapped once, or not: a server's memory would go up and down
    # by as much. Bytes; set, it is fixed, and larger buffers return to the system at once.
    "MALLOC_MMAP_THRESHOLD_": "4194304",
}

draw = random.Random(0)


def tokens(length):
    return [draw.randrange(10, 256) for _ in range(length)]


# The window is 65 tokens, blocks have 16 to 128: lengths around them.
PROMPTS = [{"prompt": tokens(length)} for length in (9, 40, 64, 65, 66, 130, 300, 600) * 3]
SHARED = tokens(512)
TEXT_TOKENS = 96
WITH_PREFIX = [{"prompt": SHARED + tokens(n), "text": tokens(TEXT_TOKENS)} for n in (40, 1, 20, 33, 70, 100)]
ALONE = [{"prompt": tokens(length), "text": tokens(TEXT_TOKENS)} for length in (1, 64, 300, 900)]
TEXTS = WITH_PREFIX + ALONE
# Texts of one token over and over, so that n-grams are found and accepted: several tokens are verified at once.
REPEATED = 20
REPEATING = [{"prompt": tokens(n) + [REPEATED] * 5, "only": REPEATED, "new_tokens": TEXT_TOKENS} for n in (3, 60, 200)]


def one_by_one(requests):
    return {"requests": requests, "together": False}


ALL_PROMPTS, ALL_REPEATING = one_by_one(PROMPTS), one_by_one(REPEATING)
# A salt each: nothing is found in the cache.
FRESH = one_by_one([request | {"salt": str(number)} for number, request in enumerate(TEXTS)])
HITS = one_by_one([request | {"salt": "shared"} for request in WITH_PREFIX])
CROWD = {"requests": TEXTS, "together": True}

INT4 = {"scheme": "hadamard-int4"}
# One context of 2,048 takes 26 blocks: a crowd of ten texts, 6,800 tokens, has to preempt, and takes the blocks that
# others leave. Chunks of 48 tokens end in the middle of blocks.
SMALL = {"num_gpu_blocks_override": 30, "max_num_batched_tokens": 48}
# vLLM's connector that makes up what a prompt would have stored, all but the last token of it.
MADE_UP = {
    "enable_prefix_caching": False,
    "kv_transfer_config": {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both"},
}
NGRAM = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}}
ENGINES = {
    "bf16": {"rounds": {"prompts": ALL_PROMPTS}},
    "fp8": {"rounds": {"prompts": ALL_PROMPTS}, "engine": {"kv_cache_dtype": "fp8"}},
    "hadamard-int4": INT4
    | {"rounds": {"prompts": ALL_PROMPTS, "fresh": FRESH, "hits": HITS, "repeating": ALL_REPEATING}},
    "int4": {"scheme": "int4", "rounds": {"prompts": ALL_PROMPTS}},
    "calibrated": {"scheme": "calibrated", "rounds": {"prompts": ALL_PROMPTS}},
    "small": INT4 | {"rounds": {"fresh": FRESH, "crowd": CROWD}, "engine": SMALL, "poisoned": True},
    "two-ranks": INT4 | {"rounds": {"prompts": ALL_PROMPTS}, "engine": {"tensor_parallel_size": 2}},
    "compiled": INT4 | {"rounds": {"prompts": ALL_PROMPTS}, "engine": {"enforce_eager": False}},
    "decode-bench": INT4 | {"rounds": {"fresh": one_by_one(TEXTS[:2])}, "engine": MADE_UP},
    "n-grams": INT4 | {"rounds": {"repeating": ALL_REPEATING}, "engine": NGRAM},
}


def run_engine(name, checkpoint, calibration, folder):
    """Start the engine of that name on a checkpoint, ask it all, stop it; returns what `engine_job` writes."""
    chosen = ENGINES[name]
    scheme = chosen.get("scheme")
    option = {"kv_cache": scheme} | ({"calibration": str(calibration)} if scheme == "calibrated" else {})
    forces = any("text" in request for each in chosen["rounds"].values() for request in each["requests"])
    engine = {
        "model": str(checkpoint),
        "max_model_len": 2048,
        "max_num_seqs": 16,
        "enforce_eager": True,
        "kv_cache_dtype": CACHE_DTYPE if scheme else "auto",
        "additional_config": {"kolibri1": option} if scheme else {},
        "logits_processors": ["engine_job:Forced"] if forces else None,
        **chosen.get("engine", {}),
    }
    asked, answer = folder / f"{name}.asked.json", folder / f"{name}.json"
    asked.write_text(
        json.dumps({"engine": engine, "rounds": chosen["rounds"], "poisoned": chosen.get("poisoned", False)})
    )
    environment = os.environ | ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    command = [sys.executable, str(JOB), str(asked), str(answer)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return json.loads(answer.read_text())


def maps(num_kv_heads, generator, head_dim=128):
    """Matrices for a layer's KV heads: no rotations, but no direction is made three times another."""
    noise = torch.randn(num_kv_heads, head_dim, head_dim, generator=generator)
    scales = 0.6 + torch.rand(num_kv_heads, head_dim, generator=generator)
    return torch.linalg.qr(noise).Q * scales[:, None]


def write_calibration(path):
    """A calibration of the tiny model: a seed, means and maps for each full-attention layer, unequal bits for keys."""
    config = served_config()
    generator = torch.Generator().manual_seed(3)
    shape = (config.num_key_value_heads, config.head_dim)
    seeds = {layer: 11 + layer for layer in FULL}
    names = ("error_before", "error_after", "error_map", "value_error_before", "value_error_after")
    errors = dict.fromkeys(names, 0.0)
    manifest = {
        "format": "kvlab-calibration/1",
        "model": "tiny",
        "config_hash": "none",
        "num_kv_heads": shape[0],
        "head_dim": shape[1],
        "scheme": "hadamard-int4",
        "ingredients": ["rotation_seeds", "key_means", "key_maps", "value_means", "value_maps", "fine_channels"],
        "captures": [],
        "holdout": [],
        "search": {"seeds": list(seeds.values())},
        "layers": {str(layer): {"objectives": [0.0] * len(seeds), **errors} for layer in FULL},
    }
    # Normalised keys have components of order 1.
    means = [{layer: 0.5 * torch.randn(shape, generator=generator) for layer in FULL} for _ in range(2)]
    matrices = [{layer: maps(shape[0], generator) for layer in FULL} for _ in range(2)]
    # Two: with eight of a random map the spread of test_engine is 1.25, its bar, and with two 1.17 (AMD EPYC). With
    # "hadamard-int4-refit", whose choice of a range a rounding may tip, it is 1.28: that is for real keys to show.
    return Calibration(seeds, means[0], manifest, matrices[0], means[1], matrices[1], fine_channels=2).save(path)
