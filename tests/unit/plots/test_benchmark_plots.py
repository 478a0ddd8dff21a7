import matplotlib as mpl
import pytest
from matplotlib.colors import to_hex

from kvlab import plots
from kvlab.plots.style import scheme_color
from kvlab.tables import published

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def close_figures():
    yield
    mpl.pyplot.close("all")


def ruler(table=None, **options):
    return plots.plot_ruler(published("ruler") if table is None else table, **options)


def gpqa(**options):
    return plots.plot_gpqa(published("gpqa"), published("gpqa_difference"), **options)


def texts(figure):
    return [text.get_text() for text in figure.findobj(mpl.text.Text)]


def diamonds(ax):
    return [line for line in ax.lines if line.get_marker() == "D"]


def test_ruler_scores_lie_where_the_table_says():
    scores, _ = ruler().axes
    stock, rotated = diamonds(scores)
    assert list(stock.get_ydata()) == [81.4, 76.2, 73.6, 72.1, 65.4, 55.2, 44.8]
    assert list(rotated.get_ydata()) == [79.4, 76.5, 73.2, 71.7, 65.5, 56.1, 44.5]
    assert [line.get_color() for line in (stock, rotated)] == [scheme_color("fp8"), scheme_color("hadamard-int4")]


def test_ruler_intervals_are_the_published_ones_and_cross_zero():
    _, differences = ruler().axes
    bars = [
        tuple(line.get_ydata())
        for line in differences.lines
        if len(set(line.get_xdata())) == 1 and len(line.get_xdata()) == 2
    ]
    bars = [bar for bar in bars if bar[0] != bar[1]]
    assert bars == list(published("ruler")[["low", "high"]].itertuples(index=False, name=None))
    assert "7 of 7 intervals\ncontain zero" in texts(ruler())
    low, high = differences.get_ylim()
    assert low < -4.9 and high > 4.3


def test_an_interval_off_zero_is_not_counted():
    table = published("ruler")
    table.loc[0, "high"] = -0.1
    assert "6 of 7 intervals\ncontain zero" in texts(ruler(table))


def test_gpqa_runs_and_interval():
    left, right = gpqa().axes
    rotated, stock = diamonds(left)
    assert sorted(stock.get_xdata()) == pytest.approx([100 * count / 198 for count in (163, 164, 165, 165)])
    assert sorted(rotated.get_xdata()) == pytest.approx([100 * count / 198 for count in (162, 163, 167, 169)])
    assert [-1.8, 2.7] in [list(line.get_xdata()) for line in right.lines]
    shown = texts(gpqa())
    assert {"1, 3", "stock (fp8): mean 83.0", "rotated INT4 (hadamard-int4): mean 83.5", "+0.5", "−1.8"} <= set(shown)


@pytest.mark.parametrize("draw", [ruler, gpqa])
def test_published_is_told_at_a_glance(draw):
    figure = draw(title="a title", source="somewhere")
    marks = [mark for ax in figure.axes for mark in diamonds(ax)]
    assert marks and all(to_hex(mark.get_markerfacecolor()) == "#ffffff" for mark in marks)
    assert figure.axes[0].get_title(loc="left") == "Published, Kolibri-1"
    assert any("not measured here" in text and "somewhere" in text for text in texts(figure))
    assert all(ax.get_xlabel() or ax.get_ylabel() for ax in figure.axes)


@pytest.mark.parametrize("draw", [ruler, gpqa])
def test_settings_are_left_alone_and_bytes_repeat(draw, tmp_path):
    before = dict(mpl.rcParams)
    first, second = (plots.save(draw(), tmp_path / name) for name in ("a", "b"))
    assert dict(mpl.rcParams) == before
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
