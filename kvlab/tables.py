"""The project's own tables: what the write-up published and what this project measured."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

WRITE_UP = "“Serving Kolibri-1 with a 4-bit KV cache” (2026)"


def data_folder() -> Path:
    """Folder of the tables: inside the installed package, or ``data/`` of a source checkout."""
    package = Path(__file__).parent
    installed = package / "_data"
    return installed if installed.is_dir() else package.parent / "data"


def published(name: str) -> pd.DataFrame:
    """Read one of the write-up's tables, as published.

    Raises
    ------
    ValueError
        There is no such table; the message lists those there are.
    """
    return _read("published", name)


def measured(name: str) -> pd.DataFrame:
    """Read one of this project's measurements (machine, versions, date and command are in its columns).

    Raises
    ------
    ValueError
        There is no such table; the message lists those there are.
    """
    return _read("measured", name)


def _read(kind: str, name: str) -> pd.DataFrame:
    folder = data_folder() / kind
    path = folder / f"{name}.csv"
    if not path.is_file():
        names = ", ".join(sorted(file.stem for file in folder.glob("*.csv"))) or "none"
        raise ValueError(f"table is {name!r}; accepted ({kind}): {names}")
    return pd.read_csv(path, comment="#")
