"""A real server on this machine and OpenAI's client, for stock and the 4-bit cache alike."""

import json
import math
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import mean, median

import httpx
import pytest
from openai_client import (
    MODEL,
    NO_SPACE,
    THINKING_OFF,
    TOOL,
    chat,
    complete,
    connect,
    forced,
    metric,
    next_token_logprobs,
)
from served_checkpoint import MAX_TOKENS, WINDOW

pytestmark = pytest.mark.serving

SENTENCE = "Sphinx of black quartz, judge my vow. "
THOUGHTS = "<think>\nAlpha\n</think>\n\n"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"unit": "kelvin"}}\n</tool_call>'
# As much as an answer may depend on where the prompt was cut, in chunks or by a cached prefix.
SAME = 5e-3


def mean_difference(a, b):
    """Between the log-probabilities of the likeliest tokens; infinite where those are not nearly the same ones."""
    both = a.keys() & b.keys()
    if len(both) < 0.9 * len(a):
        return math.inf
    return sum(abs(a[token] - b[token]) for token in both) / len(both)


def text_of(length):
    return (SENTENCE * (length // len(SENTENCE) + 1))[:length]


def test_completions(client):
    reply = complete(client, "Hello", 8)
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (5, 8)
    assert reply.choices[0].finish_reason == "length"


def test_logprobs_are_a_distributions(client):
    logprobs = complete(client, text_of(2 * WINDOW), 4, logprobs=5, extra_body={"return_tokens_as_token_ids": True})
    (choice,) = logprobs.choices
    for chosen, top in zip(choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True):
        assert chosen == max(top.values()) <= 0
        # Float32, and a sum over the whole vocabulary before it.
        assert sum(map(math.exp, top.values())) <= 1 + 1e-4


def test_logprobs_of_the_prompt(client):
    length = 2 * WINDOW
    (choice,) = complete(client, text_of(length), 1, logprobs=0, echo=True).choices
    first, *others = choice.logprobs.token_logprobs
    assert first is None
    assert len(others) == length
    assert all(math.isfinite(each) and each <= 0 for each in others)


def test_chat_with_reasoning(client):
    message = chat(client, **forced(f"{THOUGHTS}Beta")).choices[0].message
    assert (message.reasoning.strip(), message.content.strip()) == ("Alpha", "Beta")


def test_chat_without_reasoning(client):
    options = forced("Beta")
    options["extra_body"] |= THINKING_OFF
    message = chat(client, **options).choices[0].message
    assert (message.reasoning, message.content) == (None, "Beta")


def test_reasoning_off_is_in_the_prompt(client):
    on, off = (chat(client, max_tokens=1, extra_body=extra).usage.prompt_tokens for extra in ({}, THINKING_OFF))
    # The empty block: its two marks and four newlines.
    assert off == on + 6


@pytest.mark.parametrize("thoughts", ["", THOUGHTS])
def test_a_tool_call_of_the_models_own(client, thoughts):
    options = forced(thoughts + CALL)
    if not thoughts:
        options["extra_body"] |= THINKING_OFF
    choice = chat(client, tools=[TOOL], **options).choices[0]
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"unit": "kelvin"})
    assert not (choice.message.content or "").strip()


def test_a_tool_call_that_is_required(client):
    reply = chat(client, tools=[TOOL], tool_choice="required", extra_body=THINKING_OFF, logit_bias=NO_SPACE)
    (call,) = reply.choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["unit"] in ("celsius", "kelvin")


def test_streaming(client):
    stream = chat(client, stream=True, stream_options={"include_usage": True}, **forced(f"{THOUGHTS}Beta"))
    reasoning, content, usage = [], [], None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            reasoning.append(getattr(choice.delta, "reasoning", None) or "")
            content.append(choice.delta.content or "")
    assert ("".join(reasoning).strip(), "".join(content).strip()) == ("Alpha", "Beta")
    assert sum(map(bool, content)) > 1
    # Two marks, fifteen other characters less the two marks' own, and the end.
    assert usage.completion_tokens == len("\nAlpha\n") + len("\n\nBeta") + 2 + 1


def test_many_at_once_around_the_window(client):
    lengths = [1, 2, *range(WINDOW - 6, WINDOW + 8), *range(90, 410, 20)]
    new_tokens = 8
    assert len(lengths) == 32

    def ask(length):
        return complete(client, text_of(length), new_tokens, logprobs=1)

    with ThreadPoolExecutor(len(lengths)) as pool:
        replies = list(pool.map(ask, lengths))
    for length, reply in zip(lengths, replies, strict=True):
        (choice,) = reply.choices
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (length, new_tokens)
        assert choice.finish_reason == "length"
        assert all(math.isfinite(each) and each <= 0 for each in choice.logprobs.token_logprobs)


def test_a_prefix_is_found_again_and_changes_nothing(client):
    differences, shifts = [], []
    for number, tail in enumerate(["", "A", "be", "see", "Dee!", "eagle"]):
        prompt = text_of(700) + tail
        # A salt of its own keeps a prompt from what others left.
        found, cached = next_token_logprobs(client, prompt, cache_salt="found")
        alone, uncached = next_token_logprobs(client, prompt, cache_salt=f"alone {number}")
        assert uncached == 0
        assert WINDOW < cached < len(prompt) if number else cached == 0
        differences.append(mean_difference(found, alone))
        shifts += [found[token] - alone[token] for token in found.keys() & alone.keys() if number]
    # A single log-probability moves by BF16 rounding, 0.01 and more; the mean over tokens and prompts does not.
    assert median(differences[1:]) <= 10 * SAME
    assert abs(mean(shifts)) <= SAME


def test_what_a_cached_prefix_is_continued_with_matters(client):
    prompt = text_of(700)
    one, _ = next_token_logprobs(client, prompt + "A", cache_salt="shared")
    two, cached = next_token_logprobs(client, prompt + "B", cache_salt="shared")
    assert cached > WINDOW
    assert mean_difference(one, two) > 10 * SAME


def test_a_client_that_leaves_is_not_served_on(client, server):
    before = metric(server, "generation_tokens_total")
    wanted = MAX_TOKENS // 2
    stream = complete(client, "Tell me everything", wanted, stream=True)
    for _ in range(3):
        next(stream)
    stream.close()
    deadline = time.monotonic() + 30
    while metric(server, "num_requests_running"):
        assert time.monotonic() < deadline, "the request still runs"
        time.sleep(0.2)
    assert metric(server, "generation_tokens_total") - before < wanted / 2
    assert complete(client, "Hello", 1).usage.completion_tokens == 1


@pytest.mark.parametrize(
    ("prompt", "new_tokens"),
    [(text_of(MAX_TOKENS + 1), 1), (text_of(MAX_TOKENS - 3), 4), ("", 1)],
    ids=["prompt", "reply", "empty"],
)
def test_a_prompt_that_does_not_fit_is_refused(client, prompt, new_tokens):
    import openai

    with pytest.raises(openai.BadRequestError) as refused:
        complete(client, prompt, new_tokens)
    assert refused.value.status_code == 400
    assert complete(client, "Hello", 1).usage.completion_tokens == 1


def test_a_prompt_that_just_fits(client):
    (choice,) = complete(client, text_of(MAX_TOKENS - 1), 1, logprobs=1).choices
    assert math.isfinite(choice.logprobs.token_logprobs[0])


def test_it_says_which_model_it_serves(client, server):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert httpx.get(f"{server.url}/health", trust_env=False).status_code == 200


@pytest.mark.long
def test_stopped_and_started_again(start_server):
    answers, port = [], None
    for _ in range(2):
        with start_server("hadamard-int4", port=port) as server:
            port = int(server.url.rpartition(":")[2])
            answers.append(next_token_logprobs(connect(server), text_of(3 * WINDOW))[0])
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health", trust_env=False)
    assert mean_difference(*answers) <= SAME
