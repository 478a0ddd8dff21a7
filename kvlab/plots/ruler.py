"""Figure: RULER by context length, and the difference between two set-ups with its interval."""

from __future__ import annotations

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvlab.plots.style import (
    FAINT,
    INK,
    SETUPS,
    WIDTH,
    caption,
    context_label,
    direct_label,
    scheme_color,
    signed,
    spread,
    style,
)

APART = 2.5
"""Least distance of the two labels, in points."""


def plot_ruler(published: pd.DataFrame, *, source: str = "", title: str | None = None) -> Figure:
    """Draw RULER's published scores over the context length, and below them their difference with its interval.

    Parameters
    ----------
    published
        From ``kvlab.tables.published("ruler")``: drawn as open diamonds.
    source
        Caption: where the numbers were published.
    title
        Above the panels.

    Returns
    -------
    matplotlib.figure.Figure
        Two panels over one axis of context lengths.
    """
    ticks = range(len(published))
    with style():
        figure, (scores, differences) = plt.subplots(
            2, 1, figsize=(WIDTH, 5.6), sharex=True, height_ratios=(3, 2), layout="constrained"
        )
        _draw_scores(scores, published)
        _draw_differences(differences, published)
        differences.set_xticks(ticks, [context_label(context) for context in published["context"]])
        # Room for the labels at the lines' ends.
        differences.set_xlim(-0.4, ticks[-1] + 2.1)
        differences.set_xlabel("context, tokens")
        if title:
            figure.suptitle(title, x=0.012, ha="left", fontsize=12)
        model = published["model"].iloc[0]
        caption(figure, f"Open diamonds: published for {model}, not measured here. Bars: 95% intervals. {source}")
    return figure


def _draw_scores(ax: Axes, published: pd.DataFrame) -> None:
    for scheme in SETUPS:
        color = scheme_color(scheme)
        ax.plot(range(len(published)), published[scheme], "D-", color=color, markerfacecolor="white", linewidth=1.2)
    ends = published[list(SETUPS)].iloc[-1].to_dict()
    for scheme, y in spread(ends, APART * 2).items():
        # The labels stand around their lines' common end, not above it.
        direct_label(ax, len(published) - 1, y - APART, SETUPS[scheme], scheme_color(scheme), offset=(9, 0))
    ax.set(ylabel="RULER score, %", ylim=(0, 100))
    ax.set_title(f"Published, {published['model'].iloc[0]}", fontsize=10)
    ax.grid(axis="y", color="#eeeeee")


def _draw_differences(ax: Axes, published: pd.DataFrame) -> None:
    color = scheme_color("hadamard-int4")
    ax.axhline(0, color=FAINT, linewidth=0.9)
    for x, row in enumerate(published.to_dict("records")):
        ax.plot([x, x], [row["low"], row["high"]], color=color, linewidth=2, alpha=0.5, solid_capstyle="butt")
        ax.plot(x, row["difference"], "D", color=color, markerfacecolor="white")
        direct_label(ax, x, row["difference"], signed(row["difference"], 1), color, offset=(8, 0))
    zero = ((published["low"] <= 0) & (published["high"] >= 0)).sum()
    text = f"{zero} of {len(published)} intervals\ncontain zero"
    ax.annotate(text, (len(published) - 0.4, 0), (0, 5), textcoords="offset points", fontsize=9, color=INK)
    ax.set_ylabel("rotated INT4 − stock,\npoints")
    ax.grid(axis="y", color="#eeeeee")
