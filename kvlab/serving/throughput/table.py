"""The table of a benchmark that is written point by point and continued where it stopped."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from kvlab.paths import written_whole

SETTINGS = "# settings: "
"""Begins the line of the file with what its rows have in common."""

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
    settings
        What all rows have in common, in JSON's types. A file with others is refused.
    notes
        What the columns mean, a line each.

    Raises
    ------
    ValueError
        ``path`` cannot be written, was written with other settings, or is cut off.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        columns: Sequence[str],
        key: Sequence[str],
        settings: Mapping[str, object],
        notes: Sequence[str] = (),
    ):
        self.path, self.columns, self.key, self.settings, self.notes = path, columns, key, settings, notes
        if path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK)):
            raise ValueError(f"out is {str(path)!r}; accepted: a file in a folder that can be written")
        self.frame = self._read() if path is not None and path.exists() else pd.DataFrame(columns=columns)

    def has(self, point: Mapping[str, object]) -> bool:
        """Say whether a point has been measured."""
        names = self.frame[list(self.key)].astype(str).itertuples(index=False, name=None)
        return tuple(str(point[name]) for name in self.key) in set(names)

    def append(self, rows: Sequence[Row]) -> None:
        """Add all rows of a point at once."""
        new = pd.DataFrame(rows, columns=self.columns, dtype=object).map(_rounded)
        self.frame = pd.concat([self.frame, new], ignore_index=True) if len(self.frame) else new
        if self.path is not None:
            self._write()

    def _write(self) -> None:
        head = "".join(f"# {note}\n" for note in self.notes) + SETTINGS + json.dumps(self.settings) + "\n"
        with written_whole(self.path) as scratch:
            scratch.write_text(head + self.frame.to_csv(index=False), encoding="utf-8")

    def _read(self) -> pd.DataFrame:
        text = self.path.read_text(encoding="utf-8")
        head = next((line for line in text.splitlines() if line.startswith(SETTINGS)), None)
        if head is None:
            raise ValueError(f"out is {str(self.path)!r}; accepted: a new file, or one that this command wrote")
        found = json.loads(head.removeprefix(SETTINGS))
        for name, value in self.settings.items():
            if found.get(name) != value:
                raise ValueError(
                    f"out is {str(self.path)!r}, measured with {name} {found.get(name)!r}; accepted: a new file, or "
                    f"one measured with {value!r}"
                )
        cut = f"out is {str(self.path)!r}, which is cut off; accepted: a whole file (remove its last line)"
        try:
            # Text as it stands: numbers stay as they were written.
            frame = pd.read_csv(io.StringIO(text), comment="#", dtype=object, keep_default_na=False)
        except ValueError:
            raise ValueError(cut) from None
        if not text.endswith("\n") or list(frame.columns) != list(self.columns):
            raise ValueError(cut)
        return frame


def _rounded(value: object) -> object:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
