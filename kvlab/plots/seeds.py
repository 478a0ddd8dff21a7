"""Figure: what the seed of a rotation is worth, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from kvlab.plots.style import FAINT, INK, WIDTH, caption, direct_label, scheme_color, spread, style

CHOSEN = scheme_color("hadamard-int4")
HALF = 0.3
GOLDEN = (5**0.5 - 1) / 2


def plot_seed_spread(
    table: pd.DataFrame, chosen: Mapping[int, int], *, source: str = "", title: str | None = None
) -> Figure:
    """Draw every seed's objective in every layer, relative to the layer's median seed.

    Parameters
    ----------
    table
        From `kvlab.calibrate.search_seeds`, or the ``search`` of a calibration.
    chosen
        Layer → the seed that calibration chose.
    source
        Caption: model, text, machine, date.
    title
        Above the panel.

    Returns
    -------
    matplotlib.figure.Figure
        Per layer one dot a seed, a bar from the first to the third quartile, seed 0 and the chosen seed marked.

    Raises
    ------
    ValueError
        A layer of ``table`` has no chosen seed, or not the one chosen.
    """
    relative = table.pivot(index="layer", columns="seed", values="objective")
    relative = relative.div(relative.median(axis=1), axis=0) - 1
    for layer in relative.index:
        if chosen.get(layer) not in relative.columns:
            raise ValueError(f"chosen has seed {chosen.get(layer)} for layer {layer}; accepted: one in the table")
    with style():
        figure, ax = plt.subplots(figsize=(WIDTH, 4.6), layout="constrained")
        for x, (layer, errors) in enumerate(relative.iterrows()):
            _draw_layer(ax, x, errors)
            ax.plot(x, errors[chosen[layer]], "o", color=CHOSEN, markersize=7, zorder=4)
        if 0 in relative.columns:
            x = range(len(relative))
            ax.plot(x, relative[0], "D", markersize=7, markerfacecolor="white", color=INK, linestyle="", zorder=3)
        _label_ends(ax, relative, chosen)
        ax.hlines(0, -0.6, len(relative) - 1 + HALF, color=FAINT, linewidth=0.9, linestyle=":")
        ax.set(
            xlabel="decoder layer, and the seed chosen for it",
            ylabel="key error weighted by the query covariance,\ndifference from the layer's median seed (%)",
            xlim=(-0.6, len(relative) + 0.4),
        )
        ax.set_xticks(range(len(relative)), [f"{layer}\n{chosen[layer]}" for layer in relative.index])
        ax.yaxis.set_major_formatter(PercentFormatter(1, symbol=""))
        if title:
            figure.suptitle(title, x=0.012, ha="left", fontsize=12)
        caption(figure, f"One dot a seed ({relative.shape[1]} seeds); bars: the middle half of them. {source}")
    return figure


def _draw_layer(ax: Axes, x: int, errors: pd.Series) -> None:
    """Draw one layer's seeds beside each other, so that equal ones do not hide one another, and their quartiles."""
    low, high = errors.quantile([0.25, 0.75])
    ax.bar(x, high - low, bottom=low, width=2 * HALF, color="#c9d3dc", zorder=1)
    ax.hlines(errors.median(), x - HALF, x + HALF, color=INK, linewidth=1.1, zorder=2)
    offsets = (np.arange(len(errors)) * GOLDEN % 1 - 0.5) * 2 * HALF
    ax.plot(x + offsets, errors, "o", markersize=2.5, color=FAINT, alpha=0.7, markeredgewidth=0, zorder=2)


def _label_ends(ax: Axes, relative: pd.DataFrame, chosen: Mapping[int, int]) -> None:
    """Name the marks beside the last layer."""
    last = relative.iloc[-1]
    marks = {"chosen seed": last[chosen[relative.index[-1]]], "median seed": last.median()}
    if 0 in relative.columns:
        marks["seed 0"] = last[0]
    colors = {"chosen seed": CHOSEN, "median seed": FAINT, "seed 0": INK}
    span = np.ptp(relative.to_numpy()) or 1.0
    for text, y in spread(marks, 0.05 * span).items():
        direct_label(ax, len(relative) - 1 + HALF, y, text, colors[text])
