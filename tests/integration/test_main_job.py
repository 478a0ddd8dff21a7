import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from kvlab import figures
from kvlab.cli import main
from kvlab.subjects import DEFAULT, TESTBED, Study
from kvlab.testbed import loading

pytestmark = pytest.mark.integration

OF_A_MODEL = ("attention_error", "loss", "outliers", "rounding")
NAMES = (
    *OF_A_MODEL,
    *(f"testbed_{name}" for name in OF_A_MODEL),
    "capacity",
    "capacity_gain",
    "gpqa",
    "kernels_decode",
    "kernels_store",
    "overview",
    "ruler",
    "step_model",
    "testbed_training",
    "throughput",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("main") / "new" / "figures"
    command = [sys.executable, "-c", "from kvlab.cli import main; main()", "figures", "--quick", "--out", str(out)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout == f"{3 * len(NAMES) + 1} files in {out}; start with {out / 'summary.md'}\n"
    assert "%|" in run.stderr
    return out


def test_every_figure_comes_as_png_svg_and_numbers(folder):
    expected = {f"{name}.{ending}" for name in NAMES for ending in ("png", "svg", "csv")} | {"summary.md"}
    assert {path.name for path in folder.iterdir()} == expected


def test_the_numbers_are_the_figures(folder):
    errors = pd.read_csv(folder / "attention_error.csv")
    assert set(errors["scheme"]) == set(figures.QUICK_SCHEMES)
    assert set(errors["stored"]) == {"K", "V", "KV"}
    assert errors["layer"].nunique() == 30
    svg = (folder / "attention_error.svg").read_text()
    mean = errors[(errors["stored"] == "K") & (errors["scheme"] == "fp8")]["error"].mean()
    assert f"{mean:.2%}" in svg
    assert "published 5.7%" in svg


def test_the_summary_tells_measured_from_published(folder):
    summary = (folder / "summary.md").read_text()
    assert "Measured: SmolLM2-135M-Instruct" in summary
    assert "published: 7 of 10" in summary
    assert "| 5.7% |" in next(line for line in summary.splitlines() if line.startswith("| hadamard-int4 |"))


def test_the_testbed_is_told_from_kolibri_1_and_from_smollm2(folder):
    errors = pd.read_csv(folder / "testbed_attention_error.csv")
    assert set(errors["layer"]) == {4, 9} and set(errors["scheme"]) == set(figures.QUICK_SCHEMES)
    for name in OF_A_MODEL:
        svg = (folder / f"testbed_{name}.svg").read_text()
        assert "kvlab-testbed" in svg and "not Kolibri-1" in svg and "SmolLM2" not in svg
        assert "kvlab-testbed" not in (folder / f"{name}.svg").read_text()
    _, part = (folder / "summary.md").read_text().split("## kvlab-testbed (`testbed_*`)")
    row = next(line for line in part.splitlines() if line.startswith("| hadamard-int4 | 4.25 |"))
    mean = errors.query("scheme == 'hadamard-int4' and stored == 'K'")["error"].mean()
    loss = pd.read_csv(folder / "testbed_loss.csv").set_index("scheme")["increase"]["hadamard-int4"]
    assert f"| {mean:.2%} |" in row and f"| {loss:+.4f} |" in row


def test_a_subject_bounds_the_context(monkeypatch):
    captured = []

    def capture(_model, ids, chosen, *, progress):
        captured.append((ids.shape[1], chosen.tokens))
        raise KeyboardInterrupt

    monkeypatch.setattr(figures, "_capture", capture)
    for chosen in (figures.FULL, figures.QUICK):
        with pytest.raises(KeyboardInterrupt):
            figures._study(TESTBED, *TESTBED.load(), chosen, progress=False)
    assert captured == [(TESTBED.longest, TESTBED.longest), (figures.QUICK.tokens, figures.QUICK.tokens)]


def test_a_failure_leaves_nothing(monkeypatch, tmp_path, capsys):
    def fail(*_args, **_kwargs):
        raise ValueError("no luck")

    monkeypatch.setattr(figures, "_analyse", fail)
    monkeypatch.setattr(figures, "_capture", lambda *_args, **_kwargs: None)
    out = tmp_path / "new"
    with pytest.raises(SystemExit) as stop:
        main(["figures", "--out", str(out)])
    assert (stop.value.code, capsys.readouterr().err) == (2, "kvlab: no luck\n")
    assert not out.exists()


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        *((Path.unlink, name) for name in ("config.json", "model-00001-of-00002.safetensors", "loss.csv")),
        *((cut, name) for name in ("config.json", "model-00002-of-00002.safetensors", "tokenizer.json")),
    ],
)
def test_a_damaged_testbed_is_refused_before_anything_is_measured(monkeypatch, tmp_path, capsys, damage, name):
    monkeypatch.setattr(figures, "_study", lambda *_args, **_kwargs: pytest.fail("measured"))
    monkeypatch.setattr(figures, "SUBJECTS", (replace(DEFAULT, load=lambda: (None, None)), TESTBED))
    copy = tmp_path / "testbed"
    shutil.copytree(loading.checkpoint_folder(), copy)
    damage(copy / name)
    monkeypatch.setattr(loading, "data_folder", lambda: tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["figures", "--out", str(tmp_path / "new")])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and str(copy) in error
    assert not (tmp_path / "new").exists()


def test_a_folder_in_the_way_is_noticed_before_any_file_moves(folder, monkeypatch, tmp_path):
    study = Study({name: pd.read_csv(folder / f"{name}.csv") for name in OF_A_MODEL}, "somewhere")
    (tmp_path / "rounding.csv").mkdir()
    with pytest.raises(ValueError, match=r"out has a folder 'rounding\.csv' where a file goes"):
        figures._write(tmp_path, lambda: figures.Results([study]), progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["rounding.csv"]
