"""What the command line does with captures: measure, calibrate, and say it to people or as JSON."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
import torch

from kvlab.calibrate import Calibration, calibrate, check_names
from kvlab.capture_files import StoredCapture, open_capture
from kvlab.capture_job import choose_device
from kvlab.error_table import fill_error_table
from kvlab.measure import by_text, layers_lowered_by_folding, measure_captures, outlier_table, over_texts
from kvlab.schemes import get_schemes

SCHEMES = ("fp8", "int4", "hadamard-int4", "hadamard-int4-with-gain", "int4-per-token-head", "turboquant-4bit")


def open_captures(folders: Sequence[Path], device: torch.device | str = "cpu") -> dict[str, StoredCapture]:
    """Open captures by folder name, their tensors bound for ``device``.

    Raises
    ------
    ValueError
        A folder is no finished capture, two have one name, or two captures are of different models.
    """
    captures = {folder.resolve().name: open_capture(folder, device) for folder in folders}
    if len(captures) < len(folders):
        raise ValueError(f"captures are {', '.join(map(str, folders))}; accepted: folders of different names")
    for field, meaning in {
        "config_hash": "architectures",
        "revision": "revisions of a model",
        "model": "names",
    }.items():
        found = {getattr(capture.manifest, field) for capture in captures.values()}
        if len(found) > 1:
            raise ValueError(f"captures are of {len(found)} {meaning}; accepted: captures of one model")
    ranges = {(capture.manifest.text_hash, capture.manifest.first_token) for capture in captures.values()}
    if len(ranges) < len(captures):
        raise ValueError(f"captures {', '.join(captures)} have a text twice; accepted: captures of different texts")
    return captures


def measure(
    folders: Sequence[Path],
    schemes: Sequence[str] | None,
    calibrations: Sequence[Path],
    device: str | None,
    *,
    exact_first: int = 0,
    exact_recent: int = 0,
    out: Path | None = None,
    command: str = "",
) -> dict[str, pd.DataFrame]:
    """Tables of `measure_captures` for captures on disk, calibrations measured beside the schemes.

    Parameters
    ----------
    folders
        Of the captures.
    schemes
        Names; None or none is `SCHEMES`.
    calibrations
        Files, each measured under its name without the ending.
    device
        ``cuda`` where there is one, else ``cpu``.
    exact_first, exact_recent
        Tokens that are not stored, as in `measure_captures`.
    out
        A CSV file to which errors are written capture by capture (`fill_error_table`); what it has is not measured
        again.
    command
        Recorded there.

    Raises
    ------
    ValueError
        A capture, scheme, calibration or table's file that is not accepted, or two schemes of one name.
    """
    captures = open_captures(folders, choose_device(device))
    named = get_schemes(schemes or SCHEMES)
    check_names(calibrations, [scheme.name for scheme in named])
    chosen = [*named, *(_load(path, captures).scheme(path.stem) for path in calibrations)]
    exact = {"exact_first": exact_first, "exact_recent": exact_recent}
    if out is None:
        return measure_captures(captures, chosen, **exact, progress=True)
    hashes = {path.stem: hashlib.sha256(path.read_bytes()).hexdigest() for path in calibrations}
    errors = fill_error_table(out, captures, chosen, hashes, **exact, command=command, progress=True)
    return {"outliers": by_text(captures, outlier_table), "attention_error": errors}


def _load(path: Path, captures: Mapping[str, StoredCapture]) -> Calibration:
    """Load a calibration; refuse one of another model or revision, or that has seen a text that it is measured on."""
    manifest = next(iter(captures.values())).manifest
    loaded = Calibration.load(path, config_hash=manifest.config_hash)
    loaded.check_applies(manifest.config_hash, manifest.layers, manifest.num_kv_heads, manifest.head_dim)
    seen = {"calibrated on": loaded.texts["captures"], "decided by": loaded.texts["holdout"]}
    for name, capture in captures.items():
        for role, entries in seen.items():
            if any(capture.manifest.text_hash == text for text, _ in entries):
                raise ValueError(f"capture {name} is of a text that {path} was {role}; accepted: another text")
            if any(capture.manifest.revision != revision for _, revision in entries):
                raise ValueError(f"capture {name} is of another revision of the model than {path}; accepted: the same")
    return loaded


def as_document(tables: Mapping[str, pd.DataFrame]) -> dict[str, object]:
    """Return the tables as JSON rows, with the figures over texts that people compare."""
    every = {**tables, **_summaries(tables)}
    # JSON has no NaN, which a spread over one text is.
    return {name: json.loads(table.to_json(orient="records", double_precision=15)) for name, table in every.items()}


def as_text(tables: Mapping[str, pd.DataFrame]) -> str:
    """Return what people read: means over layers and texts, the spread over texts, where folding helps."""
    summaries = _summaries(tables)
    outliers = summaries["outliers_over_texts"].to_string(index=False, float_format="{:.2f}".format, na_rep="–")
    errors = summaries["errors_over_texts"].pivot(index="scheme", columns="stored", values="mean")
    lines = [
        "Outlier ratio, mean over layers:",
        outliers,
        "",
        "Attention-output error, mean over layers:",
        errors.sort_values(errors.columns[0]).to_string(float_format="{:.2%}".format),
    ]
    per_layer = tables["outliers"].groupby(["layer", "form"], sort=False)["ratio"].mean().reset_index()
    lowered, layers = layers_lowered_by_folding(per_layer)
    if layers:
        lines += ["", f"Without the QK-norm gain the ratio is lower in {lowered} of {layers} layers."]
    return "\n".join(lines)


def _summaries(tables: Mapping[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    return {
        "outliers_over_texts": over_texts(tables["outliers"], "ratio", ["form"]),
        "errors_over_texts": over_texts(tables["attention_error"], "error", ["scheme", "stored", "bits"]),
    }


def calibrate_captures(
    folders: Sequence[Path],
    holdout: Sequence[Path],
    out: Path,
    scheme: str,
    seeds: int,
    tokens: int | None,
    finder: str | None,
    device: str | None,
    *,
    values: bool,
) -> dict[str, object]:
    """Calibrate on captures, write the file and return its manifest.

    Raises
    ------
    ValueError
        A capture or scheme that is not accepted, a text both calibrated and held out, a file that cannot be written.
    """
    if out.is_dir() or not out.parent.is_dir() or not os.access(out.parent, os.W_OK | os.X_OK):
        raise ValueError(f"out is {str(out)!r}; accepted: a file in a folder that exists and can be written")
    calibration = calibrate(
        open_captures(folders).values(),
        open_captures(holdout).values() if holdout else None,
        scheme=scheme,
        seeds=seeds,
        tokens=tokens,
        finder=finder,
        values=values,
        device=choose_device(device),
        progress=True,
    )
    calibration.save(out)
    return calibration.manifest


def calibration_as_text(manifest: Mapping[str, dict], out: Path) -> str:
    """Return what a calibration gained, layer by layer."""
    lines = []
    for layer, entry in manifest["layers"].items():
        gained = f"keys {entry['error_before']:.2%} → {entry['error_after']:.2%}"
        if "value_error_after" in entry:
            gained += f", of values {entry['value_error_before']:.2%} → {entry['value_error_after']:.2%}"
        lines.append(f"layer {layer:>3}: attention-output error of {gained}")
    return "\n".join([*lines, f"written to {out}"])
