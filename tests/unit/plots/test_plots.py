import re

import matplotlib as mpl
import pandas as pd
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from kvlab import plots
from kvlab.plots.style import scheme_color, signed, spread
from kvlab.schemes import list_schemes
from kvlab.tables import published

pytestmark = pytest.mark.unit

LAYERS = (4, 9, 14)


@pytest.fixture(autouse=True)
def close_figures():
    yield
    mpl.pyplot.close("all")


def outlier_table(forms=("raw", "rotated")):
    rows = [(layer, form, 2.0 + layer / 10 + i) for layer in LAYERS for i, form in enumerate(forms)]
    return pd.DataFrame(rows, columns=["layer", "form", "ratio"])


def error_table(schemes=("int4", "hadamard-int4", "fp8", "mine")):
    rows = [
        (layer, scheme, stored, 4.25, 0.01 * (1 + i) + layer / 1000)
        for layer in LAYERS
        for i, scheme in enumerate(schemes)
        for stored in ("K", "V", "KV")
    ]
    return pd.DataFrame(rows, columns=["layer", "scheme", "stored", "bits", "error"])


def loss_table():
    rows = [("exact", 32, 2.5, 0.0, 0.0), ("int4", 4.25, 2.6, 0.1, 0.01), ("fp8", 8.0, 2.499, -0.001, 0.002)]
    return pd.DataFrame(rows, columns=["scheme", "bits", "loss", "increase", "standard_error"])


def rounding_table():
    rows = [
        (state, 7, d, float(d % 5), d % 5 + 0.2, 0.2, 64, 0.1)
        for state in ("before rotation", "after rotation")
        for d in range(32)
    ]
    columns = ["state", "token", "dimension", "original", "rounded", "error", "head_dim", "relative_error"]
    return pd.DataFrame(rows, columns=columns)


def texts(figure):
    return [text.get_text() for text in figure.findobj(mpl.text.Text)]


ALL = {
    "outliers": lambda: plots.plot_outliers(outlier_table(), published("outliers"), source="somewhere"),
    "attention_error": lambda: plots.plot_attention_error(
        error_table(), published("attention_error"), source="somewhere"
    ),
    "loss": lambda: plots.plot_loss(loss_table(), source="somewhere"),
    "rounding": lambda: plots.plot_rounding(rounding_table(), source="somewhere"),
}


@pytest.mark.parametrize("draw", ALL.values(), ids=ALL)
def test_axes_are_labelled_and_the_source_is_named(draw):
    figure = draw()
    assert any("somewhere" in text for text in texts(figure))
    for ax in figure.axes:
        shared = ax.get_shared_y_axes().get_siblings(ax)
        assert ax.get_ylabel() or ax.get_yticklabels() or len(shared) > 1
    assert any(ax.get_xlabel() for ax in figure.axes)


@pytest.mark.parametrize("draw", ALL.values(), ids=ALL)
def test_settings_are_left_alone_and_bytes_repeat(draw, tmp_path):
    before = dict(mpl.rcParams)
    first, second = (plots.save(draw(), tmp_path / name) for name in ("a", "b"))
    assert dict(mpl.rcParams) == before
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "a.svg", "b.png", "b.svg"]


def test_the_last_bits_of_a_layout_leave_no_trace(tmp_path):
    """Those of a constrained layout differ from process to process."""

    def saved(width):
        figure = Figure()
        for left in (0.1, 0.6):
            ax = figure.add_axes((left, 0.1, width, 0.8))
            ax.plot([0, 1])
        return [path.read_bytes() for path in plots.save(figure, tmp_path / "a")]

    steady = saved(0.3)
    assert saved(0.3 + 2**-40) == steady
    # Of two panels, with what is clipped told apart.
    assert {b'url(#clip0)"', b'url(#clip1)"'} <= set(re.findall(rb'url\(#\w+\)"', steady[1]))


def test_outliers_draw_the_table_and_mark_the_published():
    (ax,) = plots.plot_outliers(outlier_table(), published("outliers")).axes
    raw = next(line for line in ax.lines if list(line.get_xdata()) == list(LAYERS))
    assert list(raw.get_ydata()) == pytest.approx([2.4, 2.9, 3.4])
    diamonds = [line for line in ax.lines if line.get_marker() == "D"]
    assert [line.get_ydata()[0] for line in diamonds] == [7.5, 2.2]
    assert all(to_hex(line.get_markerfacecolor()) == "#ffffff" for line in diamonds)
    assert any("published" in text for text in texts(ax))


def test_outliers_of_qk_norm_models_say_where_folding_helps():
    forms = ("without gain", "raw", "rotated", "without gain, rotated")
    figure = plots.plot_outliers(outlier_table(forms))
    assert any("lower in 3 of 3 layers" in text for text in texts(figure))


def test_attention_error_marks_only_what_was_published():
    layers, *panels = plots.plot_attention_error(error_table(), published("attention_error")).axes
    diamonds = [[line for line in ax.lines if line.get_marker() == "D"] for ax in panels]
    assert [len(marks) for marks in diamonds] == [3, 0, 0]
    assert sorted(line.get_xdata()[0] for line in diamonds[0]) == [0.023, 0.057, 0.098]
    assert any("hadamard-int4, mean 2.9%" in text for text in texts(layers))


def test_a_published_mark_hides_no_label():
    _, keys, *_ = plots.plot_attention_error(error_table(), published("attention_error")).axes
    last = {each.get_text(): each.xy[0] for each in keys.texts if not each.get_text().startswith("published")}
    # int4's layers end at 2.4%, its published figure is 9.8%; "mine" has none.
    assert last == {"1.90%": 0.098, "2.90%": 0.057, "3.90%": pytest.approx(0.044), "4.90%": pytest.approx(0.054)}


def test_labels_of_outliers_are_apart_on_the_axis_that_the_published_stretch():
    flat = outlier_table().assign(ratio=1.5)
    (ax,) = plots.plot_outliers(flat, published("outliers")).axes
    first, second = sorted(each.xy[1] for each in ax.texts if each.get_text() in ("raw", "rotated"))
    assert second - first == pytest.approx(0.05 * published("outliers")["max_ratio"].max())


def test_attention_error_draws_what_the_table_has():
    table = error_table(("int4", "mine"))
    figure = plots.plot_attention_error(table[table["stored"] == "K"])
    assert len(figure.axes) == 2


def test_loss_orders_by_increase_and_names_the_exact_loss():
    (ax,) = plots.plot_loss(loss_table()).axes
    assert [label.get_text().split()[0] for label in ax.get_yticklabels()] == ["int4", "fp8"]
    assert any("2.5000 nats" in text for text in texts(ax.figure))


def test_a_scheme_has_one_colour_and_published_ones_differ():
    assert scheme_color("mine") == scheme_color("mine")
    shown = ("fp8", "fp8-per-token-head", "int4", "hadamard-int4", "int4-per-token-head", "turboquant-4bit")
    shown += ("kivi-int4", "nvfp4", "mxfp4")
    assert set(shown) <= set(list_schemes())
    assert len({scheme_color(name) for name in shown}) == len(shown)


def test_labels_are_spread_in_order():
    placed = spread({"b": 1.0, "a": 1.05, "c": 5.0}, 0.5)
    assert placed == {"b": 1.0, "a": 1.5, "c": 5.0}


def test_minus_is_a_minus():
    assert (signed(-0.00123), signed(0.5)) == ("−0.0012", "+0.5000")
