"""The table of a benchmark: continued where it stopped, and refused where that cannot be done."""

import os

import pandas as pd
import pytest

from kvlab.point_table import PointTable

pytestmark = pytest.mark.unit

COLUMNS = ("scheme", "point", "median_ms", "counts", "reason")
ROW = {"scheme": "fp8", "point": "8", "median_ms": 12.3456789, "counts": True, "reason": None}


def table(path, **settings):
    return PointTable(
        path,
        columns=COLUMNS,
        key=("scheme", "point"),
        numbers=["median_ms"],
        settings={"steps": 512} | settings,
        notes=["n"],
    )


def test_a_table_is_continued_and_no_row_changes(tmp_path):
    path = tmp_path / "table.csv"
    table(path).append([ROW])
    first = path.read_text()
    again = table(path)
    assert again.has(ROW) and not again.has(ROW | {"point": "full"})
    again.append([ROW | {"point": "full", "counts": False, "reason": "queued: 1, 2", "median_ms": None}])
    assert path.read_text().startswith(first)
    back = pd.read_csv(path, comment="#")
    assert back["median_ms"].iloc[0] == 12.3457 and back["reason"].iloc[1] == "queued: 1, 2"
    assert [file.name for file in tmp_path.iterdir()] == ["table.csv"]


def test_what_another_process_wrote_is_not_overwritten(tmp_path):
    path = tmp_path / "table.csv"
    one, other = table(path), table(path)
    one.append([ROW])
    with pytest.raises(ValueError, match="which another process has changed; accepted: one at a time"):
        other.append([ROW | {"point": "1"}])
    one.append([ROW | {"point": "2"}])
    assert pd.read_csv(path, comment="#")["point"].tolist() == [8, 2]


def test_a_link_stays_one(tmp_path):
    (tmp_path / "link.csv").symlink_to(tmp_path / "real.csv")
    for point in "12":
        table(tmp_path / "link.csv").append([ROW | {"point": point}])
    assert (tmp_path / "link.csv").is_symlink()
    assert len(pd.read_csv(tmp_path / "real.csv", comment="#")) == 2


@pytest.mark.parametrize("cell", ["", "nan", "inf"])
def test_a_number_that_is_needed_is_not_blank(tmp_path, cell):
    def needing():
        settings = {"columns": COLUMNS, "key": ("scheme",), "numbers": ["median_ms"], "needed": ["median_ms"]}
        return PointTable(tmp_path / "table.csv", settings={}, **settings)

    needing().append([ROW])
    path = tmp_path / "table.csv"
    path.write_text(path.read_text().replace("12.3457", cell))
    with pytest.raises(ValueError, match="is damaged"):
        needing()


def test_other_settings_are_refused(tmp_path):
    table(tmp_path / "table.csv").append([ROW])
    with pytest.raises(ValueError, match=r"measured with steps 512; accepted: .* measured with 64"):
        table(tmp_path / "table.csv", steps=64)


@pytest.mark.parametrize("cut", [1, 5, 12])
def test_a_file_that_is_cut_off_is_refused_and_stays(tmp_path, cut):
    path = tmp_path / "table.csv"
    table(path).append([ROW, ROW | {"point": "1"}])
    path.write_text(path.read_text()[:-cut])
    before = path.read_text()
    with pytest.raises(ValueError, match="which is cut off"):
        table(path)
    assert path.read_text() == before


def test_cells_keep_what_looks_like_a_comment(tmp_path):
    path = tmp_path / "table.csv"
    table(path).append([ROW | {"scheme": "a#b", "reason": "# all of it, and\n# this line"}])
    first = path.read_text()
    again = table(path)
    assert again.has(ROW | {"scheme": "a#b"})
    again.append([ROW])
    assert path.read_text().startswith(first)


@pytest.mark.parametrize(
    "row", ["fp8,8,12.3,True", "fp8,8,12.3,True,,", "fp8,8,abc,True,", "", 'fp8,8,12.3,True,"queued']
)
def test_a_damaged_row_is_named_and_does_not_count(tmp_path, row):
    path = tmp_path / "table.csv"
    table(path).append([ROW])
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines, row, ""]))
    message = rf"whose line {len(lines) + 1} is damaged; accepted: a whole file \(remove that line\)"
    with pytest.raises(ValueError, match=message):
        table(path)
    path.write_text("\n".join([*lines, ""]))
    assert table(path).has(ROW)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"a,b\n1,2\n",
        b"\xff\xfe",
        b"# settings: [1]\n",
        b"# settings: 5\n",
        b'# settings: {"steps": \n',
        b"# settings: " + b"[" * 100_000 + b"\n",
        b'# settings: {"steps": 512}\n',
        b'# settings: {"steps": 512}\nscheme,points,median_ms,counts,reason\nfp8,8,12,True,\n',
    ],
    ids=lambda content: repr(content[:60]),
)
def test_a_file_of_something_else_is_refused(tmp_path, content):
    path = tmp_path / "table.csv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"out is .*; accepted: a new file, or one that this command wrote"):
        table(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("out", ["no/such/folder.csv", "."])
def test_a_file_that_cannot_be_written_is_refused(tmp_path, out):
    with pytest.raises(ValueError, match="accepted: a file in a folder that can be written"):
        table(tmp_path / out)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="accepted: a file in a folder that can be written"):
        table(tmp_path / "pipe")
