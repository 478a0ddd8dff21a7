"""Figure: attention-output error per layer and on average, by scheme and by what is stored."""

from __future__ import annotations

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from kvlab.plots.style import (
    INK,
    WIDTH,
    caption,
    context_label,
    direct_label,
    layer_ticks,
    scheme_color,
    spread,
    style,
)

PER_LAYER = ("int4", "hadamard-int4", "fp8")
"""The three schemes of the write-up, drawn layer by layer."""

PANELS = {"K": "keys stored", "V": "values stored", "KV": "keys and values stored"}
PERCENT = FuncFormatter(lambda value, _: f"{value * 100:g}%")


def plot_attention_error(
    table: pd.DataFrame, published: pd.DataFrame | None = None, *, source: str = "", title: str | None = None
) -> Figure:
    """Draw the error of keys per layer, and per scheme its layers and mean for K, V and KV.

    Parameters
    ----------
    table
        From `kvlab.measure.attention_error_table`.
    published
        From ``kvlab.tables.published("attention_error")``: open diamonds in the panel of what they store.
    source
        Caption: model, text, machine, date.
    title
        Above the panels.

    Returns
    -------
    matplotlib.figure.Figure
        Above, lines over layers; below, one panel per thing stored, sharing the schemes' rows.
    """
    panels = [stored for stored in PANELS if stored in set(table["stored"])]
    order = _order(table, panels[0])
    with style():
        figure = plt.figure(figsize=(WIDTH, 4.0 + 0.27 * len(order) + 0.9), layout="constrained")
        top, bottom = figure.subfigures(2, 1, height_ratios=[3.2, 0.27 * len(order) + 1.3])
        _draw_layers(top.subplots(), table[table["stored"] == panels[0]], panels[0])
        axes = bottom.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
        for ax, stored in zip(axes, panels, strict=True):
            theirs = {}
            if published is not None:
                theirs = published[published["stored"] == stored].set_index("scheme")["error"].to_dict()
            _draw_schemes(ax, table[table["stored"] == stored], order, theirs)
            _draw_published(ax, theirs, order)
            ax.set_title(PANELS[stored].capitalize(), fontsize=10)
        _share_errors(axes[0], table["error"])
        axes[0].set_yticks(range(len(order)), [f"{name}  ({bits:.2f} b)" for name, bits in order.items()])
        for label, name in zip(axes[0].get_yticklabels(), order, strict=True):
            label.set_color(scheme_color(name))
        if title:
            figure.suptitle(title, x=0.012, ha="left", fontsize=12)
        marks = "Dots: layers; bar: their mean."
        if published is not None:
            context = f"{published['model'].iloc[0]}, {context_label(published['context'].iloc[0])} context"
            marks += f" Open diamonds: published for {context} (mean over its full-attention layers)."
        caption(figure, f"{marks} {source}")
    return figure


def _order(table: pd.DataFrame, stored: str) -> dict[str, float]:
    """Schemes by mean error, worst first (drawn from the bottom up), with the bits of all that is stored."""
    errors = table[table["stored"] == stored].groupby("scheme")["error"].mean()
    bits = table[table["stored"] == table["stored"].iloc[-1]].groupby("scheme")["bits"].first()
    return {name: bits[name] for name in errors.sort_values(ascending=False).index}


def _draw_layers(ax: Axes, table: pd.DataFrame, stored: str) -> None:
    errors = table.pivot_table(index="layer", columns="scheme", values="error")
    names = [name for name in PER_LAYER if name in errors]
    for name in names:
        ax.plot(errors.index, errors[name], "o-", markersize=4, linewidth=1.3, color=scheme_color(name))
    ends = errors[names].iloc[-1].to_dict()
    for name, y in spread(ends, errors[names].to_numpy().max() * 0.075).items():
        direct_label(ax, errors.index[-1], y, f"{name}, mean {errors[name].mean():.1%}", scheme_color(name))
    ax.set(xlabel="decoder layer", ylabel="attention-output error\n‖ô − o‖ / ‖o‖", ylim=(0, None))
    ax.set_title(f"Layer by layer, {PANELS[stored]}", fontsize=10)
    ax.yaxis.set_major_formatter(PERCENT)
    ax.set_xticks(layer_ticks(errors.index))


def _draw_schemes(ax: Axes, table: pd.DataFrame, order: dict[str, float], published: dict[str, float]) -> None:
    for row, name in enumerate(order):
        errors = table.loc[table["scheme"] == name, "error"]
        color = scheme_color(name)
        ax.plot(errors, [row] * len(errors), "o", markersize=3, alpha=0.35, color=color, markeredgewidth=0)
        ax.plot([errors.mean()] * 2, [row - 0.32, row + 0.32], color=color, linewidth=3, solid_capstyle="butt")
        # Behind the last mark of the row, a diamond included.
        direct_label(ax, max(errors.max(), published.get(name, 0)), row, f"{errors.mean():.2%}", color)
    ax.set_xscale("log")
    ax.set_xlabel("error (log scale)")
    ax.set_ylim(-0.7, len(order) - 0.3)
    ax.tick_params(axis="x", labelsize=8)
    ax.grid(axis="y", color="#eeeeee")
    ax.set_axisbelow(True)


def _share_errors(ax: Axes, errors: pd.Series) -> None:
    """Set the error axis that all panels share, so that they compare by eye; room at its end for the labels."""
    # A scheme that keeps recent tokens exact may have no error at all, which a log axis cannot show.
    low, high = errors[errors > 0].min() / 1.4, errors.max() * 7
    ax.set_xlim(low, high)
    ax.set_xticks([tick for tick in (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1) if low < tick < high])
    ax.xaxis.set_major_formatter(PERCENT)
    ax.xaxis.set_minor_formatter(NullFormatter())


def _draw_published(ax: Axes, published: dict[str, float], order: dict[str, float]) -> None:
    for y, name in enumerate(order):
        if name not in published:
            continue
        x = published[name]
        ax.plot(x, y, "D", markersize=7, markerfacecolor="white", color=INK, zorder=3)
        text = f"published {x:.1%}"
        ax.annotate(text, (x, y), xytext=(0, 6), textcoords="offset points", ha="center", va="bottom", fontsize=7)
