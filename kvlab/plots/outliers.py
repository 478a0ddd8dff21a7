"""Figure: channel outliers per layer, raw and rotated."""

from __future__ import annotations

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from kvlab.measure.outliers import layers_lowered_by_folding
from kvlab.plots.style import (
    FAINT,
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

# Rotated keys wear the rotated scheme's colour, plain ones the plain scheme's; hollow means without gain.
FORM_STYLES = {
    "raw": {"color": scheme_color("int4"), "marker": "o"},
    "rotated": {"color": scheme_color("hadamard-int4"), "marker": "o"},
    "without gain": {"color": scheme_color("int4"), "marker": "s", "markerfacecolor": "white"},
    "without gain, rotated": {
        "color": scheme_color("hadamard-int4"),
        "marker": "s",
        "markerfacecolor": "white",
    },
}
SHORT = {"without gain": "w/o gain", "without gain, rotated": "w/o gain, rotated"}


def plot_outliers(
    table: pd.DataFrame, published: pd.DataFrame | None = None, *, source: str = "", title: str | None = None
) -> Figure:
    """Draw every layer's outlier ratio in each form, the published bounds beside them.

    Parameters
    ----------
    table
        From `kvlab.measure.outlier_table`.
    published
        From ``kvlab.tables.published("outliers")``: drawn as open diamonds in a strip of their own.
    source
        Caption: model, text, machine, date.
    title
        Above the panel.

    Returns
    -------
    matplotlib.figure.Figure
        Lines over layers, labelled at their ends.
    """
    ratios = table.pivot_table(index="layer", columns="form", values="ratio")
    forms = [form for form in FORM_STYLES if form in ratios]
    with style():
        figure, ax = plt.subplots(figsize=(WIDTH, 4.6), layout="constrained")
        for form in forms:
            ax.plot(ratios.index, ratios[form], linewidth=1.3, markersize=5, **FORM_STYLES[form])
        ends = ratios[forms].iloc[-1]
        # Labels are as far apart as the axis asks for, which the published bounds may stretch.
        top = max(ratios[forms].to_numpy().max(), 0 if published is None else published["max_ratio"].max())
        for form, y in spread(ends.to_dict(), top * 0.05).items():
            direct_label(ax, ratios.index[-1], y, SHORT.get(form, form), FORM_STYLES[form]["color"])
        ax.plot(ratios.index[[0, -1]], [1, 1], color=FAINT, linewidth=0.9, linestyle=":")
        ax.text(ratios.index[0], 1, "all channels equal", color=FAINT, fontsize=8, va="bottom")
        span = max(ratios.index[-1] - ratios.index[0], 1)
        if published is not None:
            x = ratios.index[-1] + 0.25 * span
            ax.axvline(x - 0.03 * span, color="#dddddd", linewidth=0.8)
            for _, row in published.iterrows():
                color = FORM_STYLES[row["keys"]]["color"]
                ax.plot(x, row["max_ratio"], "D", markersize=8, markerfacecolor="white", color=color)
                direct_label(ax, x, row["max_ratio"], f"≤ {row['max_ratio']:g} {row['keys']}", color, offset=(9, 0))
            head = f"published,\n{published['model'].iloc[0]} at {context_label(published['context'].iloc[0])}"
            ax.text(x - 0.015 * span, published["max_ratio"].max() * 1.08, head, va="bottom", fontsize=8, color=INK)
        ax.set(
            xlabel="decoder layer",
            ylabel="largest channel ÷ average channel\n(mean magnitude, worst KV head)",
            ylim=(0, None),
            xlim=(
                ratios.index[0] - 0.03 * span - 0.2,
                ratios.index[-1] + (0.42 if published is not None else 0.2) * span,
            ),
        )
        ax.set_xticks(layer_ticks(ratios.index))
        lowered, layers = layers_lowered_by_folding(table)
        if layers:
            ax.set_title(f"Without the QK-norm gain the ratio is lower in {lowered} of {layers} layers", fontsize=10)
        if title:
            figure.suptitle(title, x=0.012, ha="left", fontsize=12)
        caption(figure, source)
    return figure
