"""Figure: how the testbed's training went."""

from __future__ import annotations

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvlab.plots.style import FAINT, INK, WIDTH, caption, context_label, direct_label, spread, style

HELD_OUT = {"held_out_en": ("English", INK), "held_out_de": ("German", "#aa3377")}
"""Column → what it is of, and its colour: no scheme has either."""
ANSWERS = "#2a788e"
MILLION = 1e6
ROOM = 1.2
"""Of the axis of tokens, for the labels behind the curves' ends."""
GAP = 0.07
"""Least distance of two labels, as a share of the axis of losses."""


def plot_training(table: pd.DataFrame, *, source: str = "", title: str | None = None) -> Figure:
    """Draw the loss of held-out text in each language and that of the tasks' answers against the tokens trained on.

    Parameters
    ----------
    table
        From `kvlab.testbed.loading.loss_curve`.
    source
        Caption: machine, date.
    title
        Above the panels.

    Returns
    -------
    matplotlib.figure.Figure
        Two panels that share the axis of tokens; dotted lines where the sequences grow longer.
    """
    end = table["tokens"].iloc[-1] / MILLION
    with style():
        figure, (text, answers) = plt.subplots(
            2, 1, figsize=(WIDTH, 5.6), height_ratios=(3, 2), sharex=True, layout="constrained"
        )
        _draw_held_out(text, table)
        answers.plot(table["tokens"] / MILLION, table["answer_loss"], color=ANSWERS, linewidth=0.9)
        answers.set_yscale("log")
        # A row is one step's batch; the median of the last ones says where the curve has come to.
        last = table[table["length"] == table["length"].iloc[-1]]["answer_loss"].median()
        direct_label(answers, end, last, f"answers\n{last:.3f} (median of\nthe last stage)", ANSWERS)
        answers.set(xlabel="tokens trained on, millions", ylabel="loss of answers in a batch,\nnats per token (log)")
        text.set(xlim=(0, end * ROOM), ylabel="loss of held-out text,\nnats per token")
        for ax in (text, answers):
            ax.grid(axis="y", color="#eeeeee")
        _mark_stages((text, answers), table)
        if title:
            figure.suptitle(title, x=0.012, ha="left", fontsize=12)
        caption(figure, f"{_run(table)} {source}")
    return figure


def _draw_held_out(ax: Axes, table: pd.DataFrame) -> None:
    ends = {}
    for column, (language, color) in HELD_OUT.items():
        rows = table[table[column].notna()]
        ax.plot(rows["tokens"] / MILLION, rows[column], color=color, linewidth=1.5)
        ends[language] = rows[column].iloc[-1]
    span = table[list(HELD_OUT)].max().max() - min(ends.values())
    for language, y in spread(ends, GAP * span).items():
        color = dict(HELD_OUT.values())[language]
        direct_label(ax, table["tokens"].iloc[-1] / MILLION, y, f"{language} {ends[language]:.3f}", color)


def _mark_stages(axes: tuple[Axes, Axes], table: pd.DataFrame) -> None:
    """Name each stage's length above it, and draw a line where it begins."""
    begin = 0.0
    for length, rows in table.groupby("length", sort=False):
        end = rows["tokens"].iloc[-1] / MILLION
        axes[0].text(
            (begin + end) / 2,
            0.97,
            f"sequences of {context_label(length)}",
            transform=axes[0].get_xaxis_transform(),
            ha="center",
            va="top",
            fontsize=8.5,
            color=FAINT,
        )
        if begin:
            for ax in axes:
                ax.axvline(begin, color=FAINT, linewidth=0.9, linestyle=":")
        begin = end


def _run(table: pd.DataFrame) -> str:
    last = table.iloc[-1]
    run = f"{last['step']:,.0f} steps, {last['tokens'] / MILLION:,.0f} M tokens in {last['seconds']:,.0f} s."
    return (
        f"{run} Held-out text: the same tokens whatever the sequences' length, which is the context they are predicted "
        "from. Answers: of synthetic tasks in RULER's manner, as long as the sequences, in one step's batch; the "
        "longer, the fewer."
    )
