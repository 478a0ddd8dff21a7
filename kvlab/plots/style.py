"""One style for every figure: sizes, fonts, one colour per scheme, captions and how figures are saved."""

from __future__ import annotations

import hashlib
import re
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import matplotlib as mpl
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvlab.paths import written_whole

WIDTH = 9.0
"""Width of every figure, in inches."""

SETUPS = {"fp8": "stock (fp8)", "hadamard-int4": "rotated INT4 (hadamard-int4)"}
"""The two set-ups that the write-up compares, as figures name them."""

KIB = 1024
"""Contexts are powers of two: 64k is 65,536 tokens."""

CLIP_PATH = re.compile(r'<clipPath id="(\w+)"')
"""As an SVG file defines one."""

INK, FAINT, ERROR = "#222222", "#8c8c8c", "#c1121f"

# Okabe & Ito's colour-blind-safe set, darkened where it must carry text, and Paul Tol's for the rest.
SCHEME_COLORS = {
    "exact": INK,
    "bf16": "#555555",
    "fp8": "#0072b2",
    "fp8-per-token-head": "#2f8fce",
    "int4": "#d55e00",
    "hadamard-int4": "#009e73",
    "hadamard-int4-with-gain": "#44aa99",
    "int4-per-token-head": "#b85c93",
    "turboquant-4bit": "#882255",
    "kivi-int4": "#b87a00",
    "kivi-int2": "#7a5200",
    "nvfp4": "#332288",
    "mxfp4": "#6a51a3",
    "nf4": "#999933",
    "fp8-e5m2": "#4477aa",
    "int4-g32": "#a65628",
    "int4-g64": "#8c510a",
    "int4-symmetric": "#b2182b",
    "int8": "#117733",
    "int2": "#7f2704",
    "int3": "#a63603",
    "hadamard-int3": "#66a61e",
    "hadamard-int2": "#1b7837",
    "hadamard-int4-refit": "#0f766e",
    "hadamard-int4-refit-kv": "#134e4a",
    "hadamard-int4-g64-fp8": "#4d7c0f",
    "hadamard-int4-g64-fp8-kv": "#365314",
    "hadamard-lloyd-g32": "#7c3aed",
    "hadamard-lloyd-g32-kv": "#4c1d95",
}
FALLBACK_COLORS = ("#aa3377", "#228833", "#a17c00", "#d1495b", "#2a788e")


def scheme_color(name: str) -> str:
    """Colour of a scheme, the same in every figure; a user's own scheme gets one by its name."""
    digest = hashlib.sha256(name.encode()).digest()
    return SCHEME_COLORS.get(name, FALLBACK_COLORS[digest[0] % len(FALLBACK_COLORS)])


@contextmanager
def style() -> Iterator[None]:
    """Use kvlab's style inside the context; matplotlib's settings are as before afterwards."""
    ticks = sns.axes_style("ticks")
    settings = {
        "font.family": "DejaVu Sans",
        "font.size": 10,
        "axes.titlesize": 11,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.labelcolor": INK,
        "axes.edgecolor": FAINT,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "xtick.color": INK,
        "ytick.color": INK,
        "text.color": INK,
        "legend.frameon": False,
        "figure.dpi": 96,
        # Text stays text and ids do not change from run to run.
        "svg.fonttype": "none",
        "svg.hashsalt": "kvlab",
    }
    with mpl.rc_context({**ticks, **settings}):
        yield
        interactive = mpl.is_interactive()
    # The first figure of a notebook turns interactive mode on, which leaving the context must not undo.
    mpl.interactive(interactive)


def caption(figure: Figure, text: str) -> None:
    """Write the figure's source, machine and date under it, wrapped to its width.

    Figures are built with ``layout="constrained"``; the caption claims its own strip below.
    """
    wrapped = textwrap.fill(text, int(figure.get_figwidth() * 16.5))
    height = (wrapped.count("\n") + 1) * 0.16 + 0.1
    figure.get_layout_engine().set(rect=(0, height / figure.get_figheight(), 1, 1 - height / figure.get_figheight()))
    figure.text(0.012, 0.012, wrapped, fontsize=8, color="#555555", va="bottom", ha="left")


def direct_label(ax: Axes, x: float, y: float, text: str, color: str, **kwargs: object) -> None:
    """Label a line or point beside it, in its own colour."""
    ax.annotate(
        text,
        (x, y),
        xytext=kwargs.pop("offset", (6, 0)),
        textcoords="offset points",
        color=color,
        va="center",
        fontsize=9,
        annotation_clip=False,
        **kwargs,
    )


def signed(value: float, digits: int = 4) -> str:
    """Format a difference with its sign, the minus as typographers set it."""
    return f"{value:+.{digits}f}".replace("-", "−")


def layer_ticks(layers: Iterable[int]) -> list[int]:
    """Choose at most some twelve of the layers measured to label, evenly, the first one included."""
    layers = list(layers)
    return layers[:: -(-len(layers) // 12)]


def spread(positions: dict[str, float], gap: float) -> dict[str, float]:
    """Move label positions apart until neighbours are at least ``gap`` away from each other.

    Parameters
    ----------
    positions
        Label → wanted position.
    gap
        Least distance, in the same units.

    Returns
    -------
    dict
        Label → position; the order of the positions is kept.
    """
    placed: dict[str, float] = {}
    lowest = float("-inf")
    for label, position in sorted(positions.items(), key=lambda item: item[1]):
        lowest = placed[label] = max(position, lowest + gap)
    return placed


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write ``stem``.png and ``stem``.svg and return their paths; equal figures give equal bytes.

    Parameters
    ----------
    figure
        Drawn inside `style`.
    stem
        Path without its ending.
    """
    paths = []
    for ending, metadata in {".png": {"Software": None}, ".svg": {"Date": None, "Creator": None}}.items():
        path = stem.with_name(stem.name + ending)
        with written_whole(path) as scratch, style():
            figure.savefig(scratch, format=ending[1:], dpi=160, metadata=metadata, facecolor="white")
            if ending == ".svg":
                scratch.write_text(_with_numbered_clips(scratch.read_text(encoding="utf-8")), encoding="utf-8")
        paths.append(path)
    return paths


def _with_numbered_clips(svg: str) -> str:
    """Name clip paths by their order in the file.

    matplotlib names them by all bits of their coordinates, of which a constrained layout's last differ from process to
    process; the file itself has six decimals.
    """
    names = {name: f"clip{number}" for number, name in enumerate(CLIP_PATH.findall(svg))}
    for name, numbered in names.items():
        svg = svg.replace(name, numbered)
    return svg


def context_label(tokens: float) -> str:
    """Return a number of tokens as it is read: 65,536 is 64k, 1,048,576 is 1M."""
    return f"{tokens / KIB**2:g}M" if tokens >= KIB**2 else f"{tokens / KIB:g}k"
