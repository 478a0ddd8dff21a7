"""Figures: what the kernels take, over context and batch, every competitor beside the floor of the 4-bit cache."""

from __future__ import annotations

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from kvlab.plots.style import FAINT, WIDTH, caption, context_label, scheme_color, style

FLOOR_SCHEME = "hadamard-int4"
"""The floor drawn is that of its 4.25 bits."""
FLOOR = "floor"

SCHEMES = {
    "hadamard-int4": "hadamard-int4 (kvlab)",
    "hadamard-int4-refit": "hadamard-int4-refit (kvlab)",
    "fp8": "fp8 (FlashAttention 3)",
    "bf16": "bf16 (FlashAttention 3)",
    "int4-per-token-head": "int4-per-token-head (vLLM)",
    "turboquant-4bit": "turboquant-4bit (vLLM)",
    FLOOR: "floor: 4.25 bits at copy speed",
}
"""Scheme → what its line is called, in the legend's order."""

COLUMNS = 4
MILLISECOND = 1000


def plot_decode_times(
    table: pd.DataFrame, *, num_heads: int = 24, num_kv_heads: int = 2, source: str = "", title: str | None = None
) -> Figure:
    """Draw the time of decode attention against the context, one panel a batch size.

    Parameters
    ----------
    table
        From ``kvlab bench kernels``; uniform batches with one new token are drawn.
    num_heads, num_kv_heads
        Which of the table's shapes.
    source
        Caption: machine, versions, date.
    title
        Above the panels.

    Returns
    -------
    matplotlib.figure.Figure
        Lines over contexts on logarithmic axes, and the floor: reading the 4-bit cells at the speed of a copy.

    Raises
    ------
    ValueError
        The table has no such rows.
    """
    rows = table[(table["kernel"] == "decode") & (table["lengths"] == "uniform") & (table["q_len"] == 1)]
    rows = _of_shape(rows, num_heads, num_kv_heads)
    batches = sorted(rows["batch"].unique())
    with style():
        # One more for the legend.
        width = min(COLUMNS, len(batches) + 1)
        height = -(-(len(batches) + 1) // width)
        figure, grid = plt.subplots(
            height,
            width,
            figsize=(WIDTH, 0.9 + 2.5 * height),
            sharex=True,
            sharey=True,
            squeeze=False,
            layout="constrained",
        )
        axes = grid.flatten()
        for ax, batch in zip(axes, batches, strict=False):
            _draw_lines(ax, rows[rows["batch"] == batch], "context")
            ax.set_title(f"{batch:.0f} session{'s' if batch > 1 else ''}", fontsize=10)
        _contexts(axes[0], rows["context"])
        _finish(figure, grid, len(batches), xlabel="context, tokens", ylabel="time per layer, µs", title=title)
        caption(figure, _explained(table, num_heads, num_kv_heads, source))
    return figure


def plot_store_times(table: pd.DataFrame, *, source: str = "", title: str | None = None) -> Figure:
    """Draw the time from projection to cache against the number of new tokens, one panel a shape.

    Parameters
    ----------
    table
        From ``kvlab bench kernels``.
    source
        Caption: machine, versions, date.
    title
        Above the panels.

    Returns
    -------
    matplotlib.figure.Figure
        Lines over tokens on logarithmic axes, and the floor.

    Raises
    ------
    ValueError
        The table has no rows of the store.
    """
    rows = table[table["kernel"] == "store"]
    if rows.empty:
        raise ValueError("table has no rows of the kernel 'store'; accepted: one with them")
    shapes = list(rows.groupby(["num_heads", "num_kv_heads"]))
    names = {"fp8": "fp8 (vLLM: two norms and the cache write)", FLOOR: "floor: bytes at copy speed"}
    with style():
        figure, grid = plt.subplots(
            1, len(shapes), figsize=(WIDTH, 3.8), sharex=True, sharey=True, squeeze=False, layout="constrained"
        )
        for ax, ((heads, kv_heads), part) in zip(grid[0], shapes, strict=True):
            _draw_lines(ax, part, "tokens", names)
            ax.set_title(f"{heads:.0f} query heads, {kv_heads:.0f} KV heads", fontsize=10)
        tokens = sorted(rows["tokens"].unique())
        grid[0, 0].set_xticks(tokens, [f"{count:,.0f}" for count in tokens])
        _finish(figure, grid, len(shapes), xlabel="new tokens", ylabel="time per layer, µs", title=title)
        caption(figure, f"CUDA graph replay, medians. Floor: projection read, query and 4-bit cells written. {source}")
    return figure


def run_of(table: pd.DataFrame) -> str:
    """Return machine, versions and date of a table, for a caption."""
    first = table.iloc[0]
    return f"{first['machine']}; {first['versions']}; {first['date']}."


def _of_shape(rows: pd.DataFrame, num_heads: int, num_kv_heads: int) -> pd.DataFrame:
    chosen = rows[(rows["num_heads"] == num_heads) & (rows["num_kv_heads"] == num_kv_heads)]
    if chosen.empty:
        shapes = rows[["num_heads", "num_kv_heads"]].drop_duplicates().astype(int).to_numpy().tolist()
        raise ValueError(f"table has no decode rows of shape {num_heads}/{num_kv_heads}; accepted: one of {shapes}")
    return chosen


def _draw_lines(ax: Axes, rows: pd.DataFrame, x: str, names: dict[str, str] | None = None) -> None:
    """Draw one line a scheme over the column ``x``, and the floor."""
    names = SCHEMES | (names or {})
    for scheme, name in names.items():
        line = rows[rows["scheme"] == scheme].sort_values(x)
        if not line.empty:
            mine = scheme == FLOOR_SCHEME
            ax.plot(
                line[x],
                line["time_us"],
                "o-",
                color=scheme_color(scheme),
                label=name,
                linewidth=2 if mine else 1.2,
                markersize=4 if mine else 3,
                zorder=3 if mine else 2,
            )
    floor = rows[rows["scheme"] == FLOOR_SCHEME].sort_values(x)
    ax.plot(floor[x], floor["floor_us"], ":", color=FAINT, label=names[FLOOR], zorder=1)
    ax.set(xscale="log", yscale="log")
    ax.minorticks_off()
    ax.grid(axis="y", color="#eeeeee")


def _contexts(ax: Axes, contexts: pd.Series) -> None:
    ticks = sorted(contexts.unique())
    ax.set_xticks(ticks, [context_label(tick) for tick in ticks])


def _finish(figure: Figure, grid: object, used: int, *, xlabel: str, ylabel: str, title: str | None) -> None:
    """Label the outer axes, put the legend into the free panel or above, and drop what is empty."""
    axes = grid.flatten()
    # Below a microsecond no kernel launches.
    axes[0].set_ylim(bottom=1)
    axes[0].yaxis.set_major_formatter(FuncFormatter(_time))
    for ax in grid[:, 0]:
        ax.set_ylabel(ylabel)
    columns = grid.shape[1]
    for i in range(max(0, used - columns), used):
        axes[i].set_xlabel(xlabel)
        axes[i].tick_params(labelbottom=True)
    handles, labels = axes[0].get_legend_handles_labels()
    for ax in axes[used:]:
        ax.set_axis_off()
    if used < len(axes):
        axes[used].legend(handles, labels, loc="center left", fontsize=8.5, borderpad=0)
    else:
        axes[0].legend(handles, labels, loc="upper left", fontsize=8)
    if title:
        figure.suptitle(title, x=0.012, ha="left", fontsize=12)


def _time(value: float, _: int) -> str:
    return f"{value / MILLISECOND:g} ms" if value >= MILLISECOND else f"{value:g}"


def _explained(table: pd.DataFrame, num_heads: int, num_kv_heads: int, source: str) -> str:
    copy = table.loc[table["kernel"] == "copy", "gb_per_s"].iloc[0]
    return (
        f"{num_heads} query heads, {num_kv_heads} KV heads of 128; CUDA graph replay, medians, pages shuffled, inputs "
        f"rotated so that L2 does not hide them. Floor: the 4-bit cells at the {copy:,.0f} GB/s of a copy. {source}"
    )
