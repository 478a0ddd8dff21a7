import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest

from kvlab import plots

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def close_figures():
    yield
    mpl.pyplot.close("all")


@pytest.fixture
def curve():
    """Twelve rows in three stages; held-out text in every fourth."""
    step = 25 * np.arange(1, 13)
    held_out = np.where(step % 100 == 0, 5 - step / 100, np.nan)
    return pd.DataFrame(
        {
            "step": step,
            "tokens": 2_000_000 * step,
            "seconds": 0.5 * step,
            "length": np.repeat([2048, 8192, 16384], [6, 4, 2]),
            "answer_loss": np.linspace(1.2, 0.1, 12),
            "held_out_en": held_out,
            "held_out_de": held_out - 0.01,
        }
    )


def texts(figure):
    return [text.get_text() for text in figure.findobj(mpl.text.Text)]


def test_the_curves_are_the_tables(curve):
    text, answers = plots.plot_training(curve).axes
    english, german = text.lines[:2]
    assert list(english.get_xdata()) == [200, 400, 600] and list(english.get_ydata()) == [4, 3, 2]
    assert list(german.get_ydata()) == pytest.approx([3.99, 2.99, 1.99])
    assert list(answers.lines[0].get_ydata()) == list(curve["answer_loss"])
    assert answers.get_yscale() == "log"


def test_ends_are_labelled_apart(curve):
    figure = plots.plot_training(curve)
    assert {"English 2.000", "German 1.990", "answers\n0.150 (median of\nthe last stage)"} <= set(texts(figure))
    labels = {text.get_text(): text.xy[1] for text in figure.axes[0].texts if hasattr(text, "xy")}
    assert labels["English 2.000"] - labels["German 1.990"] > 0.1


def test_stages_are_named_where_they_are(curve):
    text, answers = plots.plot_training(curve).axes
    for ax in (text, answers):
        dotted = [line.get_xdata()[0] for line in ax.lines if line.get_linestyle() == ":"]
        assert dotted == [300, 500]
    middles = {each.get_text(): each.get_position()[0] for each in text.texts if "sequences" in each.get_text()}
    assert middles == {"sequences of 2k": 150, "sequences of 8k": 400, "sequences of 16k": 550}


def test_axes_have_units_and_the_caption_its_source(curve):
    figure = plots.plot_training(curve, source="somewhere")
    assert all("nats per token" in ax.get_ylabel() for ax in figure.axes)
    assert figure.axes[1].get_xlabel() == "tokens trained on, millions"
    (caption,) = (text for text in texts(figure) if "somewhere" in text)
    assert caption.startswith("300 steps, 600 M tokens in 150 s.")
