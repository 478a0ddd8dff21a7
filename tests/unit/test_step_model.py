"""What a decode step reads, counted again from the model's shape."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.models.kolibri1_config import kolibri1_config
from kvlab.step_model import KERNEL, PARTS, experts_hit, step_bytes, step_model_table
from kvlab.tables import measured

pytestmark = pytest.mark.unit

LAYERS, FULL, HIDDEN, WIDTH, EXPERTS = 50, 10, 2560, 512, 384


def scales(rows, columns):
    return 4 * -(-rows // 128) * -(-columns // 128)


@pytest.mark.parametrize("scheme", ["fp8", "hadamard-int4", "bf16"])
def test_a_single_session_reads_what_the_shape_says(scheme):
    found = step_bytes(scheme, 1, 65_536)
    expert = 3 * (HIDDEN * WIDTH + scales(HIDDEN, WIDTH))
    # Six of its own, and the shared one.
    assert found["experts"] == pytest.approx(LAYERS * 7 * expert)
    attention = [(6144, HIDDEN), (512, HIDDEN), (512, HIDDEN), (HIDDEN, 6144)]
    of_layer = sum(rows * columns + scales(rows, columns) for rows, columns in attention) + 2 * EXPERTS * HIDDEN
    assert found["projections"] == LAYERS * of_layer
    assert found["head"] == 2 * 128_000 * HIDDEN
    assert found["sliding cache"] == (LAYERS - FULL) * 513 * 4 * 256
    assert found["full cache"] == FULL * 65_536 * 4 * {"fp8": 256, "hadamard-int4": 136, "bf16": 512}[scheme]
    assert tuple(found) == PARTS


def test_a_short_context_has_no_whole_window():
    assert step_bytes("fp8", 3, 100)["sliding cache"] == (LAYERS - FULL) * 3 * 100 * 4 * 256


def test_gpus_share_all_but_the_router():
    one, two = (step_bytes("fp8", 8, 65_536, tp=tp) for tp in (1, 2))
    for part in set(PARTS) - {"projections"}:
        assert two[part] == pytest.approx(one[part] / 2)
    router = LAYERS * 2 * EXPERTS * HIDDEN
    assert two["projections"] - router == pytest.approx((one["projections"] - router) / 2)


@given(experts=st.integers(1, 60), tokens=st.integers(1, 40), data=st.data())
def test_experts_that_are_hit_are_counted(experts, tokens, data):
    top_k = data.draw(st.integers(1, experts))
    expected = experts_hit(experts, top_k, tokens)
    assert top_k - 1e-9 <= expected <= min(experts, top_k * tokens) + 1e-9
    draw = np.random.default_rng(0)
    hit = [len({e for _ in range(tokens) for e in draw.permutation(experts)[:top_k]}) for _ in range(60)]
    # Five standard errors: an expert's being hit has a standard deviation of 1/2 at most, and hits exclude each other.
    assert abs(np.mean(hit) - expected) <= 5 * np.sqrt(experts / 4 / 60)


def kernels(**changes):
    rows = [
        {"kernel": "copy", "gb_per_s": 4000.0},
        *(
            {
                "kernel": "decode",
                "scheme": scheme,
                "num_heads": 48,
                "batch": batch,
                "context": 65_536,
                "lengths": "uniform",
                "q_len": 1,
                "time_us": time,
            }
            for scheme, batch, time in [("hadamard-int4", 8, 90.0), ("fp8", 8, 200.0), ("fp8", 1, 40.0)]
        ),
    ]
    return pd.DataFrame(rows).assign(**changes)


def test_the_model_adds_up_to_bounds_and_measured_attention():
    table = step_model_table(kernels(), 65_536)
    assert table[["sessions", "scheme"]].drop_duplicates().to_numpy().tolist() == [
        [1, "fp8"],
        [8, "fp8"],
        [8, "hadamard-int4"],
    ]
    for (scheme, sessions), rows in table.groupby(["scheme", "sessions"]):
        ms = rows.set_index("part")["ms"]
        assert list(ms.index) == [*PARTS, KERNEL]
        size = step_bytes(scheme, sessions, 65_536)
        for part in PARTS:
            assert ms[part] == pytest.approx(1e3 * size[part] / 4e12)
        time = {("fp8", 1): 40, ("fp8", 8): 200, ("hadamard-int4", 8): 90}[scheme, sessions]
        assert ms["full cache"] + ms[KERNEL] == pytest.approx(FULL * time / 1e3)


@pytest.mark.parametrize(
    ("context", "tp", "accepted"), [(1000, 1, "measured for 48 query heads.: 65536"), (65_536, 2, "measured for 24")]
)
def test_what_was_not_measured_is_refused(context, tp, accepted):
    with pytest.raises(ValueError, match=f"^context is {context}; accepted .{accepted}"):
        step_model_table(kernels(), context, tp=tp)


@pytest.mark.parametrize(
    ("table", "error", "message"),
    [
        ("kernels.csv", TypeError, "kernels is a str; accepted: the table of kvlab bench kernels"),
        (kernels().drop(columns=["batch", "time_us"]), ValueError, "kernels lacks batch, time_us; accepted: the table"),
    ],
)
def test_another_table_is_refused(table, error, message):
    with pytest.raises(error, match=f"^{message}"):
        step_model_table(table, 65_536)


def test_a_scheme_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"^scheme is 'fp9'.*; accepted: "):
        step_model_table(kernels(), 65_536, schemes=["fp8", "fp9"])


@pytest.mark.parametrize("tp", [1, 2])
def test_the_measured_kernels_fit_the_model(tp):
    table = step_model_table(measured("kernels_h200"), 65_536, tp=tp)
    total = table.groupby(["scheme", "sessions"])["ms"].sum()
    # A kernel that beat a copy by more than what clocks vary by would be one that does not read its cache.
    assert (table.loc[table["part"] == KERNEL, "ms"] > -0.03 * table.loc[table["part"] == KERNEL, "ms"].max()).all()
    assert (total["hadamard-int4"] < total["fp8"]).all()
    assert kolibri1_config().layer_types.count("full_attention") == FULL
