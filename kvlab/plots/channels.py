"""Figure: how large each channel of the keys is, with and without the QK-norm gain."""

from __future__ import annotations

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvlab.plots.style import FAINT, INK, WIDTH, caption, style

# Of heads, which no scheme is; the darkest first.
HEAD_COLORS = (INK, "#d1495b", "#2a788e", "#a17c00")
NAMED = 2
"""Channels of a panel that are named: the largest ones of any head."""


def plot_channels(table: pd.DataFrame, *, source: str = "", title: str | None = None) -> Figure:
    """Draw the magnitude of every channel of the keys, a panel per layer and form, a colour per KV head.

    Parameters
    ----------
    table
        From `kvlab.measure.channel_table`.
    source
        Caption: model, text, machine, date.
    title
        Above the panels.

    Returns
    -------
    matplotlib.figure.Figure
        Layers in rows, forms in columns, all panels with the same axes.

    Raises
    ------
    ValueError
        The table is empty, or has more KV heads than there are colours.
    """
    heads = table["head"].nunique()
    if not 0 < heads <= len(HEAD_COLORS):
        raise ValueError(f"table has {heads} KV heads; accepted: 1 to {len(HEAD_COLORS)}")
    layers, forms = table["layer"].unique(), table["form"].unique()
    with style():
        figure, axes = plt.subplots(
            len(layers),
            len(forms),
            figsize=(WIDTH, 1.2 + 1.7 * len(layers)),
            sharex=True,
            sharey=True,
            squeeze=False,
            layout="constrained",
        )
        for row, layer in zip(axes, layers, strict=True):
            for ax, form in zip(row, forms, strict=True):
                _draw(ax, table[(table["layer"] == layer) & (table["form"] == form)])
                ax.set_title(f"layer {layer}, {form}", fontsize=10)
            row[0].set_ylabel("mean magnitude\n÷ average channel's")
        for ax in axes[-1]:
            ax.set_xlabel("channel")
        # Room for the names above the largest.
        axes[0, 0].set_ylim(0, 1.12 * table["magnitude"].max())
        for position, color in enumerate(HEAD_COLORS[:heads]):
            place = {"xycoords": "axes fraction", "textcoords": "offset points", "ha": "right", "va": "top"}
            axes[0, -1].annotate(f"KV head {position}", (1, 1), xytext=(0, -13 * position), color=color, **place)
        if title:
            figure.suptitle(title, x=0.012, ha="left", fontsize=12)
        caption(figure, f"Mean over tokens of each channel's magnitude; dotted: all channels equal. {source}")
    return figure


def _draw(ax: Axes, table: pd.DataFrame) -> None:
    """Draw one layer's heads in one form, and name the largest channels."""
    heads = table.pivot_table(index="channel", columns="head", values="magnitude")
    for color, (_, sizes) in zip(HEAD_COLORS, heads.items(), strict=False):
        # Dots, since neighbouring channels have nothing to do with each other.
        ax.plot(sizes.index, sizes, "o", color=color, markersize=3, markeredgewidth=0)
    ax.axhline(1, color=FAINT, linewidth=0.9, linestyle=":")
    for channel, size in heads.max(axis=1).nlargest(NAMED).items():
        ax.annotate(f"{channel}", (channel, size), (0, 3), textcoords="offset points", ha="center", fontsize=8)
