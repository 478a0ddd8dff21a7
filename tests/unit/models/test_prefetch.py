import gc
import threading
import weakref

import pytest
import torch

from kvlab.models.raw_tensors import RawTensors
from kvlab.models.weight_source import prefetch

pytestmark = pytest.mark.unit


class Source:
    """Notes what is read and by whom; the layers in ``broken`` cannot be."""

    def __init__(self, broken=()):
        self.broken = broken
        self.read = []
        self.threads = set()
        self.reading = {index: threading.Event() for index in range(10)}

    def layer(self, index, *, pin):
        self.threads.add(threading.current_thread())
        self.read.append((index, pin))
        self.reading[index].set()
        if index in self.broken:
            raise ValueError(f"layer {index} is broken")
        return RawTensors(torch.full((1,), index, dtype=torch.uint8), {})


def index_of(raw):
    return int(raw.buffer)


def test_order_and_one_thread_of_its_own():
    source = Source()
    assert [index_of(raw) for raw in prefetch(source, [4, 2, 7], pin=True)] == [4, 2, 7]
    assert source.read == [(4, True), (2, True), (7, True)]
    assert len(source.threads) == 1
    assert threading.current_thread() not in source.threads


def test_the_next_layer_is_read_while_one_is_used_and_no_further():
    source = Source()
    layers = prefetch(source, range(5))
    assert index_of(next(layers)) == 0
    # Without reading ahead nothing would set it.
    assert source.reading[1].wait(timeout=30)
    assert not source.reading[2].is_set()
    layers.close()


def test_an_exception_comes_when_its_layer_is_due():
    layers = prefetch(Source(broken=[2]), range(5))
    assert [index_of(next(layers)) for _ in range(2)] == [0, 1]
    with pytest.raises(ValueError, match="layer 2 is broken"):
        next(layers)


@pytest.mark.parametrize("broken", [(), (1,)])
def test_leaving_early_ends_the_thread(broken):
    source = Source(broken)
    layers = prefetch(source, range(5))
    next(layers)
    layers.close()
    assert not any(thread.is_alive() for thread in source.threads)
    assert [index for index, _ in source.read] in ([0], [0, 1])


def test_a_used_layer_is_not_kept():
    layers = prefetch(Source(), range(3))
    raw = next(layers)
    gone = weakref.ref(raw.buffer)
    del raw
    gc.collect()
    assert gone() is None
    layers.close()


def test_nothing_to_read():
    assert list(prefetch(Source(), [])) == []
