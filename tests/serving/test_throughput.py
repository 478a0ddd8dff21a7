"""The whole engine is timed only in steps in which every session decodes, on contents that it wrote itself."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from served_checkpoint import FULL

pytest.importorskip("vllm", reason="needs vLLM: .ci/install-serving-cpu installs its CPU build")

from kvlab.serving.throughput import Setup, bench, bench_first_token, bench_throughput
from kvlab.serving.throughput.fill import PageTemplate
from kvlab.serving.throughput.job import Job, decode_arguments, engine_arguments

pytestmark = pytest.mark.serving

CONTENTS = Path(__file__).with_name("throughput_contents.py")
# BF16 for stock and in the sliding-window layers, so that any machine will do.
ARGUMENTS = ("--kv-cache-dtype", "auto", "--enforce-eager", "--max-num-batched-tokens", "512", "--max-num-seqs", "16")
# Ten sessions or so, of which each starts a new page of any size while it decodes.
CACHE_GB, CONTEXT, STEPS = 0.006, 250, 8


@pytest.fixture(scope="module", autouse=True)
def few_threads():
    """Of the CPU build: a GB figure of its own would win over ours, and threads that spin starve each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def setup(tiny_checkpoint, tmp_path_factory):
    return Setup(
        tiny_checkpoint,
        schemes=("bf16", "hadamard-int4"),
        contexts=[CONTEXT],
        cache_gb=CACHE_GB,
        arguments=ARGUMENTS,
        out=tmp_path_factory.mktemp("throughput") / "table.csv",
        command="made up",
        progress=False,
    )


@pytest.fixture(scope="module")
def curve(setup):
    return bench_throughput(setup, sessions=["full", 16, 2, 1], steps=STEPS)


def test_a_small_curve_counts(curve):
    small = curve[curve["point"].isin(["2", "1"])]
    assert small[["scheme", "sessions"]].values.tolist() == [
        ["bf16", 2],
        ["bf16", 1],
        ["hadamard-int4", 2],
        ["hadamard-int4", 1],
    ]
    assert small["counts"].all() and small["reason"].isna().all()
    assert (small["steps"] == STEPS).all() and (small["first_tokens"] == CONTEXT).all()
    assert (small["median_ms"] > 0).all() and (small["slowest_tenth"] >= 1).all()
    rates = small["tokens_per_s"] / small["sessions"]
    assert rates.astype(float).tolist() == pytest.approx(small["tokens_per_s_per_session"].tolist(), rel=1e-4)
    assert (curve["cache_gb"] <= CACHE_GB).all() and (curve["cache_gb"] > 0.9 * CACHE_GB).all()
    assert curve["versions"].str.contains("vllm 0.29").all()


def test_a_point_that_queued_is_named_and_has_no_time(curve):
    queued = curve[curve["point"] == "16"]
    assert len(queued) == 2 and not queued["counts"].any()
    assert queued["reason"].str.match(r"queued: \d+ of 16 sessions waited").all()
    assert queued[["median_ms", "tokens_per_s"]].isna().all(axis=None)


def test_a_full_cache_holds_its_sessions_to_the_end(curve):
    full = curve[curve["point"] == "full"]
    assert full["counts"].all() and len(full) == full["scheme"].nunique()
    assert (full["sessions"] <= full["fit"]).all()
    assert curve.loc[curve["point"] != "full", "fit"].isna().all()


def test_sessions_that_fit_are_counted_before_they_grow(setup):
    # Of 64 tokens, two whole pages of 32 in two groups and one of 128 in the third. With the second token every session
    # needs a page more, and some lose theirs.
    whole = dataclasses.replace(
        setup,
        schemes=("hadamard-int4",),
        contexts=[64],
        cache_gb=2 * CACHE_GB,
        arguments=(*ARGUMENTS[:-1], "64"),
        out=None,
    )
    rows = bench_throughput(whole, sessions=["full"], steps=1)
    assert (rows["fit"] == (rows["num_blocks"] - 1) // 5).all()


def test_a_point_that_evicts_as_sessions_grow_is_named_and_has_no_time(setup, curve):
    (fit,) = curve.loc[(curve["point"] == "full") & (curve["scheme"] == "hadamard-int4"), "fit"].astype(int)
    growing = dataclasses.replace(setup, schemes=("hadamard-int4",), out=None)
    # As many as fit at first, and half as long again at the end.
    (row,) = bench_throughput(growing, sessions=[fit], steps=CONTEXT // 2).to_dict("records")
    assert not row["counts"] and pd.isna(row["median_ms"])
    assert row["reason"].startswith("evicted: ")


def test_four_bits_hold_more_sessions(curve):
    most = curve[curve["point"] == "full"].groupby("scheme")["sessions"].max()
    assert most["hadamard-int4"] > most["bf16"] > 2


def test_as_many_fit_as_run_when_more_are_offered(curve):
    for scheme, rows in curve.groupby("scheme"):
        fit = rows.loc[rows["point"] == "full", "fit"].max()
        waited = int(rows.loc[rows["point"] == "16", "reason"].iloc[0].split()[1])
        # Those are a little shorter.
        assert fit <= 16 - waited <= fit + 2, scheme


def test_a_table_that_is_whole_is_not_measured_again(setup, curve, monkeypatch):
    monkeypatch.setattr(bench, "run_job", lambda *unused: pytest.fail("an engine was started"))
    before = setup.out.read_bytes()
    again = bench_throughput(setup, sessions=["full", 16, 2, 1], steps=STEPS)
    assert len(again) == len(curve) and setup.out.read_bytes() == before


def test_an_engine_that_cannot_start_says_why_and_keeps_its_log(setup, tmp_path):
    broken = dataclasses.replace(setup, schemes=("bf16",), out=None, logs=tmp_path, arguments=("--no-such-option",))
    with pytest.raises(ChildProcessError, match=r"engine of bf16-tp1 ended .* 0 of 1 points: .*no-such-option"):
        bench_throughput(broken, sessions=[1], steps=1)
    (log,) = tmp_path.iterdir()
    assert "no-such-option" in log.read_text()


@pytest.mark.long
def test_two_ranks_and_random_weights(setup, tmp_path):
    (tmp_path / "config.json").write_bytes((setup.model / "config.json").read_bytes())
    drawn = dataclasses.replace(
        setup,
        model=tmp_path,
        schemes=("hadamard-int4",),
        tensor_parallel=(2,),
        random_weights=True,
        arguments=ARGUMENTS,
        out=None,
    )
    (row,) = bench_throughput(drawn, sessions=[2], steps=2).to_dict("records")
    assert row["counts"] and row["tensor_parallel"] == 2 and row["weights"] == "random"


def test_first_tokens(setup):
    short = dataclasses.replace(setup, schemes=("bf16",), contexts=[64, 1024], out=None)
    table = bench_first_token(short, requests=2)
    assert table["context"].tolist() == [64, 1024]
    assert (table["fastest_s"] <= table["median_s"]).all() and (table["median_s"] <= table["slowest_s"]).all()
    # Prefilled for real: 16 times the tokens, in two chunks.
    assert table["fastest_s"].iloc[1] > table["slowest_s"].iloc[0]


@pytest.mark.parametrize("scheme", ["bf16", "hadamard-int4"])
def test_filled_pages_are_the_templates(tiny_checkpoint, scheme):
    points = [{"context": 960}]
    arguments = engine_arguments(str(tiny_checkpoint), scheme, 1, 1024, cache_gb=0.02)
    job = Job("throughput", points, [*arguments, *decode_arguments([1]), *ARGUMENTS], steps=1)
    command = [sys.executable, str(CONTENTS), json.dumps(dataclasses.asdict(job))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ)
    assert done.returncode == 0, done.stderr[-4000:]
    layers = json.loads(next(line for line in done.stderr.splitlines() if line.startswith('[{"layer"')))
    assert len(layers) == 6
    for layer in layers:
        assert layer["known"] == layer["pages"] and layer["empty"] == 0, layer
        assert layer["null_is_empty"], layer
        # A window may lie in the one page that the step has written.
        is_full = int(layer["layer"].split(".")[2]) in FULL
        assert layer["different"] > 1 or not is_full, layer


def test_pages_are_copied_whole_and_no_others():
    from types import SimpleNamespace

    generator = torch.Generator().manual_seed(0)
    # A layer whose kernel has two blocks in one of vLLM's, and one of another type whose blocks are strided.
    caches = {
        "a": torch.randint(0, 256, (16, 2, 4, 6), dtype=torch.uint8, generator=generator),
        "b": torch.randn(8, 4, 2, 6, generator=generator).bfloat16().transpose(1, 2),
    }
    before = {name: cache.clone() for name, cache in caches.items()}
    groups = [SimpleNamespace(layer_names=["a"]), SimpleNamespace(layer_names=["b"])]
    template = PageTemplate(caches, SimpleNamespace(num_blocks=8, kv_cache_groups=groups))
    template.keep(([1, 2], [3]))
    template.fill(([5, 7], [6]))
    a, b = caches["a"].unflatten(0, (8, 2)), caches["b"]
    old = before["a"].unflatten(0, (8, 2))
    for number in (5, 7):
        assert any(torch.equal(a[number], old[source]) for source in (1, 2))
    assert torch.equal(b[6], before["b"][3])
    assert torch.equal(a[[0, 1, 2, 3, 4, 6]], old[[0, 1, 2, 3, 4, 6]])
    assert torch.equal(b[[0, 1, 2, 3, 4, 5, 7]], before["b"][[0, 1, 2, 3, 4, 5, 7]])
