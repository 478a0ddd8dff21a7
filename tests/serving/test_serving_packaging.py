"""What installs the server agrees with what is asked of it: pyproject.toml, the script for CPUs, the launcher."""

import importlib.util
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from kvlab.serving import server

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SCRIPT = ROOT / ".ci" / "install-serving-cpu"


def test_the_plugin_that_the_launcher_looks_for_is_the_one_that_is_installed():
    ((name, target),) = PROJECT["entry-points"][server.PLUGIN_GROUP].items()
    assert name == server.CACHE_PLUGIN
    module, _, function = target.partition(":")
    source = Path(importlib.util.find_spec(module).origin).read_text()
    assert f"\ndef {function}(" in source


def test_with_and_without_a_gpu_the_same_versions_are_installed():
    extra = dict(re.split("==", line.split(";")[0]) for line in PROJECT["optional-dependencies"]["serving"])
    script = dict(re.findall(r"\b(vllm|plugin)=([\d.]+)", SCRIPT.read_text()))
    assert script["plugin"] == extra["aleph-alpha-inference"]
    assert script["vllm"].startswith(extra["vllm"].removesuffix("*"))


@pytest.mark.parametrize("arguments", [[], ["/no/environment"], ["a", "b"]])
def test_the_script_says_what_it_takes(arguments):
    done = subprocess.run([SCRIPT, *arguments], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "VENV, a virtual environment; got: " in done.stderr
