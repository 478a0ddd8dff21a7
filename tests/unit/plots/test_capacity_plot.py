import matplotlib as mpl
import pandas as pd
import pytest

from kvlab import plots
from kvlab.plots import scheme_color
from kvlab.standing_figures import draw_standing, standing_tables

pytestmark = pytest.mark.unit

CONTEXTS = [16_384, 65_536, 262_144, 1_048_576]
SIZES = {"fp8": [0.2, 0.7, 2.8, 11.0], "hadamard-int4": [0.1, 0.35, 1.4, 5.5]}
PUBLISHED = pd.DataFrame({"context": [65_536], "gain": [0.82]})


@pytest.fixture(autouse=True)
def close_figures():
    yield
    mpl.pyplot.close("all")


def sizes():
    rows = [
        {"scheme": scheme, "context": context, "bytes_per_session": size * 1e9}
        for scheme, line in SIZES.items()
        for context, size in zip(CONTEXTS, line, strict=True)
    ]
    return pd.DataFrame(rows)


def gains():
    rows = [(65_536, 20.0, 21.0, 0.8), (65_536, 21.0, 23.0, 0.82), (262_144, 20.0, 23.0, 0.9)]
    return pd.DataFrame(rows, columns=["context", "from_gb", "to_gb", "gain"])


def texts(figure):
    return [text.get_text() for text in figure.findobj(mpl.text.Text)]


@pytest.mark.parametrize("longest", [None, 262_144, 5_000_000, 1])
def test_lines_lie_where_the_table_says_and_are_dashed_beyond_the_model(longest):
    (ax,) = plots.plot_session_sizes(sizes(), longest=longest).axes
    for scheme, expected in SIZES.items():
        solid, dashed = (
            [line for line in ax.lines if line.get_color() == scheme_color(scheme) and line.get_linestyle() == style]
            for style in ("-", "--")
        )
        beyond = [context for context in CONTEXTS if longest is not None and context > longest]
        assert list(solid[0].get_xdata()) == [context for context in CONTEXTS if context not in beyond]
        assert list(solid[0].get_ydata()) == expected[: len(CONTEXTS) - len(beyond)]
        assert len(dashed) == bool(beyond)
        if beyond:
            assert list(dashed[0].get_ydata())[-len(beyond) :] == expected[-len(beyond) :]


def test_sizes_are_written_down_with_their_ratio_and_source():
    figure = plots.plot_session_sizes(sizes(), longest=262_144, source="Computed somewhere.", title="Sizes")
    shown = texts(figure)
    for text in (
        "0.70 GB",
        "0.35 GB",
        "2.80 GB",
        "1.40 GB",
        "stock (fp8)",
        "64k",
        "1M",
        "Sizes",
        "Computed somewhere.",
    ):
        assert text in shown
    assert shown.count("2.00×") == 2
    assert "GB" in figure.axes[0].get_ylabel()
    assert "tokens" in figure.axes[0].get_xlabel()


def test_steps_published_diamond_and_the_memory_that_matches():
    figure = plots.plot_session_gain(gains(), PUBLISHED, [(21.0, 23.0)], source="Computed somewhere.")
    first, second = figure.axes
    (steps,) = (patch for patch in first.patches if isinstance(patch, mpl.patches.StepPatch))
    assert steps.get_data().values.tolist() == [0.8, 0.82]
    assert steps.get_data().edges.tolist() == [20.0, 21.0, 23.0]
    (diamond,) = (line for line in first.lines if line.get_marker() == "D")
    assert list(diamond.get_ydata()) == [0.82]
    assert not [line for line in second.lines if line.get_marker() == "D"]
    assert "both as published: 21.00 to 23.00 GB" in texts(figure)
    assert "published\n+82%" in texts(figure)


def test_without_published_numbers_none_are_drawn():
    figure = plots.plot_session_gain(gains())
    assert not [line for ax in figure.axes for line in ax.lines]


def test_kvlab_figures_draws_both():
    tables = standing_tables()
    assert tables["capacity"]["context"].min() == 4096
    assert tables["capacity"]["context"].max() == 2**20
    assert set(draw_standing(tables)) == set(tables)
