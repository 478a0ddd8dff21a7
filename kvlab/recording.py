"""Recording q, k, v of a model's attention layers during any forward pass."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from kvlab.checks import check_integer
from kvlab.models.attention import AttentionLayer, model_layers, select_layers
from kvlab.models.projected_keys import ProjectedKeys
from kvlab.models.taps import tapped


@dataclass(frozen=True, eq=False)
class LayerCapture:
    """What one attention layer saw. Tensors are detached, in the model's dtype and on its device.

    Attributes
    ----------
    index, kind, rope, scaling
        As in `kvlab.models.attention.AttentionLayer`.
    q
        Queries at the sampled positions, ``[batch, num_heads, sampled, head_dim]``.
    positions
        Those positions, counted from the first token captured, int64 ``[sampled]``.
    k, v
        Keys and values of every token, ``[batch, num_kv_heads, tokens, head_dim]``.
    normed_keys
        With QK-norm: the keys before their gain, float32, shaped as ``k``; on layers with RoPE
        rotated like them. They come from the model's own projection, so no scheme has touched them.
    q_gain, k_gain
        QK-norm gains, float32 ``[head_dim]``; None without QK-norm.
    """

    index: int
    kind: str
    rope: bool
    scaling: float
    q: torch.Tensor
    positions: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    normed_keys: torch.Tensor | None = None
    q_gain: torch.Tensor | None = None
    k_gain: torch.Tensor | None = None

    @property
    def folds_gain(self) -> bool:
        """Whether the key's gain can move into the query: QK-norm and no RoPE in between."""
        return self.k_gain is not None and not self.rope


@dataclass(eq=False)
class Capture:
    """What the attention layers of one model saw of one batch of sequences.

    Attributes
    ----------
    model_name, model_type
        As the model's config has them.
    read_layers
        Returns the layers recorded so far, by absolute decoder index: from a running model or from disk.
    padded
        Whether a forward had an attention mask with padding in it.
    """

    model_name: str
    model_type: str
    read_layers: Callable[[], Mapping[int, LayerCapture]] = field(repr=False)
    padded: bool = False

    @property
    def layers(self) -> Mapping[int, LayerCapture]:
        """The recorded layers by absolute decoder index; ValueError before the first forward."""
        return self.read_layers()

    @property
    def tokens(self) -> int:
        """Tokens recorded per sequence; ValueError before the first forward."""
        return next(iter(self.layers.values())).k.shape[2]


def query_positions(context: int, num_queries: int) -> torch.Tensor:
    """Positions evenly spaced over the last quarter of the context, its last position included.

    Parameters
    ----------
    context, num_queries
        Tokens in all, and how many positions to choose (fewer where the quarter has fewer).

    Returns
    -------
    torch.Tensor
        Distinct positions in increasing order, int64 ``[min(num_queries, quarter)]``.

    Raises
    ------
    TypeError, ValueError
        ``context`` or ``num_queries`` is not a positive integer.
    """
    context = check_integer(context, "context", minimum=1)
    num_queries = check_integer(num_queries, "num_queries", minimum=1)
    quarter = max(1, context // 4)
    count = min(num_queries, quarter)
    return (context - 1 - torch.arange(count, device="cpu") * quarter // count).flip(0)


@contextmanager
def capture(
    model: nn.Module,
    *,
    layers: str | Iterable[int] | None = None,
    num_queries: int = 256,
    context: int | None = None,
) -> Iterator[Capture]:
    """Record what attention sees while the model runs inside the context.

    The model's output is unchanged, bit for bit, and on leaving the model is as it was. Chunks of
    one context (chunked prefill, generate) are appended. Inside `kvlab.apply`, whichever of the two
    was entered first, keys and values are the stored ones.

    Parameters
    ----------
    model
        A transformers model supported by `kvlab.models.attention.attention_layers`.
    layers
        "full" (the default), "sliding", "all" or absolute decoder indices.
    num_queries
        Query positions sampled, by `query_positions`; keys and values are kept for all tokens.
    context
        Tokens in all, from which those positions follow; None means the length of the first forward.

    Yields
    ------
    Capture
        Readable once the model has run, inside the context and after it.

    Raises
    ------
    TypeError, ValueError
        A model, layer or number that is not accepted; from the forward pass a static cache, or tokens
        that do not continue the context captured so far (another text, another batch size, a cache
        that beam search reordered).

    Examples
    --------
    >>> with kvlab.capture(model) as captured:
    ...     model(input_ids)
    >>> captured.layers[4].k.shape
    torch.Size([1, 4, 8192, 128])
    """
    num_queries = check_integer(num_queries, "num_queries", minimum=1)
    if context is not None:
        context = check_integer(context, "context", minimum=1)
    chosen = select_layers(model_layers(model), layers).values()
    recorders = [LayerRecorder(layer, num_queries, context) for layer in chosen]
    captured = Capture(
        model_name=Path(model.config.name_or_path).name or type(model).__name__,
        model_type=model.config.model_type,
        read_layers=lambda: {recorder.layer.index: recorder.result() for recorder in recorders},
    )

    def note_padding(module: nn.Module, args: tuple, kwargs: dict) -> None:
        mask = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.ndim == 2 and not mask.all():
            captured.padded = True

    with ExitStack() as stack:
        # The base model receives the mask from every way in: with or without a head, and from generate.
        handle = model.base_model.register_forward_pre_hook(note_padding, with_kwargs=True)
        stack.callback(handle.remove)
        for recorder in recorders:
            stack.enter_context(recorder.recording())
        yield captured


class LayerRecorder:
    """Collects the chunks that one layer's attention sees."""

    def __init__(self, layer: AttentionLayer, num_queries: int, context: int | None) -> None:
        self.layer = layer
        self._num_queries = num_queries
        self._positions = None if context is None else query_positions(context, num_queries)
        self._tokens = 0
        self._chunks: dict[str, list[torch.Tensor]] = {"q": [], "k": [], "v": [], "normed_keys": []}
        self._projected = None if layer.k_gain is None else ProjectedKeys(layer)
        self._position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None
        self._values_stay = True

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record every chunk that passes inside the context; the hooks are removed on leaving."""
        with ExitStack() as stack:
            handle = self.layer.module.register_forward_pre_hook(self._look_ahead, with_kwargs=True)
            stack.callback(handle.remove)
            if self._projected is not None:
                stack.enter_context(self._projected.watched())
            stack.enter_context(tapped(self.layer.module, self._record))
            yield

    def _look_ahead(self, _module: nn.Module, _args: tuple, kwargs: dict) -> None:
        if getattr(kwargs.get("cache"), "is_compileable", False):
            raise ValueError("cache is a static one; accepted by capture: a DynamicCache, or none")
        self._values_stay = getattr(kwargs.get("cache"), "values_stay", True)
        self._position_embeddings = kwargs.get("position_embeddings")

    def _check_continues(self, new: int, v: torch.Tensor) -> None:
        """Check that the history in ``v``, all but its ``new`` tokens, is what was recorded so far."""
        seen, history = self._tokens, v.shape[2] - new
        # A sliding layer's history is cut, but there is one exactly where there were tokens before.
        if history != seen if self.layer.kind == "full" else (history > 0) != (seen > 0):
            raise ValueError(
                f"layer {self.layer.index} attends to {v.shape[2]} tokens where the capture has seen {seen + new}; "
                "accepted: one context from its first token on, with a new capture for every other"
            )
        if not seen:
            return
        # Values, because KIVI stores keys anew at each step; one token, because it costs next to nothing.
        last = self._chunks["v"][-1][:, :, -1]
        if len(last) != len(v):
            raise ValueError(f"the batch size is {len(v)} after {len(last)}; accepted: one batch throughout a capture")
        if self._values_stay and not torch.equal(last, v[:, :, -new - 1]):
            raise ValueError(
                f"layer {self.layer.index} attends to another history than the one captured: the cache was reordered "
                "(beam search) or is another text's; accepted: greedy or sampled generation, one context per capture"
            )

    def _record(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        new, seen = q.shape[2], self._tokens
        self._check_continues(new, v)
        if self._positions is None:
            self._positions = query_positions(new, self._num_queries)
        sampled = self._positions[(self._positions >= seen) & (self._positions < seen + new)] - seen
        # Copies, since a slice would keep the whole history alive at every decoding step.
        self._keep("q", q[:, :, sampled.to(q.device)])
        self._keep("k", k[:, :, -new:].clone())
        self._keep("v", v[:, :, -new:].clone())
        if self._projected is not None:
            self._keep("normed_keys", self._normed_keys())
        self._tokens = seen + new

    def _normed_keys(self) -> torch.Tensor:
        normed = self._projected.take()
        return self.layer.rotate(normed, self._position_embeddings) if self.layer.rope else normed

    def _keep(self, name: str, chunk: torch.Tensor) -> None:
        self._chunks[name].append(chunk.detach())

    def result(self) -> LayerCapture:
        """Return what was recorded so far; ValueError before the first chunk."""
        if not self._tokens:
            raise ValueError("nothing was captured: run the model inside the context")
        for chunks in self._chunks.values():
            if len(chunks) > 1:
                chunks[:] = [torch.cat(chunks, dim=2)]
        layer, tensors = self.layer, {name: chunks[0] for name, chunks in self._chunks.items() if chunks}
        known = {"index", "kind", "rope", "scaling", "q_gain", "k_gain"}
        seen = self._positions[self._positions < self._tokens]
        return LayerCapture(**{name: getattr(layer, name) for name in known}, positions=seen, **tensors)
