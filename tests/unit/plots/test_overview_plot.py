import matplotlib as mpl
import pandas as pd
import pytest
from matplotlib.colors import to_hex

from kvlab import capacity, plots, standing_figures
from kvlab.overview import CACHE_GB, overview_table
from kvlab.tables import measured, published

pytestmark = pytest.mark.unit

OURS = "hadamard-int4"
RUN = {"machine": "none", "versions": "none", "date": "2026-01-01"}


@pytest.fixture(autouse=True)
def close_figures():
    yield
    mpl.pyplot.close("all")


@pytest.fixture(scope="module")
def table():
    return overview_table(measured("kernels_h200"))


def throughput():
    """Made up."""
    speeds = {("fp8", 65_536): 1000.0, (OURS, 65_536): 1750.0, ("fp8", 262_144): 300.0}
    row = {"tensor_parallel": 2, "point": "full", "repeat": 1, "sessions": 9, "steps": 512, "slowest_tenth": 1.0}
    rows = [
        {**row, "scheme": scheme, "context": context, "tokens_per_s": speed, "tokens_per_s_per_session": speed / 9}
        | {"counts": True, "reason": None, "weights": "none", "cache_gb": 30.0, "command": "kvlab bench", **RUN}
        for (scheme, context), speed in speeds.items()
    ]
    # Neither a point that does not count nor another number of GPUs is compared.
    other = [rows[1] | {"tokens_per_s": 9e9, "counts": False}, rows[1] | {"tokens_per_s": 9e9, "tensor_parallel": 1}]
    return pd.DataFrame([*rows, *other])


def texts(figure):
    return [text.get_text() for text in figure.findobj(mpl.text.Text)]


def marks(ax, marker):
    return [line for line in ax.lines if line.get_marker() == marker]


def panels(figure):
    return {ax.get_title(loc="left"): ax for ax in figure.axes}


def test_every_number_has_its_kind_unit_and_source(table):
    assert table[["part", "quantity", "kind", "value", "unit", "source"]].notna().all(axis=None)
    assert set(table["unit"]) == {"points", "× stock"}
    by_part = table.groupby("part")["kind"].unique().map(set).to_dict()
    assert by_part == {
        "quality": {"published"},
        "memory": {"computed", "published"},
        "speed": {"measured", "published"},
    }


def test_quality_is_what_was_published(table):
    quality = table[table["part"] == "quality"]
    ruler = quality[quality["quantity"] == "RULER"]
    for column in ("low", "high", "fp8", OURS):
        assert list(ruler[column]) == list(published("ruler")[column])
    assert list(ruler["value"]) == list(published("ruler")["difference"])
    (gpqa,) = quality[quality["quantity"] == "GPQA Diamond"].to_dict("records")
    assert [gpqa[name] for name in ("value", "low", "high", "fp8", OURS)] == [0.5, -1.8, 2.7, 83.0, 83.5]


def test_memory_is_what_capacity_counts(table):
    counted = capacity.capacity_table([65_536, 262_144], CACHE_GB * 1e9, tp=2)
    computed = table[table["kind"] == "computed"]
    for scheme in ("fp8", OURS):
        assert list(computed[scheme]) == list(counted.loc[counted["scheme"] == scheme, "sessions"])
    assert list(computed["value"]) == pytest.approx(list(computed[OURS] / computed["fp8"]))
    theirs = table[(table["kind"] == "published") & (table["part"] == "memory")]
    assert list(theirs["value"]) == [1.82, 1.95]


def test_attention_is_measured_with_sessions_that_stock_holds(table):
    speed = table[(table["part"] == "speed") & (table["kind"] == "measured")]
    kernels = measured("kernels_h200")
    for row, batch in zip(speed.to_dict("records"), (64, 16), strict=True):
        assert row["quantity"] == f"attention alone, {batch} sessions"
        case = kernels[
            (kernels["kernel"] == "decode")
            & (kernels["context"] == row["context"])
            & (kernels["batch"] == batch)
            & (kernels["num_heads"] == 24)
            & (kernels["q_len"] == 1)
            & (kernels["lengths"] == "uniform")
        ].set_index("scheme")
        assert row["value"] == pytest.approx(case.loc[OURS, "speedup_over_fp8"], rel=1e-4)
        assert row["source"].startswith("NVIDIA H200; ")


def test_throughput_joins_where_both_were_measured():
    rows = overview_table(measured("kernels_h200"), throughput())
    engine = rows[rows["quantity"] == "whole engine, memory full"]
    assert list(zip(engine["kind"], engine["value"], strict=True)) == [("published", 1.7), ("measured", 1.75)]
    shown = texts(plots.plot_overview(rows))
    assert "1.75×: 1,000 → 1,750 tokens/s" in shown
    assert "published 1.7×" in shown


def test_stocks_best_is_compared_with_where_it_is_not_at_full_memory():
    table = throughput()
    best = table.iloc[0].to_dict() | {"point": "64", "sessions": 7, "tokens_per_s": 1400.0}
    rows = overview_table(measured("kernels_h200"), pd.concat([table, pd.DataFrame([best])]))
    engine = rows[rows["quantity"] == "whole engine, each at its best"]
    assert list(zip(engine["context"], engine["value"], strict=True)) == [(65_536, 1.25)]
    assert list(rows["part"]) == sorted(rows["part"], key=["quality", "memory", "speed"].index)


def test_published_computed_and_measured_are_told_at_a_glance(table):
    figure = plots.plot_overview(table, source="From somewhere.", title="One page")
    drawn = panels(figure)
    assert list(drawn) == ["Quality", "Memory", "Speed of decoding"]
    counts = {name: [len(marks(ax, marker)) for marker in "Dso"] for name, ax in drawn.items()}
    assert counts == {"Quality": [8, 0, 0], "Memory": [2, 2, 0], "Speed of decoding": [1, 0, 2]}
    for ax in drawn.values():
        assert all(to_hex(mark.get_markerfacecolor()) == "#ffffff" for mark in marks(ax, "D"))
        assert all(to_hex(mark.get_markerfacecolor()) != "#ffffff" for marker in "so" for mark in marks(ax, marker))
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["published", "computed", "measured"]
    assert {"One page", "From somewhere.", "−2.0", "1.82×: 86.5 → 157.8 sessions, 2 GPUs"} <= set(texts(figure))


def test_marks_and_intervals_lie_where_the_table_says(table):
    quality = panels(plots.plot_overview(table))["Quality"]
    assert [mark.get_xdata()[0] for mark in marks(quality, "D")] == list(table.loc[:7, "value"])
    bars = [list(line.get_xdata()) for line in quality.lines if len(set(line.get_ydata())) == 1]
    assert [bar for bar in bars if len(bar) == 2] == table.loc[:7, ["low", "high"]].to_numpy().tolist()
    assert len(quality.get_yticks()) == 8


@pytest.mark.parametrize("engine", [None, throughput()], ids=["without throughput", "with throughput"])
def test_no_text_is_cut_off_or_on_another(engine):
    table = overview_table(measured("kernels_h200"), engine)
    figure = plots.plot_overview(table, source="Somewhere.", title="Stock against rotated INT4, Kolibri-1")
    figure.canvas.draw()
    boxes = [
        (text.get_text(), text.get_window_extent())
        for text in figure.findobj(mpl.text.Text)
        if text.get_visible() and text.get_text().strip()
    ]
    width, height = figure.canvas.get_width_height()
    for i, (text, box) in enumerate(boxes):
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height, text
        for other, taken in boxes[:i]:
            assert not (box.overlaps(taken) and box is not taken), (text, other)


def test_throughput_is_drawn_once_it_is_measured(monkeypatch, tmp_path):
    tables = standing_figures.standing_tables()
    assert set(standing_figures.draw_standing(tables)) == set(tables)
    folder = standing_figures.data_folder()
    (tmp_path / "measured").mkdir()
    throughput().to_csv(tmp_path / "measured" / f"{standing_figures.THROUGHPUT}.csv", index=False)
    monkeypatch.setattr(standing_figures, "data_folder", lambda: tmp_path)
    monkeypatch.setattr(
        standing_figures,
        "measured",
        lambda name: pd.read_csv(
            (tmp_path if name == standing_figures.THROUGHPUT else folder) / "measured" / f"{name}.csv", comment="#"
        ),
    )
    tables = standing_figures.standing_tables()
    figures = standing_figures.draw_standing(tables)
    assert "throughput" in figures and set(figures) == set(tables)
    assert "whole engine, memory full" in set(tables["overview"]["quantity"][tables["overview"]["kind"] == "measured"])
