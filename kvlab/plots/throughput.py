"""Figure: decode throughput of the whole engine against the number of sessions, batched and per session."""

from __future__ import annotations

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from kvlab.plots.style import INK, SETUPS, WIDTH, caption, context_label, scheme_color, style

STOCK, FULL = "fp8", "full"
NAMES = {scheme: name.partition(" (")[0] for scheme, name in SETUPS.items()}
"""Scheme → its label, where that is not its name."""

BATCHED, PER_SESSION = "tokens_per_s", "tokens_per_s_per_session"
AXIS = {BATCHED: "batched, tokens/s", PER_SESSION: "per session, tokens/s"}

NAMED = 3
"""As many points that do not count are named in the caption."""
ROOM = 1.35
"""Height of a panel over that of its curves: for what is written at its top."""
LINE = 12
"""Height of a line of that, in points."""
CENTRE = 0.5
"""Of an axis: labels of lines that end right of it stand on their left."""


def plot_throughput(
    table: pd.DataFrame, *, tensor_parallel: int = 2, source: str = "", title: str | None = None
) -> Figure:
    """Draw tokens per second, of all sessions together and of each, against the number of sessions.

    Parameters
    ----------
    table
        From ``kvlab bench throughput``. Points that do not count are not drawn; the caption names them. Repeats of a
        curve are thinner.
    tensor_parallel
        On how many GPUs: which of the table's rows.
    source
        Caption: machine, versions, date.
    title
        Above the panels.

    Returns
    -------
    matplotlib.figure.Figure
        Two rows, batched and per session; one column a context, which share the axis of sessions. Rings mark the points
        at full memory; their throughput is written down, with how many times stock's it is, and stock's best.

    Raises
    ------
    ValueError
        The table has no point that counts on as many GPUs.
    """
    rows = table[table["tensor_parallel"] == tensor_parallel]
    counted = rows[rows["counts"]]
    if counted.empty:
        found = ", ".join(map(str, sorted(table.loc[table["counts"], "tensor_parallel"].unique()))) or "none"
        raise ValueError(f"tensor_parallel is {tensor_parallel}; accepted (points that count): {found}")
    contexts = sorted(counted["context"].unique())
    with style():
        figure, grid = plt.subplots(
            len(AXIS), len(contexts), figsize=(WIDTH, 6.4), sharex="col", squeeze=False, layout="constrained"
        )
        for column, context in zip(grid.T, contexts, strict=True):
            here = counted[counted["context"] == context]
            for ax, quantity in zip(column, AXIS, strict=True):
                _draw_lines(ax, here, quantity)
                ax.set(xlim=(0, here["sessions"].max() * 1.06), ylim=(0, here[quantity].max() * ROOM))
                ax.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
                ax.grid(axis="y", color="#eeeeee")
                _label_ends(ax, here, quantity)
            _compare_full(column[0], here)
            _compare_same_batch(column[1], here)
            column[0].set_title(f"{context_label(context)} context", fontsize=10)
            column[1].set_xlabel("sessions")
        for ax, label in zip(grid[:, 0], AXIS.values(), strict=True):
            ax.set_ylabel(label)
        if title:
            figure.suptitle(title, x=0.012, ha="left", fontsize=12)
        caption(figure, " ".join(filter(None, [_explained(counted, tensor_parallel), _left_out(rows), source])))
    return figure


def engine_of(table: pd.DataFrame, tensor_parallel: int) -> str:
    """Say how the engine of these rows ran, where a caption has to: its cache, and whether torch.compile was off."""
    rows = table[table["tensor_parallel"] == tensor_parallel]
    cache = " and ".join(f"{gb:.0f}" for gb in sorted(rows["cache_gb"].round().unique()))
    off = rows["command"].str.contains("compilation-config.mode=0", regex=False).all()
    return f"{cache} GB of cache per GPU{', without torch.compile' if off else ''}"


def _draw_lines(ax: Axes, rows: pd.DataFrame, quantity: str) -> None:
    for (scheme, repeat), line in rows.groupby(["scheme", "repeat"], sort=False):
        first = repeat == rows["repeat"].min()
        line = line.sort_values("sessions")
        ax.plot(
            line["sessions"],
            line[quantity],
            "o-",
            color=scheme_color(scheme),
            linewidth=1.6 if first else 0.8,
            markersize=3.5 if first else 2.5,
            alpha=1 if first else 0.6,
            label=scheme,
        )
        full = line[line["point"] == FULL]
        ring = {"markersize": 11, "markerfacecolor": "none", "markeredgewidth": 1.6}
        ax.plot(full["sessions"], full[quantity], "o", color=scheme_color(scheme), **ring)


def _label_ends(ax: Axes, rows: pd.DataFrame, quantity: str) -> None:
    """Name each scheme below the end of its first curve: there curves leave room, whether they rise or fall."""
    first = rows[rows["repeat"] == rows["repeat"].min()]
    for scheme, line in first.groupby("scheme", sort=False):
        end = line.sort_values("sessions").iloc[-1]
        leftwards = end["sessions"] > CENTRE * ax.get_xlim()[1]
        ax.annotate(
            NAMES.get(scheme, scheme),
            (end["sessions"], end[quantity]),
            xytext=(8 if leftwards else -4, -14),
            textcoords="offset points",
            ha="right" if leftwards else "left",
            va="top",
            fontsize=8.5,
            color=scheme_color(scheme),
        )


def _compare_full(ax: Axes, rows: pd.DataFrame) -> None:
    """Write down the throughput at full memory, means over repeats, and how many times stock's it is.

    Of stock's best too, where that is at fewer sessions.
    """
    full = rows[rows["point"] == FULL].groupby("scheme", sort=False)[["sessions", BATCHED]].mean()
    best = rows.loc[rows["scheme"] == STOCK].groupby("sessions")[BATCHED].mean().max()
    lines = {}
    for scheme, row in full.iterrows():
        lines[scheme] = f"{row[BATCHED]:,.0f} tokens/s, {row['sessions']:,.0f} sessions"
        if scheme != STOCK and STOCK in full.index:
            lines[scheme] += f": {row[BATCHED] / full.loc[STOCK, BATCHED]:.2f}× stock"
            if best > full.loc[STOCK, BATCHED]:
                lines[scheme] += f", {row[BATCHED] / best:.2f}× its best"
    _write(ax, "memory full (rings)", lines, x=0.02, ha="left")


def _compare_same_batch(ax: Axes, rows: pd.DataFrame) -> None:
    """Say how fast a session is against stock's wherever both were timed with as many."""
    speeds = rows.pivot_table(index="sessions", columns="scheme", values=PER_SESSION, sort=False)
    lines = {}
    for scheme in speeds.columns.drop(STOCK, errors="ignore"):
        both = speeds[[STOCK, scheme]].dropna() if STOCK in speeds else speeds.iloc[:0]
        if not both.empty:
            ratio = both[scheme] / both[STOCK]
            lines[scheme] = f"{ratio.min():.2f} to {ratio.max():.2f}× stock"
    _write(ax, "at the same number of sessions", lines, x=0.98, ha="right")


def _write(ax: Axes, head: str, lines: dict[str, str], *, x: float, ha: str) -> None:
    """Write a line a scheme, in its colour, at the top of a panel."""
    for i, (text, color) in enumerate([(head, INK), *((lines[scheme], scheme_color(scheme)) for scheme in lines)]):
        if lines:
            place = {"xy": (x, 0.98), "xycoords": "axes fraction", "xytext": (0, -LINE * i), "ha": ha, "va": "top"}
            ax.annotate(text, **place, textcoords="offset points", fontsize=8.5, color=color)


def _explained(counted: pd.DataFrame, tensor_parallel: int) -> str:
    engine = engine_of(counted, tensor_parallel)
    steps, slowest = counted["steps"].min(), counted["slowest_tenth"].max() - 1
    weights = ", ".join(counted["weights"].unique())
    repeats = "; thin lines: repeats" if counted["repeat"].nunique() > 1 else ""
    return (
        f"Stock: {STOCK}; rotated INT4: hadamard-int4. Measured: decode only, {steps:,.0f} steps a point, "
        f"TP{tensor_parallel}; weights: {weights}; {engine}; rings: full memory{repeats}. "
        f"The slowest tenth of a point's steps is at most {slowest:.0%} slower than their median."
    )


def _left_out(rows: pd.DataFrame) -> str:
    """Name what was timed and does not count."""
    out = rows[~rows["counts"]]
    names = [
        f"{row['scheme']}, {context_label(row['context'])}, {row['sessions']:.0f} sessions ({row['reason']})"
        for row in out.head(NAMED).to_dict("records")
    ]
    if len(out) > NAMED:
        names.append(f"{len(out) - NAMED} more, which the table names")
    return f"Not drawn, since they do not count: {'; '.join(names)}." if names else ""
