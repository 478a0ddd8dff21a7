"""A table that is written point by point and continued where it stopped."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pandas as pd

from kvlab.paths import check_file, written_whole

SETTINGS = "# settings: "
"""Begins the line of the file with what its rows have in common."""

HEAD = re.compile("(#.*\n)*")
"""The lines before the columns' names; below them, # is a character as any other."""

DIGITS = 6
"""Of a measured number, at most."""

Row = dict[str, object]


class PointTable:
    """Rows in memory and, with a path, in a CSV file that is whole after every point.

    Parameters
    ----------
    path
        The file; one that exists is continued. None keeps the rows in memory only.
    columns
        Of the table, in order.
    key
        The columns that name a point.
    numbers
        The columns that hold a number, or nothing where they are not in ``needed``.
    settings
        What all rows have in common, in JSON's types. A file with others is refused.
    notes
        What the columns mean, a line each.
    needed
        Those of the numbers without which a row is damaged; they are finite.

    Raises
    ------
    ValueError
        ``path`` cannot be written, was written with other settings, or is damaged; from `append` too, where another
        process has written there since.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        columns: Sequence[str],
        key: Sequence[str],
        numbers: Sequence[str],
        settings: Mapping[str, object],
        notes: Sequence[str] = (),
        needed: Sequence[str] = (),
    ):
        # A link stays one: what it leads to is written.
        self.path = path = Path(os.path.realpath(path)) if path is not None and path.is_symlink() else path
        self.columns, self.key, self.numbers, self.needed = columns, key, numbers, needed
        self.settings, self.notes = settings, notes
        self._last: bytes | None = None
        exists = path is not None and path.exists()
        if path is not None:
            check_file(path)
        self.frame = self._read() if exists else pd.DataFrame(columns=columns)

    def has(self, point: Mapping[str, object]) -> bool:
        """Say whether a point has been measured."""
        return not self.lacking([point])

    def lacking(self, points: Iterable[Row]) -> list[Row]:
        """Return those of some points that have not been measured."""
        measured = set(self.frame[list(self.key)].astype(str).itertuples(index=False, name=None))
        return [point for point in points if tuple(str(point[name]) for name in self.key) not in measured]

    def append(self, rows: Sequence[Row]) -> None:
        """Add all rows of a point at once."""
        new = pd.DataFrame(rows, columns=self.columns, dtype=object).map(_rounded)
        self.frame = pd.concat([self.frame, new], ignore_index=True) if len(self.frame) else new
        if self.path is not None:
            self._write()

    def _write(self) -> None:
        head = "".join(f"# {note}\n" for note in self.notes) + SETTINGS + json.dumps(self.settings) + "\n"
        content = (head + self.frame.to_csv(index=False)).encode("utf-8")
        if (self.path.read_bytes() if self.path.exists() else None) != self._last:
            raise ValueError(f"out is {str(self.path)!r}, which another process has changed; accepted: one at a time")
        with written_whole(self.path) as scratch:
            scratch.write_bytes(content)
        self._last = content

    def _read(self) -> pd.DataFrame:
        out, new = f"out is {str(self.path)!r}", "accepted: a new file, or one that this command wrote"
        found = None
        with suppress(ValueError, RecursionError):
            self._last = self.path.read_bytes()
            text = self._last.decode("utf-8")
            head = HEAD.match(text)[0]
            found = json.loads(head.partition(SETTINGS)[2].partition("\n")[0])
        if not isinstance(found, dict):
            raise ValueError(f"{out}, without a line of settings that can be read; {new}")
        for name, value in self.settings.items():
            if found.get(name) != value:
                measured = f"measured with {name} {found.get(name)!r}"
                raise ValueError(f"{out}, {measured}; accepted: a new file, or one measured with {value!r}")
        if not text.endswith("\n"):
            raise ValueError(f"{out}, which is cut off; accepted: a whole file (remove its last line)")
        names, _, body = text[len(head) :].partition("\n")
        if names.rstrip() != ",".join(self.columns):
            raise ValueError(f"{out}, with other columns than this command's; {new}")
        reader = csv.reader(io.StringIO(body, newline=""), strict=True)
        try:
            # Text as it stands: numbers stay as they were written.
            return pd.DataFrame(map(self._checked, reader), columns=self.columns, dtype=object)
        except (csv.Error, ValueError):
            line = head.count("\n") + 1 + reader.line_num
            damaged = f"whose line {line} is damaged"
            raise ValueError(f"{out}, {damaged}; accepted: a whole file (remove that line)") from None

    def _checked(self, cells: Sequence[str]) -> dict[str, str]:
        """Return a row of the file if it is whole; else a ValueError."""
        row = dict(zip(self.columns, cells, strict=True))
        for name in self.numbers:
            number = float(row[name] or "nan")
            if name in self.needed and not math.isfinite(number):
                raise ValueError(name)
        return row


def _rounded(value: object) -> object:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
