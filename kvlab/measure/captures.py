"""Every measurement of one or several captures at once: the tables behind ``kvlab measure``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

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
    exact_first: int = 0,
    exact_recent: int = 0,
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
    exact_first, exact_recent
        Tokens that are not stored, as in `attention_error_table`.
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
    exact = {"exact_first": exact_first, "exact_recent": exact_recent}
    errors = by_text(
        captures, lambda one: attention_error_table(one, schemes, stored=stored, **exact, progress=progress)
    )
    return {"outliers": by_text(captures, outlier_table), "attention_error": errors}


def by_text(captures: Mapping[str, Capture], measure: Callable[[Capture], pd.DataFrame]) -> pd.DataFrame:
    """Return the tables that ``measure`` gives of captures as one, with a first column ``text``.

    Parameters
    ----------
    captures
        Name of the text → its capture.
    measure
        From a capture to a table, as `outlier_table`.
    """
    tables = {name: measure(capture) for name, capture in captures.items()}
    return pd.concat(tables, names=["text"]).reset_index("text").reset_index(drop=True)


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
