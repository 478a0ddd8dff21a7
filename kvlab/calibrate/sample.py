"""What a finder of key transforms sees of a layer: its keys, how much each matters, and the queries' second moment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from kvlab.calibrate.layers import folds, stored_keys
from kvlab.calibrate.means import BLOCK_TOKENS
from kvlab.measure.attention import BLOCK_SCORES
from kvlab.recording import LayerCapture
from kvlab.schemes import Scheme, get_scheme


@dataclass(frozen=True, eq=False)
class KeySample:
    """Keys of one layer with a weight each, and the weighted second moment of the queries that read them.

    Attributes
    ----------
    keys
        float32 ``[num_kv_heads, tokens, head_dim]``, as a scheme transforms and quantizes them.
    weights
        float64 ``[num_kv_heads, tokens]``, not negative, adding up to 1 per head.
    covariance
        C: float64 ``[num_kv_heads, head_dim, head_dim]``, the queries' second moment about zero.

    Raises
    ------
    ValueError
        The shapes do not fit, or a head's weights or covariance are zero or not finite.
    """

    keys: torch.Tensor
    weights: torch.Tensor
    covariance: torch.Tensor

    def __post_init__(self) -> None:
        num_kv_heads, tokens, head_dim = self.keys.shape
        for name, shape in (("weights", (num_kv_heads, tokens)), ("covariance", (num_kv_heads, head_dim, head_dim))):
            if (found := getattr(self, name).shape) != shape:
                raise ValueError(f"{name} has shape {list(found)}; accepted: {list(shape)}, as keys are")
        for name, total in (("weights", self.weights.sum(-1)), ("covariance", _trace(self.covariance))):
            if not (total > 0).all() or not total.isfinite().all():
                shown = ", ".join(f"{value:.3g}" for value in total.tolist())
                raise ValueError(f"{name} add up to {shown} per KV head; accepted: positive finite totals")

    @property
    def mean(self) -> torch.Tensor:
        """Weighted mean of the keys, float64 ``[num_kv_heads, head_dim]``."""
        blocks = zip(self.keys.split(BLOCK_TOKENS, dim=1), self.weights.split(BLOCK_TOKENS, dim=1), strict=True)
        return sum((weights[:, None] @ keys.double())[:, 0] for keys, weights in blocks)

    @cached_property
    def moment(self) -> torch.Tensor:
        """M: the weighted second moment of the keys about zero, float64 ``[num_kv_heads, head_dim, head_dim]``."""
        return moment(self.keys, self.weights)

    @property
    def score_energy(self) -> torch.Tensor:
        """tr(C M): the weighted mean square of the scores, float64 ``[num_kv_heads]``."""
        return (self.covariance * self.moment).sum((-2, -1))

    def minus(self, mean: torch.Tensor) -> KeySample:
        """Return this sample with ``mean``, ``[num_kv_heads, head_dim]``, subtracted from the keys."""
        return replace(self, keys=self.keys - mean.float()[:, None])


UNIFORM_SHARE = 0.5
"""Of the weight in `mixed_sample`: no token counts less than half of what it does in either of the two."""

Sampler = Callable[[Iterable[LayerCapture], "str | Scheme"], KeySample]


def uniform_sample(layers: Iterable[LayerCapture], scheme: str | Scheme = "hadamard-int4") -> KeySample:
    """Weigh every token and every sampled query alike, as `kvlab.calibrate.KeyObjective` does.

    Parameters
    ----------
    layers
        One layer of one or more captures of a model.
    scheme
        Decides whether the keys are those before their gain.

    Returns
    -------
    KeySample
        All sequences of all captures, one after the other.
    """
    parts = [
        (keys, torch.ones(keys.shape[:2], dtype=torch.float64), queries, torch.ones(queries.shape[:2]).double())
        for layer in layers
        for keys, queries in (_as_stored(layer, item, get_scheme(scheme)) for item in range(len(layer.k)))
    ]
    return _joined(parts)


def attention_sample(layers: Iterable[LayerCapture], scheme: str | Scheme = "hadamard-int4") -> KeySample:
    """Weigh tokens and queries by what a score's error does to the attention output.

    With weights w = softmax(s) and output o = Σ w v, an error δ of the score of token j moves o by
    w (v − o) δ to first order. Errors of different tokens are independent, so the squares add up: a pair of
    query and token counts w² ‖v − o‖², in units of the layer's ‖o‖². A token counts the sum over the queries, a
    query the sum over the tokens.

    Parameters
    ----------
    layers, scheme
        As in `uniform_sample`.

    Returns
    -------
    KeySample
        As `uniform_sample`. A sink that all queries attend to counts for what it is worth, a token that none
        attends to for nothing.
    """
    parts = []
    for layer in layers:
        pairs = [_importance(layer, item) for item in range(len(layer.k))]
        energy = sum(output for *_, output in pairs)
        for item, (tokens, queries, _) in enumerate(pairs):
            keys, read_by = _as_stored(layer, item, get_scheme(scheme))
            parts.append((keys, tokens / energy, read_by, queries / energy))
    return _joined(parts)


def mixed_sample(layers: Iterable[LayerCapture], scheme: str | Scheme = "hadamard-int4") -> KeySample:
    """Take half of every weight from `attention_sample` and half from `uniform_sample`.

    Where attention is sharp, few tokens and queries carry its weights, and moments of few say little about other
    text; where it has sinks, tokens weighed alike miss what matters most.

    Parameters
    ----------
    layers, scheme
        As in `uniform_sample`.

    Returns
    -------
    KeySample
        As `uniform_sample`.
    """
    layers = list(layers)
    attended, alike = attention_sample(layers, scheme), uniform_sample(layers, scheme)
    weights, covariance = (mixed(getattr(attended, name), getattr(alike, name)) for name in ("weights", "covariance"))
    return KeySample(alike.keys, weights, covariance)


def mixed(attended: torch.Tensor, alike: torch.Tensor) -> torch.Tensor:
    """Mix what attention says with what counts all alike, by `UNIFORM_SHARE`."""
    return (1 - UNIFORM_SHARE) * attended + UNIFORM_SHARE * alike


def _as_stored(layer: LayerCapture, item: int, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys, and the queries that read them per KV head as they meet them, of one sequence."""
    keys = stored_keys(scheme, layer)[item].float()
    queries = layer.q[item].float() * (layer.k_gain if folds(scheme, layer) else 1)
    return keys, queries.reshape(len(keys), -1, keys.shape[-1])


def attention_weights(layer: LayerCapture, item: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the sampled queries' attention weights of one sequence, a block of queries at a time.

    Yields
    ------
    weights, outputs
        float32 ``[num_kv_heads, queries, tokens]``, the caller's to change, and ``[num_kv_heads, queries, head_dim]``.
    """
    k, v = layer.k[item].float(), layer.v[item].float()
    num_kv_heads, tokens, head_dim = k.shape
    queries = (layer.q[item].float() * layer.scaling).reshape(num_kv_heads, -1, head_dim)
    last = layer.positions.repeat(queries.shape[1] // len(layer.positions))[:, None]
    seen = torch.arange(tokens, device=k.device)
    step = max(1, BLOCK_SCORES // (num_kv_heads * tokens))
    for q, until in zip(queries.split(step, dim=1), last.split(step), strict=True):
        weights = (q @ k.mT).masked_fill_(seen > until, -torch.inf).softmax(-1)
        yield weights, weights @ v


def _importance(layer: LayerCapture, item: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Sum w² ‖v − o‖² per token and per query, and ‖o‖² over all."""
    v = layer.v[item].float()
    per_token, per_query, energy = 0, [], 0.0
    for weights, outputs in attention_weights(layer, item):
        lengths = outputs.square().sum(-1, keepdim=True)
        distances = (v.square().sum(-1)[:, None] + lengths - 2 * outputs @ v.mT).clamp_(min=0)
        pairs = weights.square_().mul_(distances)
        per_token = per_token + pairs.sum(1, dtype=torch.float64)
        per_query.append(pairs.sum(2, dtype=torch.float64))
        energy += lengths.sum(dtype=torch.float64).item()
    return per_token, torch.cat(per_query, dim=1), energy


def _joined(parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]) -> KeySample:
    """Join sequences of (keys, their weights, queries, their weights)."""
    columns = [torch.cat([part.cpu() for part in column], dim=1) for column in zip(*parts, strict=True)]
    keys, weights, queries, counts = columns
    weights, counts = (column / column.sum(-1, keepdim=True) for column in (weights, counts))
    return KeySample(keys, weights, moment(queries, counts))


def moment(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return Σ weight · x xᵀ over ``[num_kv_heads, tokens, head_dim]``, a float64 matrix per KV head."""
    blocks = zip(x.split(BLOCK_TOKENS, dim=1), weights.split(BLOCK_TOKENS, dim=1), strict=True)
    return sum((block.double() * weight[..., None]).mT @ block.double() for block, weight in blocks)


def _trace(x: torch.Tensor) -> torch.Tensor:
    return x.diagonal(dim1=-2, dim2=-1).sum(-1)
