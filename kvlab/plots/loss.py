"""Figure: what each stored cache costs the model in loss."""

from __future__ import annotations

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from kvlab.plots.style import FAINT, WIDTH, caption, direct_label, scheme_color, signed, style


def plot_loss(table: pd.DataFrame, *, source: str = "", title: str | None = None) -> Figure:
    """Draw the increase of the loss over an exact cache, smallest above, with 95% intervals over tokens.

    Parameters
    ----------
    table
        From `kvlab.measure.loss_table`.
    source
        Caption: model, text, machine, date.
    title
        Above the panel.

    Returns
    -------
    matplotlib.figure.Figure
        One row per scheme on a symmetric-log axis, because schemes differ by orders of magnitude.
    """
    exact = table.loc[table["scheme"] == "exact", "loss"].iloc[0]
    rows = table[table["scheme"] != "exact"].sort_values("increase", ascending=False).reset_index(drop=True)
    with style():
        figure, ax = plt.subplots(figsize=(WIDTH, 1.7 + 0.32 * len(rows)), layout="constrained")
        for y, row in rows.iterrows():
            color = scheme_color(row["scheme"])
            half = 1.96 * row["standard_error"]
            ax.plot([row["increase"] - half, row["increase"] + half], [y, y], color=color, linewidth=2, alpha=0.5)
            ax.plot(row["increase"], y, "o", color=color)
            direct_label(ax, row["increase"], y, signed(row["increase"]), color, offset=(0, 9), ha="center")
        ax.axvline(0, color=FAINT, linewidth=0.9)
        ax.set_xscale("symlog", linthresh=0.01)
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}".replace("-", "−")))
        ax.set_xlim(right=(rows["increase"] + 1.96 * rows["standard_error"]).max() * 3)
        ax.set_ylim(-0.6, len(rows) - 0.2)
        ax.set_yticks(
            rows.index,
            [f"{name}  ({bits:.2f} b)" for name, bits in zip(rows["scheme"], rows["bits"], strict=True)],
        )
        for label, name in zip(ax.get_yticklabels(), rows["scheme"], strict=True):
            label.set_color(scheme_color(name))
        ax.set_xlabel("increase of the loss over an exact cache, nats per token (linear within ±0.01, log beyond)")
        ax.grid(axis="y", color="#eeeeee")
        if title:
            figure.suptitle(title, x=0.012, ha="left", fontsize=12)
        caption(figure, f"Exact cache: {exact:.4f} nats per token. Bars: 95% interval over tokens. {source}")
    return figure
