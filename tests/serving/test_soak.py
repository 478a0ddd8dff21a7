"""Two thousand requests of every kind: the answer to a fixed prompt stays, memory stays, nothing is ever not finite."""

import math
import os
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from openai_client import complete, metric, next_token_logprobs
from served_checkpoint import MAX_TOKENS, WINDOW

pytestmark = [pytest.mark.serving, pytest.mark.long]

REQUESTS, ROUND, AT_ONCE = 2000, 100, 16
# Of a thousand requests; the others are short and plain. The CPU's plain kernels read some hundred tokens a second, so
# that most have few.
KINDS = {"prefix": 150, "long": 20, "leaves": 40, "refused": 60, "at the limit": 4}
CANARY = "".join(map(chr, random.Random(0).choices(range(32, 127), k=3 * WINDOW)))
# As much as the canary's log-probabilities may move, and the processes' memory in the second half of the run, by the
# slope of a straight line: 16 kB a request, which is less than what one kept of its objects.
SAME, BYTES_PER_THOUSAND = 5e-3, 16e6
# A little more than two blocks of 128 tokens.
PREFIX = ("A prefix that many requests share, longer than the window. " * 5)[:264]


def text(draw, length):
    return "".join(map(chr, draw.choices(range(32, 127), k=length)))


def finite(values):
    return all(math.isfinite(value) for value in values)


def check(choice, new_tokens, *, logprobs):
    assert choice.finish_reason == "length"
    if logprobs is not None:
        assert len(choice.logprobs.token_logprobs) == new_tokens
        assert finite(choice.logprobs.token_logprobs)
        assert all(finite(top.values()) for top in choice.logprobs.top_logprobs)


def stream(client, prompt, new_tokens, *, logprobs, leave=False):
    """Read a stream to its end, or leave after its first piece."""
    received = []
    # Closed at the end, as a client's connection is when it leaves.
    with complete(client, prompt, new_tokens, logprobs=logprobs, stream=True) as chunks:
        for chunk in chunks:
            for choice in chunk.choices:
                if choice.logprobs:
                    received += choice.logprobs.token_logprobs
            if leave:
                break
    assert finite(received)
    assert logprobs is None or leave or len(received) == new_tokens


def request(client, number):
    """Send the request of that number, which is always the same, and check its answer; returns its kind."""
    import openai

    draw = random.Random(number)
    kind = draw.choices([*KINDS, "short"], [*KINDS.values(), 1000 - sum(KINDS.values())])[0]
    new_tokens, logprobs = draw.randint(1, 3), draw.choice([None, 0, 5])
    if kind == "refused":
        prompt = draw.choice(["", text(draw, MAX_TOKENS + draw.randint(1, 9))])
        with pytest.raises(openai.BadRequestError):
            complete(client, prompt, new_tokens)
        return kind
    prompt = {
        "short": lambda: text(draw, draw.randint(1, WINDOW // 2)),
        "prefix": lambda: PREFIX + text(draw, draw.randint(1, 40)),
        "long": lambda: text(draw, draw.randint(200, 400)),
        "leaves": lambda: text(draw, draw.randint(1, WINDOW // 2)),
        "at the limit": lambda: text(draw, MAX_TOKENS - new_tokens),
    }[kind]()
    if kind == "leaves":
        stream(client, prompt, MAX_TOKENS // 4, logprobs=logprobs, leave=True)
    elif draw.random() < 0.5:
        stream(client, prompt, new_tokens, logprobs=logprobs)
    else:
        (choice,) = complete(client, prompt, new_tokens, logprobs=logprobs).choices
        check(choice, new_tokens, logprobs=logprobs)
    return kind


def wait_until_idle(server, seconds=30):
    deadline = time.monotonic() + seconds
    while metric(server, "num_requests_running") + metric(server, "num_requests_waiting"):
        assert time.monotonic() < deadline, "requests still run"
        time.sleep(0.1)


def resident_bytes(server):
    """Memory of all processes of the server's group, what they share counted in each."""
    pages = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            group = int((process / "stat").read_text().rpartition(")")[2].split()[2])
            if group == server.process.pid:
                pages += int((process / "statm").read_text().split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return pages * os.sysconf("SC_PAGE_SIZE")


# For 4 bits only; one round of each kind of request is enough for stock elsewhere.
@pytest.mark.parametrize("server", ["hadamard-int4"], indirect=True)
def test_soak(client, server, report):
    def sing():
        wait_until_idle(server)
        # A salt of its own each time: computed anew, on blocks that others have left.
        return next_token_logprobs(client, CANARY, cache_salt=str(time.monotonic()))[0]

    first, memory, kinds, worst = sing(), [], Counter(), 0.0
    hits = metric(server, "prefix_cache_hits_total")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for start in range(0, REQUESTS, ROUND):
            kinds.update(pool.map(lambda number: request(client, number), range(start, start + ROUND)))
            canary = sing()
            assert canary.keys() == first.keys()
            worst = max(worst, max(abs(canary[token] - first[token]) for token in first))
            memory.append(resident_bytes(server))
            print(f"{start + ROUND} requests: canary within {worst:.1e}, {memory[-1] / 1e6:.0f} MB", flush=True)
    half = len(memory) // 2
    growth = np.polyfit(np.arange(half), memory[half:], 1)[0] * 1000 / ROUND
    report(
        f"soak: {dict(kinds)}; canary within {worst:.1e}; {memory[0] / 1e6:.0f} MB after {ROUND} requests, "
        f"{memory[half] / 1e6:.0f} at half time, {memory[-1] / 1e6:.0f} at the end, {growth / 1e6:+.1f} per thousand"
    )
    assert set(kinds) == {*KINDS, "short"}
    assert metric(server, "prefix_cache_hits_total") - hits > WINDOW * kinds["prefix"]
    assert worst <= SAME
    assert growth < BYTES_PER_THOUSAND
