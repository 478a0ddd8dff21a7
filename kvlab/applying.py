"""Running a model with its keys and values stored under a scheme (a simulated cache)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from transformers import Cache

from kvlab.checks import check_choice, check_integer
from kvlab.models.attention import AttentionLayer, model_layers, select_layers
from kvlab.models.projected_keys import ProjectedKeys
from kvlab.schemes import Scheme, StoredAs, get_scheme


@contextmanager
def apply(
    model: nn.Module,
    scheme: str | Scheme | Mapping[str | int, str | Scheme],
    *,
    layers: str | Iterable[int] | None = None,
) -> Iterator[None]:
    """Store keys and values under a scheme while the model runs inside the context.

    Attention sees what the cache would give back, in prefill, chunked prefill and generate, with a
    cache or without; a cache then holds the stored vectors, so that every token is stored once. A
    scheme that shares scales between tokens (KIVI's keys) stores the whole history anew at each
    step, and the cache holds the exact vectors. Under such a scheme decoding differs from prefill, as it
    does in serving: all queries of one forward read the history as it is stored at the forward's end, so
    those of a prefill read blocks that were not full yet at their own time, when decoding read exact keys.

    A context entered inside another on the same layer stores what the outer one gave back (or, where
    the outer scheme shares scales between tokens, comes before it), and each removes only its own.

    Parameters
    ----------
    model
        A transformers model supported by `kvlab.models.attention.attention_layers`.
    scheme
        A name or `kvlab.Scheme`, or a mapping from "full", "sliding" or absolute decoder indices to
        such; an index beats a kind.
    layers
        With a single scheme: "full" (the default), "sliding", "all" or absolute decoder indices.

    Yields
    ------
    None

    Raises
    ------
    TypeError, ValueError
        A model, scheme or layer that is not accepted; from the forward pass a vector that the scheme
        cannot hold, or a cache that it cannot work with.

    Examples
    --------
    >>> with kvlab.apply(model, "hadamard-int4"):
    ...     model.generate(input_ids, max_new_tokens=64)
    """
    stores = [_LayerStore(layer, scheme) for layer, scheme in _assign(model, scheme, layers)]
    with ExitStack() as stack:
        for store in stores:
            stack.enter_context(store.storing())
        yield


def _assign(model: nn.Module, scheme: object, layers: object) -> list[tuple[AttentionLayer, Scheme]]:
    """Which layer is stored under which scheme."""
    known = model_layers(model)
    if not isinstance(scheme, Mapping):
        return [(layer, get_scheme(scheme)) for layer in select_layers(known, layers).values()]
    if layers is not None:
        raise ValueError(f"layers is {layers!r} beside a mapping of schemes; accepted: one or the other")
    if not scheme:
        raise ValueError("scheme is an empty mapping; accepted: a scheme for 'full', 'sliding' or layer indices")
    chosen: dict[int, Scheme] = {}
    # Kinds before indices, so that an index has the last word.
    for key, value in sorted(scheme.items(), key=lambda item: not isinstance(item[0], str)):
        which = key if isinstance(key, str) else check_integer(key, "a key of scheme", minimum=0)
        check_choice(which, "a key of scheme", ("full", "sliding", *known))
        for index in select_layers(known, which if isinstance(which, str) else [which]):
            chosen[index] = get_scheme(value)
    return [(known[index], scheme) for index, scheme in chosen.items()]


class _LayerStore:
    """Stores the keys and values of one layer under one scheme."""

    def __init__(self, layer: AttentionLayer, scheme: Scheme) -> None:
        self.layer = layer
        self.scheme = scheme
        self.folds = scheme.fold_gain and layer.folds_gain
        self.per_token = scheme.keys.per_token and scheme.values.per_token
        self._projected = ProjectedKeys(layer) if self.folds else None
        if self.folds and not scheme.keys.per_token:
            raise ValueError(f"scheme {scheme.name!r} folds the gain; accepted: keys stored token by token")
        if layer.kind == "sliding" and not self.per_token:
            raise ValueError(
                f"scheme {scheme.name!r} shares scales between tokens and layer {layer.index} is a sliding one, "
                "whose history is cut; accepted: full-attention layers"
            )

    @contextmanager
    def storing(self) -> Iterator[None]:
        with ExitStack() as stack:
            # Before the hooks of outer contexts, whose proxies then come around this one's and store first.
            hook = self.layer.module.register_forward_pre_hook(self._wrap_cache, prepend=True, with_kwargs=True)
            stack.callback(hook.remove)
            if self.folds:
                stack.enter_context(self._projected.watched())
            yield

    def _wrap_cache(self, _module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        name = "past_key_values" if "past_key_values" in kwargs else "cache"
        return args, {**kwargs, name: _StoringCache(kwargs.get(name), self)}

    def new_keys(self, k: torch.Tensor) -> torch.Tensor:
        """Return what the cache is to hold of new keys, ``[batch, num_kv_heads, new tokens, head_dim]``."""
        if not self.scheme.keys.per_token:
            return k
        normed = self._projected.take() if self.folds else None
        return self.scheme.store_keys(k, layer=self.layer.index, normed_keys=normed, k_gain=self.layer.k_gain)

    def new_values(self, v: torch.Tensor) -> torch.Tensor:
        """Return what the cache is to hold of new values."""
        return self._store(self.scheme.values, v, per_token=True)

    def history(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what attention reads, given all that the cache holds: stored anew where tokens share scales."""
        return (
            self._store(self.scheme.keys, k, per_token=False),
            self._store(self.scheme.values, v, per_token=False),
        )

    def _store(self, side: StoredAs, x: torch.Tensor, *, per_token: bool) -> torch.Tensor:
        return side.roundtrip(x, layer=self.layer.index) if side.per_token is per_token else x


class _StoringCache:
    """A cache as attention modules use it: `update` stores, all else is the real cache's."""

    def __init__(self, cache: Cache | _StoringCache | None, store: _LayerStore) -> None:
        if not store.per_token and getattr(cache, "is_compileable", False):
            raise ValueError(
                f"cache is a static one and scheme {store.scheme.name!r} shares scales between tokens; "
                "accepted: a DynamicCache, or none"
            )
        if isinstance(cache, _StoringCache) and cache._store.folds:
            raise ValueError(
                f"scheme {cache._store.scheme.name!r} stores the keys of layer {store.layer.index} without their "
                f"gain, so it cannot follow {store.scheme.name!r}; accepted: as the outermost apply"
            )
        self._cache = cache
        self._store = store

    def update(self, k: torch.Tensor, v: torch.Tensor, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values; return the whole history as attention reads it."""
        k, v = self._store.new_keys(k), self._store.new_values(v)
        if self._cache is not None:
            k, v = self._cache.update(k, v, *args, **kwargs)
        return self._store.history(k, v)

    @property
    def values_stay(self) -> bool:
        """Whether attention reads a token's values at every step as it first did."""
        return self._store.scheme.values.per_token and getattr(self._cache, "values_stay", True)

    def __getattr__(self, name: str) -> object:
        return getattr(self._cache, name)
