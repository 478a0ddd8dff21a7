"""Every measurement of one or several captures at once: the tables behind ``kvlab measure``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pandas as pd

from kvlab.measure.attention import STORED, Stored, attention_error_table
from kvlab.measure.outliers import outlier_table
from kvlab.recording import Capture
from kvlab.schemes import Scheme


def measure_captures(
    captures: Mapping[str, Capture],
    schemes: Iterable[str | Scheme],
    *,
    stored: Iterable[Stored] = STORED,
    progress: bool = False,
) -> dict[str, pd.DataFrame]:
    """Outlier ratios and attention-output errors of captures of one model on several texts.

    Parameters
    ----------
    captures
        Name of the text → its capture.
    schemes
        Names or `Scheme` objects.
    stored
        Which of ``"K"``, ``"V"``, ``"KV"`` to store.
    progress
        Show progress bars on standard error.

    Returns
    -------
    dict
        ``"outliers"`` and ``"attention_error"``: the tables of `outlier_table` and
        `attention_error_table` with a first column ``text``.

    Raises
    ------
    ValueError
        The captures are of different models.
    """
    schemes, stored = list(schemes), list(stored)
    models = {capture.model_name for capture in captures.values()}
    if len(models) > 1:
        raise ValueError(f"captures are of {', '.join(sorted(models))}; accepted: captures of one model")
    tables: dict[str, list[pd.DataFrame]] = {"outliers": [], "attention_error": []}
    for name, capture in captures.items():
        errors = attention_error_table(capture, schemes, stored=stored, progress=progress)
        for kind, table in {"outliers": outlier_table(capture), "attention_error": errors}.items():
            table.insert(0, "text", name)
            tables[kind].append(table)
    return {kind: pd.concat(parts, ignore_index=True) for kind, parts in tables.items()}


def over_texts(table: pd.DataFrame, value: str, by: list[str]) -> pd.DataFrame:
    """Mean of ``value`` over layers per text, then mean and standard deviation over texts.

    Parameters
    ----------
    table
        One of `measure_captures`.
    value
        The column to average.
    by
        Columns that tell the rows of the result apart.

    Returns
    -------
    pandas.DataFrame
        Columns ``by``, ``mean``, ``spread`` (standard deviation over texts; NaN for one text), ``texts``.
    """
    per_text = table.groupby([*by, "text"], sort=False)[value].mean()
    grouped = per_text.groupby(by, sort=False).agg(["mean", "std", "count"])
    return grouped.rename(columns={"std": "spread", "count": "texts"}).reset_index()
