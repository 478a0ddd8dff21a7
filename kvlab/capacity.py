"""How many sessions a cache holds, and what a session takes, for any scheme, context, model and memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING

import pandas as pd

from kvlab.checks import LARGEST, check_integer, check_number
from kvlab.defaults import MAX_NUM_BATCHED_TOKENS
from kvlab.models.kolibri1_config import kolibri1_config
from kvlab.models.kolibri1_layout import embedding_specs, head_specs, layer_specs
from kvlab.paging import plan_cache, text_config
from kvlab.schemes import Scheme, get_schemes

if TYPE_CHECKING:
    from transformers import PretrainedConfig

GB = 10**9
STOCK, WRITE_UP_SCHEME = "fp8", "hadamard-int4"
SCHEMES = (STOCK, WRITE_UP_SCHEME)

MAX_BYTES = 10**18
"""An exabyte: more than any memory, and its bytes and sessions fit 64-bit integers."""

GPU_MEMORY_UTILIZATION = 0.92
"""vLLM 0.29's default."""


def capacity_table(
    contexts: Iterable[int],
    cache_bytes: float,
    schemes: Iterable[str | Scheme] = SCHEMES,
    config: PretrainedConfig | None = None,
    *,
    tp: int = 1,
    replicas: int = 1,
    max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS,
) -> pd.DataFrame:
    """Count the sessions that fit.

    Parameters
    ----------
    contexts
        Tokens of a session; may be beyond what the model was made for. One given twice counts once.
    cache_bytes
        Memory of the cache on each GPU.
    schemes
        What the full-attention layers store.
    config
        As in `plan_cache`.
    tp
        GPUs that share each session.
    replicas
        How many such sets of GPUs serve beside each other.
    max_num_batched_tokens
        The server's; only ``sessions_admitted`` depends on it.

    Returns
    -------
    pandas.DataFrame
        One row a context and scheme: ``scheme``, ``context``; ``sessions`` while all of them decode, and
        ``sessions_whole``, on all GPUs; ``bytes_per_session``, in whole blocks, on the ``tp`` GPUs of one set together;
        ``sessions_admitted``, the "maximum concurrency" that vLLM logs where this context is its longest: it keeps room
        for a prefill in every sliding-window layer.

    Raises
    ------
    TypeError, ValueError
        As `plan_cache`; a context is no positive integer, there is no context or scheme, or the memory is as `to_bytes`
        refuses it.
    """
    contexts = _check_contexts(contexts)
    cache_bytes = to_bytes(cache_bytes, "cache_bytes")
    check_integer(replicas, "replicas", minimum=1, maximum=LARGEST)
    check_integer(max_num_batched_tokens, "max_num_batched_tokens", minimum=1, maximum=LARGEST)
    plans = {scheme.name: plan_cache(scheme, config, tp=tp) for scheme in get_schemes(schemes)}
    if not plans:
        raise ValueError("schemes is empty; accepted: at least one scheme")
    rows = []
    for context in contexts:
        for name, plan in plans.items():
            pool = int(cache_bytes) // plan.block_bytes
            # vLLM never hands out the first block, its null block.
            sessions = max(pool - 1, 0) / plan.blocks(context)
            rows.append(
                {
                    "scheme": name,
                    "context": context,
                    "sessions": replicas * sessions,
                    "sessions_whole": replicas * int(sessions),
                    "bytes_per_session": plan.blocks(context) * plan.block_bytes * tp,
                    "sessions_admitted": replicas * pool / plan.blocks_reserved(context, max_num_batched_tokens),
                }
            )
    return pd.DataFrame(rows)


def session_table(
    contexts: Iterable[int],
    schemes: Iterable[str | Scheme] = SCHEMES,
    config: PretrainedConfig | None = None,
    *,
    tp: int = 1,
) -> pd.DataFrame:
    """Return what one session takes: ``scheme``, ``context`` and ``bytes_per_session`` of `capacity_table`."""
    # Whatever the memory is: a session takes the same.
    table = capacity_table(contexts, GB, schemes, config, tp=tp)
    return table[["scheme", "context", "bytes_per_session"]]


def cache_bytes_per_gpu(
    gpu_memory_bytes: float, weight_bytes: float, *, tp: int, utilization: float = GPU_MEMORY_UTILIZATION
) -> float:
    """Return what weights leave of a GPU for its cache.

    Parameters
    ----------
    gpu_memory_bytes
        Of one GPU.
    weight_bytes
        Of the whole model, shared evenly by ``tp`` GPUs.
    tp
        GPUs that share the weights.
    utilization
        The part of its memory that vLLM may use.

    Returns
    -------
    float
        Bytes; an upper bound, since activations and CUDA graphs, a few GB, come off it too.

    Raises
    ------
    TypeError, ValueError
        A number is not positive, or nothing is left.
    """
    gpu_memory_bytes = to_bytes(gpu_memory_bytes, "gpu_memory_bytes")
    utilization = check_utilization(utilization, "utilization")
    weights = to_bytes(weight_bytes, "weight_bytes") / check_integer(tp, "tp", minimum=1)
    left = utilization * gpu_memory_bytes - weights
    if left <= 0:
        raise ValueError(
            f"gpu memory is {gpu_memory_bytes / GB:g} GB, of which {utilization:g} is used; accepted: more than the "
            f"{weights / GB:.1f} GB of weights on each of {tp} GPU{'s'[: tp != 1]}"
        )
    return left


def to_bytes(value: float, name: str, *, unit: int = 1) -> float:
    """Return a size of memory in bytes.

    Parameters
    ----------
    value
        The size.
    name
        What errors call it.
    unit
        Bytes that ``value`` counts: 1, or `GB`.

    Raises
    ------
    TypeError, ValueError
        It is no number, not positive, or beyond `MAX_BYTES`.
    """
    accepted = f"a positive number, at most {MAX_BYTES / unit:g}, in {'bytes' if unit == 1 else f'{unit:.0e} bytes'}"
    if not 0 < check_number(value, name, accepted) <= MAX_BYTES / unit:
        raise ValueError(f"{name} is {value}; accepted: {accepted}")
    return value * unit


def check_utilization(value: float, name: str) -> float:
    """Check the part of a GPU's memory that vLLM may use; errors call it ``name``.

    Raises
    ------
    TypeError, ValueError
        It is no number above 0 and at most 1.
    """
    accepted = "a number in (0, 1]"
    if not 0 < check_number(value, name, accepted) <= 1:
        raise ValueError(f"{name} is {value}; accepted: {accepted}")
    return value


def gain_table(
    contexts: Iterable[int],
    cache_gb: tuple[float, float],
    scheme: str | Scheme = WRITE_UP_SCHEME,
    stock: str | Scheme = STOCK,
    config: PretrainedConfig | None = None,
    *,
    tp: int = 1,
) -> pd.DataFrame:
    """Compare the whole sessions of two schemes over a range of memory, at every size at which either changes.

    Parameters
    ----------
    contexts
        Tokens of a session.
    cache_gb
        Smallest and largest memory of the cache on each GPU, in 1e9 bytes.
    scheme, stock
        What is compared with what.
    config, tp
        As in `capacity_table`.

    Returns
    -------
    pandas.DataFrame
        One row a context and interval of memory, ``from_gb`` to ``to_gb``: ``sessions`` of ``scheme`` and
        ``sessions_stock``, whole ones, and ``gain``, their ratio less one (NaN where stock holds none).

    Raises
    ------
    TypeError, ValueError
        As `plan_cache`, the range is none, or the contexts are as `capacity_table` refuses them.
    """
    contexts = _check_contexts(contexts)
    accepted = "two positive numbers, the smaller first"
    try:
        low, high = cache_gb
    except (TypeError, ValueError):
        raise ValueError(f"cache_gb is {cache_gb!r}; accepted: {accepted}") from None
    low, high = (check_number(value, "cache_gb", accepted) for value in (low, high))
    if not 0 < low < high:
        raise ValueError(f"cache_gb is {cache_gb}; accepted: {accepted}")
    plans = [plan_cache(one, config, tp=tp) for one in (scheme, stock)]
    rows = []
    for context in contexts:
        # What a session more takes, the null block included.
        steps = [(plan.blocks(context) * plan.block_bytes, plan.block_bytes) for plan in plans]
        edges = {low, high}
        for session, block in steps:
            first, last = ((value * GB - block) / session for value in (low, high))
            edges |= {(number * session + block) / GB for number in range(max(math.ceil(first), 1), int(last) + 1)}
        for start, end in itertools.pairwise(sorted(edges)):
            # In the middle of an interval no rounding decides.
            middle = (start + end) / 2 * GB
            ours, theirs = (max(int((middle - block) // session), 0) for session, block in steps)
            rows.append(
                {
                    "context": context,
                    "from_gb": start,
                    "to_gb": end,
                    "sessions": ours,
                    "sessions_stock": theirs,
                    "gain": ours / theirs - 1 if theirs else math.nan,
                }
            )
    return pd.DataFrame(rows)


def memory_that_gives(gains: pd.DataFrame, published: pd.DataFrame) -> list[tuple[float, float]]:
    """Return the intervals of memory in which whole sessions gain what was published, at all contexts at once.

    Parameters
    ----------
    gains
        From `gain_table`.
    published
        ``context`` and ``gain``, rounded to whole percent.

    Returns
    -------
    list of tuple
        Smallest and largest memory of each interval, in 1e9 bytes a GPU, ascending; empty if there is none.
    """
    common = [(gains["from_gb"].min(), gains["to_gb"].max())]
    for context, gain in published[["context", "gain"]].itertuples(index=False):
        rows = gains[(gains["context"] == context) & ((100 * gains["gain"]).round() == round(100 * gain))]
        intervals = list(rows[["from_gb", "to_gb"]].itertuples(index=False, name=None))
        both = [(max(a, c), min(b, d)) for a, b in common for c, d in intervals]
        common = [(start, end) for start, end in both if start < end]
    return common


def count_replicas(gpus: int, tp: int) -> int:
    """Return how many sets of ``tp`` GPUs there are among ``gpus``.

    Raises
    ------
    TypeError, ValueError
        They do not come out even.
    """
    gpus, tp = check_integer(gpus, "gpus", minimum=1, maximum=LARGEST), check_integer(tp, "tp", minimum=1)
    if gpus % tp:
        raise ValueError(f"gpus is {gpus}; accepted: a multiple of tp = {tp}")
    return gpus // tp


def beyond_model(contexts: Iterable[int], config: PretrainedConfig | None = None) -> str | None:
    """Return one line that names the contexts longer than the model was made for, or None.

    They are counted all the same: what a cache would hold is asked for before a model can do it.

    Raises
    ------
    TypeError, ValueError
        Contexts that `capacity_table` refuses, or no transformers config.
    """
    contexts = _check_contexts(contexts)
    longest = getattr(text_config(config), "max_position_embeddings", None)
    if longest is None:
        return None
    longest = check_integer(longest, "config.max_position_embeddings", minimum=1)
    found = [f"{context:,}" for context in contexts if context > longest]
    return f"context {', '.join(found)} is longer than the model's {longest:,} tokens" if found else None


def _check_contexts(contexts: Iterable[int]) -> list[int]:
    if not isinstance(contexts, Iterable) or isinstance(contexts, str):
        raise TypeError(f"contexts is {contexts!r}; accepted: several contexts, in tokens")
    checked = [check_integer(context, "context", minimum=1, maximum=LARGEST) for context in contexts]
    contexts = list(dict.fromkeys(checked))
    if not contexts:
        raise ValueError("contexts is empty; accepted: at least one context, in tokens")
    return contexts


def as_text(table: pd.DataFrame) -> str:
    """Return `capacity_table`'s rows for people: sessions with one decimal, sizes in 1e9 bytes."""
    shown = table.rename(columns={"bytes_per_session": "GB_per_session"})
    formats = {
        "context": "{:,}".format,
        "sessions": "{:.1f}".format,
        "sessions_admitted": "{:.1f}".format,
        "GB_per_session": lambda size: f"{size / GB:.3f}",
    }
    return shown.to_string(index=False, formatters=formats)


@cache
def kolibri1_weight_bytes() -> int:
    """Bytes of Kolibri-1's released FP8 weights, the block scales included."""
    config = kolibri1_config()
    outside = [*embedding_specs(config), *head_specs(config)]
    # Layers differ in their attention, not in their tensors.
    layer = sum(spec.bytes_on_disk for spec in layer_specs(config, 0))
    return sum(spec.bytes_on_disk for spec in outside) + config.num_hidden_layers * layer
