"""The testbed's losses under stored caches: continued where they stopped, and refused before any is measured."""

import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from calibration_cases import seeds_only
from training_cases import config
from transformers import Kolibri1ForCausalLM

from kvlab.cli import main
from kvlab.measure.loss import loss_table, token_losses
from kvlab.testbed import losses
from kvlab.testbed.losses import TABLE, write_losses
from kvlab.testbed.prepared import read_prepared

pytestmark = pytest.mark.unit

SCHEMES = ["int4", "hadamard-int4"]
SIZES = {"texts": 3, "length": 40, "device": "cpu"}


@pytest.fixture
def model(folder, monkeypatch):
    """A tiny model in the testbed's place."""
    torch.manual_seed(0)
    made = Kolibri1ForCausalLM(config()).eval()
    monkeypatch.setattr(losses, "read_config", lambda _: config())
    monkeypatch.setattr(losses, "load_testbed", lambda: (made, read_prepared(folder).tokenizer))
    return made


@pytest.fixture
def measured(monkeypatch):
    """The first tokens of stretches that were measured, and how many there are to be at an interruption."""
    seen, interrupted = [], []

    def table(model, ids, schemes):
        if len(seen) in interrupted:
            interrupted.clear()
            raise KeyboardInterrupt
        seen.append(ids[0, :5].tolist())
        return loss_table(model, ids, schemes)

    monkeypatch.setattr(losses, "loss_table", table)
    return seen, interrupted


@pytest.fixture
def calibration(tmp_path):
    return seeds_only(config()).save(tmp_path / "mine.safetensors")


def test_rows_are_losses_of_the_stretches(folder, model, calibration, tmp_path):
    path = write_losses(folder, tmp_path / "out", SCHEMES, [calibration], **SIZES)
    assert [file.name for file in path.parent.iterdir()] == [TABLE]
    table = pd.read_csv(path, comment="#")
    assert table["scheme"].tolist() == ["exact", *SCHEMES, "mine"] * 6
    assert table["language"].tolist() == ["en"] * 12 + ["de"] * 12
    ids = read_prepared(folder).tokens("held_out", "de")
    row = table.query("language == 'de' and scheme == 'exact'").iloc[2]
    assert row["text"] == len(ids) // 3 * 2
    stretch = torch.from_numpy(ids[row["text"] : row["text"] + 40].astype(np.int64))[None]
    # Six digits are kept.
    assert row["loss"] == pytest.approx(token_losses(model, stretch).mean().item(), rel=1e-5)


def test_what_was_interrupted_goes_on_where_it_stopped(folder, model, measured, tmp_path):
    seen, interrupted = measured
    whole = write_losses(folder, tmp_path / "whole", SCHEMES, **SIZES).read_text()
    in_one = list(seen)
    seen.clear()
    interrupted.append(4)
    with pytest.raises(KeyboardInterrupt):
        write_losses(folder, tmp_path / "out", SCHEMES, **SIZES)
    assert len(pd.read_csv(tmp_path / "out" / TABLE, comment="#")) == 4 * 3
    assert write_losses(folder, tmp_path / "out", SCHEMES, **SIZES).read_text() == whole
    assert seen == in_one
    write_losses(folder, tmp_path / "out", SCHEMES, **SIZES)
    assert seen == in_one


def test_a_row_that_was_taken_out_is_measured_again(folder, model, measured, tmp_path):
    path = write_losses(folder, tmp_path / "out", SCHEMES, **SIZES)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    measured[0].clear()
    assert write_losses(folder, tmp_path / "out", SCHEMES, **SIZES).read_text() == "".join(lines)
    assert len(measured[0]) == 1


def test_another_measurement_is_not_continued(folder, model, measured, calibration, tmp_path):
    def write(prepared=folder, schemes=SCHEMES, calibrations=(calibration,), **changes):
        return write_losses(prepared, tmp_path / "out", schemes, calibrations, **SIZES | changes)

    before = write().read_bytes()
    other = tmp_path / "prepared"
    shutil.copytree(folder, other)
    tokens = np.load(other / "held_out-de.npy")
    np.save(other / "held_out-de.npy", np.roll(tokens, 1))
    measured[0].clear()
    for changes, named in (
        ({"length": 41}, "length 40"),
        ({"texts": 2}, "texts 3"),
        ({"schemes": ["int4"]}, r"schemes \['int4', 'hadamard-int4'\]"),
        ({"calibrations": ()}, "calibrations {'mine': "),
        ({"prepared": other}, "held_out '"),
    ):
        with pytest.raises(ValueError, match=rf"^out is .*{TABLE}', measured with {named}"):
            write(**changes)
    seeds_only(config(), model="another").save(calibration)
    with pytest.raises(ValueError, match=rf"^out is .*{TABLE}', measured with calibrations {{'mine': "):
        write()
    assert (tmp_path / "out" / TABLE).read_bytes() == before and not measured[0]


def test_a_folder_in_the_tables_place_is_refused_before_any_work(folder, model, measured, tmp_path):
    (tmp_path / TABLE).mkdir()
    with pytest.raises(ValueError, match=rf"^out is '.*{TABLE}'; accepted: a file in a folder that can be written$"):
        write_losses(folder, tmp_path, SCHEMES, **SIZES)
    assert not measured[0] and [file.name for file in tmp_path.iterdir()] == [TABLE]


@pytest.mark.parametrize(
    "names", [["exact.safetensors"], ["int4.safetensors"], ["a/mine.safetensors", "b/mine.bin"]], ids=str
)
def test_rows_of_one_name_are_refused_before_anything_is_read(capsys, monkeypatch, tmp_path, names):
    monkeypatch.setattr(losses, "read_prepared", lambda _: pytest.fail("read"))
    arguments = [word for name in names for word in ("--calibration", str(tmp_path / name))]
    arguments += ["--scheme", "int4", "--prepared", "p", "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as stop:
        main(["testbed", "loss", *arguments])
    stem = names[-1].rpartition("/")[2].partition(".")[0]
    message = f"kvlab: calibration is '{tmp_path / names[-1]}', but other rows are called '{stem}'; accepted: files "
    captured = capsys.readouterr()
    assert stop.value.code == 2 and captured.err.startswith(message) and captured.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"texts": 0}, "texts is 0; accepted: an integer of at least 1"),
        ({"length": 1}, "length is 1; accepted: an integer of at least 2"),
        ({"length": 10**6}, r"texts · length is 3000000; accepted: at most \d+, all held-out tokens"),
        ({"device": "moon"}, "device is 'moon'; accepted"),
        ({"schemes": ["int4", "int4"]}, "schemes has 2 named 'int4'"),
    ],
    ids=str,
)
def test_what_cannot_be_measured_leaves_nothing(folder, model, tmp_path, changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        write_losses(folder, tmp_path / "out", **{"schemes": SCHEMES} | SIZES | changes)
    assert not (tmp_path / "out").exists()


def test_text_of_another_tokenizer_is_refused(folder, model, monkeypatch, tmp_path):
    other = type("Tokenizer", (), {"get_vocab": lambda _: {}})
    monkeypatch.setattr(losses, "load_testbed", lambda: (model, other()))
    with pytest.raises(ValueError, match=r"^prepared is '.*', of another tokenizer; accepted: the testbed's own$"):
        write_losses(folder, tmp_path / "out", SCHEMES, **SIZES)
    assert not (tmp_path / "out").exists()
