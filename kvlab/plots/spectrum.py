"""Figure: what queries see of the keys, direction by direction."""

from __future__ import annotations

import math

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from kvlab.plots.style import FAINT, INK, WIDTH, caption, direct_label, spread, style

# Of layers, which no scheme is; heads of one layer share its colour and differ by their marks.
LAYER_COLORS = (INK, "#a17c00", "#2a788e", "#aa3377")
HEAD_MARKS = ("o", "x", "^", "+")


def plot_spectrum(table: pd.DataFrame, *, source: str = "", title: str | None = None) -> Figure:
    """Draw each head's share of the scores' energy by direction, on a logarithmic scale.

    Parameters
    ----------
    table
        From `kvlab.calibrate.spectrum_table`.
    source
        Caption: model, text, machine, date.
    title
        Above the panel.

    Returns
    -------
    matplotlib.figure.Figure
        Marks per layer and KV head, labelled at their end, and the level at which all directions would be equal.

    Raises
    ------
    ValueError
        The table is empty, or has more layers or KV heads than there are colours and marks.
    """
    layers, heads = table["layer"].unique(), table["head"].unique()
    for name, found, most in (("layers", layers, len(LAYER_COLORS)), ("KV heads", heads, len(HEAD_MARKS))):
        if not 0 < len(found) <= most:
            raise ValueError(f"table has {len(found)} {name}; accepted: 1 to {most}")
    colors, marks = dict(zip(layers, LAYER_COLORS, strict=False)), dict(zip(heads, HEAD_MARKS, strict=False))
    directions = table["direction"].max()
    ends = {}
    with style():
        figure, ax = plt.subplots(figsize=(WIDTH, 3.8), layout="constrained")
        for (layer, head), rows in table.groupby(["layer", "head"]):
            ax.plot(rows["direction"], rows["share"], marks[head], color=colors[layer], markersize=3)
            ends[f"layer {layer}, KV head {head}"] = (math.log10(rows["share"].iloc[-1]), colors[layer])
        ax.axhline(1 / directions, color=FAINT, linewidth=0.9, linestyle=":")
        ax.text(directions, 1 / directions, "all directions equal", color=FAINT, fontsize=8, ha="right", va="bottom")
        decades = math.log10(table["share"].max() / table["share"].min())
        for label, y in spread({label: y for label, (y, _) in ends.items()}, 0.05 * decades).items():
            direct_label(ax, directions, 10**y, label, ends[label][1])
        ax.set(
            yscale="log",
            xlim=(0, directions * 1.2),
            xlabel="direction, the strongest first",
            ylabel="share of the scores' energy (log)",
        )
        # Quarters of head_dim.
        ax.set_xticks(range(0, directions + 1, max(1, directions // 4)))
        ax.grid(axis="y", color="#eeeeee")
        if title:
            figure.suptitle(title, x=0.012, ha="left", fontsize=12)
        caption(figure, f"Eigenvalues of C^½ M C^½, keys about their mean, as shares of their sum. {source}")
    return figure
