"""Where a model's weights come from, a part at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from kvlab.models.kolibri1_config import config_hash
from kvlab.models.raw_tensors import RawTensors

if TYPE_CHECKING:
    from transformers import Kolibri1Config


class WeightSource(ABC):
    """Weights of a Kolibri-1 model, read or made when asked for and not kept.

    Parameters
    ----------
    config
        The model's.
    name, revision
        Which model this is and which state of it, in words.

    Attributes
    ----------
    config, name, revision
        As above.
    config_hash
        SHA-256 over the architecture, as `kvlab.models.kolibri1_config.config_hash`.
    """

    def __init__(self, config: Kolibri1Config, name: str, revision: str) -> None:
        self.config = config
        self.name = name
        self.revision = revision
        self.config_hash = config_hash(config)

    @abstractmethod
    def layer(self, index: int, *, pin: bool = False) -> RawTensors:
        """Tensors of decoder layer ``index``, in pinned host memory if ``pin`` and there is CUDA."""

    @abstractmethod
    def embeddings(self, *, pin: bool = False) -> RawTensors:
        """``embed_tokens.weight``."""

    @abstractmethod
    def head(self, *, pin: bool = False) -> RawTensors:
        """``norm.weight`` and ``lm_head.weight``."""

    def check_layer(self, index: int) -> None:
        """Check that the model has a layer ``index``.

        Raises
        ------
        ValueError
            It has not.
        """
        if not 0 <= index < self.config.num_hidden_layers:
            raise ValueError(f"layer is {index}; accepted: 0 to {self.config.num_hidden_layers - 1}")


def prefetch(source: WeightSource, indices: Iterable[int], *, pin: bool = False) -> Iterator[RawTensors]:
    """Yield the layers of ``indices`` in order, each read while its predecessor is in use.

    One thread reads one layer ahead. What it raises is raised here when that layer's turn comes. Leaving early
    (``close``, an exception around the loop) waits for the layer being read, then ends the thread.

    Parameters
    ----------
    source
        Where the layers come from.
    indices
        Absolute decoder indices.
    pin
        As in `WeightSource.layer`.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvlab-prefetch") as pool:
        # Popped before it is yielded, so that a layer's bytes go when the consumer drops them.
        ahead: deque[Future[RawTensors]] = deque()
        for index in indices:
            ahead.append(pool.submit(source.layer, index, pin=pin))
            if len(ahead) == 2:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
