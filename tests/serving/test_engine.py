"""The served 4-bit cache against the library's simulation of it, and against itself however vLLM runs a batch."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kvlab

pytest.importorskip("vllm", reason="needs vLLM: .ci/install-serving-cpu installs its CPU build")

pytestmark = pytest.mark.serving

JOB = Path(__file__).with_name("prompt_logprobs.py")
SCHEMES = ("hadamard-int4", "int4")
# What this machine's vLLM can store in the sliding-window layers does not matter here, so that any machine will do.
ENGINE = {"max_model_len": 2048, "max_num_seqs": 8, "enforce_eager": True, "kv_cache_dtype": "auto"}
LENGTHS = (9, 40, 64, 65, 66, 130, 300, 600)


@pytest.fixture(scope="module")
def prompts():
    draw = random.Random(0)
    return [[draw.randrange(10, 256) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def ask(tiny_checkpoint, tmp_path_factory):
    """Ask an engine; each configuration is started once."""
    known = {}

    def ask(prompts, scheme=None, *, max_tokens=0, **engine):
        options = {"kolibri1": {"kv_cache": scheme}} if scheme else {}
        asked = {
            "model": str(tiny_checkpoint),
            "engine": ENGINE | {"additional_config": options} | engine,
            "prompts": prompts,
            "max_tokens": max_tokens,
        }
        key = json.dumps(asked, sort_keys=True)
        if key not in known:
            folder = tmp_path_factory.mktemp("engine")
            (folder / "asked.json").write_text(key)
            command = [sys.executable, str(JOB), str(folder / "asked.json"), str(folder / "answer.json")]
            # The CPU build's: 1 GB of cache instead of half of the machine's memory, and ranks that share its cores.
            environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
            done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment)
            assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
            known[key] = json.loads((folder / "answer.json").read_text())
        return known[key]

    return ask


def flat(answers, part="prompt"):
    return torch.tensor([value for answer in answers for value in answer[part]])


@pytest.fixture(scope="module")
def simulated(tiny_checkpoint, prompts):
    """Log-probabilities from transformers in BF16, plain and with the scheme applied to the full-attention layers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def of(prompt):
        logits = model(torch.tensor([prompt])).logits[0, :-1].float().log_softmax(-1)
        return {"prompt": logits.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()}

    results = {None: flat([of(prompt) for prompt in prompts])}
    for scheme in SCHEMES:
        with kvlab.apply(model, {"full": scheme}):
            results[scheme] = flat([of(prompt) for prompt in prompts])
    return results


@pytest.mark.parametrize("scheme", SCHEMES)
def test_served_is_what_was_simulated(ask, prompts, simulated, scheme):
    served, stock = flat(ask(prompts, scheme)), flat(ask(prompts))
    assert served.isfinite().all()
    # How far two correct BF16 implementations are apart on this model is measured, not assumed.
    noise = (stock - simulated[None]).abs().mean()
    # Codes flip where BF16 noise moves a key across a rounding boundary: half as much again, of the same kind.
    assert (served - simulated[scheme]).abs().mean() < 1.5 * noise
    # And the scheme is there at all: what it stores is not what stock stores.
    assert (served - stock).abs().mean() > 0.2 * noise


def test_mean_log_probability_is_the_simulated_one(ask, prompts, simulated):
    tokens = len(simulated[None])
    served, stock = flat(ask(prompts, "hadamard-int4")), flat(ask(prompts))
    spread = (stock - simulated[None]).std() / tokens**0.5
    # The mean of that many differences of BF16 noise, three times its standard error.
    assert abs((served - simulated["hadamard-int4"]).mean()) < 3 * 1.5 * spread


@pytest.mark.parametrize(
    "engine",
    [
        {"max_num_batched_tokens": 48, "enable_chunked_prefill": True},
        {"tensor_parallel_size": 2},
        {"enforce_eager": False},
    ],
    ids=["chunks-of-48", "two-ranks", "compiled"],
)
def test_however_it_is_computed(ask, prompts, simulated, engine):
    plain, other = flat(ask(prompts, "hadamard-int4")), flat(ask(prompts, "hadamard-int4", **engine))
    noise = (flat(ask(prompts)) - simulated[None]).abs().mean()
    assert other.isfinite().all()
    assert (other - plain).abs().mean() < 1.5 * noise


def test_speculated_tokens_are_verified_to_the_same_text(ask):
    # Text that repeats itself, so that n-grams are found: 3 tokens are then verified at once.
    phrase = [20, 70, 33, 90, 41, 55, 62]
    prompts = [phrase * 12, phrase[::-1] * 20]
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    plain = ask(prompts, "hadamard-int4", max_tokens=24)
    speculated = ask(prompts, "hadamard-int4", max_tokens=24, speculative_config=ngram)
    for one, other in zip(plain, speculated, strict=True):
        agree = next((i for i, (a, b) in enumerate(zip(one["tokens"], other["tokens"], strict=True)) if a != b), 24)
        # Sums of another order may choose another of two close tokens; until then all is alike to BF16's noise.
        assert agree > 0
        both = torch.tensor([one["text"][:agree], other["text"][:agree]])
        assert (both[0] - both[1]).abs().mean() < 0.1


def test_a_prefix_from_the_cache_changes_nothing(ask):
    draw = random.Random(1)
    prefix = [draw.randrange(10, 256) for _ in range(512)]
    tails = [[draw.randrange(10, 256) for _ in range(length)] for length in (20, 33, 70)]
    prompts = [prefix + tail for tail in tails]
    # The first fills the cache, the others find its blocks.
    hits = ask(prompts, "hadamard-int4", max_tokens=16, enable_prefix_caching=True)
    fresh = ask(prompts, "hadamard-int4", max_tokens=16, enable_prefix_caching=False)
    assert hits[0]["cached"] == 0 and all(answer["cached"] > 0 for answer in hits[1:])
    for hit, full in zip(hits, fresh, strict=True):
        agree = next((i for i, (a, b) in enumerate(zip(hit["tokens"], full["tokens"], strict=True)) if a != b), 16)
        assert agree > 0
        means = [sum(answer["text"][:agree]) / agree for answer in (hit, full)]
        assert abs(means[0] - means[1]) < 5e-3 or agree < 16
