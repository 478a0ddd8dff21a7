"""Figure: attention-output error against the bits a number takes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from kvlab.plots.style import INK, WIDTH, caption, scheme_color, spread, style

HEIGHT = 6.4
"""In inches: some 25 schemes have room for their names."""
GAP = (5.3, 7.7)
"""In bits: names stand between the formats of up to 5 bits and those of 8, each on its formats' side."""
STORED = {"K": "keys stored", "V": "values stored", "KV": "keys and values stored"}


def plot_error_by_bits(
    table: pd.DataFrame, *, ours: Collection[str] = (), source: str = "", title: str | None = None
) -> Figure:
    """Draw a panel for each side that is stored: every scheme's error, on a logarithmic scale, over its bits.

    Parameters
    ----------
    table
        A row a scheme and side, with ``scheme``, ``stored`` (K, V or KV), ``bits`` per number, ``error`` and
        ``interval``, half the width of its interval, in the error's unit and less than it.
    ours
        Schemes to mark: dark diamonds, named in bold.
    source
        Caption: what errors and intervals are over, model, texts, machine, date.
    title
        Above the panels.

    Returns
    -------
    matplotlib.figure.Figure
        Points with their intervals, each with a line to its name.

    Raises
    ------
    ValueError
        The table is empty, an error is not above its interval, or a side is none of the three.
    """
    if table.empty:
        raise ValueError("table has no rows; accepted: the error of at least one scheme")
    if unknown := set(table["stored"]) - set(STORED):
        raise ValueError(f"table has stored {min(unknown)!r}; accepted: {', '.join(STORED)}")
    # A logarithmic scale has no 0, and an interval over one text is no number.
    for row in table[~(table["error"] > table["interval"])].itertuples():
        raise ValueError(
            f"table has interval {row.interval:g} for {row.scheme!r}; accepted: less than its error, {row.error:g}"
        )
    sides = [side for side in STORED if side in set(table["stored"])]
    with style():
        figure, axes = plt.subplots(
            1, len(sides), figsize=(WIDTH, HEIGHT), sharex=True, sharey=True, squeeze=False, layout="constrained"
        )
        for ax, side in zip(axes[0], sides, strict=True):
            rows = table[table["stored"] == side]
            for row in rows.itertuples():
                mark, color = ("D", INK) if row.scheme in ours else ("o", scheme_color(row.scheme))
                ax.errorbar(row.bits, row.error, row.interval, fmt=mark, color=color, markersize=4, elinewidth=1)
            ax.set(yscale="log", title=STORED[side], xlabel="bits per number")
            ax.grid(axis="y", which="both", color="#eeeeee")
        axes[0, 0].set_ylabel("attention-output error (log)")
        # Shared by all panels.
        errors = axes[0, 0].yaxis
        errors.set_major_locator(LogLocator(subs=(1, 2, 5)))
        errors.set_major_formatter(lambda error, _: f"{100 * error:g}%")
        errors.set_minor_formatter(NullFormatter())
        # Names are placed when no panel changes the shared limits any more.
        for ax, side in zip(axes[0], sides, strict=True):
            rows = table[table["stored"] == side]
            on_left = rows["bits"] < statistics.mean(GAP)
            _name_points(ax, rows[on_left], ours, GAP[0], "left")
            _name_points(ax, rows[~on_left], ours, GAP[1], "right")
        if title:
            figure.suptitle(title, x=0.012, ha="left", fontsize=12)
        caption(figure, source)
    return figure


def _name_points(ax: Axes, rows: pd.DataFrame, ours: Collection[str], x: float, side: str) -> None:
    """Write schemes' names in a column at ``x``, near their points' heights, with lines from this side of the gap."""
    low, high = map(math.log10, ax.get_ylim())
    # A line of small text in decades; titles, ticks and caption take 1.4 inches of the height.
    line = (high - low) * 0.135 / (HEIGHT - 1.4)
    wanted = dict(zip(rows["scheme"], rows["error"].map(math.log10), strict=True))
    heights = spread(wanted, line)
    # Names are spread upwards: moved down together, they lie below their points as much as above.
    lift = sum(heights[scheme] - wanted[scheme] for scheme in wanted) / max(1, len(wanted))
    for row in rows.itertuples():
        ax.annotate(
            row.scheme,
            (row.bits, row.error),
            xytext=(x, 10 ** (heights[row.scheme] - lift)),
            ha=side,
            va="center",
            fontsize=7.5,
            fontweight="bold" if row.scheme in ours else "normal",
            color=INK if row.scheme in ours else scheme_color(row.scheme),
            arrowprops={
                "arrowstyle": "-",
                "color": "#bbbbbb",
                "linewidth": 0.6,
                "shrinkA": 1,
                "shrinkB": 3,
                # The end of the name that faces its point.
                "relpos": (0 if side == "left" else 1, 0.5),
            },
        )
