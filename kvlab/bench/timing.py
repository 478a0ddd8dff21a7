"""Times of device work: graph replays, single launches, sustained load, copy bandwidth."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch

Calls = Sequence[Callable[[], object]]
"""One launch each, on inputs of their own."""

GRAPH_US = 5_000.0
"""Work captured in one graph, in microseconds: long enough that starting the replay does not show."""
REPLAYS = 5
REST_SECONDS = 0.02
"""Before each replay: a GPU under load meets its power limit within tens of milliseconds, as `sustained_us` shows."""
SINGLES = 15
FLUSH_BYTES = 1 << 30
"""Written before a single launch: many times Hopper's L2, and long enough to hide what Python takes to launch."""
COPY_BYTES = 1 << 31


class CudaClock:
    """Measures with device events; every figure is a median in microseconds.

    Parameters
    ----------
    device
        A CUDA device, which becomes the current one.

    Raises
    ------
    ValueError
        ``device`` is no CUDA device, or torch finds none.
    """

    def __init__(self, device: torch.device | str = "cuda"):
        if torch.device(device).type != "cuda" or not torch.cuda.is_available():
            raise ValueError(f"device is {str(device)!r}; accepted: a CUDA device that torch finds")
        self.device = torch.device(device)
        torch.cuda.set_device(torch.cuda.current_device() if self.device.index is None else self.device)

    def single_us(self, calls: Calls, repeats: int = SINGLES) -> float:
        """Time launches one by one, each after L2 was flushed, launch latency included."""
        flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=self.device)
        calls[0]()
        marks = []
        for i in range(repeats):
            flush.zero_()
            marks.append(self._timed(calls[i % len(calls)]))
        return _median_us(marks)

    def graph_us(self, calls: Calls, single_us: float, repeats: int = REPLAYS) -> float:
        """Time a launch inside a CUDA graph that goes through all ``calls`` until `GRAPH_US` are full, rested.

        Parameters
        ----------
        calls
            Capturable launches; several sets of inputs keep L2 from hiding their traffic.
        single_us
            Roughly what one launch takes.
        repeats
            Timed replays.
        """
        graph, launches = self._capture(calls, single_us)
        marks = []
        for _ in range(repeats):
            torch.cuda.synchronize()
            time.sleep(REST_SECONDS)
            marks.append(self._timed(graph.replay))
        return _median_us(marks) / launches

    def sustained_us(
        self, calls: Calls, single_us: float, seconds: float = 1.0, window: float = 0.2
    ) -> tuple[float, float]:
        """Run back to back for ``seconds``: the mean time of a launch in the first and the last ``window`` of them."""
        graph, launches = self._capture(calls, single_us)
        replays = math.ceil(seconds * 1e6 / _median_us([self._timed(graph.replay)]))
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
        ends[0].record()
        for end in ends[1:]:
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        times = [before.elapsed_time(after) for before, after in itertools.pairwise(ends)]
        shown = max(1, round(window / seconds * replays))
        first, last = (statistics.fmean(part) * 1e3 / launches for part in (times[:shown], times[-shown:]))
        return first, last

    def copy_us(self) -> tuple[int, float]:
        """Time a large copy in device memory: bytes moved, read and written together, and microseconds."""
        source = torch.randint(256, (COPY_BYTES,), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * COPY_BYTES, self.single_us([lambda: target.copy_(source)])

    def _capture(self, calls: Calls, single_us: float) -> tuple[torch.cuda.CUDAGraph, int]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            calls[0]()
        torch.cuda.synchronize()
        passes = max(1, round(GRAPH_US / single_us / len(calls)))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(passes):
                for call in calls:
                    call()
        graph.replay()
        torch.cuda.synchronize()
        return graph, passes * len(calls)

    def _timed(self, call: Callable[[], object]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        return start, end


def _median_us(marks: Sequence[tuple[torch.cuda.Event, torch.cuda.Event]]) -> float:
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in marks) * 1e3
