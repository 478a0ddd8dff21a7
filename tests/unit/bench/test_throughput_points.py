"""Which steps count, the table, and what is measured again; without vLLM."""

import dataclasses
import itertools
import json
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.cli import main
from kvlab.serving.throughput import Setup, bench, bench_first_token, bench_throughput, job
from kvlab.serving.throughput.points import Step, summary, why_not
from kvlab.serving.throughput.table import PointTable

pytestmark = pytest.mark.unit

COLUMNS = ("scheme", "point", "median_ms", "counts", "reason")
ROW = {"scheme": "fp8", "point": "8", "median_ms": 12.3456789, "counts": True, "reason": None}


def test_a_step_counts_with_one_token_for_each_session():
    assert why_not(3, Step(0.1, (1, 1, 1)), waiting=0, preempted=0) is None


@pytest.mark.parametrize(
    ("step", "state", "reason"),
    [
        (Step(0.1, (1, 1)), {"waiting": 1}, "queued: 1 of 3 sessions waited"),
        (Step(0.1, (1, 1)), {"waiting": 1, "preempted": 1}, "evicted: "),
        # It is back in the cache by now, but was out of it.
        (Step(0.1, (1, 1, 1)), {"preempted": 1}, "evicted: "),
        (Step(0.1, (1, 1, 1), ended=1), {}, "ended early: 1 of 3"),
        (Step(0.1, (1, 1)), {}, "a step brought 2 tokens to 2 of 3 sessions"),
        (Step(0.1, (1, 2, 1)), {}, "a step brought 4 tokens to 3 of 3 sessions"),
        (Step(0.1, (1, 0, 1)), {}, "a step brought 2 tokens to 3 of 3 sessions"),
        (Step(0.1, ()), {}, "a step brought 0 tokens"),
    ],
    ids=str,
)
def test_other_steps_are_named(step, state, reason):
    assert why_not(3, step, **{"waiting": 0, "preempted": 0} | state).startswith(reason)


def test_a_summary_by_hand():
    row = summary(4, [0.01] * 18 + [0.03, 0.05])
    assert row["median_ms"] == pytest.approx(10)
    assert row["slowest_tenth"] == pytest.approx(4)
    # 20 steps of 4 tokens in 0.26 s.
    assert row["tokens_per_s"] == pytest.approx(80 / 0.26)
    assert row["tokens_per_s_per_session"] == pytest.approx(20 / 0.26)


@given(st.lists(st.floats(1e-4, 1e3), min_size=1), st.integers(1, 500))
def test_the_slowest_are_never_faster_than_the_median(seconds, sessions):
    row = summary(sessions, seconds)
    assert row["slowest_tenth"] >= 1 - 1e-12
    assert row["tokens_per_s"] == pytest.approx(sessions * row["tokens_per_s_per_session"])


def table(path, **settings):
    return PointTable(path, columns=COLUMNS, key=("scheme", "point"), settings={"steps": 512} | settings, notes=["n"])


def test_a_table_is_continued_and_no_row_changes(tmp_path):
    path = tmp_path / "table.csv"
    table(path).append([ROW])
    first = path.read_text()
    again = table(path)
    assert again.has(ROW) and not again.has(ROW | {"point": "full"})
    again.append([ROW | {"point": "full", "counts": False, "reason": "queued: 1, 2", "median_ms": None}])
    assert path.read_text().startswith(first)
    back = pd.read_csv(path, comment="#")
    assert back["median_ms"].iloc[0] == 12.3457 and back["reason"].iloc[1] == "queued: 1, 2"
    assert [file.name for file in tmp_path.iterdir()] == ["table.csv"]


def test_other_settings_are_refused(tmp_path):
    table(tmp_path / "table.csv").append([ROW])
    with pytest.raises(ValueError, match=r"measured with steps 512; accepted: .* measured with 64"):
        table(tmp_path / "table.csv", steps=64)


@pytest.mark.parametrize("cut", [1, 5, 12])
def test_a_file_that_is_cut_off_is_refused_and_stays(tmp_path, cut):
    path = tmp_path / "table.csv"
    table(path).append([ROW, ROW | {"point": "1"}])
    path.write_text(path.read_text()[:-cut])
    before = path.read_text()
    with pytest.raises(ValueError, match="which is cut off"):
        table(path)
    assert path.read_text() == before


def test_a_file_of_something_else_is_refused(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="accepted: a new file, or one that this command wrote"):
        table(path)


@pytest.mark.parametrize("out", ["no/such/folder.csv", "."])
def test_a_file_that_cannot_be_written_is_refused(tmp_path, out):
    with pytest.raises(ValueError, match="accepted: a file in a folder that can be written"):
        table(tmp_path / out)


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"model_type": "kolibri1", "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def engines(monkeypatch):
    """Stand-ins for engines: the jobs that they got; one is told after how many points it fails."""
    jobs, failure = [], {}

    def run_job(job, name, logs):
        jobs.append(job)
        for index, point in enumerate(job.points):
            if failure.get(name) == index:
                raise ChildProcessError(f"the engine of {name} ended")
            yield [{**point, "sessions": 3, "counts": True}]

    monkeypatch.setattr(bench, "run_job", run_job)
    monkeypatch.setattr(bench.server, "check_plugins", lambda environment, *, with_cache: None)
    return jobs, failure


def setup(model, **changes):
    values = {"schemes": ("fp8", "hadamard-int4"), "contexts": (1024, 2048), "progress": False} | changes
    return Setup(model, **values)


def test_an_engine_per_scheme_and_number_of_gpus_from_the_most_sessions_down(model, engines):
    rows = bench_throughput(setup(model, tensor_parallel=(1, 2)), sessions=[1, "full", 8], repeats=2)
    jobs, _ = engines
    assert [(each.points[0]["scheme"], each.points[0]["tensor_parallel"]) for each in jobs] == [
        ("fp8", 1),
        ("fp8", 2),
        ("hadamard-int4", 1),
        ("hadamard-int4", 2),
    ]
    assert [point["point"] for point in jobs[0].points[:6]] == ["full", "8", "1"] * 2
    assert len(rows) == 4 * 2 * 2 * 3
    arguments = jobs[0].engine_arguments
    assert arguments[arguments.index("--max-model-len") + 1] == str(2048 + 512 + job.WARM_UP_STEPS + job.SLACK_STEPS)


def test_after_a_failure_the_rest_is_measured_and_nothing_twice(model, engines, tmp_path):
    jobs, failure = engines
    failure["hadamard-int4-tp1"] = 3
    one = setup(model, out=tmp_path / "table.csv")
    with pytest.raises(ChildProcessError):
        bench_throughput(one, sessions=[4, 1])
    assert len(pd.read_csv(one.out, comment="#")) == 7
    failure.clear()
    jobs.clear()
    table = bench_throughput(one, sessions=[4, 1])
    assert [each.points for each in jobs] == [
        [{"scheme": "hadamard-int4", "tensor_parallel": 1, "context": 2048, "point": "1", "repeat": 1}]
    ]
    assert len(table) == 8 and not table.duplicated(list(bench.THROUGHPUT_KEY)).any()
    jobs.clear()
    bench_throughput(one, sessions=[4, 1])
    assert jobs == []
    with pytest.raises(ValueError, match="measured with steps 512"):
        bench_throughput(one, sessions=[4, 1], steps=8)
    with pytest.raises(ValueError, match="measured with bench 'throughput'"):
        bench_first_token(one)


def test_graphs_are_captured_for_the_batches_that_are_timed():
    def sizes(sessions, most=None):
        return json.loads(job.decode_arguments(sessions, most=most)[-1].partition("=")[2])

    assert sizes([64, 8, 1]) == [1, 8, 64]
    full = sizes(["full", 3])
    assert full[0] == 3 and full[-1] == job.MAX_SESSIONS
    # A batch of a full cache is at most 7 sequences short of its graph's, 15 beyond 256.
    for a, b in itertools.pairwise(full):
        assert b - a <= (job.GRAPH_STEP if a < job.COARSE_GRAPHS else job.COARSE_GRAPH_STEP)


@pytest.mark.parametrize("most", [5, 100, 1000])
def test_graphs_are_captured_up_to_what_a_user_allows(most):
    assert job.max_num_seqs(["--enforce-eager", "--max-num-seqs", str(most), "--seed=1"]) == most
    arguments = job.decode_arguments(["full"], most=most)
    assert arguments[:2] == ["--max-num-seqs", str(most)]
    assert max(json.loads(arguments[-1].partition("=")[2])) == most


def test_a_limit_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="--max-num-seqs"):
        job.max_num_seqs(["--max-num-seqs", "many"])
    assert job.max_num_seqs(["--seed", "1"]) is None


def test_every_scheme_has_its_arguments():
    for scheme in job.ALL_SCHEMES:
        if scheme != "calibrated":
            assert job.cache_arguments(scheme)[0] == "--kv-cache-dtype"
    assert job.cache_arguments("hadamard-int4")[2:] == [
        "--additional-config",
        '{"kolibri1": {"kv_cache": "hadamard-int4"}}',
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schemes": ("int3",)}, "scheme is 'int3'; accepted: bf16, fp8, hadamard-int4"),
        ({"schemes": ()}, r"schemes is \(\); accepted: a list of at least one"),
        ({"schemes": ("calibrated",)}, "calibration is None"),
        ({"contexts": (1,)}, "context is 1; accepted: an integer of at least 2"),
        ({"cache_gb": 0}, "cache_gb is 0; accepted: more than 0"),
        ({"tensor_parallel": (0,)}, "tensor_parallel is 0"),
        ({"logs": "missing"}, "logs is 'missing'; accepted: a folder that exists"),
        ({"arguments": ("200",)}, "arguments begin with '200'; accepted: options of vLLM"),
        ({"calibration": "k1.safetensors"}, "calibration is 'k1.safetensors'; accepted: with scheme 'calibrated'"),
    ],
    ids=str,
)
def test_a_setup_that_cannot_be_is_refused(model, changes, message):
    with pytest.raises(ValueError, match=message):
        setup(model, **{name: Path(value) if name == "logs" else value for name, value in changes.items()})


def test_a_setup_without_a_model_is_refused():
    with pytest.raises(ValueError, match="model is ''; accepted: a folder or a hub name"):
        setup("")


def test_points_are_checked_before_the_model_is_asked_for(tmp_path):
    with pytest.raises(ValueError, match="sessions is 0"):
        bench_throughput(setup(tmp_path / "nowhere"), sessions=[0])


def test_a_context_beyond_the_model_is_refused(model, engines):
    with pytest.raises(ValueError, match="context is 4097; accepted: at most the model's 4096 positions"):
        bench_throughput(setup(model, contexts=(64, 4097)), sessions=[1])
    assert engines[0] == []


def test_more_gpus_than_there_are_are_refused(model, monkeypatch):
    monkeypatch.setattr(bench.torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="tensor_parallel is 2; accepted: at most the 1 GPUs"):
        setup(model, tensor_parallel=(1, 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sessions": []}, "sessions is .*; accepted: a list of at least one"),
        ({"sessions": [0]}, "sessions is 0; accepted: an integer of at least 1"),
        ({"sessions": ["all"]}, "sessions is 'all'; accepted: an integer of at least 1, or 'full'"),
        ({"sessions": [1], "steps": 0}, "steps is 0"),
        ({"sessions": [1], "repeats": 0}, "repeats is 0"),
    ],
    ids=str,
)
def test_points_that_cannot_be_are_refused(model, engines, options, message):
    with pytest.raises(ValueError, match=message):
        bench_throughput(setup(model), **options)
    assert engines[0] == []


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main(["bench", *arguments])
    captured = capsys.readouterr()
    return stop.value.code, captured.out, captured.err


def test_the_command_prints_one_document_and_says_what_was_typed(capsys, model, engines, tmp_path):
    typed = ["throughput", str(model), "--context", "1024", "--sessions", "full", "--sessions", "2", "--scheme", "fp8"]
    code, out, _ = run(capsys, *typed, "--json", "--max-num-seqs", "64")
    rows = json.loads(out)
    assert code == 0 and [row["point"] for row in rows] == ["full", "2"]
    assert rows[0]["command"].startswith("kvlab bench throughput ")
    assert rows[0]["command"].endswith("--max-num-seqs 64")
    assert engines[0][0].engine_arguments[-2:] == ["--max-num-seqs", "64"]


def test_a_users_mistake_is_one_line(capsys, model, engines):
    code, out, err = run(capsys, "first-token", str(model), "--context", "1000000")
    assert (code, out) == (2, "")
    assert err == "kvlab: context is 1000000; accepted: at most the model's 4096 positions\n"


def test_without_vllm_the_command_says_how_to_install_it(capsys, model, monkeypatch):
    monkeypatch.setattr(bench.server.importlib.util, "find_spec", lambda name: None)
    code, out, err = run(capsys, "throughput", str(model), "--context", "64", "--sessions", "1")
    assert (code, out) == (2, "")
    assert err.endswith("kvlab: vLLM is missing; install it with: pip install 'kvlab[serving]'\n")


def test_a_setup_does_not_change(model):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setup(model).model = "other"


def test_a_table_shows_no_secrets():
    typed = [
        "--hf-token",
        "abc",
        "--api-key=def",
        "--seed",
        "1",
        "--max-num-batched-tokens",
        "8192",
        "--api-key",
        "x",
        "y",
    ]
    assert job.without_secrets(typed) == [
        *("--hf-token", "…", "--api-key=…", "--seed", "1", "--max-num-batched-tokens", "8192", "--api-key", "…", "…"),
    ]
