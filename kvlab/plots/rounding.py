"""Figure: one key rounded to 4 bits, before and after the rotation."""

from __future__ import annotations

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from kvlab.plots.style import ERROR, FAINT, INK, WIDTH, caption, style


def plot_rounding(table: pd.DataFrame, *, source: str = "", title: str | None = None) -> Figure:
    """Draw one key's components as bars with their rounded values and, in red, the rounding error.

    Parameters
    ----------
    table
        From `kvlab.measure.rounding_table`.
    source
        Caption: model, text, machine, date.
    title
        Above the panels.

    Returns
    -------
    matplotlib.figure.Figure
        One panel per state, in the table's order.
    """
    head_dim = table["head_dim"].iloc[0]
    states = list(dict.fromkeys(table["state"]))
    with style():
        figure, axes = plt.subplots(
            len(states), 1, figsize=(WIDTH, 2.5 * len(states) + 0.9), layout="constrained", sharey=True, squeeze=False
        )
        for ax, state in zip(axes[:, 0], states, strict=True):
            rows = table[table["state"] == state]
            x = rows["dimension"].to_numpy()
            ax.bar(x, rows["original"], width=0.75, color="#c9d3dc", label="original")
            # The error is drawn where it happens: between the original and the rounded value.
            ax.vlines(x, rows["original"], rows["rounded"], color=ERROR, linewidth=2.4, label="rounding error")
            ax.hlines(rows["rounded"], x - 0.375, x + 0.375, color=INK, linewidth=1.1, label="rounded to 4 bits")
            ax.axhline(0, color=FAINT, linewidth=0.8)
            ax.set(xlim=(x.min() - 0.8, x.max() + 0.8), ylabel="component value")
            ax.set_title(f"{state.capitalize()}: relative error {rows['relative_error'].iloc[0]:.1%}")
        axes[-1, 0].set_xlabel(f"dimension of the key ({len(x)} of {head_dim} shown, the error is over all)")
        axes[0, 0].legend(
            loc="lower right",
            bbox_to_anchor=(1.0, 1.0),
            ncols=3,
            fontsize=9,
            borderaxespad=0,
            handlelength=1.4,
        )
        if title:
            figure.suptitle(title, x=0.012, ha="left", fontsize=12)
        caption(figure, source)
    return figure
