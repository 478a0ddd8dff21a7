"""Figure: GPQA Diamond by run, and the difference between two set-ups with its interval."""

from __future__ import annotations

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvlab.plots.style import FAINT, INK, SETUPS, WIDTH, caption, direct_label, scheme_color, signed, style


def plot_gpqa(runs: pd.DataFrame, difference: pd.DataFrame, *, source: str = "", title: str | None = None) -> Figure:
    """Draw every published run of GPQA Diamond, and beside them the difference of the means with its interval.

    Parameters
    ----------
    runs
        From ``kvlab.tables.published("gpqa")``: drawn as open diamonds.
    difference
        From ``kvlab.tables.published("gpqa_difference")``; its interval is drawn as published, since it takes the
        answers to every question to compute one.
    source
        Caption: where the numbers were published.
    title
        Above the panels.

    Returns
    -------
    matplotlib.figure.Figure
        Two panels, one row a set-up on the left.
    """
    (summary,) = difference.to_dict("records")
    with style():
        figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 3.2), width_ratios=(3, 2), layout="constrained")
        _draw_runs(left, runs, summary["model_card"])
        _draw_difference(right, summary)
        if title:
            figure.suptitle(title, x=0.012, ha="left", fontsize=12)
        questions, model = runs["questions"].iloc[0], summary["model"]
        left.set_title(f"Published, {model}", fontsize=10)
        caption(
            figure,
            f"Open diamonds: published for {model}, not measured here; {questions} questions a run; digits: which run; "
            f"vertical lines: means over runs. Bar: 95% interval over questions. {source}",
        )
    return figure


def _draw_runs(ax: Axes, runs: pd.DataFrame, card: float) -> None:
    for y, (scheme, name) in enumerate(reversed(SETUPS.items())):
        rows, color = runs[runs["scheme"] == scheme], scheme_color(scheme)
        percent = 100 * rows["correct"] / rows["questions"]
        ax.plot([percent.mean()] * 2, [y - 0.18, y + 0.18], color=color, linewidth=3, solid_capstyle="butt")
        ax.plot(percent, [y] * len(percent), "D", markersize=8, color=color, markerfacecolor="white")
        for value, at in rows.groupby(percent)["run"]:
            ax.annotate(
                ", ".join(map(str, at)),
                (value, y),
                (0, -9),
                textcoords="offset points",
                ha="center",
                va="top",
                fontsize=8,
            )
        text = f"{name}: mean {percent.mean():.1f}"
        ax.text(percent.min(), y + 0.24, text, color=color, va="bottom", fontsize=9)
    ax.axvline(card, color=FAINT, linewidth=0.9, linestyle=":")
    ax.text(card, len(SETUPS) - 0.3, f" model card {card:g}", color=INK, fontsize=8, va="top")
    ax.set(xlabel="GPQA Diamond, % correct", ylim=(-0.5, len(SETUPS) - 0.3))
    ax.margins(x=0.12)
    ax.set_yticks([])
    ax.spines["left"].set_visible(False)


def _draw_difference(ax: Axes, summary: dict[str, float]) -> None:
    color = scheme_color("hadamard-int4")
    ends = [summary["low"], summary["high"]]
    ax.axvline(0, color=FAINT, linewidth=0.9)
    ax.plot(ends, [0, 0], color=color, linewidth=3, alpha=0.5, solid_capstyle="butt")
    ax.plot(summary["difference"], 0, "D", markersize=8, color=color, markerfacecolor="white")
    for x in (*ends, summary["difference"]):
        direct_label(ax, x, 0, signed(x, 1), color, offset=(0, 13), ha="center")
    ax.set(xlabel="rotated INT4 − stock, points", ylim=(-0.5, 0.5))
    ax.margins(x=0.2)
    ax.set_yticks([])
    ax.spines["left"].set_visible(False)
