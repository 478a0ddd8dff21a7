"""A forward pass of Kolibri-1 with one layer's weights on the device at a time."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers.models.kolibri1.modeling_kolibri1 import (
    Kolibri1DecoderLayer,
    Kolibri1RMSNorm,
    Kolibri1RotaryEmbedding,
)

from kvlab.models import blocked_attention
from kvlab.models.weight_source import WeightSource, prefetch

CHUNK_TOKENS = 8192
"""Tokens that pass through a layer at once. Chunks attend to the keys of those before them, like chunked prefill."""

LOSS_TOKENS = 1024
"""Positions whose logits exist at once."""

LayerHook = Callable[[int, Kolibri1DecoderLayer], contextlib.AbstractContextManager[None]]


@dataclass
class LayerTimes:
    """Seconds that one layer took: waiting for its weights, moving them, attention, experts, all of it."""

    layer: int
    waiting: float = 0.0
    loading: float = 0.0
    attention: float = 0.0
    experts: float = 0.0
    total: float = 0.0


class _LayerCache:
    """Keys and values of one layer, as its attention module uses a cache: chunks are written, the past is read."""

    def __init__(self, window: int | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.window = window
        self.tokens = 0
        self.keys, self.values = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))

    def update(self, k: torch.Tensor, v: torch.Tensor, *_args: object, **_kwargs: object) -> tuple[torch.Tensor, ...]:
        seen, self.tokens = self.tokens, self.tokens + k.shape[2]
        self.keys[:, :, seen : self.tokens] = k
        self.values[:, :, seen : self.tokens] = v
        first = 0 if self.window is None else max(0, seen - self.window + 1)
        return self.keys[:, :, first : self.tokens], self.values[:, :, first : self.tokens]


@dataclass
class StreamedModel:
    """Kolibri-1 without ever holding it: each layer's weights are read, used for the whole context and dropped.

    The layers are transformers' own modules, built on the meta device and given one layer's tensors; only
    the loop over chunks of tokens, the attention call and the reading ahead are ours.

    Parameters
    ----------
    source
        Where weights come from: a checkpoint or random ones.
    device
        Where layers run.
    dtype
        What layers run in; FP8 weights are dequantized to it on the device.
    chunk_tokens
        Tokens that pass through a layer at once.
    """

    source: WeightSource
    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.bfloat16
    chunk_tokens: int = CHUNK_TOKENS
    times: list[LayerTimes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.device = torch.device(self.device)
        self.config = copy.deepcopy(self.source.config)
        self.config._attn_implementation = blocked_attention.register()
        self.config._experts_implementation = "grouped_mm" if self.device.type == "cuda" else "eager"

    @torch.no_grad()
    def embed(self, input_ids: torch.Tensor, home: torch.device | str | None = None) -> torch.Tensor:
        """Look up the embeddings of ``input_ids`` [1, tokens]; returns ``[1, tokens, hidden_size]`` on ``home``.

        Raises
        ------
        ValueError
            There is a token that the vocabulary lacks.
        """
        if int(input_ids.max()) >= self.config.vocab_size or int(input_ids.min()) < 0:
            raise ValueError(
                f"input_ids go from {int(input_ids.min())} to {int(input_ids.max())}; accepted: 0 to "
                f"{self.config.vocab_size - 1}"
            )
        # Looked up on the host: a context needs a fraction of the rows.
        (weight,) = self.source.embeddings().materialize("cpu", self.dtype).values()
        return nn.functional.embedding(input_ids.cpu(), weight).to(home or self.device)

    @torch.no_grad()
    def run(self, hidden: torch.Tensor, *, first_layer: int = 0, hook: LayerHook | None = None) -> Iterator[int]:
        """Pass ``hidden`` through the layers, in place; yields the index of each layer once it is finished.

        Parameters
        ----------
        hidden
            ``[1, tokens, hidden_size]`` in `dtype`, on the device or in host memory: the output of the layer
            before ``first_layer``.
        first_layer
            Where to start, to resume.
        hook
            Called with each layer's index and module; its context is open while the layer runs.
        """
        indices = range(first_layer, self.config.num_hidden_layers)
        arrivals = prefetch(self.source, indices, pin=self.device.type == "cuda")
        rotary = Kolibri1RotaryEmbedding(self.config).to(self.device)
        with contextlib.closing(arrivals):
            for index in indices:
                watch = _Stopwatch(index, self.device)
                raw = next(arrivals)
                watch.lap("waiting")
                with torch.device("meta"):
                    layer = Kolibri1DecoderLayer(self.config, index).eval()
                layer.load_state_dict(raw.materialize(self.device, self.dtype), strict=True, assign=True)
                del raw
                watch.lap("loading")
                with watch.watching(layer), hook(index, layer) if hook else contextlib.nullcontext():
                    self._run_layer(layer, hidden, rotary)
                # Dropped before the next one comes, so that two never lie on the device together.
                del layer
                self.times.append(watch.stop())
                yield index

    def end_before_attention(self, layer: nn.Module) -> None:
        """Let the last layer that is run compute what attention sees of it and nothing more; to be called in its hook.

        Attention of a full layer over a long context, and its experts, are most of what a layer costs.
        """
        self.config._attn_implementation = blocked_attention.register_unattended()
        layer.mlp = nn.Identity()

    def _run_layer(self, layer: nn.Module, hidden: torch.Tensor, rotary: nn.Module) -> None:
        tokens = hidden.shape[1]
        attention = layer.self_attn
        window = attention.sliding_window if attention.is_sliding else None
        shape = (1, attention.num_key_value_heads, tokens, attention.head_dim)
        cache = _LayerCache(window, shape, self.dtype, self.device)
        for start in range(0, tokens, self.chunk_tokens):
            chunk = hidden[:, start : start + self.chunk_tokens]
            moved = chunk.to(self.device, non_blocking=True)
            positions = torch.arange(start, start + chunk.shape[1], device=self.device)[None]
            output = layer(moved, cache=cache, position_embeddings=rotary(moved, positions))
            chunk.copy_(output)

    @torch.no_grad()
    def finish(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the final norm: the model's last hidden states, ``[1, tokens, hidden_size]``."""
        norm, _ = self._head()
        return torch.cat([norm(chunk.to(self.device)).to(hidden.device) for chunk in hidden.split(CHUNK_TOKENS, 1)], 1)

    @torch.no_grad()
    def losses(self, hidden: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        """Negative log-probability of each next token in nats, float32 ``[1, tokens − 1]``, logits in blocks."""
        norm, head = self._head()
        blocks = []
        for start in range(0, hidden.shape[1] - 1, LOSS_TOKENS):
            targets = input_ids[:, start + 1 : start + 1 + LOSS_TOKENS].to(self.device)
            block = hidden[:, start : start + targets.shape[1]].to(self.device)
            logits = head(norm(block))[0].float()
            blocks.append(nn.functional.cross_entropy(logits, targets[0], reduction="none"))
        return torch.cat(blocks)[None]

    def _head(self) -> tuple[nn.Module, nn.Module]:
        weights = self.source.head().materialize(self.device, self.dtype)
        norm = Kolibri1RMSNorm(self.config.hidden_size, eps=self.config.rms_norm_eps)
        head = nn.Linear(self.config.hidden_size, self.config.vocab_size, bias=False, device="meta")
        norm.load_state_dict({"weight": weights["norm.weight"]}, assign=True)
        head.load_state_dict({"weight": weights["lm_head.weight"]}, assign=True)
        return norm, head


class _Stopwatch:
    """Times the parts of one layer; on CUDA with events, read once at its end."""

    def __init__(self, index: int, device: torch.device) -> None:
        self.times = LayerTimes(index)
        self.device = device
        self.marks: dict[str, list[object]] = {"attention": [], "experts": []}
        self.start = self.last = time.perf_counter()

    def lap(self, name: str) -> None:
        self._synchronize()
        now = time.perf_counter()
        setattr(self.times, name, now - self.last)
        self.last = now

    @contextlib.contextmanager
    def watching(self, layer: nn.Module) -> Iterator[None]:
        def mark(name: str) -> Callable[..., None]:
            return lambda *_args: self.marks[name].append(self._now())

        handles = []
        for name, module in {"attention": layer.self_attn, "experts": layer.mlp}.items():
            handles.append(module.register_forward_pre_hook(mark(name)))
            handles.append(module.register_forward_hook(mark(name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def stop(self) -> LayerTimes:
        self._synchronize()
        self.times.total = time.perf_counter() - self.start
        for name, marks in self.marks.items():
            pairs = zip(marks[::2], marks[1::2], strict=True)
            setattr(self.times, name, sum(self._between(start, end) for start, end in pairs))
        return self.times

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _now(self) -> object:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, start: object, end: object) -> float:
        return start.elapsed_time(end) / 1e3 if self.device.type == "cuda" else end - start
