import base64
import json
import os
import re
import shutil
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from PIL import Image

from kvlab import plots
from kvlab.cli import main
from kvlab.report import write_report
from kvlab.report.reading import read_file

pytestmark = pytest.mark.unit

CSV = """# Made up for a test.
# second note
scheme,time_us,note,machine,versions,date,command
fp8,12.50,,A machine,"kvlab 1, torch 2",2026-01-01,kvlab bench
int4,6,slow,A machine,"kvlab 1, torch 2",2026-01-01,kvlab bench
"""
NASTY = '<script>alert("x")</script><img src=http://example.com/x.png>&amp;'


class Page(HTMLParser):
    """What a browser would make of a page: tags, what it would fetch, cells, text."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.fetched, self.cells, self.links, self.ids = [], [], [], [], []
        self.source = path.read_text(encoding="utf-8")
        self.text, self.in_cell = "", False
        self.feed(self.source)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append(tag)
        self.fetched += [attrs[name] for name in ("src", "srcset", "data", "poster", "action") if name in attrs]
        self.links += [attrs["href"]] if "href" in attrs else []
        self.ids += [attrs["id"]] if "id" in attrs else []
        self.in_cell = tag in ("td", "th")
        if self.in_cell:
            self.cells.append("")

    def handle_endtag(self, tag):
        self.in_cell = False

    def handle_data(self, data):
        self.text += data
        if self.in_cell:
            self.cells[-1] += data


def page(tmp_path, *sources):
    out = tmp_path / "out" / "report.html"
    out.parent.mkdir(exist_ok=True)
    write_report(sources, out)
    assert [file.name for file in out.parent.iterdir()] == ["report.html"]
    return Page(out)


def write(folder, **files):
    for name, content in files.items():
        stem, _, ending = name.rpartition("_")
        (folder / f"{stem}.{ending}").write_text(content, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    figure = Figure(figsize=(2, 1))
    figure.subplots().plot([1, 2])
    return plots.save(figure, tmp_path_factory.mktemp("drawn") / "loss")


@pytest.fixture
def folder(drawn, tmp_path):
    figures = tmp_path / "figures"
    figures.mkdir()
    for file in drawn:
        shutil.copy(file, figures)
    shutil.copy(drawn[0], figures / "only_png.png")
    return write(figures, loss_csv=CSV, summary_md="# What it shows\n\n| a | b |\n|---|---|\n| 1 | 2 |\n")


def test_a_folder_becomes_sections_with_what_is_written_first(folder, tmp_path):
    made = page(tmp_path, folder)
    assert re.findall(r"<h2>(.*?)</h2>", made.source) == ["summary", "loss", "only png"]
    assert made.links == ["#section-1", "#section-2", "#section-3"]
    assert made.ids == ["section-1", "section-2", "section-3"]
    assert "<h3>What it shows</h3>" in made.source


def test_figures_are_inside_as_svg_where_there_is_one(folder, tmp_path):
    loss, only_png = page(tmp_path, folder).fetched
    for uri, kind, file in ((loss, "svg+xml", "loss.svg"), (only_png, "png", "only_png.png")):
        head, data = uri.split(",")
        assert head == f"data:image/{kind};base64"
        assert base64.b64decode(data) == (folder / file).read_bytes()


def test_a_table_is_shown_as_it_is_written_and_its_provenance_folded(folder, tmp_path):
    made = page(tmp_path, folder / "loss.csv")
    assert made.cells == ["scheme", "time_us", "note", "fp8", "12.50", "–", "int4", "6", "slow"]
    assert "Made up for a test.\nsecond note" in made.text
    line = "machine: A machine · versions: kvlab 1, torch 2 · date: 2026-01-01 · command: kvlab bench"
    assert line in made.text
    (table,) = read_file(folder / "loss.csv")
    assert table.numeric == [False, True, False]


def test_provenance_on_which_rows_differ_stays_with_them(tmp_path):
    write(tmp_path, t_csv="value,date\n1,2026-01-01\n2,2026-01-02\n")
    (table,) = read_file(tmp_path / "t.csv")
    assert (table.columns, table.origin) == (["value", "date"], {})


def test_long_tables_are_folded_and_short_ones_open(tmp_path):
    write(tmp_path, long_csv="x\n" + "1\n" * 1000, short_csv="x\n1\n")
    made = page(tmp_path, tmp_path)
    assert re.findall(r"<details( open)?>\n<summary>Rows: ([\d,]+)", made.source) == [("", "1,000"), (" open", "1")]


def shown(tmp_path, document):
    (tmp_path / "d.json").write_text(json.dumps(document))
    return {table.name: table for table in read_file(tmp_path / "d.json")}


def test_json_of_measure_and_of_lists(tmp_path):
    tables = shown(tmp_path, {"outliers": [{"layer": 4, "ratio": 1 / 3}], "attention_error": [{"error": None}]})
    assert list(tables) == ["outliers", "attention_error"]
    assert tables["outliers"].rows == [["4", "0.333333"]]
    assert tables["attention_error"].rows == [["–"]]
    (rows,) = shown(tmp_path, [{"a": 1}, {"b": True}]).values()
    assert (rows.columns, rows.rows) == (["a", "b"], [["1", "–"], ["–", "True"]])


def test_json_of_compare_and_of_bench(tmp_path):
    (tmp_path / "d.json").write_text(json.dumps({"a": "one", "b": "two", "rows": [{"task": "t", "p": float("nan")}]}))
    alone, rows = read_file(tmp_path / "d.json")
    assert alone.rows == [["a", "one"], ["b", "two"]]
    assert rows.rows == [["t", "–"]]
    (bench,) = shown(tmp_path, {"rows": [{"time_us": 2, "date": "2026-01-01"}], "notes": ["not measured: …"]}).values()
    assert (bench.notes, bench.rows) == (["not measured: …"], [["2"]])
    assert bench.origin == {"date": "2026-01-01"}


def test_json_of_a_calibration(tmp_path):
    manifest = {
        "format": "kvlab-calibration/1",
        "captures": [{"tokens": 9}],
        "search": {"seeds": list(range(200)), "tokens": 7},
        "layers": {"4": {"objectives": list(range(200)), "error_after": 0.25}, "9": {"error_after": 0.5}},
    }
    tables = shown(tmp_path, manifest)
    assert list(tables) == ["", "captures", "search", "layers"]
    assert tables["layers"].rows == [["4", "200 values", "0.25"], ["9", "–", "0.5"]]
    assert tables["search"].rows == [["seeds", "200 values"], ["tokens", "7"]]


def test_what_files_say_is_text_and_nothing_is_asked_for(tmp_path):
    quoted = NASTY.replace('"', '""')
    write(
        tmp_path,
        t_csv=f'# {NASTY}\n"{quoted}",date\n1,"{quoted}"\n',
        j_json=json.dumps([{NASTY: NASTY}]),
        m_md=f"# {NASTY}\n\n{NASTY}\n\n![x](http://example.com/y.png) [link](javascript:alert(1))\n",
    )
    made = page(tmp_path, tmp_path)
    assert made.fetched == []
    assert not {"script", "img", "link", "iframe", "object"} & set(made.tags)
    assert NASTY in made.cells
    # What was an image is a link, which asks for nothing until somebody follows it.
    assert [link for link in made.links if not link.startswith("#section-")] == ["http://example.com/y.png"]
    assert "default-src 'none'" in made.source


@settings(max_examples=25, deadline=None)
@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n\0"), min_size=1), min_size=1, max_size=4))
def test_any_cell_comes_back(tmp_path_factory, cells):
    folder = tmp_path_factory.mktemp("cells")
    (folder / "d.json").write_text(json.dumps([dict.fromkeys("ab", cell) for cell in cells]))
    made = page(folder, folder / "d.json")
    assert made.cells == ["a", "b", *(cell for cell in cells for _ in "ab")]


def test_files_of_the_same_name_in_two_folders_are_told_apart(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, loss_csv=CSV)
    made = page(tmp_path, tmp_path / "one", tmp_path / "two", tmp_path / "two" / "loss.csv")
    assert re.findall(r"<h2>(.*?)</h2>", made.source) == ["one / loss", "two / loss"]


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main(["report", *map(str, arguments)])
    captured = capsys.readouterr()
    return stop.value.code, captured.out, captured.err


def test_the_command_takes_figures_by_default(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(capsys) == (0, "3 sections in report.html\n", "")
    assert (tmp_path / "report.html").stat().st_size > 10_000


BROKEN = {
    "ragged.csv": (b"a,b\n1,2,3\n", "row 1 has 3 cells, its header 2"),
    "short.csv": (b"a,b\n1,2\n1\n", "row 2 has 1 cells, its header 2"),
    "head.csv": (b"a,b\n", "no row below its header"),
    "empty.csv": (b"", "no row below its header"),
    "notes.csv": (b"# only a note\n", "no row below its header"),
    "quote.csv": (b'a,b\n1,"2\n', "which is no table"),
    "binary.csv": (b"\x89PNG\0\xff", "which is no table"),
    "zero.csv": (b"a\n\0\n", "zero byte"),
    "cut.json": (b'[{"a": 1}', "which is no table"),
    "lone.json": (b"3", "it has no rows"),
    "list.json": (b"[1, 2]", "it has no rows"),
    "none.json": (b"{}", "it has no rows"),
    "deep.json": (b"[" * 100_000, "which is no table"),
    "cut.svg": (b'<svg xmlns="http://www.w3.org/2000/svg"><g>', "which is no SVG image"),
    "page.svg": (b"<html/>", "an XML document of 'html'"),
    "encoding.svg": (b'<?xml version="1.0" encoding="foo"?><svg/>', "which is no SVG image (unknown encoding: foo)"),
    "text.png": (b"hello", "which is no PNG image (it does not begin as one); accepted"),
    "binary.md": (b"\xff\xfe\xff", "which is no text"),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("form", ["file", "folder"])
def test_a_file_that_is_not_what_its_name_says(folder, tmp_path, capsys, name, form):
    data, message = BROKEN[name]
    (folder / name).write_bytes(data)
    out = tmp_path / "report.html"
    code, printed, err = run(capsys, folder / name if form == "file" else folder, "--out", out)
    assert (code, printed, err.count("\n")) == (2, "", 1)
    assert f"file is '{folder / name}'" in err and message in err
    assert not out.exists()


def test_a_large_png_is_shown_without_a_warning(folder, tmp_path, capsys, monkeypatch, recwarn):
    # Pillow warns of more pixels than this and refuses twice as many.
    with Image.open(folder / "only_png.png") as image:
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", image.width * image.height - 1)
    assert run(capsys, folder, "--out", tmp_path / "report.html")[0] == 0
    assert not [warning for warning in recwarn if warning.category is Image.DecompressionBombWarning]


def test_what_no_text_can_hold_becomes_a_question_mark(tmp_path):
    (tmp_path / os.fsdecode(b"name\xff.json")).write_text(r'[{"cell": "half \ud800"}]')
    shown = page(tmp_path, tmp_path)
    assert "half ?" in shown.cells and "name?" in shown.text


@pytest.mark.parametrize("cut", [40, 400])
def test_a_png_that_is_cut_off(folder, tmp_path, capsys, cut):
    image = folder / "only_png.png"
    image.write_bytes(image.read_bytes()[:cut])
    code, _, err = run(capsys, image, "--out", tmp_path / "report.html")
    assert (code, err.count("\n")) == (2, 1)
    assert "which is no PNG image" in err


def test_nothing_to_show(tmp_path, capsys):
    (tmp_path / ".hidden.csv").write_text(CSV)
    (tmp_path / "notes.txt").write_text("x")
    for source, message in {
        tmp_path: "with nothing to show; accepted: one with .md, .svg, .png, .csv, .json files",
        tmp_path / "nowhere": "accepted: folders and files that exist",
        tmp_path / "notes.txt": "accepted: names that end in .md",
    }.items():
        code, _, err = run(capsys, source, "--out", tmp_path / "report.html")
        assert (code, err.count("\n")) == (2, 1)
        assert f"'{source}'" in err and message in err


@pytest.mark.parametrize("place", ["nowhere/report.html", "folder.html", "loss.csv", "report", "loss.csv/report.html"])
def test_an_out_that_cannot_be_written(folder, capsys, place):
    (folder / "folder.html").mkdir()
    before = {file.name for file in folder.iterdir()}
    out = folder / place
    code, _, err = run(capsys, folder, "--out", out)
    assert (code, err.count("\n")) == (2, 1)
    assert f"out is '{out}'; accepted: a file name that ends in .html" in err
    assert {file.name for file in folder.iterdir()} == before
    assert (folder / "loss.csv").read_text() == CSV


def test_a_full_disk_leaves_the_page_before_it(folder, tmp_path, capsys, monkeypatch):
    out = tmp_path / "report.html"
    out.write_text("before")

    def full(self, *_args, **_kwargs):
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(out), "write_text", full)
    code, _, err = run(capsys, folder, "--out", out)
    monkeypatch.undo()
    assert (code, err.count("\n")) == (2, 1)
    assert "No space left on device" in err
    assert out.read_text() == "before"
    assert {file.name for file in tmp_path.iterdir()} == {"figures", "report.html"}
