import builtins
import sys
from pathlib import Path

import pytest

from kvlab.cli import main
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
