"""Figure: what a decode step reads and takes, stock beside rotated INT4, part by part."""

from __future__ import annotations

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvlab.plots.style import INK, SETUPS, WIDTH, caption, context_label, scheme_color, style
from kvlab.plots.throughput import engine_of
from kvlab.step_model import KERNEL

PARTS = {
    "experts": ("experts", "#c9c4b5"),
    "projections": ("projections", "#ded9cb"),
    "head": ("LM head", "#b5b0a2"),
    "sliding cache": ("sliding-window cache", "#a09b8e"),
}
"""Part that both set-ups have in common → what it is called, and its colour."""

BAR, GAP = 0.36, 0.04
"""Height of a bar and the gap between the two of a pair, where pairs are 1 apart."""
POINTS = {"textcoords": "offset points"}
LEAST, LEAST_KERNEL = 0.1, 0.05
"""Share of the axis below which a part is not named in its bar."""
ROOM = 1.12
"""The axis over the longest step: for its label."""


def plot_step_model(
    table: pd.DataFrame, measured: pd.DataFrame | None = None, *, source: str = "", title: str | None = None
) -> Figure:
    """Draw a bar for each scheme and number of sessions: the parts of a decode step, one after the other.

    Parameters
    ----------
    table
        From `kvlab.step_model.step_model_table`, of one context.
    measured
        From ``kvlab bench throughput``: whole steps of the same context and number of GPUs, drawn as diamonds.
    source
        Caption: machine, versions, date.
    title
        Above the bars.

    Returns
    -------
    matplotlib.figure.Figure
        Grey what both have in common; in the scheme's colour the full-attention layers: reading the cache at the speed
        of a copy, and behind it, lighter, what the measured kernel takes beyond that.
    """
    sessions = sorted(table["sessions"].unique())
    schemes = list(dict.fromkeys(table["scheme"]))
    first = table.iloc[0]
    with style():
        figure, ax = plt.subplots(figsize=(WIDTH, 1.6 + 0.72 * len(sessions)), layout="constrained")
        steps = _measured_steps(measured, first, sessions, schemes)
        right = ROOM * max(table.groupby(["scheme", "sessions"])["ms"].sum().max(), steps["ms"].max())
        for place, number in enumerate(sessions):
            for side, scheme in enumerate(schemes):
                y = place + (side - (len(schemes) - 1) / 2) * (BAR + GAP)
                rows = table[(table["sessions"] == number) & (table["scheme"] == scheme)].set_index("part")["ms"]
                end = _draw_bar(ax, y, rows, scheme, right)
                ax.annotate(f"{end:.1f} ms", (end, y), xytext=(4, 0), **POINTS, va="center", fontsize=8.5, color=INK)
        if steps.empty:
            _label_schemes(ax, sessions, schemes, table)
        _draw_measured(ax, steps, sessions, schemes)
        ax.set_yticks(range(len(sessions)), [f"{number} session{'s' if number > 1 else ''}" for number in sessions])
        ax.invert_yaxis()
        ax.set(xlim=(0, right), xlabel=f"time of a decode step at {context_label(first['context'])}, ms")
        ax.tick_params(axis="y", length=0)
        ax.spines["left"].set_visible(False)
        if title:
            ax.set_title(title)
        grey = ", ".join(name for name, _ in PARTS.values())
        diamonds = ""
        if not steps.empty:
            diamonds = f"; diamonds: whole steps, random weights, {engine_of(measured, first['tensor_parallel'])}"
        caption(
            figure,
            f"Per GPU, TP{first['tensor_parallel']}. Computed: the bytes that a step reads, at the speed of a copy. "
            f"Grey, from the left: {grey}; experts chosen evenly. Measured: what the attention kernels take beyond "
            f"that (lighter){diamonds}. {source}",
        )
    return figure


def _draw_bar(ax: Axes, y: float, rows: pd.Series, scheme: str, right: float) -> float:
    left = 0.0
    colour = scheme_color(scheme)
    own = {"full cache": ("full attention", colour, 1.0), KERNEL: ("kernel", colour, 0.45)}
    for part, (name, color, alpha) in ({part: (*shown, 1.0) for part, shown in PARTS.items()} | own).items():
        width = max(0.0, rows.get(part, 0.0))
        ax.barh(y, width, BAR, left=left, color=color, alpha=alpha, linewidth=0)
        if width > (LEAST_KERNEL if part == KERNEL else LEAST) * right:
            ink = "white" if part == "full cache" else INK
            ax.text(left + width / 2, y, name, ha="center", va="center", fontsize=8, color=ink)
        left += width
    return left


def _measured_steps(
    measured: pd.DataFrame | None, first: pd.Series, sessions: list[int], schemes: list[str]
) -> pd.DataFrame:
    """Return the measured steps, with their ``ms``, that belong to these bars."""
    if measured is None:
        return pd.DataFrame(columns=["scheme", "sessions", "ms"])
    belongs = measured["counts"] & measured["sessions"].isin(sessions) & measured["scheme"].isin(schemes)
    for name in ("context", "tensor_parallel"):
        belongs &= measured[name] == first[name]
    rows = measured[belongs]
    return rows.assign(ms=1e3 * rows["sessions"] / rows["tokens_per_s"])


def _draw_measured(ax: Axes, steps: pd.DataFrame, sessions: list[int], schemes: list[str]) -> None:
    """Draw and label the diamonds; one pair of them names the schemes."""
    for row in steps.itertuples():
        place, side = sessions.index(row.sessions), schemes.index(row.scheme)
        y = place + (side - (len(schemes) - 1) / 2) * (BAR + GAP)
        color = scheme_color(row.scheme)
        ax.plot(row.ms, y, "D", color=color, markeredgecolor="white")
        name = f", {SETUPS.get(row.scheme, row.scheme)}" if place == min(1, len(sessions) - 1) else ""
        label = f"{row.ms:.1f} ms{name}"
        ax.annotate(label, (row.ms, y), xytext=(7, 0), **POINTS, va="center", fontsize=8.5, color=color)


def _label_schemes(ax: Axes, sessions: list[int], schemes: list[str], table: pd.DataFrame) -> None:
    """Name the two bars of a pair that leaves room behind it."""
    place = min(1, len(sessions) - 1)
    ends = table[table["sessions"] == sessions[place]].groupby("scheme")["ms"].sum()
    for side, scheme in enumerate(schemes):
        y = place + (side - (len(schemes) - 1) / 2) * (BAR + GAP)
        ax.annotate(
            SETUPS.get(scheme, scheme),
            (ends[scheme], y),
            xytext=(52, 0),
            **POINTS,
            va="center",
            fontsize=9,
            color=scheme_color(scheme),
            annotation_clip=False,
        )
