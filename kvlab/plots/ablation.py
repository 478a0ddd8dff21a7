"""Figure: what each ingredient of a calibration is worth."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from kvlab.plots.style import FAINT, INK, WIDTH, caption, scheme_color, style

BASE = "hadamard-int4"
REFERENCE = "fp8"
SPREAD = 0.22
"""How far dots of layers lie above and below their row, which are 1 apart."""


def plot_ablation(
    table: pd.DataFrame, labels: Mapping[str, str] | None = None, *, source: str = "", title: str | None = None
) -> Figure:
    """Draw a row a scheme: every layer's attention-output error as a dot, their mean as a bar that is labelled.

    Parameters
    ----------
    table
        Tidy, with ``scheme``, ``layer`` and ``error``; rows are drawn in the order in which schemes first appear.
    labels
        Scheme → what its row is called; others by their names.
    source
        Caption: model, texts, machine, date.
    title
        Above the panel.

    Returns
    -------
    matplotlib.figure.Figure
        With a line at the mean of ``fp8`` and one at half of that of ``hadamard-int4``, where the table has them.

    Raises
    ------
    ValueError
        The table is empty.
    """
    if table.empty:
        raise ValueError("table has no rows; accepted: errors of at least one scheme")
    means = table.groupby("scheme", sort=False)["error"].mean()
    with style():
        figure, ax = plt.subplots(figsize=(WIDTH, 1.7 + 0.42 * len(means)), layout="constrained")
        lines = {}
        if REFERENCE in means:
            lines[means[REFERENCE]] = (REFERENCE, scheme_color(REFERENCE))
        if BASE in means:
            lines[means[BASE] / 2] = (f"half of {BASE}", scheme_color(BASE))
        for (x, (text, color)), ha in zip(sorted(lines.items()), ("right", "left"), strict=False):
            ax.axvline(x, color=color, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
            offset = (-4 if ha == "right" else 4, 2)
            place = {"xycoords": ("data", "axes fraction"), "xytext": offset, "textcoords": "offset points"}
            ax.annotate(text, (x, 1), **place, ha=ha, va="bottom", fontsize=8.5, color=color)
        for row, (scheme, mean) in enumerate(means.items()):
            errors = np.sort(table.loc[table["scheme"] == scheme, "error"])
            # Spread by rank, so that dots lie apart and the figure is the same every time.
            heights = row + SPREAD * (np.arange(len(errors)) * 2 % 5 - 2) / 2
            color = scheme_color(scheme) if scheme in (BASE, REFERENCE) else INK
            ax.plot(errors, heights, "o", color=color, alpha=0.3, markersize=3.5, markeredgewidth=0, zorder=2)
            ax.plot([mean, mean], [row - 0.34, row + 0.34], color=color, linewidth=2.5, zorder=3)
            text = f"{mean:.1%}" + (f", {mean / means[BASE]:.2f}×" if BASE in means and scheme != BASE else "")
            place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "xytext": (6, 0)}
            ax.annotate(text, (1, row), **place, va="center", fontsize=9, color=color, annotation_clip=False)
        ax.set_yticks(range(len(means)), [(labels or {}).get(scheme, scheme) for scheme in means.index])
        ax.invert_yaxis()
        ax.set_xlim(left=0)
        # Whole percents.
        ax.xaxis.set_major_locator(MaxNLocator(steps=[1, 2, 5, 10]))
        ax.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        ax.set_xlabel("attention-output error, keys stored")
        ax.tick_params(axis="y", length=0)
        ax.grid(axis="x", color="#eeeeee")
        ax.spines["left"].set_color(FAINT)
        if title:
            ax.set_title(title, pad=18)
        caption(figure, f"Dots: layers; bars: their means, and how many times that of {BASE} they are. {source}")
    return figure
