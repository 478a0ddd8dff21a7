import matplotlib as mpl
import pandas as pd
import pytest

from kvlab import plots
from kvlab.plots.kernels import FLOOR_SCHEME, SCHEMES

pytestmark = pytest.mark.unit

CONTEXTS = (4096, 65536)
TIMES = {"hadamard-int4": 20.0, "fp8": 50.0, "turboquant-4bit": 5000.0}


@pytest.fixture(autouse=True)
def close_figures():
    yield
    mpl.pyplot.close("all")


def table(batches=(1, 8, 64), shapes=((24, 2), (48, 4)), tokens=(1, 512)):
    rows = [{"kernel": "copy", "gb_per_s": 4275.0}]
    for heads, kv_heads in shapes:
        shape = {"num_heads": heads, "num_kv_heads": kv_heads}
        for scheme, time in TIMES.items():
            for batch in batches:
                for context in CONTEXTS:
                    floor = batch * context * kv_heads * 1e-5
                    decode = {"kernel": "decode", "scheme": scheme, **shape, "batch": batch, "context": context}
                    decode |= {"lengths": "uniform", "q_len": 1, "floor_us": floor, "time_us": time + floor}
                    rows += [
                        decode,
                        decode | {"q_len": 4, "time_us": -1.0},
                        decode | {"lengths": "ragged", "time_us": -1.0},
                    ]
            rows += [
                {"kernel": "store", "scheme": scheme, **shape, "tokens": n, "time_us": time + n, "floor_us": 1.0 + n}
                for n in tokens
            ]
    run = {"machine": "a machine", "versions": "kvlab 0.1.0", "date": "2026-11-30"}
    return pd.DataFrame(rows).assign(**run)


def lines(ax):
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in ax.lines}


def texts(figure):
    return [text.get_text() for text in figure.findobj(mpl.text.Text)]


@pytest.mark.parametrize("shape", [(24, 2), (48, 4)], ids=["24/2", "48/4"])
def test_decode_lines_lie_where_the_table_says(shape):
    figure = plots.plot_decode_times(table(), num_heads=shape[0], num_kv_heads=shape[1])
    for ax, batch in zip(figure.axes, (1, 8, 64), strict=False):
        floors = [batch * context * shape[1] * 1e-5 for context in CONTEXTS]
        drawn = lines(ax)
        for scheme, time in TIMES.items():
            x, y = drawn.pop(SCHEMES[scheme])
            assert x == list(CONTEXTS)
            assert y == pytest.approx([time + floor for floor in floors])
        ((x, y),) = drawn.values()
        assert y == pytest.approx(floors)


@pytest.mark.parametrize("batches", [(1,), (1, 8, 64), (1, 2, 4, 8), (1, 2, 4, 8, 16, 32, 64)], ids=len)
def test_a_panel_a_batch_and_one_legend(batches):
    figure = plots.plot_decode_times(table(batches), title="Decode", source="somewhere")
    panels = [ax for ax in figure.axes if ax.lines]
    assert [ax.get_title(loc="left") for ax in panels][:2] == [
        "1 session",
        *(f"{batch} sessions" for batch in batches[1:2]),
    ]
    assert len(panels) == len(batches)
    (legend,) = figure.findobj(mpl.legend.Legend)
    assert [text.get_text() for text in legend.get_texts()] == [SCHEMES[scheme] for scheme in (*TIMES, "floor")]
    assert any("somewhere" in text and "4,275 GB/s" in text for text in texts(figure))
    assert panels[0].get_ylabel() == "time per layer, µs" and panels[-1].get_xlabel()


@pytest.mark.parametrize("draw", [plots.plot_decode_times, plots.plot_store_times])
def test_every_time_is_inside_its_panel(draw):
    figure = draw(table((1, 8, 64, 4096)))
    for ax in figure.axes:
        low, high = ax.get_ylim()
        assert low == 1 and all(max(line.get_ydata()) <= high for line in ax.lines)


def test_contexts_and_long_times_are_in_words():
    figure = plots.plot_decode_times(table())
    figure.canvas.draw()
    assert {"4k", "64k"} <= {label.get_text() for label in figure.axes[0].get_xticklabels()}
    assert "1 ms" in [label.get_text() for label in figure.axes[0].get_yticklabels()]


def test_store_lines_lie_where_the_table_says():
    figure = plots.plot_store_times(table(), title="Store", source="somewhere")
    assert len(figure.axes) == 2
    drawn = lines(figure.axes[0])
    assert drawn[SCHEMES[FLOOR_SCHEME]] == ([1, 512], [21.0, 532.0])
    assert drawn["fp8 (vLLM: two norms and the cache write)"] == ([1, 512], [51.0, 562.0])
    assert drawn["floor: bytes at copy speed"] == ([1, 512], [2.0, 513.0])
    assert any("somewhere" in text for text in texts(figure))


def test_what_is_not_in_the_table_is_named():
    with pytest.raises(ValueError, match=r"no decode rows of shape 6/1; accepted: one of \[\[24, 2\], \[48, 4\]\]"):
        plots.plot_decode_times(table(), num_heads=6, num_kv_heads=1)
    with pytest.raises(ValueError, match="no rows of the kernel 'store'"):
        plots.plot_store_times(table(tokens=()))


@pytest.mark.parametrize("draw", [plots.plot_decode_times, plots.plot_store_times])
def test_settings_are_left_alone_and_bytes_repeat(draw, tmp_path):
    before = dict(mpl.rcParams)
    first, second = (plots.save(draw(table()), tmp_path / name) for name in ("a", "b"))
    assert dict(mpl.rcParams) == before
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()


def test_a_run_is_machine_versions_and_date():
    assert plots.run_of(table()) == "a machine; kvlab 0.1.0; 2026-11-30."
