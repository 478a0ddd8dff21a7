"""The main job: measure the models that come with kvlab and draw every figure, with its numbers."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pandas as pd
import torch
from matplotlib.figure import Figure
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvlab import measure, plots, provenance
from kvlab.capture_files import StoredCapture, describe, open_capture
from kvlab.models.default import default_text, text_hash, tokenize
from kvlab.recording import Capture, capture
from kvlab.standing_figures import draw_standing, standing_tables
from kvlab.subjects import DEFAULT, SUBJECTS, Study, Subject
from kvlab.summary import summarise
from kvlab.tables import WRITE_UP, published

SCHEMES = (
    "fp8",
    "fp8-per-token-head",
    "int4",
    "hadamard-int4",
    "int4-per-token-head",
    "turboquant-4bit",
    "kivi-int4",
    "nvfp4",
    "mxfp4",
)
LOSS_SCHEMES = ("fp8", "int4", "hadamard-int4", "int4-per-token-head", "turboquant-4bit", "kivi-int4", "nvfp4")
QUICK_SCHEMES = (
    "fp8",
    "int4",
    "hadamard-int4",
    "nvfp4",
    "kivi-int4",
    "turboquant-4bit",
    "int4-per-token-head",
)
QUICK_LOSS_SCHEMES = ("fp8", "int4", "hadamard-int4")

Tables = dict[str, pd.DataFrame]


@dataclass(frozen=True)
class Settings:
    """How much is measured.

    Attributes
    ----------
    tokens
        Context of the capture.
    num_queries
        Query positions for the attention error.
    loss_tokens
        Tokens of the text whose loss is measured.
    schemes, loss_schemes
        Compared in attention error and in loss.
    """

    tokens: int = 8192
    num_queries: int = 128
    loss_tokens: int = 2048
    schemes: tuple[str, ...] = SCHEMES
    loss_schemes: tuple[str, ...] = LOSS_SCHEMES


@dataclass(frozen=True)
class Results:
    """All that one run of the main job has measured.

    Attributes
    ----------
    studies
        A model each.
    standing
        From `kvlab.standing_figures.standing_tables`, or nothing.
    """

    studies: list[Study]
    standing: Tables = field(default_factory=dict)

    def tables(self) -> Tables:
        """Return every table by its figure's name."""
        of_models = {f"{study.prefix}{name}": table for study in self.studies for name, table in study.tables.items()}
        return of_models | self.standing

    def draw(self) -> dict[str, Figure]:
        """Draw every figure."""
        of_models = {f"{study.prefix}{name}": fig for study in self.studies for name, fig in _draw(study).items()}
        return of_models | (draw_standing(self.standing) if self.standing else {})


FULL = Settings()
QUICK = Settings(tokens=1024, num_queries=64, loss_tokens=512, schemes=QUICK_SCHEMES, loss_schemes=QUICK_LOSS_SCHEMES)


def settings() -> Settings:
    """Return `FULL`, or `QUICK` where the environment variable ``KVLAB_QUICK`` is set (notebooks in CI)."""
    return QUICK if os.environ.get("KVLAB_QUICK") else FULL


def capture_default(chosen: Settings = FULL, *, progress: bool = False) -> Capture:
    """Run the embedded default model over the embedded text and return what its attention saw.

    Where the environment variable ``KVLAB_CAPTURE`` names a capture on disk, that one is opened instead, so
    that notebooks which need no more than a capture run on it.
    """
    if folder := os.environ.get("KVLAB_CAPTURE"):
        return open_capture(folder)
    model, tokenizer = DEFAULT.load()
    ids = tokenize(tokenizer, default_text(), chosen.tokens)
    return _capture(model, ids, chosen, progress=progress)


def _capture(model: PreTrainedModel, ids: torch.Tensor, chosen: Settings, *, progress: bool) -> Capture:
    with tqdm(total=1, desc=f"capturing {chosen.tokens:,} tokens", unit="pass", disable=not progress) as bar:
        with capture(model, num_queries=chosen.num_queries) as captured, torch.no_grad():
            model(ids, use_cache=False, logits_to_keep=1)
        bar.update()
    return captured


def source(tokens: int, subject: Subject = DEFAULT) -> str:
    """Caption of a figure measured on the embedded text: model, text, machine, versions, date."""
    measured = (
        f"Measured: {subject.model} ({subject.details}) in float32, {tokens:,} tokens of Python's help topics "
        f"(SHA-256 {text_hash(default_text())[:12]}); {provenance.machine()}; {provenance.versions()}; "
        f"{provenance.today()}."
    )
    return f"{measured} {subject.note}".strip()


def source_of(captured: Capture) -> str:
    """Caption of a figure drawn from `capture_default`: the embedded default, or what ``KVLAB_CAPTURE`` names."""
    if isinstance(captured, StoredCapture):
        return describe({Path(os.environ["KVLAB_CAPTURE"]).name: captured})
    return source(captured.tokens)


def largest_outlier(captured: Capture) -> tuple[int, int]:
    """Layer and KV head whose raw keys have the largest outlier ratio: the key that `rounding` shows is theirs."""
    ratios = {
        (layer.index, head): measure.outlier_ratio(layer.k[0, head])
        for layer in captured.layers.values()
        for head in range(layer.k.shape[1])
    }
    return max(ratios, key=ratios.__getitem__)


def make_figures(out: Path, chosen: Settings = FULL, *, progress: bool = True) -> list[Path]:
    """Measure `SUBJECTS` and write every figure (PNG, SVG), its numbers (CSV) and ``summary.md``.

    Parameters
    ----------
    out
        Folder, created where missing. Files appear in it only once all of them are finished.
    chosen
        `FULL` or `QUICK`.
    progress
        Show progress bars on standard error.

    Returns
    -------
    list of pathlib.Path
        The files written.

    Raises
    ------
    ValueError
        ``out`` cannot be written, or the testbed is damaged.
    ModuleNotFoundError
        The embedded default model is not installed.
    FileNotFoundError
        The installation lacks the testbed.
    """

    def measured() -> Results:
        # All that is read comes before what is measured, which takes minutes.
        loaded = [(subject, *subject.load()) for subject in SUBJECTS]
        standing = standing_tables()
        return Results([_study(*one, chosen, progress=progress) for one in loaded], standing)

    return _write(out, measured, progress=progress)


def _study(
    subject: Subject, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, chosen: Settings, *, progress: bool
) -> Study:
    if subject.longest:
        chosen = replace(chosen, tokens=min(chosen.tokens, subject.longest))
    ids = tokenize(tokenizer, default_text(), chosen.tokens)
    captured = _capture(model, ids, chosen, progress=progress)
    tables = _analyse({"": captured}, chosen.schemes, progress=progress)
    # Hundreds of megabytes, which the loss does not need.
    del captured
    loss_ids = ids[:, : chosen.loss_tokens]
    tables["loss"] = measure.loss_table(model, loss_ids, chosen.loss_schemes, progress=progress)
    return Study(tables, source(chosen.tokens, subject), subject.model, subject.prefix)


def make_capture_figures(
    out: Path, captures: Mapping[str, Capture], where: str, chosen: Settings = FULL, *, progress: bool = True
) -> list[Path]:
    """Draw the analysis figures of captures of one model, means over their texts.

    Parameters
    ----------
    out
        As in `make_figures`.
    captures
        Name of the text → its capture; the key of the rounding figure is the first one's.
    where
        Model, texts, machine and date, for the captions.
    chosen
        Which schemes.
    progress
        Show progress bars on standard error.

    Returns
    -------
    list of pathlib.Path
        The files written.

    Raises
    ------
    ValueError
        ``out`` cannot be written, or the captures are of different models.
    """

    def measured() -> Results:
        return Results([Study(_analyse(captures, chosen.schemes, progress=progress), where)])

    return _write(out, measured, progress=progress)


def _analyse(captures: Mapping[str, Capture], schemes: Iterable[str], *, progress: bool) -> Tables:
    first = next(iter(captures.values()))
    layer, head = largest_outlier(first)
    measured = measure.measure_captures(captures, schemes, progress=progress)
    return {
        "rounding": measure.rounding_table(first.layers[layer].k[0, head], layer=layer).assign(layer=layer, head=head),
        "outliers": _over_texts(measured["outliers"], "ratio"),
        "attention_error": _over_texts(measured["attention_error"], "error"),
    }


def _over_texts(table: pd.DataFrame, value: str) -> pd.DataFrame:
    """Average ``value`` over texts, row by row."""
    by = [column for column in table.columns if column not in ("text", value)]
    return table.groupby(by, sort=False)[value].mean().reset_index()


def _write(out: Path, measured: Callable[[], Results], *, progress: bool) -> list[Path]:
    """Measure, draw, write all of it beside ``out``'s files and move it in at the end."""
    scratch = _scratch_folder(out)
    try:
        results = measured()
        for name, table in results.tables().items():
            table.to_csv(scratch / f"{name}.csv", index=False, float_format="%.6g")
        for name, figure in tqdm(results.draw().items(), desc="drawing", unit="figure", disable=not progress):
            plots.save(figure, scratch / name)
        summary = summarise(results.studies, results.standing)
        (scratch / "summary.md").write_text(summary, encoding="utf-8")
        made = sorted(scratch.iterdir())
        for path in made:
            if (out / path.name).is_dir():
                raise ValueError(f"out has a folder {path.name!r} where a file goes; accepted: a folder without it")
        return [path.replace(out / path.name) for path in made]
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        with contextlib.suppress(OSError):
            # Only an empty folder goes: nothing was written.
            out.rmdir()


def _scratch_folder(out: Path) -> Path:
    try:
        out.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=".figures-", dir=out))
    except OSError as error:
        raise ValueError(
            f"out is {str(out)!r}, which cannot be written ({error.strerror}); accepted: a folder"
        ) from None


def _draw(study: Study) -> dict[str, Figure]:
    """Draw the figures of one model's tables, by the tables' names."""
    tables, where = study.tables, study.where
    key = tables["rounding"].iloc[0]
    of_model = f", {study.model}" if study.model else ""
    figures = {
        "rounding": plots.plot_rounding(
            tables["rounding"],
            title=f"One key in 4 bits: layer {key['layer']}, KV head {key['head']}, token {key['token']:,}{of_model}",
            source=f"The layer and head with the largest outlier ratio, its key of median error. {where}",
        ),
        "outliers": plots.plot_outliers(
            tables["outliers"],
            published("outliers"),
            title=f"Channel outliers of the keys, raw and rotated{of_model}",
            source=f"{where} Diamonds: {WRITE_UP}.",
        ),
        "attention_error": plots.plot_attention_error(
            tables["attention_error"],
            published("attention_error"),
            title=f"How far a stored cache moves the attention output{of_model}",
            source=f"Positions in the last quarter of the context. {where}",
        ),
    }
    if "loss" in tables:
        tokens = tables["loss"]["tokens"].iloc[0]
        figures["loss"] = plots.plot_loss(
            tables["loss"],
            title=f"What each stored cache costs in loss{of_model}",
            source=f"The first {tokens:,} tokens only. {where}",
        )
    return figures
