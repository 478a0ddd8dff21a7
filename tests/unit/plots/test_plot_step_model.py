import pandas as pd
import pytest
from matplotlib import pyplot as plt

from kvlab.plots import plot_step_model, scheme_color
from kvlab.plots.step_model import KERNEL
from kvlab.step_model import PARTS

pytestmark = pytest.mark.unit

TIMES = {"experts": 2.0, "projections": 0.5, "head": 0.2, "sliding cache": 0.1}
RUN = {"context": 65_536, "tensor_parallel": 2}
OWN = {"fp8": (4.0, 1.5), "hadamard-int4": (2.0, -0.1)}


@pytest.fixture
def table():
    rows = [
        {
            "scheme": scheme,
            "sessions": sessions,
            "context": 65_536,
            "tensor_parallel": 2,
            "part": part,
            "ms": ms * sessions,
        }
        for sessions in (1, 8)
        for scheme, (cache, kernel) in OWN.items()
        for part, ms in (TIMES | {"full cache": cache, KERNEL: kernel}).items()
    ]
    return pd.DataFrame(rows)


def figures_text(figure):
    (ax,) = figure.axes
    return [text.get_text() for text in ax.texts], " ".join(text.get_text() for text in figure.texts).replace("\n", " ")


def test_bars_add_up_and_are_labelled(table):
    figure = plot_step_model(table, source="A GPU; today.", title="A title")
    (ax,) = figure.axes
    bars = [(round(bar.get_y() + bar.get_height() / 2, 3), bar.get_x(), bar.get_width()) for bar in ax.patches]
    ends = {}
    for y, left, width in bars:
        # One begins where the last one of its row ended.
        assert left == pytest.approx(ends.get(y, 0.0))
        ends[y] = left + width
    # A kernel faster than the copy it is compared with shortens no bar.
    assert sorted(ends.values()) == pytest.approx([4.8, 8.3, 38.4, 66.4])
    texts, caption = figures_text(figure)
    assert {"4.8 ms", "8.3 ms", "38.4 ms", "66.4 ms"} <= set(texts)
    assert {"stock (fp8)", "rotated INT4 (hadamard-int4)", "full attention", "experts"} <= set(texts)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["1 session", "8 sessions"]
    assert ax.get_xlabel() == "time of a decode step at 64k, ms" and ax.yaxis_inverted()
    assert "TP2" in caption and "sliding-window cache" in caption and "A GPU; today." in caption
    assert "diamonds" not in caption
    plt.close(figure)


def test_measured_steps_are_diamonds_where_they_belong(table):
    point = {
        "context": 65_536,
        "tensor_parallel": 2,
        "counts": True,
        "scheme": "fp8",
        "sessions": 8,
        "tokens_per_s": 100.0,
        "cache_gb": 30.0,
        "command": "kvlab bench throughput",
    }
    others = [
        {"context": 1024},
        {"tensor_parallel": 1},
        {"counts": False},
        {"scheme": "bf16"},
        {"sessions": 7},
    ]
    figure = plot_step_model(table, pd.DataFrame([point, *(point | other for other in others)]))
    (ax,) = figure.axes
    (diamond,) = ax.lines
    assert diamond.get_xdata() == pytest.approx([80.0]) and diamond.get_color() == scheme_color("fp8")
    assert diamond.get_ydata()[0] == pytest.approx(1 - 0.2)
    assert "diamonds: whole steps, random weights, 30 GB of cache per GPU." in figures_text(figure)[1].replace(
        "\n", " "
    )
    plt.close(figure)


def test_every_part_is_drawn():
    from kvlab.plots.step_model import PARTS as DRAWN

    assert {*DRAWN, "full cache"} == set(PARTS)
