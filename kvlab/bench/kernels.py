"""The benchmark of the kernels: every entrant in every case, in one run, beside what its bytes take at copy speed."""

from __future__ import annotations

import contextlib
import importlib.metadata
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import torch
from tqdm import tqdm

from kvlab import provenance
from kvlab.bench import ours
from kvlab.bench.cases import (
    KIB,
    SHAPES,
    DecodeCase,
    Entry,
    StoreCase,
    decode_cases,
    prefill_cases,
    store_cases,
)
from kvlab.bench.timing import CudaClock
from kvlab.kernels.folding import REFIT
from kvlab.paths import written_whole

if TYPE_CHECKING:
    from kvlab.kernels.prefill import Flash

OURS, REFITTED, STOCK = "hadamard-int4", "hadamard-int4-refit", "fp8"
SUSTAINED = tuple(DecodeCase(*shape, (64 * KIB,) * 64) for shape in SHAPES)
"""The load under which the GPU meets its power limit."""

HEADER = (
    "# Times of the kernels on one GPU in one run, medians per launch: time_us under CUDA graph replay, "
    "time_single_us alone after L2 was flushed\n"
    "# (prefill, which no graph captures: both are that one).\n"
    "# step_us: once per step for all layers. floor_us: the scheme's own bytes at the speed of a copy.\n"
)

CASE_COLUMNS = ("num_heads", "num_kv_heads", "batch", "context", "lengths", "q_len", "tokens")
TIMES = ("time_us", "time_single_us", "step_us", "bytes", "gb_per_s", "floor_us", "speedup_over_fp8", "error")
COLUMNS = ("kernel", "scheme", *CASE_COLUMNS, *TIMES)
WHOLE_NUMBERS = ["bytes", *(column for column in CASE_COLUMNS if column != "lengths")]

Case = DecodeCase | StoreCase
Entrant = Callable[[Case, torch.device], Entry]
Rows = list[dict[str, object]]


class KernelBench:
    """Times entrants with one clock and keeps the rows and what could not be measured.

    Parameters
    ----------
    clock
        `kvlab.bench.timing.CudaClock`, or another with its methods.
    """

    def __init__(self, clock: CudaClock):
        self.clock = clock
        num_bytes, time_us = clock.copy_us()
        self.gb_per_s = num_bytes / time_us / 1e3
        self.rows: Rows = [
            {
                "kernel": "copy",
                "scheme": "device to device",
                "time_single_us": time_us,
                "bytes": num_bytes,
                "gb_per_s": self.gb_per_s,
            }
        ]
        self.notes: list[str] = []

    def run(
        self, kernel: str, entrants: Mapping[str, Entrant], cases: Iterable[Case], *, progress: bool = True
    ) -> None:
        """Time every entrant in every case.

        Parameters
        ----------
        kernel
            ``"decode"``, ``"store"`` or ``"prefill"``.
        entrants
            Scheme → entrant. `OURS` has to run; another that fails is named in ``notes``, and one whose package is
            missing is left out from then on.
        cases
            What to run.
        progress
            Show a progress bar on standard error.
        """
        missing: set[str] = set()
        for case in tqdm(list(cases), desc=kernel, unit="case", disable=not progress):
            rows = []
            for scheme in (name for name in entrants if name not in missing):
                try:
                    row = self._measure(entrants[scheme](case, self.clock.device), graph=kernel != "prefill")
                except Exception as error:
                    if scheme == OURS:
                        raise
                    if isinstance(error, ImportError):
                        missing.add(scheme)
                    self._note(f"{kernel}, {scheme}: not measured: {_one_line(error)}")
                else:
                    rows.append({"kernel": kernel, "scheme": scheme, **case.columns(), **row})
                torch.cuda.empty_cache()
            stock = next((row["time_us"] for row in rows if row["scheme"] == STOCK), float("nan"))
            self.rows += [{**row, "speedup_over_fp8": stock / row["time_us"]} for row in rows]

    def run_sustained(self, entrants: Mapping[str, Entrant], cases: Iterable[DecodeCase] = SUSTAINED) -> None:
        """Run each case back to back for a second: what a launch takes at its beginning and at its end."""
        for case in cases:
            for scheme, entrant in entrants.items():
                try:
                    entry = entrant(case, self.clock.device)
                except ImportError as error:
                    self._note(f"decode, sustained, {scheme}: not measured: {_one_line(error)}")
                    continue
                times = self.clock.sustained_us(entry.calls, self.clock.single_us(entry.calls))
                for window, time_us in zip(("first 0.2 s", "last 0.2 s"), times, strict=True):
                    row = {"kernel": "decode, sustained", "scheme": scheme, **case.columns(), "lengths": window}
                    self.rows.append({**row, **self._rate(entry.num_bytes, time_us)})

    def table(self, command: str) -> pd.DataFrame:
        """Return the rows with machine, versions, date and the ``command`` that made them."""
        table = pd.DataFrame(self.rows, columns=COLUMNS)
        table[WHOLE_NUMBERS] = table[WHOLE_NUMBERS].astype("Int64")
        return table.assign(
            machine=provenance.machine(), versions=_versions(), date=provenance.today(), command=command
        )

    def _measure(self, entry: Entry, *, graph: bool) -> dict[str, object]:
        error = entry.error() if entry.error else None
        single_us = self.clock.single_us(entry.calls)
        return {
            "time_single_us": single_us,
            **self._rate(entry.num_bytes, self.clock.graph_us(entry.calls, single_us) if graph else single_us),
            "step_us": self.clock.single_us([entry.once_per_step]) if entry.once_per_step else None,
            "error": error,
        }

    def _rate(self, num_bytes: int | None, time_us: float) -> dict[str, object]:
        if num_bytes is None:
            return {"time_us": time_us}
        # Bytes per microsecond are MB per second.
        rate = num_bytes / time_us / 1e3
        return {"time_us": time_us, "bytes": num_bytes, "gb_per_s": rate, "floor_us": num_bytes / self.gb_per_s / 1e3}

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
            print(f"kvlab: {text}", file=sys.stderr)


def bench_kernels(
    decode_competitors: Mapping[str, Entrant],
    store_competitors: Mapping[str, Entrant],
    prefill_competitors: Mapping[str, Entrant],
    *,
    flash: Flash | None = None,
    quick: bool = False,
    progress: bool = True,
    command: str = "",
) -> tuple[pd.DataFrame, list[str]]:
    """Time this library's kernels and their competitors on the GPU at hand.

    Parameters
    ----------
    decode_competitors, store_competitors, prefill_competitors
        Scheme → entrant, as ``kvlab.serving.stock_kernels`` has them.
    flash
        The attention inside our prefill; None is torch's own.
    quick
        Fewer cases.
    progress
        Show progress bars on standard error.
    command
        What the table names as its command.

    Returns
    -------
    tuple of pandas.DataFrame and list of str
        One row per kernel, scheme and case; and what could not be measured.

    Raises
    ------
    ValueError
        There is no CUDA device.
    """
    bench = KernelBench(CudaClock())
    bench.run("decode", {OURS: ours.decode, **decode_competitors}, decode_cases(quick=quick), progress=progress)
    store = {OURS: ours.store, REFITTED: partial(ours.store, quantizer=REFIT), **store_competitors}
    bench.run("store", store, store_cases(quick=quick), progress=progress)
    prefill = {OURS: partial(ours.prefill, flash=flash), **prefill_competitors}
    bench.run("prefill", prefill, prefill_cases(quick=quick), progress=progress)
    stock = {name: entrant for name, entrant in decode_competitors.items() if name == STOCK}
    bench.run_sustained({OURS: ours.decode, **stock}, SUSTAINED[:1] if quick else SUSTAINED)
    return bench.table(command), bench.notes


def write_table(table: pd.DataFrame, notes: Iterable[str], path: Path) -> None:
    """Write a table as CSV, what its columns mean and the notes above it as comments.

    Raises
    ------
    OSError
        ``path`` cannot be written.
    """
    comments = HEADER + "".join(f"# {note}\n" for note in notes)
    with written_whole(path) as scratch:
        scratch.write_text(comments + table.to_csv(index=False, float_format="%.5g"), encoding="utf-8")


def as_text(table: pd.DataFrame, notes: Iterable[str]) -> str:
    """Lay the times out for a person: one line per case, one column per scheme, microseconds under graph replay."""
    copy = table[table["kernel"] == "copy"].iloc[0]
    lines = [f"copy from device to device: {copy['gb_per_s']:,.0f} GB/s, read and written"]
    for kernel, rows in table[table["kernel"] != "copy"].groupby("kernel", sort=False):
        by = ["num_heads", "num_kv_heads", "batch", "context", "lengths", "q_len"]
        by = ["num_heads", "num_kv_heads", "tokens"] if kernel == "store" else by
        times = rows.pivot_table(index=by, columns="scheme", values="time_us", sort=False)
        mine = rows[rows["scheme"] == OURS].set_index(by)
        extra = mine[[name for name in ("floor_us", "speedup_over_fp8", "error") if mine[name].notna().any()]]
        extra = extra.rename(columns=lambda name: f"{OURS}: {name}")
        joined = times.join(extra).reset_index()
        lines += ["", f"{kernel}, µs per launch", joined.to_string(index=False, float_format="%.4g")]
    return "\n".join([*lines, *notes])


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _versions() -> str:
    versions = [provenance.versions()]
    for package in ("triton", "vllm"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{package} {importlib.metadata.version(package)}")
    return ", ".join(versions)
