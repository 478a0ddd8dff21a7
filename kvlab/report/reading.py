"""Files in, what the page shows of them out: figures, tables, text."""

from __future__ import annotations

import base64
import csv
import io
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from xml.etree import ElementTree

from PIL import Image, UnidentifiedImageError

DIGITS = 6
"""Significant ones of a JSON document's numbers; a CSV file's are shown as they are written there."""
MANY = 12
"""A list in a JSON document that is longer is counted instead of shown."""
PROVENANCE = ("machine", "versions", "date", "command", "weights", "kvlab")
"""Columns that are folded into one line above the table where all rows agree."""
MISSING = "–"

BROKEN = (ValueError, csv.Error, RecursionError, SyntaxError, LookupError, OSError, Image.DecompressionBombError)
"""What readers say of a file that is not what its ending says.

Images are SyntaxErrors and OSErrors to Pillow, an encoding that nobody knows is a LookupError to the XML parser.
"""


@dataclass(frozen=True)
class Figure:
    """An image, as an address that holds it."""

    data_uri: str


@dataclass(frozen=True)
class Table:
    """Cells as they are shown, and what is said above them.

    Attributes
    ----------
    columns, rows
        The header, and one cell for each of its columns in every row.
    name
        Of one of several tables in a file; empty where it is the file's only one.
    notes
        Lines of the file about its table.
    origin
        Provenance that all rows share, by its column.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    name: str = ""
    notes: Sequence[str] = ()
    origin: Mapping[str, str] = field(default_factory=dict)

    @property
    def numeric(self) -> list[bool]:
        """Whether a column holds numbers only."""
        return [all(_is_number(cell) for cell in column) for column in zip(*self.rows, strict=True)]


@dataclass(frozen=True)
class Text:
    """Markdown."""

    source: str


Item = Figure | Table | Text


def read_file(path: Path) -> list[Item]:
    """Read what a file has to show.

    Raises
    ------
    ValueError
        It cannot be read, or is not what its name's ending says.
    """
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise ValueError(f"file is {str(path)!r}; accepted: names that end in {', '.join(READERS)}")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"file is {str(path)!r}, which cannot be read ({error.strerror})") from None
    try:
        return reader(data)
    except BROKEN as error:
        what = {".png": "PNG image", ".svg": "SVG image", ".md": "text"}.get(path.suffix.lower(), "table")
        raise ValueError(f"file is {str(path)!r}, which is no {what} ({error}); accepted: a whole one") from None


def _read_csv(data: bytes) -> list[Item]:
    lines = data.decode("utf-8-sig").splitlines(keepends=True)
    notes = []
    while lines and lines[0].startswith("#"):
        notes.append(lines.pop(0).lstrip("#").strip())
    if "\0" in "".join(lines):
        raise ValueError("it has a zero byte")
    header, *rows = [row for row in csv.reader(lines, strict=True) if row] or [[]]
    if not rows:
        raise ValueError("it has no row below its header")
    for number, row in enumerate(rows, 1):
        if len(row) != len(header):
            raise ValueError(f"row {number} has {len(row)} cells, its header {len(header)}")
    return [_fold(Table(header, [[cell or MISSING for cell in row] for row in rows], notes=notes))]


def _read_json(data: bytes) -> list[Item]:
    items = list(_tables_of(json.loads(data.decode("utf-8-sig")), ""))
    if not items:
        raise ValueError("it has no rows")
    return items


def _tables_of(document: object, name: str) -> Iterator[Table]:
    """Find the rows in a JSON document: lists or maps of objects; lone values become a table of two columns."""
    if _is_rows(document):
        columns = list(dict.fromkeys(key for row in document for key in row))
        yield _fold(Table(columns, [[_cell(row.get(key)) for key in columns] for row in document], name))
    elif isinstance(document, dict) and _is_map_of_rows(document):
        yield from _tables_of([{"": key} | row for key, row in document.items()], name)
    elif isinstance(document, dict):
        notes = document.get("notes", []) if isinstance(document.get("notes"), list) else []
        alone = {key: value for key, value in document.items() if not _is_table(value) and value is not notes}
        if alone:
            yield Table(["", "value"], [[key, _cell(value)] for key, value in alone.items()], name)
        for key, part in document.items():
            if _is_table(part):
                for table in _tables_of(part, " / ".join(filter(None, [name, "" if key == "rows" else key]))):
                    yield replace(table, notes=[*map(str, notes), *table.notes])


def _is_rows(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def _is_table(value: object) -> bool:
    return _is_rows(value) or (isinstance(value, dict) and bool(value))


def _is_map_of_rows(document: Mapping[str, object]) -> bool:
    rows = list(document.values())
    return _is_rows(rows) and not any(_is_table(cell) for row in rows for cell in row.values())


def _cell(value: object) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return MISSING
    if isinstance(value, float):
        return f"{value:.{DIGITS}g}"
    if isinstance(value, list):
        return ", ".join(map(_cell, value)) if len(value) <= MANY else f"{len(value):,} values"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else str(value)


def _fold(table: Table) -> Table:
    """Take the provenance that all rows share out of the table."""
    origin = {
        name: cells[0]
        for name, cells in zip(table.columns, zip(*table.rows, strict=True), strict=True)
        if name in PROVENANCE and len(set(cells)) == 1 and cells[0] != MISSING
    }
    kept = [i for i, name in enumerate(table.columns) if name not in origin]
    rows = [[row[i] for i in kept] for row in table.rows]
    return Table([table.columns[i] for i in kept], rows, table.name, table.notes, origin)


def _is_number(cell: str) -> bool:
    try:
        float(cell.replace(",", ""))
    except ValueError:
        return cell == MISSING
    return True


def _read_png(data: bytes) -> list[Item]:
    with warnings.catch_warnings():
        # What Pillow warns of is still read; what is too large for it is refused.
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        try:
            with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
                image.load()
        except UnidentifiedImageError:
            # Pillow's words name the buffer.
            raise ValueError("it does not begin as one") from None
    return [_embed(data, "image/png")]


def _read_svg(data: bytes) -> list[Item]:
    root = ElementTree.fromstring(data)
    if root.tag != "{http://www.w3.org/2000/svg}svg":
        raise ValueError(f"it is an XML document of {root.tag!r}")
    return [_embed(data, "image/svg+xml")]


def _embed(data: bytes, kind: str) -> Figure:
    return Figure(f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}")


def _read_markdown(data: bytes) -> list[Item]:
    return [Text(data.decode("utf-8-sig"))]


READERS: dict[str, Callable[[bytes], list[Item]]] = {
    ".md": _read_markdown,
    # An image of its own, so that neither its names nor its scripts reach the page; rather than the PNG beside it.
    ".svg": _read_svg,
    ".png": _read_png,
    ".csv": _read_csv,
    ".json": _read_json,
}
"""A file name's ending → its reader, in the order in which a section shows them."""
