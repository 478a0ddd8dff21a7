"""Figure: stock against rotated INT4 on one page, in quality, memory and speed."""

from __future__ import annotations

from math import ceil

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from kvlab.plots.style import INK, WIDTH, caption, context_label, direct_label, scheme_color, signed, style

STOCK, OURS = "fp8", "hadamard-int4"
MARKERS = {"published": "D", "computed": "s", "measured": "o"}
"""Kind of number → its mark: open for what others published, filled for what this project did."""

APART = 0.36
"""Distance of the marks that share a row, in rows."""
LEAST = 0.8
"""Where the axis of multiples begins, left of stock's 1."""
ROOM = 2.6
"""Width of the right panels over what their marks take of it."""

QUALITY = "quality"
TITLES = {QUALITY: "Quality", "memory": "Memory", "speed": "Speed of decoding"}
"""Part of the table → its panel's title."""


def plot_overview(table: pd.DataFrame, *, source: str = "", title: str | None = None) -> Figure:
    """Draw quality, memory and speed of rotated INT4 against stock, which is a line in each panel.

    Parameters
    ----------
    table
        From `kvlab.overview.overview_table`.
    source
        Caption: where the numbers come from.
    title
        Above the panels.

    Returns
    -------
    matplotlib.figure.Figure
        Quality on the left, memory above speed on the right. Open diamonds are published, filled squares computed,
        filled circles measured.
    """
    with style():
        parts = {name: table[table["part"] == name] for name in TITLES}
        largest = table.loc[table["part"] != QUALITY, "value"].max()
        ticks = range(1, ceil(largest) + 1)
        figure, axes = plt.subplot_mosaic(
            [[QUALITY, name] for name in TITLES if name != QUALITY],
            figsize=(WIDTH, 5.8),
            width_ratios=(2, 3),
            # A row is as high in one panel as in the other.
            height_ratios=[len(_slots(rows)) + 1 for name, rows in parts.items() if name != QUALITY],
            layout="constrained",
        )
        for name, rows in parts.items():
            ax = axes[name]
            _draw_rows(ax, rows, stock=0 if name == QUALITY else 1)
            ax.set_title(TITLES[name], fontsize=10)
            if name == QUALITY:
                ax.set_xlabel("rotated INT4 − stock, points\n(bars: 95% intervals)")
                ax.xaxis.set_major_locator(MaxNLocator(integer=True))
            else:
                # Right of the marks stand the numbers that a multiple comes from.
                ax.set_xlim(LEAST, LEAST + ROOM * (largest - LEAST))
                ax.set_xticks(ticks, [f"{tick}×" for tick in ticks])
        axes["speed"].set_xlabel("rotated INT4 as a multiple of stock")
        if title:
            figure.suptitle(title, x=0.012, ha="left", fontsize=12)
        handles = [_mark(kind) for kind in MARKERS if kind in set(table["kind"])]
        figure.legend(handles=handles, loc="upper right", ncols=len(handles), fontsize=9, borderaxespad=0.2)
        caption(figure, source)
    return figure


def _slots(rows: pd.DataFrame) -> dict[tuple[str, object], pd.DataFrame]:
    """Group what shares a row of the panel: the same quantity at the same context."""
    return dict(iter(rows.groupby(["quantity", "context"], sort=False, dropna=False)))


def _draw_rows(ax: Axes, rows: pd.DataFrame, *, stock: float) -> None:
    color, slots = scheme_color(OURS), _slots(rows)
    ax.axvline(stock, color=scheme_color(STOCK), linewidth=1.4, zorder=1)
    ax.annotate(
        "stock",
        (stock, 0),
        xycoords=("data", "axes fraction"),
        xytext=(4, 3),
        textcoords="offset points",
        color=scheme_color(STOCK),
        fontsize=9,
    )
    for y, slot in enumerate(slots.values()):
        for i, row in enumerate(slot.to_dict("records")):
            at = y + APART * (i - (len(slot) - 1) / 2)
            start, end = (row["low"], row["high"]) if pd.notna(row["low"]) else (stock, row["value"])
            ax.plot([start, end], [at, at], color=color, linewidth=2, alpha=0.45, solid_capstyle="butt", zorder=2)
            ax.plot(row["value"], at, color=color, **_shape(row["kind"]), zorder=3)
            if stock:
                direct_label(ax, row["value"], at, _in_words(row), INK, offset=(9, 0))
            else:
                direct_label(ax, row["high"], at, signed(row["value"], 1), INK)
    ax.set_yticks(range(len(slots)), [_name(*slot) for slot in slots])
    # The best known first, and below the last one room for the name of stock's line.
    ax.set_ylim(len(slots) - 0.1, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)


def _in_words(row: dict[str, object]) -> str:
    if pd.isna(row[STOCK]):
        # As many digits as were published.
        return f"published {row['value']:g}×"
    digits = 1 if row["kind"] == "computed" else 0
    return f"{row['value']:.2f}×: {row[STOCK]:,.{digits}f} → {row[OURS]:,.{digits}f} {row['of']}"


def _name(quantity: str, context: object) -> str:
    return quantity if pd.isna(context) else f"{quantity}\n{context_label(context)} context"


def _shape(kind: str) -> dict[str, object]:
    return {"marker": MARKERS[kind], "markersize": 7} | ({"markerfacecolor": "white"} if kind == "published" else {})


def _mark(kind: str) -> Line2D:
    return Line2D([], [], linestyle="none", color=scheme_color(OURS), label=kind, **_shape(kind))
