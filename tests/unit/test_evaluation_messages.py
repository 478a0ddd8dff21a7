import builtins
import sys
from pathlib import Path

import httpx
import pytest

from kvlab.cli import main
from kvlab.cli.evaluation import _setup
from kvlab.evaluation import job, setups
from kvlab.evaluation.harness import harness

pytestmark = pytest.mark.unit


def test_without_the_harness_it_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def without(name, *arguments, **options):
        if name == "lm_eval":
            raise ModuleNotFoundError("No module named 'lm_eval'")
        return real(name, *arguments, **options)

    monkeypatch.delitem(sys.modules, "lm_eval", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ModuleNotFoundError, match=r"needs lm-evaluation-harness .*pip install 'kvlab\[eval\]'"):
        harness()


SERVER = ["--base-url", "http://127.0.0.1:9/v1"]


def test_a_server_may_store_what_was_calibrated():
    assert _setup(SERVER[1], None, "calibrated", None, None, None).scheme == "calibrated"


@pytest.mark.parametrize(
    "benchmark", [["ruler"], ["gpqa", "--task", job.GPQA_TASKS[0], "--max-tokens", "5", "--runs", "1"]], ids=str
)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*SERVER, "--out", "/dev/null"], "out is '/dev/null', which cannot be written (/dev/null is no folder)"),
        ([*SERVER, "--out", "/dev/null/x"], "which cannot be written (/dev/null is no folder)"),
        (["--base-url", ""], "base_url is ''; accepted: a URL, as http://127.0.0.1:8000/v1"),
        (["--base-url", "127.0.0.1:8000"], "base_url is '127.0.0.1:8000'; accepted"),
        ([*SERVER, "--model", ""], "model is ''; accepted"),
        (["--model", ""], "model is ''; accepted: a folder, a hub name"),
        ([*SERVER, "--scheme", "calibratd"], "scheme is 'calibratd'; accepted: bf16, fp8"),
        (["--model", "x", "--scheme", "calibrated"], "scheme is 'calibrated'; accepted: bf16, fp8"),
        (["--model", "x", "--device", "tpu"], "device is 'tpu'; accepted: cpu, or cuda"),
    ],
    ids=str,
)
def test_mistakes_are_told_before_the_harness_is_asked_for(
    capsys, monkeypatch, tmp_path, benchmark, arguments, message
):
    for module, name in ((job, "harness"), (job, "_load"), (setups, "harness")):
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("asked for"))
    with pytest.raises(SystemExit) as stop:
        main(["eval", *benchmark, "--out", str(tmp_path / "x"), *arguments])
    captured = capsys.readouterr()
    assert (stop.value.code, captured.out, captured.err.count("\n")) == (2, "", 1)
    assert message in captured.err
    assert not list(tmp_path.iterdir())


def test_ruler_of_no_length_is_refused(tmp_path):
    with pytest.raises(ValueError, match="lengths is empty"):
        job.ruler(setups.Server(SERVER[1]), tmp_path, lengths=[])


def test_a_record_that_cannot_be_written_leaves_nothing(monkeypatch, tmp_path):
    def fail(path, *_, **__):
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fail)
    monkeypatch.setattr(job.metadata, "version", lambda _: "0")
    monkeypatch.setattr(job.provenance, "versions", dict)
    monkeypatch.setattr(job.provenance, "stamp", dict)
    with pytest.raises(ValueError, match=r"which cannot be written \(No space left on device"):
        job._record(tmp_path, "ruler", setups.InProcess("x"), job.Settings(), "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("generation", [{}, {"temperature": 0}])
def test_runs_that_would_all_be_the_same_are_refused(tmp_path, generation):
    settings = job.Settings(generation=generation)
    with pytest.raises(ValueError, match="runs is 4 without a temperature; accepted: generation temperature"):
        job.gpqa(setups.Server(SERVER[1]), tmp_path, task=job.GPQA_TASKS[0], max_tokens=5, settings=settings)


@pytest.mark.parametrize(
    "answer",
    [
        None,
        5,
        [],
        {},
        {"error": {"message": "bad"}},
        {"choices": None},
        {"choices": []},
        {"choices": [{}]},
        {"choices": [{"text": 5, "message": {"content": 5}}]},
        {"choices": [{"text": None, "message": None}]},
        {"choices": [{"text": "\ud800", "message": {"content": "\ud800"}}]},
        {"choices": 2 * [{"text": "a", "message": {"content": "a"}}]},
    ],
    ids=str,
)
@pytest.mark.parametrize("chat", [False, True])
def test_an_answer_without_a_text_is_none(answer, chat):
    with pytest.raises(setups.AnswerError, match=r"has no text as its only choices\[0\]\.") as caught:
        setups.answer_text(answer, chat=chat)
    str(caught.value).encode()


def test_answers_are_texts_and_in_a_chat_none_where_reasoning_took_all():
    assert setups.answer_text({"choices": [{"index": 0, "text": ""}]}, chat=False) == ""
    assert setups.answer_text({"choices": [{"message": {"content": "a"}}]}, chat=True) == "a"
    assert setups.answer_text({"choices": [{"message": {"content": None}}]}, chat=True) is None


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"[" * 100_000, "where no server names its models"),
        (b'{"data": [{"id": 5}]}', "where no server names its models (a model's id is no text)"),
        (
            b'{"data": [{"id": "m", "max_model_len": "abc"}]}',
            "max_model_len at http://127.0.0.1:9/v1 is 'abc'; accepted",
        ),
        (b'{"data": [{"id": "m", "max_model_len": -1}]}', "max_model_len at http://127.0.0.1:9/v1 is -1; accepted"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_what_a_server_says_of_itself_is_checked(monkeypatch, body, message):
    request = httpx.Request("GET", SERVER[1])
    monkeypatch.setattr(setups.httpx, "get", lambda *_, **__: httpx.Response(200, content=body, request=request))
    with pytest.raises((TypeError, ValueError)) as caught:
        setups.Server(SERVER[1]).longest()
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompts", 10**30], "prompts is 1000000000000000000000000000000; accepted: an integer from 1 to"),
        (["--seed", 10**30], "seed is 1000000000000000000000000000000; accepted: an integer from 0 to"),
        (["--generation", "temperature=NaN"], "generation temperature is nan; accepted: what JSON can hold"),
        (["--generation", f"a={5000 * '1'}"], "accepted: KEY=VALUE"),
        (["--generation", f"a={100_000 * '['}"], "accepted: KEY=VALUE"),
        (["--generation", r'a="\ud800"'], "generation a is '\\ud800'; accepted: what JSON can hold"),
        (["--generation", "until=5"], "generation until is 5; accepted: a text that ends an answer, or a list of them"),
        (["--generation", 'until=["a", 5]'], "generation until is ['a', 5]; accepted"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_settings_that_cannot_be_are_refused_before_anything_is_asked(capsys, tmp_path, arguments, message):
    with pytest.raises(SystemExit) as stop:
        main(["eval", "ruler", *SERVER, "--out", str(tmp_path / "x"), *map(str, arguments)])
    captured = capsys.readouterr()
    assert (stop.value.code, captured.out, captured.err.count("\n")) == (2, "", 1)
    assert message in captured.err and not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["deep", "folder"])
def test_a_record_that_is_none_is_called_damaged(monkeypatch, tmp_path, kind):
    monkeypatch.setattr(job.metadata, "version", lambda _: "0")
    record = tmp_path / job.RECORD
    record.mkdir() if kind == "folder" else record.write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"out has a damaged run\.json"):
        job._record(tmp_path, "ruler", setups.InProcess("x"), job.Settings(), "")
