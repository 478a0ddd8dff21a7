"""vLLM's engine on a GPU, with CUDA graphs and the FP8 cache beside ours, against the library's simulation."""

import gc
import os
import random
from contextlib import contextmanager

import pytest
import torch
from served_checkpoint import write_served_checkpoint

import kvlab

pytest.importorskip("vllm", reason="needs vLLM: the extra `serving`")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.serving,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ENGINE = {"max_model_len": 2048, "max_num_seqs": 8, "gpu_memory_utilization": 0.1, "kv_cache_dtype": "fp8", "seed": 0}
LENGTHS = (9, 40, 64, 65, 66, 130, 300, 600, 900, 1200)
EAGER = {"enforce_eager": True}


def tokens(length, seed):
    draw = random.Random(seed)
    return [draw.randrange(10, 256) for _ in range(length)]


PROMPTS = [tokens(length, seed) for seed, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(write_served_checkpoint(tmp_path_factory.mktemp("kolibri1")))


@contextmanager
def engine(checkpoint, scheme=None, **options):
    # In this process, since importing vLLM takes longer than all of it; read when an engine is built.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    asked = {"kolibri1": {"kv_cache": scheme}} if scheme else {}
    llm = LLM(model=checkpoint, additional_config=asked, **ENGINE | options)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def of_prompt(llm, prompts):
    """Log-probabilities of all tokens of the prompts after the first."""
    from vllm import SamplingParams

    asked = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    answers = []
    for prompt in prompts:
        (output,) = llm.generate([{"prompt_token_ids": prompt}], asked, use_tqdm=False)
        answers += [at[token].logprob for at, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)]
    return torch.tensor(answers)


def continued(llm, prompts, max_tokens=48):
    """Texts that follow, their log-probabilities, and the tokens found in the prefix cache; all at once."""
    from vllm import SamplingParams

    asked = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], asked, use_tqdm=False)
    texts = [list(output.outputs[0].token_ids) for output in outputs]
    logprobs = [
        [at[token].logprob for at, token in zip(output.outputs[0].logprobs, text, strict=True)]
        for output, text in zip(outputs, texts, strict=True)
    ]
    return texts, torch.tensor(logprobs), [output.num_cached_tokens for output in outputs]


@pytest.fixture(scope="module")
def stock(checkpoint):
    """What stock's FP8 says of the prompts, as a server runs it and eagerly."""
    answers = []
    for options in ({}, EAGER):
        with engine(checkpoint, **options) as llm:
            answers.append(of_prompt(llm, PROMPTS))
    return answers


@pytest.fixture(scope="module")
def noise(stock):
    """How far two correct runs with FP8 are apart on this model.

    FlashAttention quantizes queries and probabilities too, so that BF16 rounding flips many of their 8-bit numbers.
    """
    served, eager = stock
    return (served - eager).abs().mean()


def simulated(checkpoint, schemes):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval().cuda()

    @torch.inference_mode()
    def of(prompt):
        logits = model(torch.tensor([prompt], device="cuda")).logits[0, :-1].float().log_softmax(-1)
        return logits.gather(1, torch.tensor(prompt[1:], device="cuda")[:, None])[:, 0].cpu()

    if schemes is None:
        return torch.cat([of(prompt) for prompt in PROMPTS])
    with kvlab.apply(model, schemes):
        return torch.cat([of(prompt) for prompt in PROMPTS])


@pytest.fixture(scope="module")
def served(checkpoint):
    """Of the engine as a server runs it, compiled and with full CUDA graphs: prompts, and texts decoded together."""
    with engine(checkpoint, "hadamard-int4") as llm:
        compilation = llm.llm_engine.vllm_config.compilation_config
        texts, logprobs, _ = continued(llm, PROMPTS)
        again = of_prompt(llm, [prompt + text for prompt, text in zip(PROMPTS, texts, strict=True)])
        return {
            "cudagraph_mode": compilation.cudagraph_mode.name,
            "prompts": of_prompt(llm, PROMPTS),
            "texts": texts,
            "decoded": logprobs,
            "prefilled": again,
        }


def test_decoding_runs_in_full_graphs(served):
    assert "FULL" in served["cudagraph_mode"]


def test_served_is_what_was_simulated(checkpoint, served, stock, report):
    ours = served["prompts"] - simulated(checkpoint, {"full": "hadamard-int4", "sliding": "fp8"})
    # The simulation stores FP8, but does not compute in it: stock's own distance from it is the floor.
    floor = stock[0] - simulated(checkpoint, "fp8")
    between, fp8 = served["prompts"] - stock[0], stock[0] - simulated(checkpoint, None)
    distances = [f"{x.abs().mean():.4f} (mean {x.mean():+.4f})" for x in (ours, floor, between, fp8)]
    names = ("served - simulated", "stock - simulated FP8", "4-bit - stock", "stock - BF16")
    report(", ".join(f"{name} {distance}" for name, distance in zip(names, distances, strict=True)))
    assert ours.isfinite().all()
    assert ours.abs().mean() <= 1.25 * floor.abs().mean()
    error = (floor.std() / len(floor) ** 0.5).item()
    assert abs(ours.mean()) <= 1.25 * (abs(floor.mean()) + 3 * error)


def test_decoding_agrees_with_prefill(served, noise):
    ends = torch.tensor([len(prompt) + 48 - 1 for prompt in PROMPTS]).cumsum(0)
    prefilled = torch.stack([served["prefilled"][end - 48 : end] for end in ends])
    assert served["decoded"].isfinite().all()
    # One kernel of ours or another, one of stock's or another in the sliding-window layers.
    assert (served["decoded"] - prefilled).abs().mean() < 1.25 * noise


@pytest.mark.parametrize("options", [EAGER, {**EAGER, "max_num_batched_tokens": 48}], ids=["eager", "chunks-of-48"])
def test_however_it_is_computed(checkpoint, served, noise, options):
    with engine(checkpoint, "hadamard-int4", **options) as llm:
        other = of_prompt(llm, PROMPTS)
    assert (other - served["prompts"]).abs().mean() < 1.25 * noise


def test_speculated_tokens_are_verified_to_the_same_text(checkpoint, noise):
    # Text that repeats itself, so that n-grams are found: 3 tokens are then verified at once.
    phrase = [20, 70, 33, 90, 41, 55, 62]
    prompts = [phrase * 12, phrase[::-1] * 20]
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    with engine(checkpoint, "hadamard-int4", speculative_config=ngram) as llm:
        texts, logprobs, _ = continued(llm, prompts)
        expected = of_prompt(llm, [prompt + text for prompt, text in zip(prompts, texts, strict=True)])
    ends = torch.tensor([len(prompt) + 48 - 1 for prompt in prompts]).cumsum(0)
    prefilled = torch.stack([expected[end - 48 : end] for end in ends])
    assert (logprobs - prefilled).abs().mean() < 1.25 * noise


def test_a_prefix_from_the_cache_and_preemption_change_nothing(checkpoint, served, noise):
    # Room for little more than the longest: they take turns, and come back to what is left of them.
    few = {"num_gpu_blocks_override": 220, "max_model_len": 1280}
    with engine(checkpoint, "hadamard-int4", **EAGER, **few) as llm:
        first, one, _ = continued(llm, PROMPTS)
        second, two, cached = continued(llm, PROMPTS)
    assert max(cached) > 0
    for text, logprobs in ((first, one), (second, two)):
        for ours, theirs, a, b in zip(text, served["texts"], logprobs, served["decoded"], strict=True):
            # Greedy texts part where two tokens are close; until then they are one.
            same = next((i for i, (x, y) in enumerate(zip(ours, theirs, strict=True)) if x != y), len(ours))
            assert same == 0 or (a[:same] - b[:same]).abs().mean() < 3 * noise
