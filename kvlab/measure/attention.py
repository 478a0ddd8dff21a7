"""Attention-output error: how far a stored cache moves the output of one attention layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

import pandas as pd
import torch

from kvlab.checks import LARGEST, check_choice, check_finite, check_integer, check_number, check_vectors
from kvlab.measure.layers import measurable_layers
from kvlab.recording import Capture, LayerCapture, query_positions
from kvlab.schemes import Scheme, StoredAs, get_scheme, get_schemes

BLOCK_SCORES = 1 << 24
"""Scores held at once on a CPU: 64 MB in float32, whatever the numbers of heads, queries and keys."""
DEVICE_BLOCK_SCORES = 1 << 28
"""The same on a GPU, 1 GB: a block is 60 to 900 launches for every scheme, which take longer than little work."""

Stored = Literal["K", "V", "KV"]
STORED: tuple[Stored, ...] = ("K", "V", "KV")


class _Kept(NamedTuple):
    """Tokens of a block that are not stored: bool ``[queries of a KV head, block]``, and the block's own k and v."""

    near: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


class RunningAttention:
    """Causal attention of sampled queries, fed block after block of keys; never all scores at once.

    Parameters
    ----------
    q
        ``[num_heads, num_queries, head_dim]`` float32; query head h reads KV head h // (num_heads // num_kv_heads).
    positions
        ``[num_queries]`` int64: absolute position of each query, which sees keys 0 … position.
    scaling
        Factor on the scores.
    num_kv_heads
        Of the keys to come.

    References
    ----------
    The running maximum and sum over blocks: Milakov & Gimelshein 2018, arXiv:1805.02867.
    """

    def __init__(self, q: torch.Tensor, positions: torch.Tensor, scaling: float, num_kv_heads: int) -> None:
        self.shape = q.shape
        self.q = (q * scaling).reshape(num_kv_heads, -1, q.shape[-1])
        self.last = positions.repeat(len(q) // num_kv_heads)[:, None]
        # A number, and read once: a GPU would be waited for at every block.
        self.first_last = int(positions.min())
        # Finite, so that a query may see nothing of a block and have seen nothing yet.
        self.top = self.q.new_full((*self.q.shape[:2], 1), torch.finfo(torch.float32).min)
        self.mass = torch.zeros_like(self.top)
        self.sums: list[torch.Tensor] = []

    def update(self, start: int, k: torch.Tensor, values: Sequence[torch.Tensor], kept: _Kept | None = None) -> None:
        """Attend to keys ``start`` … of ``k`` [num_kv_heads, block, head_dim]; ``values`` share the weights.

        Tokens that are ``kept`` exact are seen as they are.
        """
        if kept is None:
            self._attend(start, k, values)
        else:
            self._attend(start, k, values, ~kept.near)
            self._attend(start, kept.k, [kept.v] * len(values), kept.near)

    def _attend(
        self, start: int, k: torch.Tensor, values: Sequence[torch.Tensor], only: torch.Tensor | None = None
    ) -> None:
        scores = self.q @ k.mT
        end = start + k.shape[-2]
        if end - 1 > self.first_last:
            scores.masked_fill_(torch.arange(start, end, device=k.device) > self.last, float("-inf"))
        if only is not None:
            scores.masked_fill_(~only, float("-inf"))
        top = torch.maximum(self.top, scores.amax(-1, keepdim=True))
        shrink = torch.exp(self.top - top)
        weights = scores.sub_(top).exp_()
        self.top = top
        self.mass.mul_(shrink).add_(weights.sum(-1, keepdim=True))
        if not self.sums:
            self.sums = [torch.zeros_like(self.q) for _ in values]
        for total, v in zip(self.sums, values, strict=True):
            total.mul_(shrink).baddbmm_(weights, v)

    def outputs(self) -> list[torch.Tensor]:
        """Per entry of ``values`` the attention output, ``[num_heads, num_queries, head_dim]`` float32."""
        return [(total / self.mass).reshape(self.shape) for total in self.sums]


def layer_errors(
    layer: LayerCapture,
    schemes: Iterable[str | Scheme],
    stored: Iterable[Stored] = STORED,
    *,
    exact_first: int = 0,
    exact_recent: int = 0,
) -> dict[tuple[str, Stored], float]:
    """Attention-output error of one captured layer under several schemes, which share the exact scores.

    Keys are read, stored and attended to block by block: beside the capture only one block's numbers
    and the running outputs exist (a scheme that shares metadata between tokens also needs its stored
    copy of the layer).

    Parameters
    ----------
    layer
        One layer of a `Capture`.
    schemes
        Names or `Scheme` objects.
    stored
        Which of ``"K"``, ``"V"``, ``"KV"`` is replaced by its stored version.
    exact_first, exact_recent
        So many of the first tokens, and of the last that each query sees, itself among them, are not replaced: a cache
        that keeps sinks and a window besides in full.

    Returns
    -------
    dict
        ``(scheme name, stored)`` → ‖ô − o‖_F / ‖o‖_F over the sampled positions and all query heads.

    Raises
    ------
    TypeError, ValueError
        An unknown scheme, two of one name or an unknown entry of ``stored``; a number of tokens below 0 or beyond
        10⁹; a layer without a sampled query position, or whose attention output is zero, so that nothing can be
        relative to it.
    """
    schemes = get_schemes(schemes)
    stored = [check_choice(entry, "stored", STORED) for entry in stored]
    kept = [
        check_integer(value, name, minimum=0, maximum=LARGEST)
        for name, value in {"exact_first": exact_first, "exact_recent": exact_recent}.items()
    ]
    if not len(layer.positions):
        raise ValueError(
            f"layer {layer.index} has {layer.k.shape[-2]} tokens and no sampled query position; accepted: a capture "
            "that saw the last quarter of the context it was told"
        )
    moved = dict.fromkeys(((scheme.name, entry) for scheme in schemes for entry in stored), 0.0)
    total = 0.0
    for item in range(layer.k.shape[0]):
        exact, outputs = _outputs(layer, item, schemes, set(stored), *kept)
        total += exact.double().square().sum().item()
        for key in moved:
            moved[key] += (outputs[key] - exact).double().square().sum().item()
    if not total:
        raise ValueError(f"v of layer {layer.index} gives an attention output of zero; accepted: values not all zero")
    return {key: (square / total) ** 0.5 for key, square in moved.items()}


def _outputs(
    layer: LayerCapture, item: int, schemes: list[Scheme], stored: set[Stored], exact_first: int, exact_recent: int
) -> tuple[torch.Tensor, dict[tuple[str, Stored], torch.Tensor]]:
    """Exact output of batch item ``item``, and per (scheme, stored) the output with that stored."""
    k, v = layer.k[item], layer.v[item]
    normed = layer.normed_keys[item] if layer.folds_gain else None
    num_kv_heads, tokens, _ = k.shape
    with_keys = schemes if stored & {"K", "KV"} else []
    keys = [_stored_keys(scheme, k, normed, layer) for scheme in with_keys]
    # Schemes that share what values are stored as share the work.
    sides = {scheme.values for scheme in schemes} if stored & {"V", "KV"} else ()
    values = {side: _stored_blocks(side, v, layer.index) for side in sides}
    runs = [
        RunningAttention(layer.q[item].float(), layer.positions, layer.scaling, num_kv_heads)
        for _ in range(1 + len(keys))
    ]
    scores = BLOCK_SCORES if k.device.type == "cpu" else DEVICE_BLOCK_SCORES
    step = max(1, scores // (layer.q.shape[1] * len(layer.positions)))
    for start in range(0, min(tokens, int(layer.positions.max()) + 1), step):
        block = slice(start, start + step)
        v_exact = v[:, block].float()
        v_stored = {side: read(block) for side, read in values.items()}
        kept = None
        if exact_first or exact_recent:
            index = torch.arange(start, start + v_exact.shape[1], device=v.device)
            distance = runs[0].last - index
            near = (index < exact_first) | ((distance >= 0) & (distance < exact_recent))
            kept = _Kept(near, k[:, block].float(), v_exact) if near.any() else None
        # Without a name: a block may be the whole context, and the next ones need its memory.
        runs[0].update(start, k[:, block].float(), [v_exact, *(v_stored.values() if "V" in stored else ())], kept)
        for scheme, run, read in zip(with_keys, runs[1:], keys, strict=True):
            run.update(start, read(block), [v_exact, *([v_stored[scheme.values]] if "KV" in stored else ())], kept)
    exact, *with_v = runs[0].outputs()
    by_side = dict(zip(values, with_v, strict=False))
    outputs = {(scheme.name, "V"): by_side[scheme.values] for scheme in schemes if "V" in stored}
    for scheme, run in zip(with_keys, runs[1:], strict=True):
        outputs |= {(scheme.name, entry): o for entry, o in zip(("K", "KV"), run.outputs(), strict=False)}
    return exact, outputs


Reader = Callable[[slice], torch.Tensor]


def _stored_blocks(side: StoredAs, x: torch.Tensor, layer: int) -> Reader:
    """Return a reader of ``x``'s stored version, a block of tokens at a time."""
    if side.per_token:
        return lambda block: side.roundtrip(x[:, block].float(), layer)
    whole = side.roundtrip(x.float(), layer)
    return lambda block: whole[:, block]


def _stored_keys(scheme: Scheme, k: torch.Tensor, normed: torch.Tensor | None, layer: LayerCapture) -> Reader:
    def store(block: slice) -> torch.Tensor:
        folded = {} if normed is None else {"normed_keys": normed[:, block].float(), "k_gain": layer.k_gain}
        return scheme.store_keys(k[:, block].float(), layer=layer.index, **folded)

    if scheme.keys.per_token:
        return store
    whole = store(slice(None))
    return lambda block: whole[:, block]


def attention_output_error(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scheme: str | Scheme,
    *,
    stored: Stored = "K",
    layer: int = 0,
    positions: torch.Tensor | None = None,
    scaling: float | None = None,
    normed_keys: torch.Tensor | None = None,
    k_gain: torch.Tensor | None = None,
) -> float:
    """How far storing keys, values or both under a scheme moves the attention output.

    Parameters
    ----------
    q
        ``[num_heads, num_queries, head_dim]`` (a leading batch dimension is accepted), any float dtype.
        With as many queries as keys and no ``positions``, up to 256 of them are taken, evenly spaced
        over the last quarter of the context.
    k, v
        ``[num_kv_heads, tokens, head_dim]``, as attention sees them.
    scheme
        A name or a `Scheme`.
    stored
        ``"K"`` (the write-up's figure), ``"V"`` or ``"KV"``: what is replaced by its stored version.
    layer
        Absolute decoder layer, for transforms that differ between layers.
    positions
        ``[num_queries]`` int64: absolute position of each query.
    scaling
        Factor on the scores; head_dim^-0.5 by default.
    normed_keys, k_gain
        Keys before their QK-norm gain and the gain ``[head_dim]``, on a layer without RoPE; used by
        schemes that fold it.

    Returns
    -------
    float
        ‖ô − o‖_F / ‖o‖_F over all queries and heads, causal, in float32.

    Raises
    ------
    TypeError, ValueError
        A tensor of the wrong type or shape or not finite, a position outside the context, a scaling that is no
        finite number, an unknown scheme; ``v`` whose attention output is zero, so that no error is relative.

    References
    ----------
    “Serving Kolibri-1 with a 4-bit KV cache” (2026): 9.8% for int4, 5.7% for hadamard-int4, 2.3% for fp8 keys.
    """
    check_choice(stored, "stored", STORED)
    scheme = get_scheme(scheme)
    _check_qkv(q, k, v)
    _check_folding(normed_keys, k_gain, k)
    scaling = k.shape[-1] ** -0.5 if scaling is None else check_number(scaling, "scaling")
    q, k, v = (x[None] if x.ndim == 3 else x for x in (q, k, v))
    if positions is None:
        if q.shape[-2] != k.shape[-2]:
            raise ValueError(
                f"positions is None with {q.shape[-2]} queries for {k.shape[-2]} keys; accepted: the absolute "
                "position of each query"
            )
        positions = query_positions(k.shape[-2], 256).to(q.device)
        q = q[..., positions, :]
    check_finite(q, "q")
    positions = torch.as_tensor(positions, device=q.device)
    if positions.ndim != 1 or not len(positions):
        raise ValueError(f"positions has shape {list(positions.shape)}; accepted: [{q.shape[-2]}], one per query")
    if positions.is_floating_point() or positions.dtype == torch.bool:
        raise TypeError(f"positions has dtype {positions.dtype}; accepted: an integer dtype")
    if positions.shape != q.shape[-2:-1] or int(positions.min()) < 0 or int(positions.max()) >= k.shape[-2]:
        raise ValueError(
            f"positions has shape {list(positions.shape)} and values {int(positions.min())} … "
            f"{int(positions.max())}; accepted: one per query ({q.shape[-2]}), from 0 to {k.shape[-2] - 1}"
        )
    captured = LayerCapture(
        index=layer,
        kind="full",
        rope=k_gain is None,
        q=q,
        positions=positions,
        k=k,
        v=v,
        normed_keys=None if normed_keys is None else normed_keys.reshape(k.shape),
        q_gain=None,
        k_gain=k_gain,
        scaling=scaling,
    )
    return layer_errors(captured, [scheme], [stored])[scheme.name, stored]


def _check_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    check_vectors(k, "k", min_ndim=3)
    check_vectors(q, "q", min_ndim=3, head_dim=k.shape[-1])
    check_vectors(v, "v", min_ndim=3, head_dim=k.shape[-1])
    if k.ndim > 4:
        raise ValueError(f"k has shape {list(k.shape)}; accepted: [num_kv_heads, tokens, head_dim], batch before it")
    if v.shape != k.shape:
        raise ValueError(f"v has shape {list(v.shape)}; accepted: k's, {list(k.shape)}")
    if q.shape[:-3] != k.shape[:-3] or q.shape[-3] % k.shape[-3]:
        raise ValueError(
            f"q has shape {list(q.shape)}; accepted: a multiple of k's {k.shape[-3]} heads, k's batch ({list(k.shape)})"
        )
    check_finite(k, "k")
    check_finite(v, "v")


def _check_folding(normed_keys: torch.Tensor | None, k_gain: torch.Tensor | None, k: torch.Tensor) -> None:
    if normed_keys is None and k_gain is None:
        return
    for name, x, shape in (("normed_keys", normed_keys, k.shape), ("k_gain", k_gain, k.shape[-1:])):
        if x is None:
            raise ValueError(f"{name} is None; accepted: normed_keys and k_gain together, or neither")
        if check_vectors(x, name).shape != shape:
            raise ValueError(f"{name} has shape {list(x.shape)}; accepted: {list(shape)}")
        check_finite(x, name)


def attention_error_table(
    capture: Capture,
    schemes: Iterable[str | Scheme],
    *,
    stored: Iterable[Stored] = STORED,
    exact_first: int = 0,
    exact_recent: int = 0,
    progress: bool = False,
) -> pd.DataFrame:
    """Attention-output error of every captured layer under every scheme.

    Parameters
    ----------
    capture
        From `kvlab.capture`.
    schemes
        Names or `Scheme` objects.
    stored
        Which of ``"K"``, ``"V"``, ``"KV"`` to store.
    exact_first, exact_recent
        Tokens that are not stored, as in `layer_errors`; ``bits`` does not count them.
    progress
        Show a progress bar over layers on standard error.

    Returns
    -------
    pandas.DataFrame
        One row per layer, scheme and stored: ``layer``, ``scheme``, ``stored``, ``bits`` (per number, of what
        is stored), ``error``. The model's figure is the mean of ``error`` over its layers.

    Raises
    ------
    TypeError, ValueError
        An unknown scheme or two of one name, a number of tokens that is none, or a capture that is empty, holds
        padding or saw no sampled position.
    """
    schemes, stored = get_schemes(schemes), list(stored)
    rows = []
    for layer in measurable_layers(capture, label="attention error" if progress else None):
        errors = layer_errors(layer, schemes, stored, exact_first=exact_first, exact_recent=exact_recent)
        head_dim = layer.k.shape[-1]
        for scheme in schemes:
            bits = {
                "K": scheme.keys.bits_per_number(head_dim),
                "V": scheme.values.bits_per_number(head_dim),
                "KV": scheme.bits_per_number(head_dim),
            }
            rows += [(layer.index, scheme.name, s, bits[s], errors[scheme.name, s]) for s in stored]
    return pd.DataFrame(rows, columns=["layer", "scheme", "stored", "bits", "error"])
