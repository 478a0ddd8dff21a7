import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest

from kvlab.plots import plot_channels, plot_spectrum

pytestmark = pytest.mark.unit

CHANNELS = 16


@pytest.fixture(autouse=True)
def close_figures():
    yield
    mpl.pyplot.close("all")


def channels(heads=2):
    rows = [
        (layer, form, head, channel, 1 + 0.5 * np.sin(layer + head + channel) + 3 * (channel == layer))
        for layer in (4, 9)
        for form in ("raw", "without gain")
        for head in range(heads)
        for channel in range(CHANNELS)
    ]
    return pd.DataFrame(rows, columns=["layer", "form", "head", "channel", "magnitude"])


def spectrum(heads=2):
    rows = [
        (layer, head, direction, 10.0 ** -(direction / (2 + head + layer)))
        for layer in (4, 9)
        for head in range(heads)
        for direction in range(1, CHANNELS + 1)
    ]
    return pd.DataFrame(rows, columns=["layer", "head", "direction", "share"])


def test_a_panel_per_layer_and_form_with_the_largest_channel_named():
    table = channels()
    figure = plot_channels(table, source="made up", title="Channels")
    panels = table.groupby(["layer", "form"], sort=False)
    assert len(figure.axes) == len(panels) == 4
    for ax, ((layer, form), rows) in zip(figure.axes, panels, strict=True):
        assert ax.get_title(loc="left") == f"layer {layer}, {form}"
        lines = [line.get_ydata() for line in ax.lines if len(line.get_xdata()) == CHANNELS]
        for line, (_, own) in zip(lines, rows.groupby("head"), strict=True):
            np.testing.assert_array_equal(line, own["magnitude"])
        assert str(layer) in [text.get_text() for text in ax.texts]
    assert figure.axes[0].get_ylabel() and figure.axes[-1].get_xlabel() == "channel"
    assert "made up" in figure.texts[-1].get_text()


def test_spectrum_has_labelled_marks_per_head_on_a_logarithmic_scale():
    table = spectrum()
    (ax,) = plot_spectrum(table, source="made up", title="Spectrum").axes
    lines = [line.get_ydata() for line in ax.lines if len(line.get_xdata()) == CHANNELS]
    for line, (_, rows) in zip(lines, table.groupby(["layer", "head"]), strict=True):
        np.testing.assert_array_equal(line, rows["share"])
    labels = {text.get_text() for text in ax.texts}
    assert labels >= {f"layer {layer}, KV head {head}" for layer in (4, 9) for head in (0, 1)}
    assert ax.get_yscale() == "log"


@pytest.mark.parametrize(("plot", "table"), [(plot_channels, channels), (plot_spectrum, spectrum)])
@pytest.mark.parametrize("heads", [0, 5])
def test_more_heads_than_can_be_told_apart_are_refused(plot, table, heads):
    with pytest.raises(ValueError, match=r"^table has [05] (KV heads|layers); accepted: 1 to 4"):
        plot(table(heads=heads))
