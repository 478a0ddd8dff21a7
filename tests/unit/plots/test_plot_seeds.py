import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest

from kvlab.plots.seeds import plot_seed_spread

pytestmark = pytest.mark.unit

CHOSEN = {4: 3, 9: 0, 14: 7}


@pytest.fixture(autouse=True)
def close_figures():
    yield
    mpl.pyplot.close("all")


def search(seeds=range(11)):
    rows = [(layer, seed, layer * (1 + 0.01 * ((seed * 7 + layer) % 11))) for layer in CHOSEN for seed in seeds]
    return pd.DataFrame(rows, columns=["layer", "seed", "objective"])


def test_marks_lie_where_the_table_says():
    table = search()
    (ax,) = plot_seed_spread(table, CHOSEN, source="made up", title="Seeds").axes
    relative = table.pivot(index="layer", columns="seed", values="objective")
    relative = relative.div(relative.median(axis=1), axis=0) - 1
    dots = [line for line in ax.lines if line.get_marker() == "o" and len(line.get_xdata()) == 11]
    assert len(dots) == 3
    for line, (_, errors) in zip(dots, relative.iterrows(), strict=True):
        np.testing.assert_array_equal(line.get_ydata(), errors)
    (zeros,) = (line for line in ax.lines if line.get_marker() == "D")
    np.testing.assert_array_equal(zeros.get_ydata(), relative[0])
    chosen = [line.get_ydata()[0] for line in ax.lines if line.get_marker() == "o" and len(line.get_xdata()) == 1]
    assert chosen == [relative.loc[layer, seed] for layer, seed in CHOSEN.items()]


def test_is_labelled():
    figure = plot_seed_spread(search(), CHOSEN, source="made up", title="Seeds")
    (ax,) = figure.axes
    assert {"seed 0", "chosen seed", "median seed"} <= {text.get_text() for text in ax.texts}
    assert "(%)" in ax.get_ylabel()
    assert [label.get_text() for label in ax.get_xticklabels()] == ["4\n3", "9\n0", "14\n7"]
    assert any("11 seeds" in text.get_text() and "made up" in text.get_text() for text in figure.texts)


def test_seed_0_need_not_be_searched():
    (ax,) = plot_seed_spread(search(range(1, 12)), {4: 3, 9: 1, 14: 7}).axes
    assert "seed 0" not in {text.get_text() for text in ax.texts}


def test_a_seed_not_searched_is_named():
    with pytest.raises(ValueError, match="chosen has seed 99 for layer 9"):
        plot_seed_spread(search(), {**CHOSEN, 9: 99})
