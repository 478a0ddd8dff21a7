"""A full-attention layer's share of a decode step: store, attend, map back; what calibration costs there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import pandas as pd
import torch

from kvlab.bench.cases import (
    HEAD_DIM,
    KIB,
    SHAPES,
    DecodeCase,
    Entry,
    StoreCase,
    lengths,
    relative_error,
    sets_of_inputs,
    shuffled_tables,
)
from kvlab.bench.kernels import OURS, REFITTED, KernelBench
from kvlab.bench.ours import BLOCK_SIZE, orthogonal, random_cache
from kvlab.bench.timing import CudaClock
from kvlab.kernels.folding import REFIT, Folding
from kvlab.kernels.layout import cell_bytes
from kvlab.quantizers import RefitUnequalInteger, UnequalInteger

BATCHES = (1, 8, 64)
CONTEXT = 64 * KIB
CHECKED_SESSIONS = 1
"""Compared with the twins, which are references and slow."""

FINE = 16
"""Directions of the keys in eight bits, and in none; the kernels' time is the same for any number."""


class Layer(NamedTuple):
    """What a scheme puts around the cache of one layer; ``inverse`` and ``mean`` where it maps values."""

    folding: Folding
    inverse: torch.Tensor | None = None
    mean: torch.Tensor | None = None


def rotated(num_kv_heads: int, device: torch.device) -> Layer:
    """Return one rotation for all heads, as hadamard-int4 has."""
    matrix = orthogonal(1, device)
    return Layer(Folding(matrix, matrix))


def refitted(num_kv_heads: int, device: torch.device) -> Layer:
    """Return the same with scale and offset of the keys searched."""
    matrix = orthogonal(1, device)
    return Layer(Folding(matrix, matrix, k_quantizer=REFIT))


def calibrated(num_kv_heads: int, device: torch.device, *, unequal: UnequalInteger, values: bool = False) -> Layer:
    """Return means and a map per head of keys in unequal bits, and with ``values`` of values too; random ones."""
    maps = orthogonal(num_kv_heads, device)
    placement, expansion = (each(HEAD_DIM).to(device) for each in (unequal.placement, unequal.expansion))
    means = torch.randn(num_kv_heads, HEAD_DIM, device=device)
    given = {"v_matrix": maps, "v_bias": means} if values else {}
    folding = Folding(expansion.mT @ maps, placement @ maps, k_bias=means @ placement.mT, k_quantizer=unequal, **given)
    # What undoes v' = M v + b with an orthogonal M, for rows: v'ᵀ M − bᵀ M.
    return Layer(folding, maps.bfloat16(), -torch.einsum("hi,hij->hj", means, maps)) if values else Layer(folding)


LAYERS: Mapping[str, Callable[[int, torch.device], Layer]] = MappingProxyType(
    {
        OURS: rotated,
        REFITTED: refitted,
        "unequal bits": partial(calibrated, unequal=UnequalInteger(FINE)),
        "unequal bits, refitted": partial(calibrated, unequal=RefitUnequalInteger(FINE)),
        "unequal bits, refitted, values mapped": partial(calibrated, unequal=RefitUnequalInteger(FINE), values=True),
    }
)
"""Scheme → what it puts around a layer's cache."""


def layer_step(case: DecodeCase, device: torch.device, make: Callable[[int, torch.device], Layer] = rotated) -> Entry:
    """Prepare a layer's store, decode attention and, where values are mapped, restore on random numbers.

    The error is of one session's bfloat16 output against the naive twins' in float64, on what the kernels stored.
    """
    from kvlab.kernels.decode import DecodePlan
    from kvlab.kernels.naive.decode import decode_attention
    from kvlab.kernels.naive.restore import restore as naive_restore
    from kvlab.kernels.restore import restore
    from kvlab.kernels.store import norm_rotate_store

    heads = {"num_heads": case.num_heads, "num_kv_heads": case.num_kv_heads}
    cell = cell_bytes(HEAD_DIM)
    num_bytes = case.cache_bytes(cell) + StoreCase(**heads, tokens=case.batch).moved_bytes(cell)
    layer = make(case.num_kv_heads, device)
    num_blocks, tables = shuffled_tables(case, BLOCK_SIZE, sets_of_inputs(num_bytes), device)
    cache, seq_lens = random_cache(num_blocks, case.num_kv_heads, device), lengths(case, device)
    width = (case.num_heads + 2 * case.num_kv_heads) * HEAD_DIM
    qkv = torch.randn(case.batch, width, dtype=torch.bfloat16, device=device)
    plan = DecodePlan(**heads, head_dim=HEAD_DIM, block_size=BLOCK_SIZE, max_batch=case.batch, device=device)
    plan.update(seq_lens)
    last = seq_lens.long() - 1
    q, out = (qkv.new_empty(case.batch, case.num_heads, HEAD_DIM) for _ in range(2))

    def step(table: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        norm_rotate_store(qkv, cache, slots, layer.folding, out=q, **heads)
        plan.attend(q, cache, table, seq_lens, scale=HEAD_DIM**-0.5, out=out)
        if layer.inverse is not None:
            restore(out, layer.inverse, layer.mean)
        return out

    def error() -> float:
        got = calls[0]()[:CHECKED_SESSIONS]
        rows = q[:CHECKED_SESSIONS], cache, tables[0][:CHECKED_SESSIONS], seq_lens[:CHECKED_SESSIONS]
        expected, _ = decode_attention(*rows, scale=HEAD_DIM**-0.5)
        if layer.inverse is not None:
            expected = naive_restore(expected, layer.inverse, layer.mean)
        return relative_error(got, expected)

    calls = []
    for table in tables:
        block = table.gather(1, (last // BLOCK_SIZE)[:, None])[:, 0]
        calls.append(partial(step, table, block.long() * BLOCK_SIZE + last % BLOCK_SIZE))
    return Entry(calls, num_bytes, once_per_step=partial(plan.update, seq_lens), error=error)


def bench_layer(*, progress: bool = True, command: str = "") -> tuple[pd.DataFrame, list[str]]:
    """Time a layer's step under every scheme of `LAYERS`, for the shapes of Kolibri-1 and `BATCHES` of `CONTEXT`.

    Parameters
    ----------
    progress
        Show a progress bar on standard error.
    command
        What the table names as its command.

    Returns
    -------
    tuple of pandas.DataFrame and list of str
        As `kvlab.bench.kernels.bench_kernels`: one row per scheme and case, and what could not be measured.

    Raises
    ------
    ValueError
        There is no CUDA device.
    """
    bench = KernelBench(CudaClock())
    cases = [DecodeCase(*shape, (CONTEXT,) * batch) for shape in SHAPES for batch in BATCHES]
    entrants = {name: partial(layer_step, make=make) for name, make in LAYERS.items()}
    bench.run("layer", entrants, cases, progress=progress)
    return bench.table(command), bench.notes
