import pandas as pd
import pytest
from matplotlib import pyplot as plt

from kvlab.plots import plot_ablation, scheme_color

pytestmark = pytest.mark.unit

ERRORS = {"fp8": [0.04, 0.06], "hadamard-int4": [0.1, 0.14], "mine": [0.052, 0.04]}


@pytest.fixture
def table():
    rows = [(scheme, layer, error) for scheme, errors in ERRORS.items() for layer, error in enumerate(errors)]
    return pd.DataFrame(rows, columns=["scheme", "layer", "error"])


def test_means_are_labelled_and_compared(table):
    figure = plot_ablation(table, {"mine": "my own"}, source="A model; today.", title="A title")
    (ax,) = figure.axes
    texts = [text.get_text() for text in ax.texts]
    assert {"5.0%, 0.42×", "12.0%", "4.6%, 0.38×", "fp8", "half of hadamard-int4"} == set(texts)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["fp8", "hadamard-int4", "my own"]
    # Dashed lines at FP8's mean and at half the base's, then a row's dots and its mean.
    drawn = [list(line.get_xdata()) for line in ax.lines]
    assert drawn[0] == pytest.approx([0.05, 0.05]) and drawn[1] == pytest.approx([0.06, 0.06])
    for row, errors in enumerate(ERRORS.values()):
        dots, mean = drawn[2 + 2 * row : 4 + 2 * row]
        assert dots == pytest.approx(sorted(errors)) and mean == pytest.approx([sum(errors) / 2] * 2)
    assert ax.lines[4].get_color() == scheme_color("hadamard-int4")
    assert ax.yaxis_inverted() and ax.get_xlim()[0] == 0 and ax.get_title(loc="left") == "A title"
    assert "A model; today." in " ".join(text.get_text() for text in figure.texts)
    plt.close(figure)


def test_without_what_it_is_compared_with_there_are_no_lines(table):
    figure = plot_ablation(table[table["scheme"] == "mine"])
    (ax,) = figure.axes
    assert [text.get_text() for text in ax.texts] == ["4.6%"] and len(ax.lines) == 2
    plt.close(figure)


def test_an_empty_table_is_refused(table):
    with pytest.raises(ValueError, match=r"^table has no rows; accepted: errors of at least one scheme$"):
        plot_ablation(table.iloc[:0])
