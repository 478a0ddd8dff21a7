import matplotlib.colors as colors
import pandas as pd
import pytest
from matplotlib import pyplot as plt

from kvlab.plots import plot_error_by_bits, scheme_color

pytestmark = pytest.mark.unit

ROWS = [
    ("fp8", "K", 8, 0.02, 0.001),
    ("hadamard-int4", "K", 4.25, 0.05, 0.004),
    ("mine", "K", 4.25, 0.049, 0.002),
    ("fp8", "KV", 8, 0.03, 0.002),
    ("hadamard-int4", "KV", 4.25, 0.07, 0.003),
]


@pytest.fixture
def table():
    return pd.DataFrame(ROWS, columns=["scheme", "stored", "bits", "error", "interval"])


@pytest.fixture
def drawn(table):
    figure = plot_error_by_bits(table, ours=["mine"], source="A model; today.", title="A title")
    figure.canvas.draw()
    yield figure
    plt.close(figure)


def named(ax):
    return {text.get_text(): text for text in ax.texts}


def test_a_panel_a_side_with_every_error_over_its_bits_and_its_interval(drawn, table):
    assert [ax.get_title(loc="left") for ax in drawn.axes] == ["keys stored", "keys and values stored"]
    for ax, side in zip(drawn.axes, ["K", "KV"], strict=True):
        rows = table[table["stored"] == side]
        assert ax.get_yscale() == "log" and ax.get_xlabel() == "bits per number"
        assert [tuple(map(float, line.get_xydata()[0])) for line in ax.lines] == list(
            rows[["bits", "error"]].itertuples(index=False, name=None)
        )
        ends = [bar.get_segments()[0][:, 1] for bar in ax.collections]
        for row, (low, high) in zip(rows.itertuples(), ends, strict=True):
            assert (low, high) == pytest.approx((row.error - row.interval, row.error + row.interval))
    assert drawn.axes[0].get_ylabel() == "attention-output error (log)"
    assert {"A title", "A model; today."} <= {drawn.get_suptitle(), *(text.get_text() for text in drawn.texts)}


def test_every_point_is_named_and_ours_stand_out(drawn):
    ax = drawn.axes[0]
    names = named(ax)
    assert set(names) == {"fp8", "hadamard-int4", "mine"} and set(named(drawn.axes[1])) == {"fp8", "hadamard-int4"}
    assert names["mine"].get_fontweight() == "bold" and names["fp8"].get_fontweight() == "normal"
    assert [line.get_marker() for line in ax.lines] == ["o", "o", "D"]
    for line, name in zip(ax.lines[:2], ["fp8", "hadamard-int4"], strict=True):
        assert colors.same_color(line.get_color(), scheme_color(name))
        assert colors.same_color(names[name].get_color(), scheme_color(name))


def test_names_of_near_points_do_not_overlap(drawn):
    ax = drawn.axes[0]
    names = named(ax)
    upper, lower = (ax.transData.transform(names[name].xyann)[1] for name in ("hadamard-int4", "mine"))
    assert upper - lower >= names["mine"].get_fontsize() * drawn.dpi / 72


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table.iloc[:0], r"^table has no rows; accepted: the error of at least one scheme$"),
        (lambda table: table.assign(stored="Q"), r"^table has stored 'Q'; accepted: K, V, KV$"),
        (
            lambda table: table.assign(interval=float("nan")),
            r"^table has interval nan for 'fp8'; accepted: less than its error, 0.02$",
        ),
        (
            lambda table: table.assign(interval=[0.001, 0.05, 0.001, 0.001, 0.001]),
            r"^table has interval 0.05 for 'hadamard-int4'; accepted: less than its error, 0.05$",
        ),
    ],
    ids=["empty", "another side", "an interval over one text", "an interval down to 0"],
)
def test_what_cannot_be_drawn_is_refused(table, change, message):
    with pytest.raises(ValueError, match=message):
        plot_error_by_bits(change(table))
