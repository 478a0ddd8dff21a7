"""What a newcomer meets first agrees with pyproject.toml, the truth."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from kvlab.models.default import INSTALL
from kvlab.tables import measured, published

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
README = (ROOT / "README.md").read_text()


def command(heading):
    return re.search(rf"^## {heading}$.*?```sh\n(.*?)```", README, re.MULTILINE | re.DOTALL)[1]


def test_environment_yml_is_python_pip_and_this_project():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    *conda, pip = environment["dependencies"]
    assert conda == [f"python{PROJECT['requires-python']}", "pip"]
    (install,) = pip["pip"]
    extras = set(re.fullmatch(r"-e \.\[(.*)\]", install)[1].split(","))
    assert extras <= set(PROJECT["optional-dependencies"])


@pytest.mark.parametrize("heading", ["Draw the figures", "Run the tests"])
def test_readme_commands_install_the_project_and_the_model(heading):
    assert "-m venv .venv" in command(heading)
    assert re.search(r"pip install .*-e '?\.", command(heading))
    assert INSTALL in command(heading).replace(".venv/bin/", "")


def test_readme_commands_end_in_the_main_job_and_the_tests():
    assert command("Draw the figures").strip().endswith(".venv/bin/kvlab figures")
    assert command("Run the tests").strip().endswith(".venv/bin/pytest -n 2")


def test_readme_pictures_exist():
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", README)
    assert pictures
    assert all((ROOT / picture).is_file() for picture in pictures)


def test_tables_are_read_and_unknown_ones_named():
    assert published("attention_error").set_index("scheme")["error"].to_dict() == {
        "int4": 0.098,
        "hadamard-int4": 0.057,
        "fp8": 0.023,
    }
    assert measured("streaming")[["machine", "versions", "date", "command"]].notna().all(axis=None)
    with pytest.raises(ValueError, match="table is 'ruler2'; accepted"):
        published("ruler2")
