"""Figures: what a session takes of the cache, and how many more whole ones 4 bits make room for."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter

from kvlab.plots.style import (
    FAINT,
    INK,
    SETUPS,
    WIDTH,
    caption,
    context_label,
    direct_label,
    scheme_color,
    spread,
    style,
)

GB = 10**9
LABEL_GAP = 0.17
"""How far apart the labels of two lines stay, in decades."""


def plot_session_sizes(
    table: pd.DataFrame,
    *,
    longest: int | None = None,
    compare_at: Iterable[int] = (65_536, 262_144),
    source: str = "",
    title: str | None = None,
) -> Figure:
    """Draw the cache of one session against its context, one line a scheme.

    Parameters
    ----------
    table
        From `kvlab.capacity.session_table`.
    longest
        The model's longest context, in tokens; lines are dashed beyond it.
    compare_at
        Contexts at which the sizes are written down, with the first scheme's over the last's.
    source
        Caption.
    title
        Above the panel.

    Returns
    -------
    matplotlib.figure.Figure
        Lines over contexts, both axes logarithmic, labelled at their ends.
    """
    sizes = table.pivot(index="context", columns="scheme", values="bytes_per_session") / GB
    schemes = list(dict.fromkeys(table["scheme"]))
    with style():
        figure, ax = plt.subplots(figsize=(WIDTH, 4.8), layout="constrained")
        ax.set(xscale="log", yscale="log")
        for scheme in schemes:
            line, color = sizes[scheme], scheme_color(scheme)
            within = line if longest is None else line[line.index <= longest]
            ax.plot(within.index, within, "o-", color=color, linewidth=1.8, markersize=4, label=scheme)
            beyond = line.iloc[max(len(within) - 1, 0) :]
            if len(within) < len(line):
                # The dashes begin at the last point within, which is drawn already.
                every = slice(min(len(within), 1), None)
                marks = {"marker": "o", "markersize": 3, "markerfacecolor": "white", "markevery": every}
                ax.plot(beyond.index, beyond, linestyle="--", color=color, linewidth=1.2, **marks)
        _name_ends(ax, sizes[schemes].iloc[-1])
        if longest is not None:
            ax.axvline(longest, color=FAINT, linewidth=0.9, linestyle=":", zorder=0)
            ax.annotate(
                "the model's longest context",
                (longest, 0.02),
                xycoords=("data", "axes fraction"),
                xytext=(-5, 0),
                textcoords="offset points",
                ha="right",
                fontsize=8,
                color=FAINT,
            )
        for context in sizes.index.intersection(list(compare_at)):
            _compare(ax, context, sizes.loc[context, schemes[0]], sizes.loc[context, schemes[-1]])
        ax.set_xticks(sizes.index, [context_label(context) for context in sizes.index])
        ax.set_xlim(sizes.index[0] / 1.15, sizes.index[-1] * 3.2)
        ax.set(xlabel="context of the session, tokens", ylabel="KV cache of one session, GB (all GPUs)")
        ax.xaxis.set_minor_locator(NullLocator())
        ax.yaxis.set_minor_locator(NullLocator())
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.grid(axis="y", color="#eeeeee")
        if title:
            figure.suptitle(title, x=0.012, ha="left", fontsize=12)
        caption(figure, source)
    return figure


def plot_session_gain(
    gains: pd.DataFrame,
    published: pd.DataFrame | None = None,
    matching: Iterable[tuple[float, float]] = (),
    *,
    scheme: str = "hadamard-int4",
    source: str = "",
    title: str | None = None,
) -> Figure:
    """Draw how many more whole sessions a scheme holds than stock, against the memory of the cache.

    Parameters
    ----------
    gains
        From `kvlab.capacity.gain_table`.
    published
        ``context`` and ``gain``: a line across with an open diamond.
    matching
        From `kvlab.capacity.memory_that_gives`: marked across all panels.
    scheme
        Whose gain it is; its colour.
    source
        Caption.
    title
        Above the panels.

    Returns
    -------
    matplotlib.figure.Figure
        One panel a context, steps over memory.
    """
    contexts = list(dict.fromkeys(gains["context"]))
    theirs = {} if published is None else published.set_index("context")["gain"].to_dict()
    matching = list(matching)
    with style():
        figure, axes = plt.subplots(
            len(contexts),
            1,
            figsize=(WIDTH, 0.9 + 2.4 * len(contexts)),
            sharex=True,
            sharey=True,
            squeeze=False,
            layout="constrained",
        )
        last = gains["to_gb"].max()
        for ax, context in zip(axes[:, 0], contexts, strict=True):
            rows = gains[gains["context"] == context]
            edges = [*rows["from_gb"], rows["to_gb"].iloc[-1]]
            ax.stairs(rows["gain"], edges, baseline=None, color=scheme_color(scheme), linewidth=1.6)
            for start, end in matching:
                ax.axvspan(start, end, color=INK, linewidth=1, alpha=0.5, zorder=0)
            if context in theirs:
                ax.axhline(theirs[context], color=FAINT, linewidth=0.9, linestyle=":")
                ax.plot(last, theirs[context], "D", markersize=8, markerfacecolor="white", color=INK, clip_on=False)
                direct_label(ax, last, theirs[context], f"published\n+{theirs[context]:.0%}", INK, offset=(9, 0))
            ax.set_title(f"{context_label(context)} context", fontsize=10)
            ax.set_ylabel("more whole sessions\nthan stock")
            ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        for start, end in matching:
            axes[0, 0].annotate(
                f"both as published: {start:.2f} to {end:.2f} GB",
                ((start + end) / 2, 1),
                xycoords=("data", "axes fraction"),
                xytext=(5, -2),
                textcoords="offset points",
                va="top",
                fontsize=8.5,
                color=INK,
            )
        axes[-1, 0].set_xlabel("cache on each GPU, GB")
        axes[-1, 0].set_xlim(gains["from_gb"].min(), last)
        if title:
            figure.suptitle(title, x=0.012, ha="left", fontsize=12)
        caption(figure, source)
    return figure


def _name_ends(ax: Axes, ends: pd.Series) -> None:
    """Label the lines at their right ends, apart in the logarithm too."""
    places = spread(np.log10(ends).to_dict(), LABEL_GAP)
    for scheme, place in places.items():
        direct_label(
            ax, ends.name, 10**place, SETUPS.get(scheme, scheme).replace(" (hada", "\n(hada"), scheme_color(scheme)
        )


def _compare(ax: Axes, context: int, first: float, last: float) -> None:
    """Write both sizes down, and between them their ratio."""
    ax.plot([context, context], [last, first], color=INK, linewidth=0.8, zorder=1)
    for size, offset in ((first, (-6, 9)), (last, (6, -10))):
        side = "right" if offset[0] < 0 else "left"
        ax.annotate(
            f"{size:.2f} GB",
            (context, size),
            xytext=offset,
            textcoords="offset points",
            fontsize=8.5,
            ha=side,
            color=INK,
        )
    ax.annotate(
        f"{first / last:.2f}×",
        # Nearer to the upper line: the lower one rises towards the text.
        (context, first**0.8 * last**0.2),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        fontsize=9,
        color=INK,
        fontweight="bold",
    )
