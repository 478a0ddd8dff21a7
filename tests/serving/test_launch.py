"""The command that is built, and the life of a server, with a stand-in for vLLM."""

import json
import os
import re
import shlex
import signal
import socket
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import httpx
import numpy as np
import pytest
from calibration_cases import seeds_only

from kvlab.cli import main
from kvlab.models.kolibri1_config import disk_config, kolibri1_config
from kvlab.serving import server as launching
from kvlab.serving.server import launch, runnable, serve_command

pytestmark = pytest.mark.unit

# Says that it is not ready, then answers; with a child in its group. The model's name is the part it plays.
STAND_IN = """
import os, signal, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer

part, folder, port = sys.argv[1:4]
print("INFO starting")
print("(Worker pid=7) ERROR 01-01 00:00:00 [worker.py:1] ValueError: no such", part)
print("(Server pid=5) RuntimeError: see above", flush=True)
if part == "broken":
    sys.exit(3)
# What a shell would start in the background: the signal to the group reaches it, its parent's end does not.
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(f"{folder}/pids", "w").write(f"{os.getpid()} {child.pid}")
if part == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
started = time.monotonic()

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        ready = part != "slow" and time.monotonic() > started + 0.4
        self.send_response(200 if ready else 503)
        self.end_headers()
    def log_message(self, *arguments):
        pass

HTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)

    def program(command, environment):
        port = command[command.index("--port") + 1]
        return [sys.executable, str(script), command[2], str(tmp_path), port]

    monkeypatch.setattr(launching, "runnable", program)
    monkeypatch.setattr(launching, "STOP_SECONDS", 1.0)
    return tmp_path


def running(folder):
    """The server's processes that still run; one that has ended and waits for init to say so does not."""
    pids = map(int, (folder / "pids").read_text().split())
    states = [Path(f"/proc/{pid}/stat") for pid in pids]
    return [path for path in states if path.exists() and path.read_text().rpartition(")")[2].split()[0] not in "ZX"]


def options(command):
    return dict(zip(command[3::2], command[4::2], strict=False))


def test_stock_is_the_command_of_the_models_plugin():
    command = serve_command("folder/k1", scheme="fp8")
    assert shlex.join(command) == (
        "vllm serve folder/k1 --host 127.0.0.1 --port 8000 --kv-cache-dtype fp8 --reasoning-parser kolibri1 "
        "--tool-call-parser kolibri1 --enable-auto-tool-choice"
    )
    assert options(serve_command("k1", scheme="bf16"))["--kv-cache-dtype"] == "auto"


@pytest.mark.parametrize(
    ("given", "section"),
    [
        ({}, {"kv_cache": "hadamard-int4"}),
        ({"scheme": "int4"}, {"kv_cache": "int4"}),
        ({"rotation_seed": 7}, {"kv_cache": "hadamard-int4", "rotation_seed": 7}),
        ({"rotation_seed": np.int64(7)}, {"kv_cache": "hadamard-int4", "rotation_seed": 7}),
        ({"rotation_seed": 0}, {"kv_cache": "hadamard-int4", "rotation_seed": 0}),
    ],
)
def test_a_4_bit_scheme_is_asked_for_in_the_additional_config(given, section):
    chosen = options(serve_command("k1", **given))
    assert chosen["--kv-cache-dtype"] == "fp8"
    assert json.loads(chosen["--additional-config"]) == {"kolibri1": section}


def test_a_calibration_is_named_by_its_whole_path(tmp_path, monkeypatch):
    seeds_only(kolibri1_config()).save(tmp_path / "c.safetensors")
    monkeypatch.chdir(tmp_path)
    section = json.loads(options(serve_command("k1", calibration="c.safetensors"))["--additional-config"])["kolibri1"]
    assert section == {"kv_cache": "calibrated", "calibration": str(tmp_path / "c.safetensors")}


@pytest.mark.parametrize("dry_run", [["--dry-run"], []], ids=str)
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1], "cannot be read as safetensors"),
        (lambda data: b"", "cannot be read as safetensors"),
        (lambda data: data.replace(b"-calibration/1", b"-calibration/7"), "is of format 'kvlab-calibration/7'; acc"),
        (
            lambda data: data.replace(b"rotation_seeds", b"rotation_speed"),
            "is no valid calibration file: 'rotation_seeds'",
        ),
        (lambda data: data.replace(b"hadamard-int4", b"hadamard-int3"), r"quantizer of keys is .*bits=3.*; accepted: "),
    ],
)
def test_a_calibration_that_is_not_served_is_refused_at_once(capsys, monkeypatch, tmp_path, damage, message, dry_run):
    found(monkeypatch, vllm=False)
    path = seeds_only(kolibri1_config()).save(tmp_path / "c.safetensors")
    data = damage(path.read_bytes())
    assert data != path.read_bytes()
    path.write_bytes(data)
    code, out, err = run(capsys, "serve", "k1", "--calibration", str(path), *dry_run)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert re.match(rf"kvlab: {path}:? .*{message}", err)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        # What the cache does not see.
        ({"max_position_embeddings": 999}, None),
        ({"num_key_value_heads": 2}, "calibration is of tiny, num_kv_heads 4; accepted: 2"),
        ({"head_dim": 64}, "calibration is of tiny, head_dim 128; accepted: 64"),
        ({"layer_types": ["full_attention"] * 50}, r"calibration lacks layers \[0, 1, 2, 3, 5, .*; accepted: one with"),
    ],
    ids=str,
)
def test_a_calibration_is_held_against_a_model_that_is_here(tmp_path, changes, message):
    calibration = seeds_only(kolibri1_config()).save(tmp_path / "c.safetensors")
    served = disk_config(kolibri1_config()) | changes
    (tmp_path / "config.json").write_text(json.dumps(served))
    with nullcontext() if message is None else pytest.raises(ValueError, match=f"^{message}"):
        assert serve_command(tmp_path, calibration=calibration)


def test_the_users_own_arguments_come_last():
    own = ["--host", "0.0.0.0", "--max-num-seqs", "4"]
    assert serve_command("k1", arguments=own)[-4:] == own


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"model": "--port"}, ValueError, "model is '--port'; accepted"),
        ({"model": ""}, ValueError, "model is ''; accepted"),
        ({"model": None}, TypeError, "model is None; accepted"),
        ({"calibration": 5}, TypeError, "calibration is 5; accepted: a path"),
        ({"host": 5}, ValueError, "host is 5; accepted: an address"),
        ({"arguments": 5}, TypeError, "arguments is 5; accepted"),
        ({"arguments": None}, TypeError, "arguments is None; accepted"),
        ({"arguments": ["--additional-conf", "{}"]}, ValueError, "arguments has '--additional-conf'; accepted"),
        ({"arguments": ["--addit.a=1"]}, ValueError, "arguments has '--addit.a=1'; accepted"),
        (
            {"scheme": "fp4"},
            ValueError,
            "scheme is 'fp4'; accepted: bf16, fp8, .*hadamard-int4-refit-kv, int4, calibrated",
        ),
        ({"scheme": "fp8", "rotation_seed": 1}, ValueError, "rotation_seed is '1' with scheme 'fp8'; accepted"),
        ({"scheme": "bf16", "calibration": "c"}, ValueError, "calibration is 'c' with scheme 'bf16'; accepted"),
        ({"scheme": "int4", "rotation_seed": 1}, ValueError, "rotation_seed .*'int4'; accepted"),
        ({"rotation_seed": -1}, ValueError, "rotation_seed is -1; accepted"),
        ({"scheme": "calibrated"}, ValueError, "calibration is None .*accepted"),
        ({"calibration": "/no/file"}, ValueError, "calibration is '/no/file'; accepted"),
        ({"port": 0}, ValueError, "port is 0; accepted"),
        ({"port": 65_536}, ValueError, "port is 65536; accepted"),
        ({"port": "80"}, TypeError, "port is '80'; accepted"),
        ({"arguments": "--max-num-seqs 4"}, TypeError, "arguments is '--max-num-seqs 4'; accepted"),
        ({"arguments": ["--max-num-seqs", 4]}, TypeError, "arguments is .*4.; accepted"),
        ({"arguments": ["other"]}, ValueError, "arguments begin with 'other'; accepted: options of vLLM"),
        ({"host": ""}, ValueError, "host is ''; accepted: an address"),
        ({"arguments": ["--additional_config={}"]}, ValueError, "arguments has '--additional_config={}'; accepted"),
        ({"arguments": ["--additional-config.a", "1"]}, ValueError, "arguments has '--additional-config.a'; accepted"),
    ],
)
def test_what_cannot_be_served_is_one_line(given, error, message):
    with pytest.raises(error, match=message) as caught:
        serve_command(**{"model": "k1", **given})
    assert "\n" not in str(caught.value)


def test_stock_takes_an_additional_config():
    assert "--additional-config" in serve_command("k1", scheme="fp8", arguments=["--additional-config", "{}"])


def found(monkeypatch, *plugins, vllm=True):
    monkeypatch.setattr(launching.importlib.util, "find_spec", lambda name: object() if vllm else None)
    named = [type("Plugin", (), {"name": name}) for name in plugins]
    monkeypatch.setattr(launching, "entry_points", lambda group: named if group == "vllm.general_plugins" else [])


def test_it_runs_in_this_interpreter(monkeypatch):
    found(monkeypatch, "aleph_alpha_inference", "kvlab")
    program = runnable(serve_command("k1"), {})
    assert program[0] == sys.executable
    assert program[program.index("serve") :] == serve_command("k1")[1:]


@pytest.mark.parametrize(
    ("scheme", "plugins", "environment", "message"),
    [
        ("fp8", [], {}, "plugin 'aleph_alpha_inference'; install it with: pip install 'kvlab.serving.'"),
        ("int4", ["aleph_alpha_inference"], {}, "plugin 'kvlab'; install it with"),
        ("int4", ["aleph_alpha_inference", "kvlab"], {"VLLM_PLUGINS": "kvlab"}, "VLLM_PLUGINS is 'kvlab'; accepted"),
        ("int4", ["aleph_alpha_inference", "kvlab"], {"VLLM_PLUGINS": ""}, "VLLM_PLUGINS is ''; accepted"),
    ],
)
def test_a_server_that_would_ignore_the_option_is_not_started(monkeypatch, scheme, plugins, environment, message):
    found(monkeypatch, *plugins)
    with pytest.raises((ImportError, ValueError), match=message):
        runnable(serve_command("k1", scheme=scheme), environment)


def test_stock_needs_no_plugin_of_this_library(monkeypatch):
    found(monkeypatch, "aleph_alpha_inference")
    assert runnable(serve_command("k1", scheme="fp8"), {"VLLM_PLUGINS": "aleph_alpha_inference"})


def test_a_server_answers_and_leaves_nothing_behind(stand_in):
    with launch("good", log_path=stand_in / "log") as server:
        assert httpx.get(f"{server.url}/health", trust_env=False).status_code == 200
        assert server.base_url == f"{server.url}/v1"
        assert len(running(stand_in)) == 2
        assert os.getpgid(server.process.pid) != os.getpgid(0)
    assert running(stand_in) == []
    assert "no such good" in (stand_in / "log").read_text()


def test_it_starts_again_where_it_was(stand_in):
    with launch("good") as server:
        port = int(server.url.rpartition(":")[2])
    with launch("good", port=port) as again:
        assert again.url == server.url


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, ZeroDivisionError])
def test_whatever_ends_the_block_ends_the_server(stand_in, interruption):
    with pytest.raises(interruption), launch("good"):
        raise interruption
    assert running(stand_in) == []


def test_one_that_does_not_listen_is_killed(stand_in):
    started = time.monotonic()
    with launch("stubborn"):
        pass
    assert running(stand_in) == []
    assert time.monotonic() > started + 1


def test_interrupted_while_it_starts(stand_in):
    def interrupt(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    try:
        with pytest.raises(KeyboardInterrupt), launch("slow"):
            pytest.fail("it never answers")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert running(stand_in) == []


def test_one_that_ends_shows_the_first_error_and_its_log(stand_in):
    message = r"exit code 3 before it answered: ValueError: no such broken; .*log.*\n(.*\n)*.*RuntimeError: see above"
    with pytest.raises(RuntimeError, match=message), launch("broken"):
        pytest.fail("it never answers")


def test_one_that_does_not_answer_in_time_shows_its_log(stand_in):
    with pytest.raises(TimeoutError, match="within 1 s: ValueError: no such slow; "), launch("slow", timeout=1):
        pytest.fail("it never answers")
    assert running(stand_in) == []


def test_a_port_in_use_is_refused(stand_in):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with (
            pytest.raises(ValueError, match=f"port is {port}, host is '127.0.0.1' .*; accepted"),
            launch("k", port=port),
        ):
            pytest.fail("another answers")


@pytest.mark.parametrize("own", [["--port", "1"], ["--host=::"], ["--por=1"]])
def test_launch_has_to_know_where_it_listens(stand_in, own):
    with pytest.raises(ValueError, match=f"arguments has '{own[0]}'; accepted"), launch("good", arguments=own):
        pytest.fail("it cannot be found")


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"host": None}, ValueError, "host is None; accepted"),
        ({"environment": 5}, TypeError, "environment is a int, .*; accepted: a dict"),
        ({"environment": {"A": 1}}, TypeError, "environment is a dict, .*; accepted: a dict"),
        ({"log_path": 5}, TypeError, "log_path is 5; accepted: a path"),
        ({"log_path": "no/such/folder/log"}, ValueError, "log_path is 'no/such/folder/log' .*; accepted: a file"),
        ({"log_path": "."}, ValueError, "log_path is '.' .*; accepted: a file"),
        ({"timeout": -1}, ValueError, "timeout is -1; accepted: more than 0 seconds"),
    ],
    ids=str,
)
def test_what_cannot_be_launched_starts_nothing(stand_in, given, error, message):
    with pytest.raises(error, match=message), launch("good", **given):
        pytest.fail("it started")
    assert not (stand_in / "pids").exists()


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:9"), ("0.0.0.0", "http://127.0.0.1:9"), ("::", "http://[::1]:9")],
)
def test_all_addresses_are_reached_by_loopback(host, url):
    assert launching._url(host, 9) == url


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    captured = capsys.readouterr()
    return stop.value.code, captured.out, captured.err


def test_the_command_is_printed_and_takes_the_place_of_this_process(capsys, monkeypatch):
    ran = []
    monkeypatch.setattr(launching, "runnable", lambda command, environment: ["/python", *command])
    monkeypatch.setattr(os, "execv", lambda path, program: ran.append((path, program)))
    own = ["--tensor-parallel-size", "2", "-cc.mode=none"]
    code, out, err = run(capsys, "serve", "k1", "--port", "9000", *own)
    command = serve_command("k1", port=9000, arguments=own)
    assert (code, out) == (0, "")
    assert ran == [("/python", ["/python", *command])]
    assert err.startswith("vllm serve k1 --host 127.0.0.1 --port 9000 ") and err.count("\n") == 1


def test_a_dry_run_needs_no_vllm(capsys, monkeypatch):
    found(monkeypatch, vllm=False)
    code, out, err = run(capsys, "serve", "k1", "--scheme", "fp8", "--dry-run")
    assert (code, out, err) == (0, " ".join(serve_command("k1", scheme="fp8")) + "\n", "")


def test_without_vllm_it_says_what_to_install(capsys, monkeypatch):
    found(monkeypatch, vllm=False)
    code, out, err = run(capsys, "serve", "k1")
    assert (code, out, err) == (2, "", "kvlab: vLLM is missing; install it with: pip install 'kvlab[serving]'\n")
