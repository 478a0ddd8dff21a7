"""Which steps count, what is refused, and what is measured again; without vLLM."""

import dataclasses
import itertools
import json
import re

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.cli import main
from kvlab.serving.throughput import Setup, bench, bench_first_token, bench_throughput, job
from kvlab.serving.throughput.points import Step, summary, why_not

pytestmark = pytest.mark.unit


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


@pytest.mark.parametrize("most", ["many", "0", "-5", "1000000000"])
def test_a_limit_that_cannot_be_is_refused(most):
    with pytest.raises(ValueError, match=r"--max-num-seqs.*; accepted: an integer"):
        job.max_num_seqs(["--max-num-seqs", most])
    assert job.max_num_seqs(["--seed", "1"]) is None


@pytest.mark.parametrize("spelling", ["--max-num-seq", "--max-num-s", "--max_num_seqs"])
def test_a_limit_is_found_in_every_spelling_that_vllm_takes(spelling):
    assert job.max_num_seqs([spelling, "7"]) == job.max_num_seqs([f"{spelling}=7"]) == 7


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
        ({"cache_gb": 0}, "cache_gb is 0; accepted: from 1e-9, a byte, to 1e"),
        ({"cache_gb": 1e-10}, "cache_gb is 1e-10; accepted"),
        ({"cache_gb": 1e300}, "cache_gb is 1e.300; accepted"),
        ({"model": None}, "model is None; accepted: a folder or a hub name"),
        ({"schemes": 5}, "schemes is 5; accepted: a list"),
        ({"contexts": None}, "contexts is None; accepted: a list"),
        ({"tensor_parallel": 2}, "tensor_parallel is 2; accepted: a list"),
        ({"arguments": None}, "arguments is None; accepted: a list of strings"),
        ({"calibration": 5}, "calibration is 5; accepted: a path"),
        ({"out": 5}, "out is 5; accepted: a path"),
        ({"tensor_parallel": (0,)}, "tensor_parallel is 0"),
        ({"logs": "missing"}, "logs is 'missing'; accepted: a folder that exists"),
        ({"arguments": ("200",)}, "arguments begin with '200'; accepted: options of vLLM"),
        ({"calibration": "k1.safetensors"}, "calibration is 'k1.safetensors'; accepted: with scheme 'calibrated'"),
    ],
    ids=str,
)
def test_a_setup_that_cannot_be_is_refused(model, changes, message):
    with pytest.raises((ValueError, TypeError), match=message):
        setup(**{"model": model} | changes)


@pytest.mark.parametrize(
    "argument",
    [
        "--additional-config",
        "--additional_config={}",
        "--additional-conf",
        "--additional-config.kolibri1.kv_cache=int4",
    ],
)
def test_what_the_cache_stores_is_not_replaced_under_the_schemes_name(model, argument):
    with pytest.raises(ValueError, match=f"arguments has '{argument}'; accepted: without it"):
        setup(model, arguments=[argument, "{}"])
    assert setup(model, schemes=["fp8"], arguments=[argument, "{}"]).arguments == (argument, "{}")


def test_paths_may_be_text_and_contexts_a_generator(model, engines, tmp_path):
    one = setup(
        model, contexts=(n for n in (64, 128)), schemes=["fp8"], out=str(tmp_path / "t.csv"), logs=str(tmp_path)
    )
    assert len(bench_throughput(one, sessions=iter([1]))) == 2 and (tmp_path / "t.csv").is_file()


def test_a_setup_without_a_model_is_refused():
    with pytest.raises(ValueError, match="model is ''; accepted: a folder or a hub name"):
        setup("")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "which has no config.json"),
        ("no JSON", "whose config.json is no JSON"),
        ('{"model_type": ' + "[" * 100_000, "whose config.json is no JSON"),
        ('{"model_type": "mamba2"}', "max_position_embeddings of model '.*' is None; accepted: an integer"),
        ('{"model_type": "kolibri1", "max_position_embeddings": "abc"}', "max_position_embeddings"),
        ('{"model_type": "kolibri1", "max_position_embeddings": null}', "max_position_embeddings"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_model_that_cannot_be_read_is_one_line(capsys, tmp_path, config, message):
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    code, out, err = run(capsys, "throughput", str(tmp_path), "--context", "64", "--sessions", "1")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert re.search(message, err) and "accepted" in err


def test_points_are_checked_before_the_model_is_asked_for(tmp_path):
    with pytest.raises(ValueError, match="sessions is 0"):
        bench_throughput(setup(tmp_path / "nowhere"), sessions=[0])


def test_a_context_beyond_the_model_is_refused(model, engines):
    with pytest.raises(ValueError, match="context is 4097; accepted: at most the model's 4096 positions"):
        bench_throughput(setup(model, contexts=(64, 4097)), sessions=[1])
    assert engines[0] == []


@pytest.mark.parametrize("context", [64, 4096])
def test_steps_beyond_the_model_are_refused(model, engines, context):
    # 24 more warm a session up and let it outlive the steps, and it begins with 2.
    most = 4096 - 24 - 2
    with pytest.raises(ValueError, match=f"steps is {most + 1}; accepted: at most {most}, .* 4096 positions"):
        bench_throughput(setup(model, contexts=[context]), sessions=[1], steps=most + 1)
    assert engines[0] == []
    bench_throughput(setup(model, contexts=[context]), sessions=[1], steps=most)
    bench_first_token(setup(model, contexts=[4096]))


def test_more_gpus_than_there_are_are_refused(model, monkeypatch):
    monkeypatch.setattr(bench.torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="tensor_parallel is 2; accepted: at most the 1 GPUs"):
        setup(model, tensor_parallel=(1, 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sessions": []}, "sessions is .*; accepted: a list of at least one"),
        ({"sessions": 5}, "sessions is 5; accepted: a list"),
        ({"sessions": None}, "sessions is None; accepted: a list"),
        ({"sessions": [0]}, "sessions is 0; accepted: an integer from 1 to 65536"),
        ({"sessions": ["full", 10**9]}, "sessions is 1000000000; accepted"),
        ({"sessions": [1], "repeats": 10**9}, "repeats is 1000000000; accepted"),
        ({"sessions": ["all"]}, "sessions is 'all'; accepted: an integer of at least 1, or 'full'"),
        ({"sessions": [1], "steps": 0}, "steps is 0"),
        ({"sessions": [1], "repeats": 0}, "repeats is 0"),
    ],
    ids=str,
)
def test_points_that_cannot_be_are_refused(model, engines, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        bench_throughput(setup(model), **options)
    assert engines[0] == []


def test_more_sessions_than_the_user_lets_vllm_take_are_refused(model, engines):
    one = setup(model, arguments=["--max-num-seqs", "2"])
    with pytest.raises(ValueError, match="sessions is 3; accepted: an integer from 1 to 2"):
        bench_throughput(one, sessions=[3, 2])
    assert engines[0] == [] and len(bench_throughput(one, sessions=[2, "full"]))


def test_a_number_that_python_does_not_read_is_a_users_mistake(capsys, model, engines):
    code, _, err = run(capsys, "throughput", str(model), "--context", "64", "--sessions", "9" * 5000)
    assert code == 2 and err.startswith("kvlab: sessions is '999") and "9'; accepted: an integer" in err


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
