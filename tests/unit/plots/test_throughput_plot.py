import matplotlib as mpl
import pandas as pd
import pytest

from kvlab import plots
from kvlab.plots import scheme_color

pytestmark = pytest.mark.unit

OURS = "hadamard-int4"
# Made up: milliseconds of a step with n sessions are 10 + n for stock, 10 + n / 2 for ours.
MOST = {"fp8": 40, OURS: 80}
PER_SESSION_MS = {"fp8": 1.0, OURS: 0.5}
QUEUED = "queued: 9 of 60 sessions waited for room in the cache"


@pytest.fixture(autouse=True)
def close_figures():
    yield
    mpl.pyplot.close("all")


def point(scheme, context, name, sessions, *, repeat=1, tp=2, counts=True, reason=None):
    step = (10 + PER_SESSION_MS[scheme] * sessions) / 1e3
    row = {"scheme": scheme, "tensor_parallel": tp, "context": context, "point": str(name), "repeat": repeat}
    times = {"slowest_tenth": 1.05, "tokens_per_s": sessions / step, "tokens_per_s_per_session": 1 / step}
    return {
        **row,
        "sessions": sessions,
        "steps": 512,
        **(times if counts else {}),
        "counts": counts,
        "reason": reason,
        "weights": "made up",
        "cache_gb": 29.9998,
        "command": "kvlab bench throughput --compilation-config.mode=0",
    }


def rows():
    return [
        point(scheme, context, name, sessions, repeat=repeat)
        for context in (65_536, 262_144)
        for scheme, most in MOST.items()
        for repeat in (1, 2)
        for name, sessions in (("full", most), (20, 20), (1, 1))
    ]


def draw(more=(), **options):
    return plots.plot_throughput(pd.DataFrame([*rows(), *more]), **options)


def texts(figure):
    return [text.get_text() for text in figure.findobj(mpl.text.Text)]


def curves(ax, scheme):
    return [line for line in ax.lines if line.get_label() == scheme]


def test_one_column_a_context_with_both_quantities():
    figure = draw(title="Throughput", source="Made up.")
    assert len(figure.axes) == 4
    assert [ax.get_title(loc="left") for ax in figure.axes[:2]] == ["64k context", "256k context"]
    assert [ax.get_ylabel() for ax in figure.axes[::2]] == ["batched, tokens/s", "per session, tokens/s"]
    assert [ax.get_xlabel() for ax in figure.axes[2:]] == ["sessions", "sessions"]
    for batched, alone in zip(figure.axes[:2], figure.axes[2:], strict=True):
        for scheme, most in MOST.items():
            first, repeat = curves(batched, scheme)
            assert list(first.get_xdata()) == [1, 20, most]
            steps = [(10 + PER_SESSION_MS[scheme] * n) / 1e3 for n in (1, 20, most)]
            assert list(first.get_ydata()) == pytest.approx([n / s for n, s in zip((1, 20, most), steps, strict=True)])
            assert list(curves(alone, scheme)[0].get_ydata()) == pytest.approx([1 / step for step in steps])
            assert first.get_color() == scheme_color(scheme)
            assert repeat.get_linewidth() < first.get_linewidth()


def test_full_memory_is_ringed_and_written_down():
    figure = draw()
    rings = [line for line in figure.axes[0].lines if line.get_markerfacecolor() == "none" and len(line.get_xdata())]
    assert sorted(x for ring in rings for x in ring.get_xdata()) == [40, 40, 80, 80]
    # 40 sessions in 50 ms, 80 in 50 ms.
    assert "800 tokens/s, 40 sessions" in texts(figure)
    assert "1,600 tokens/s, 80 sessions: 2.00× stock" in texts(figure)
    # 1 session in 11 against 10.5 ms, 20 in 30 against 20.
    assert "1.05 to 1.50× stock" in texts(figure)


def test_stocks_best_is_compared_with_where_it_is_not_at_full_memory():
    # 30 sessions in 25 ms.
    better = [{**point("fp8", 65_536, 30, 30), "tokens_per_s": 1200.0}]
    assert "1,600 tokens/s, 80 sessions: 2.00× stock, 1.33× its best" in texts(draw(better))


def test_points_that_do_not_count_are_named_and_not_drawn():
    out = [point("fp8", 65_536, 60, 60, counts=False, reason=QUEUED)] * 5
    figure = draw(out, source="Made up.")
    caption = next(text.replace("\n", " ") for text in texts(figure) if "Made up." in text)
    assert f"Not drawn, since they do not count: fp8, 64k, 60 sessions ({QUEUED}); " in caption
    assert "; 2 more, which the table names." in caption
    assert max(curves(figure.axes[0], "fp8")[0].get_xdata()) == 40
    assert "Not drawn" not in " ".join(texts(draw()))


def test_steps_parallelism_weights_and_slowest_are_said():
    caption = " ".join(texts(draw())).replace("\n", " ")
    assert (
        "512 steps a point, TP2; weights: made up; 30 GB of cache per GPU, without torch.compile; rings: full memory; "
        in caption
    )
    assert "at most 5% slower than their median" in caption


def test_other_numbers_of_gpus_are_not_mixed_in():
    alone = [point("fp8", 65_536, 1, 1, tp=1)]
    figure = draw(alone, tensor_parallel=1)
    (line,) = curves(figure.axes[0], "fp8")
    assert list(line.get_xdata()) == [1]
    assert "stock" in texts(figure)
    assert "memory full (rings)" not in texts(figure)
    with pytest.raises(ValueError, match=r"tensor_parallel is 4; accepted \(points that count\): 1, 2"):
        draw(alone, tensor_parallel=4)


def test_without_stock_there_is_nothing_to_compare_with():
    table = pd.DataFrame(rows())
    shown = texts(plots.plot_throughput(table[table["scheme"] != "fp8"]))
    assert not [text for text in shown if "× stock" in text]


def test_settings_are_left_alone_and_bytes_repeat(tmp_path):
    before = dict(mpl.rcParams)
    first, second = (plots.save(draw(), tmp_path / name) for name in ("a", "b"))
    assert dict(mpl.rcParams) == before
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
