"""Chunks, prefixes from the cache, preemption, reused blocks, speculation: none of it changes an answer.

Texts are forced token by token after a prompt and their log-probabilities compared: those of a prompt itself would
skip the prefix cache, and texts chosen freely part for good where two tokens are as likely. What is bound is the mean
over some hundred tokens. A single token may differ by 0.01, one in a hundred by 0.2: products of other shapes sum in
another order, BF16 rounds otherwise, another code or another expert is chosen, as it is between any two BF16
implementations. So the mean has an error of about 1e-3. A wrong block or mask moves tokens by several units.
"""

import pytest
import torch
from engines import REPEATING, TEXT_TOKENS, TEXTS, WITH_PREFIX

pytest.importorskip("vllm", reason="needs vLLM: .ci/install-serving-cpu installs its CPU build")

pytestmark = pytest.mark.serving

SAME = 5e-3


@pytest.fixture(scope="module")
def fresh(answers):
    """The texts of an engine with room, one after the other, nothing in the cache, prompts in one piece."""
    found = answers("hadamard-int4")["rounds"]["fresh"]
    assert [answer["cached"] for answer in found] == [0] * len(TEXTS)
    return found


def check_same(some, others, what, report):
    pairs = [
        (a, b) for one, other in zip(some, others, strict=True) for a, b in zip(one["text"], other["text"], strict=True)
    ]
    assert len(pairs) == TEXT_TOKENS * len(some)
    difference = torch.tensor(pairs).diff(dim=1)
    assert difference.isfinite().all()
    mean, error = abs(difference.mean().item()), difference.std().item() / len(pairs) ** 0.5
    report(f"{what}: {mean:.4f} ± {error:.4f} in mean log-probability of {len(pairs)} tokens")
    # Else the test could tell nothing.
    assert error < SAME / 2
    assert mean <= SAME


def test_texts_are_the_forced_ones(fresh):
    assert [answer["tokens"] for answer in fresh] == [request["text"] for request in TEXTS]


def test_a_prefix_from_the_cache(answers, fresh, report):
    first, *hits = answers("hadamard-int4")["rounds"]["hits"]
    # The first fills the cache, the others find its blocks.
    assert first["cached"] == 0
    assert all(answer["cached"] > 0 for answer in hits)
    check_same(hits, fresh[1 : len(WITH_PREFIX)], "a prefix from the cache", report)


def test_chunks_on_memory_that_held_anything(answers, fresh, report):
    check_same(answers("small")["rounds"]["fresh"], fresh, "chunks of 48 tokens", report)


def test_preempted_and_resumed(answers, fresh, report):
    preemptions = answers("small")["metrics"]["vllm:num_preemptions"]
    assert preemptions > 0
    check_same(answers("small")["rounds"]["crowd"], fresh, f"{preemptions} preemptions", report)


def test_speculated_tokens_that_are_verified_together(answers, report):
    # All can be accepted that were drafted, up to three at once; one in three is a low mark.
    accepted = answers("n-grams")["metrics"]["vllm:spec_decode_num_accepted_tokens"]
    assert accepted > len(REPEATING) * TEXT_TOKENS / 3
    plain, speculated = (answers(name)["rounds"]["repeating"] for name in ("hadamard-int4", "n-grams"))
    check_same(speculated, plain, f"{accepted} speculated tokens", report)
