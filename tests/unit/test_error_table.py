"""The file of attention-output errors: what it holds, how it goes on, and when it is refused."""

import os

import pandas as pd
import pytest
import torch

import kvlab
from kvlab import error_table
from kvlab.capture_files import Manifest, StoredCapture
from kvlab.error_table import fill_error_table
from kvlab.recording import LayerCapture

pytestmark = pytest.mark.unit

SCHEMES = ("fp8", "int4")
LAYERS, TOKENS, HEAD_DIM = (4, 9), 40, 32


def capture_of(seed, **changes):
    generator = torch.Generator().manual_seed(seed)

    def layer(index):
        q, k, v = (torch.randn(1, heads, TOKENS, HEAD_DIM, generator=generator) for heads in (4, 2, 2))
        positions = torch.tensor([30, 39])
        return LayerCapture(index, "full", rope=True, scaling=0.1, q=q[:, :, positions], positions=positions, k=k, v=v)

    layers = {index: layer(index) for index in LAYERS}
    known = {
        "model": "tiny", "revision": "r", "model_type": "llama", "config_hash": "c", "text_hash": f"{seed}" * 64,
        "first_token": 0, "tokens": TOKENS, "num_queries": 2, "layers": LAYERS, "hidden_size": 8, "num_heads": 4,
        "num_kv_heads": 2, "head_dim": HEAD_DIM, "kvlab": "0", "date": "2026-01-01", "machine": "m",
    }  # fmt: skip
    return StoredCapture("tiny", "llama", lambda: layers, manifest=Manifest(**known | changes))


def fill(out, captures, schemes=SCHEMES, hashes=None, **others):
    return fill_error_table(out, captures, [kvlab.get_scheme(name) for name in schemes], hashes or {}, **others)


@pytest.fixture
def captures():
    return {"one": capture_of(1), "two": capture_of(2)}


@pytest.fixture
def measured(monkeypatch):
    """What is measured, as names of schemes, call by call."""
    calls = []

    def counted(capture, schemes, **others):
        calls.append([scheme.name for scheme in schemes])
        return kvlab.attention_error_table(capture, schemes, **others)

    monkeypatch.setattr(error_table, "attention_error_table", counted)
    return calls


def test_the_file_and_what_is_returned_are_the_library_s_table(tmp_path, captures):
    returned = fill(tmp_path / "t.csv", captures, exact_first=2, exact_recent=5, command="kvlab measure 'a b'")
    written = pd.read_csv(tmp_path / "t.csv", comment="#")
    for name, capture in captures.items():
        expected = kvlab.attention_error_table(capture, SCHEMES, exact_first=2, exact_recent=5)
        for table, column in ((returned, "text"), (written, "capture")):
            own = table[table[column] == name].reset_index(drop=True)
            # Six digits are written.
            pd.testing.assert_frame_equal(own[list(expected.columns)], expected, rtol=1e-5)
    for column, value in {
        "exact_first": 2, "exact_recent": 5, "tokens": TOKENS, "queries": 2, "command": "kvlab measure 'a b'",
    }.items():  # fmt: skip
        assert written[column].eq(value).all()
    assert written[["machine", "versions", "date"]].notna().all(axis=None)
    assert [path.name for path in tmp_path.iterdir()] == ["t.csv"]


def test_an_interrupted_table_goes_on_with_the_capture_it_lacks(tmp_path, captures, measured, monkeypatch):
    whole = fill(tmp_path / "whole.csv", captures)
    counted = error_table.attention_error_table

    def interrupted(capture, *arguments, **others):
        if capture is captures["two"]:
            raise KeyboardInterrupt
        return counted(capture, *arguments, **others)

    monkeypatch.setattr(error_table, "attention_error_table", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fill(tmp_path / "t.csv", captures)
    assert pd.read_csv(tmp_path / "t.csv", comment="#")["capture"].unique().tolist() == ["one"]
    monkeypatch.setattr(error_table, "attention_error_table", counted)
    measured.clear()
    pd.testing.assert_frame_equal(fill(tmp_path / "t.csv", captures), whole)
    assert len(measured) == 1
    assert (tmp_path / "t.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()
    pd.testing.assert_frame_equal(fill(tmp_path / "t.csv", captures), whole)
    assert len(measured) == 1


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"schemes": ("int2", "fp8")}, [["int2"]]),
        ({"exact_first": 1}, [["fp8", "int4"]]),
        ({"exact_recent": 1}, [["fp8", "int4"]]),
        ({"hashes": {"int4": "b" * 64}}, [["int4"]]),
        ({"captures": {"one": capture_of(3)}}, [["fp8", "int4"]]),
        ({"captures": {"one": capture_of(1, first_token=7)}}, [["fp8", "int4"]]),
        ({"captures": {"other": capture_of(1)}}, [["fp8", "int4"]]),
    ],
)
def test_what_is_new_is_measured_and_what_was_there_stays(tmp_path, captures, measured, change, expected):
    first = {"captures": {"one": captures["one"]}, "hashes": {"int4": "a" * 64}}
    fill(tmp_path / "t.csv", **first)
    before = (tmp_path / "t.csv").read_text()
    measured.clear()
    asked = first | change
    returned = fill(tmp_path / "t.csv", **asked)
    assert measured == expected
    assert (tmp_path / "t.csv").read_text().startswith(before)
    exact = {name: asked[name] for name in ("exact_first", "exact_recent") if name in asked}
    table = kvlab.attention_error_table(*asked["captures"].values(), asked.get("schemes", SCHEMES), **exact)
    # In the order asked for, whatever the file's.
    pd.testing.assert_frame_equal(returned.drop(columns="text"), table, rtol=1e-5)


def test_a_line_that_was_taken_out_comes_back_alone(tmp_path, captures, measured):
    fill(tmp_path / "t.csv", captures)
    lines = (tmp_path / "t.csv").read_text().splitlines(keepends=True)
    (tmp_path / "t.csv").write_text("".join([*lines[:-2], lines[-1]]))
    measured.clear()
    fill(tmp_path / "t.csv", captures)
    assert (tmp_path / "t.csv").read_text().splitlines(keepends=True) == [*lines[:-2], lines[-1], lines[-2]]
    assert measured == [["int4"]]


@pytest.mark.parametrize("field", ["model", "revision", "config_hash"])
def test_another_model_is_refused(tmp_path, captures, measured, field):
    fill(tmp_path / "t.csv", captures)
    measured.clear()
    with pytest.raises(ValueError, match=f"measured with {field} '.*'; accepted: a new file, or one measured with 'x'"):
        fill(tmp_path / "t.csv", {"one": capture_of(1, **{field: "x"})})
    assert not measured


@pytest.mark.parametrize("place", ["", "none/t.csv", "other.csv", "locked/t.csv"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path, captures, measured, monkeypatch, place
):
    (tmp_path / "other.csv").write_text("scheme,error\nfp8,0.1\n")
    (tmp_path / "locked").mkdir()
    access = os.access
    # Whoever may do everything, as in a container, may write there.
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path / "locked" and access(path, mode))
    with pytest.raises(ValueError, match=r"^out is '.*; accepted: a (new )?file"):
        fill(tmp_path / place, captures)
    assert not measured
    assert (tmp_path / "other.csv").read_text() == "scheme,error\nfp8,0.1\n"
