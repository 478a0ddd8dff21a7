import pytest
import torch

from kvlab.bench.timing import CudaClock

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module")
def clock():
    return CudaClock()


@pytest.fixture(scope="module")
def copies():
    source = torch.empty(2, 1 << 28, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return [lambda i=i: target[i].copy_(source[i]) for i in range(2)]


def test_a_long_launch_takes_the_same_alone_in_a_graph_and_at_length(clock, copies):
    # 512 MB moved: over 0.1 ms on any GPU, beside some 5 µs of launch.
    single = clock.single_us(copies)
    graph = clock.graph_us(copies, single)
    first, last = clock.sustained_us(copies, single, seconds=0.1, window=0.02)
    for time_us in (graph, first, last):
        assert time_us == pytest.approx(single, rel=0.25)


def test_the_copy_is_in_line_with_a_smaller_one(clock, copies):
    num_bytes, time_us = clock.copy_us()
    smaller = 2 * (1 << 28) / clock.single_us(copies)
    assert num_bytes / time_us == pytest.approx(smaller, rel=0.3)


def test_a_graph_goes_through_every_call(clock):
    counts = torch.zeros(3, dtype=torch.int64, device="cuda")
    calls = [lambda i=i: counts[i].add_(1) for i in range(3)]
    clock.graph_us(calls, 1000.0, repeats=2)
    # One call before capture, then 2 passes (5 ms of 1 ms launches, 3 calls) in each of 3 replays.
    assert counts.tolist() == [7, 6, 6]
