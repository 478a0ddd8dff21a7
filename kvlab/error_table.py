"""The file of attention-output errors: filled capture by capture, continued where it stopped."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from kvlab import provenance
from kvlab.capture_files import Manifest, StoredCapture
from kvlab.measure import STORED, attention_error_table
from kvlab.point_table import PointTable
from kvlab.schemes import Scheme

TEXT = ("capture", "text_hash", "first_token", "tokens", "queries")
KEY = (*TEXT, "layer", "scheme", "calibration_hash", "stored", "exact_first", "exact_recent")
COLUMNS = (
    *(*TEXT, "layer", "scheme", "calibration_hash", "stored", "bits", "exact_first", "exact_recent", "error"),
    *("machine", "versions", "date", "command"),
)
NUMBERS = ("first_token", "tokens", "queries", "layer", "bits", "exact_first", "exact_recent", "error")
NOTES = (
    "Relative attention-output error of each layer, K, V or both stored. queries: positions in the last quarter of the",
    "tokens. bits: per number, of what is stored. exact_first, exact_recent: so many first tokens, and last ones that",
    "each query sees, are not stored; bits does not count them.",
    "text_hash, calibration_hash: the first digits of the SHA-256 of the text and of the calibration file.",
)
HASH_DIGITS = 12


def fill_error_table(
    out: Path,
    captures: Mapping[str, StoredCapture],
    schemes: Sequence[Scheme],
    calibration_hashes: Mapping[str, str],
    *,
    exact_first: int = 0,
    exact_recent: int = 0,
    command: str = "",
    progress: bool = False,
) -> pd.DataFrame:
    """Measure what a file of attention-output errors lacks, and write it there after every capture.

    Parameters
    ----------
    out
        A CSV file with the columns `COLUMNS`; one of the same model is continued. Rows of other captures, schemes or
        exact tokens stay in it.
    captures
        Name → capture, of one model.
    schemes
        What is measured.
    calibration_hashes
        Name of a scheme that a calibration file stands for → SHA-256 of the file, so that another one of this name is
        measured anew.
    exact_first, exact_recent
        Tokens that are not stored, as in `kvlab.measure.layer_errors`.
    command
        Recorded.
    progress
        Show progress bars on standard error.

    Returns
    -------
    pandas.DataFrame
        The rows that were asked for, in that order: ``text`` (the capture's name) and the columns of
        `kvlab.attention_error_table`.

    Raises
    ------
    ValueError
        ``out`` cannot be written, is another file, of another model or damaged; from `kvlab.attention_error_table`.
    """
    manifest = next(iter(captures.values())).manifest
    settings = {name: getattr(manifest, name) for name in ("model", "revision", "config_hash")}
    settings = {"measured": "attention_error"} | settings
    table = PointTable(out, columns=COLUMNS, key=KEY, numbers=NUMBERS, settings=settings, notes=NOTES, needed=NUMBERS)
    kept = {"exact_first": exact_first, "exact_recent": exact_recent}
    hashes = {scheme.name: calibration_hashes.get(scheme.name, "")[:HASH_DIGITS] for scheme in schemes}
    asked = []
    for name, capture in captures.items():
        text = _text(name, capture.manifest)
        rows = itertools.product(capture.manifest.layers, hashes, STORED)
        wanted = [
            {**text, **kept, "layer": layer, "scheme": scheme, "stored": stored, "calibration_hash": hashes[scheme]}
            for layer, scheme, stored in rows
        ]
        asked += wanted
        missing = {row["scheme"] for row in table.lacking(wanted)}
        if not missing:
            continue
        lacking = [scheme for scheme in schemes if scheme.name in missing]
        errors = attention_error_table(capture, lacking, **kept, progress=progress)
        origin = {"machine": provenance.machine(), "versions": provenance.versions(), "date": provenance.today()}
        rows = errors.assign(**text, **kept, calibration_hash=errors["scheme"].map(hashes), **origin, command=command)
        # Of a scheme some rows may be there: a line was taken out of the file.
        table.append(table.lacking(rows[list(COLUMNS)].to_dict("records")))
    found = dict(zip(_keys(table.frame), table.frame[["bits", "error"]].astype(float).to_numpy(), strict=True))
    asked = pd.DataFrame(asked)
    shown = asked[["capture", "layer", "scheme", "stored"]].rename(columns={"capture": "text"})
    shown[["bits", "error"]] = [found[key] for key in _keys(asked)]
    return shown


def _text(name: str, manifest: Manifest) -> dict[str, object]:
    """Return what the rows of a capture have in the columns `TEXT`."""
    cells = (name, manifest.text_hash[:HASH_DIGITS], manifest.first_token, manifest.tokens, manifest.num_queries)
    return dict(zip(TEXT, cells, strict=True))


def _keys(rows: pd.DataFrame) -> list[tuple[str, ...]]:
    """Return what names each row, as text, which is what a file has."""
    return list(rows[list(KEY)].astype(str).itertuples(index=False, name=None))
