"""Stock against rotated INT4 in few numbers: quality, memory and speed, each with where it comes from."""

from __future__ import annotations

import pandas as pd

from kvlab import capacity
from kvlab.plots import engine_of, run_of
from kvlab.tables import WRITE_UP, published

CONTEXTS = (65_536, 262_144)
"""Those of the write-up's headlines."""
CACHE_GB = 30
"""On each GPU: about what the weights and the rest of the server leave of 80."""
TP = 2
HEADS = (24, 2)
"""Query and KV heads of Kolibri-1 on each of two GPUs."""

STOCK, OURS = capacity.SCHEMES
PUBLISHED, COMPUTED, MEASURED = "published", "computed", "measured"
QUALITY, MEMORY, SPEED = "quality", "memory", "speed"
POINTS, TIMES = "points", "× stock"
COLUMNS = (
    "part",
    "quantity",
    "context",
    "kind",
    "value",
    "low",
    "high",
    "unit",
    "fp8",
    "hadamard-int4",
    "of",
    "source",
)

Row = dict[str, object]


def overview_table(kernels: pd.DataFrame, throughput: pd.DataFrame | None = None) -> pd.DataFrame:
    """Gather what the overview shows.

    Parameters
    ----------
    kernels
        From ``kvlab bench kernels``.
    throughput
        From ``kvlab bench throughput``, TP2; None where it was not measured.

    Returns
    -------
    pandas.DataFrame
        One row a number: ``part`` of the overview, ``quantity``, ``context`` (missing where the source names none) and
        ``kind`` (published, computed or measured); ``value`` in ``unit``, which is rotated INT4 − stock in points or a
        multiple of stock, with its 95% interval ``low`` to ``high`` where there is one; what it comes from, of ``fp8``
        and of ``hadamard-int4`` in the unit ``of``, where that is known; ``source``.
    """
    rows = [*_quality(), *_memory(), *_attention(kernels), *_published_gains()]
    if throughput is not None:
        rows += _throughput(throughput)
    rows.sort(key=lambda row: (QUALITY, MEMORY, SPEED).index(row["part"]))
    return pd.DataFrame(rows, columns=COLUMNS).astype({"context": "Int64"})


def overview_source(kernels: pd.DataFrame, throughput: pd.DataFrame | None = None) -> str:
    """Return the overview's caption: where its numbers come from, of the tables that `overview_table` takes."""
    engine = (
        ""
        if throughput is None
        else f" The whole engine: random weights, {engine_of(throughput, TP)}, {run_of(throughput)}"
    )
    return (
        f"Published: {WRITE_UP}, on two H100 80 GB; its throughput is “about 70% more”, at no context named. Computed: "
        f"kvlab.capacity, TP{TP}, {CACHE_GB} GB of cache on each of two GPUs, sessions that decode (fractional; the "
        "write-up counts whole ones). Measured: kvlab's kernel and FlashAttention 3, the heads of one of two GPUs, the "
        f"most sessions measured that stock's cache would hold; {run_of(kernels)}{engine}"
    )


def _quality() -> list[Row]:
    tables = {"RULER": published("ruler"), "GPQA Diamond": published("gpqa_difference")}
    about = {"part": QUALITY, "kind": PUBLISHED, "unit": POINTS, "of": "%", "source": WRITE_UP}
    return [
        {name: value for name, value in row.items() if name in COLUMNS}
        | {**about, "quantity": quantity, "value": row["difference"]}
        for quantity, table in tables.items()
        for row in table.to_dict("records")
    ]


def _memory() -> list[Row]:
    table = capacity.capacity_table(CONTEXTS, CACHE_GB * capacity.GB, tp=TP)
    sessions = table.pivot(index="context", columns="scheme", values="sessions")
    source = f"kvlab capacity --context {' '.join(map(str, CONTEXTS))} --cache-gb {CACHE_GB} --tp {TP}"
    return [
        _ratio(MEMORY, "sessions that fit", context, COMPUTED, row, f"sessions, {TP} GPUs", source)
        for context, row in sessions.iterrows()
    ]


def _attention(kernels: pd.DataFrame) -> list[Row]:
    """Compare the times of decode attention, at the largest batch measured that stock's cache holds."""
    room = capacity.capacity_table(CONTEXTS, CACHE_GB * capacity.GB, [STOCK], tp=TP).set_index("context")
    heads = (kernels["num_heads"] == HEADS[0]) & (kernels["num_kv_heads"] == HEADS[1])
    uniform = (kernels["kernel"] == "decode") & (kernels["lengths"] == "uniform") & (kernels["q_len"] == 1)
    rows = []
    for context, fits in room["sessions_whole"].items():
        here = kernels[heads & uniform & (kernels["context"] == context) & (kernels["batch"] <= fits)]
        batch = here["batch"].max()
        times = here[here["batch"] == batch].set_index("scheme")["time_us"]
        quantity = f"attention alone, {batch:.0f} sessions"
        rows.append(_ratio(SPEED, quantity, context, MEASURED, times, "µs a layer", run_of(kernels), faster=True))
    return rows


def _throughput(table: pd.DataFrame) -> list[Row]:
    """Compare throughput at full memory, and where stock is faster with fewer sessions, each at its best."""
    counted = table[table["counts"] & (table["tensor_parallel"] == TP)]
    full = counted[counted["point"] == "full"].pivot_table(index="context", columns="scheme", values="tokens_per_s")
    best = counted.pivot_table(index="context", columns="scheme", values="tokens_per_s", aggfunc="max")
    rows = []
    # Whatever else was measured: a ratio takes both.
    for context, speeds in full.reindex(columns=[STOCK, OURS]).dropna().iterrows():
        quantities = {"whole engine, memory full": speeds}
        if best.loc[context, STOCK] > speeds[STOCK]:
            quantities["whole engine, each at its best"] = best.loc[context]
        rows += [
            _ratio(SPEED, quantity, context, MEASURED, both, "tokens/s", run_of(table))
            for quantity, both in quantities.items()
        ]
    return rows


def _published_gains() -> list[Row]:
    """Return the write-up's percentages over stock, as multiples."""
    named = {"sessions gain": (MEMORY, "sessions that fit"), "throughput gain": (SPEED, "whole engine, memory full")}
    gains = published("headlines")
    return [
        {"part": part, "quantity": quantity, "context": row["context"], "kind": PUBLISHED, "unit": TIMES}
        | {"value": (100 + row["value"]) / 100, "source": f"{WRITE_UP}: {row['wording']}"}
        for name, (part, quantity) in named.items()
        for row in gains[gains["quantity"] == name].to_dict("records")
    ]


def _ratio(
    part: str,
    quantity: str,
    context: int,
    kind: str,
    both: pd.Series,
    of: str,
    source: str,
    *,
    faster: bool = False,
) -> Row:
    """Return the row of a multiple of stock; ``faster`` where the smaller is the better."""
    value = both[STOCK] / both[OURS] if faster else both[OURS] / both[STOCK]
    return {
        "part": part,
        "quantity": quantity,
        "context": context,
        "kind": kind,
        "value": value,
        "unit": TIMES,
        STOCK: both[STOCK],
        OURS: both[OURS],
        "of": of,
        "source": source,
    }
