"""What the figures show, in numbers that a person reads first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from kvlab import measure
from kvlab.measure.outliers import layers_lowered_by_folding
from kvlab.subjects import Study
from kvlab.tables import WRITE_UP, published

STANDING = {
    "overview": "quality, memory and speed against stock on one page: published, computed, measured",
    "throughput": "decode throughput of the whole engine, measured",
    "step_model": "where a decode step's time goes, computed, beside measured steps",
    "kernels_decode": "decode attention, measured",
    "kernels_store": "from the projection to the cache, measured",
    "capacity_gain": "how many more sessions fit, computed and published",
    "ruler": "RULER by context length, published",
    "gpqa": "GPQA Diamond by run, published",
    "testbed_training": "how the testbed's training went, measured",
}
"""Figures that no model was run for here → what they show."""


def summarise(studies: Sequence[Study], standing: Mapping[str, pd.DataFrame]) -> str:
    """Return the numbers a reader asks for first, as Markdown.

    Parameters
    ----------
    studies
        The first in full, each other one in a short part.
    standing
        From `kvlab.standing_figures.standing_tables`, or nothing.
    """
    first, *others = studies
    lines = _first_lines(first.tables, first.where)
    for study in others:
        lines += _short_lines(study)
    if "capacity" in standing:
        lines += _capacity_lines(standing["capacity"])
    if shown := [f"| `{name}` | {shows} |" for name, shows in STANDING.items() if name in standing]:
        lines += ["", "## Elsewhere", "| figure | shows |", "|---|---|", *shown]
    return "\n".join(lines) + "\n"


def _first_lines(tables: Mapping[str, pd.DataFrame], where: str) -> list[str]:
    outliers = tables["outliers"].groupby("form")["ratio"].agg(["max", "mean"])
    rounding = tables["rounding"].groupby("state")["relative_error"].first()
    errors = tables["attention_error"]
    mean = errors.pivot_table(index="scheme", columns="stored", values="error")[list(measure.STORED)]
    theirs = published("attention_error").set_index("scheme")["error"]
    lines = [
        "# What these figures show",
        "",
        where,
        "",
        f"*Published* marks the write-up's figures for Kolibri-1 at 128k, {WRITE_UP}; all else is measured here, "
        "or computed where it says so.",
        "",
        "## One key in 4 bits (`rounding`)",
        f"Relative error {rounding['before rotation']:.1%} before the rotation, "
        f"{rounding['after rotation']:.1%} after.",
        "",
        "## Channel outliers (`outliers`)",
        "| keys | largest layer | mean over layers | published |",
        "|---|---|---|---|",
    ]
    bounds = published("outliers").set_index("keys")["max_ratio"]
    for form, row in outliers.reindex([form for form in measure.outliers.FORMS if form in outliers.index]).iterrows():
        bound = f"≤ {bounds[form]:g}" if form in bounds else "–"
        lines.append(f"| {form} | {row['max']:.2f} | {row['mean']:.2f} | {bound} |")
    lowered, layers = layers_lowered_by_folding(tables["outliers"])
    without = f"lower in {lowered} of {layers} layers" if layers else "not applicable: this model has no QK-norm"
    lines += [
        "",
        f"Without the QK-norm gain: {without} (published: 7 of 10).",
        "",
        "## Attention-output error (`attention_error`), mean over layers",
        "| scheme | bits | keys stored | values stored | both | published, keys |",
        "|---|---|---|---|---|---|",
    ]
    head_bits = errors[errors["stored"] == "KV"].groupby("scheme")["bits"].first()
    for name, row in mean.sort_values("K").iterrows():
        figure = f"{theirs[name]:.1%}" if name in theirs else "–"
        lines.append(
            f"| {name} | {head_bits[name]:.2f} | {row['K']:.2%} | {row['V']:.2%} | {row['KV']:.2%} | {figure} |"
        )
    lines += [
        "",
        "KIVI's keys share scales between 32 tokens and keep the most recent ones exact; all others stand alone.",
    ]
    if "loss" in tables:
        lines += _loss_lines(tables["loss"].set_index("scheme"))
    return lines


def _short_lines(study: Study) -> list[str]:
    """Return a table of errors and losses, and one line of outliers."""
    errors = study.tables["attention_error"].pivot_table(index="scheme", columns="stored", values="error")
    bits = study.tables["attention_error"].query("stored == 'KV'").groupby("scheme")["bits"].first()
    loss = study.tables["loss"].set_index("scheme")
    largest = study.tables["outliers"].groupby("form")["ratio"].max()
    lowered, layers = layers_lowered_by_folding(study.tables["outliers"])
    rounding = study.tables["rounding"].groupby("state")["relative_error"].first()
    lines = [
        "",
        f"## {study.model} (`{study.prefix}*`)",
        study.where,
        "",
        f"Outlier ratio of the worst layer: raw {largest['raw']:.2f}, rotated {largest['rotated']:.2f}; without the "
        f"QK-norm gain lower in {lowered} of {layers} layers. One key in 4 bits: relative error "
        f"{rounding['before rotation']:.1%} before the rotation, {rounding['after rotation']:.1%} after. "
        f"Loss over the first {loss['tokens'].iloc[0]:,} tokens: {loss.loc['exact', 'loss']:.4f} nats per token with "
        "an exact cache.",
        "",
        "| scheme | bits | keys stored | values stored | both | increase of the loss | ± (95%, over tokens) |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in errors.sort_values("K").iterrows():
        cost = "– | –"
        if name in loss.index:
            cost = f"{loss.loc[name, 'increase']:+.4f} | {1.96 * loss.loc[name, 'standard_error']:.4f}"
        lines.append(f"| {name} | {bits[name]:.2f} | {row['K']:.2%} | {row['V']:.2%} | {row['KV']:.2%} | {cost} |")
    return lines


def _loss_lines(loss: pd.DataFrame) -> list[str]:
    lines = [
        "",
        "## Loss (`loss`)",
        f"The first {loss['tokens'].iloc[0]:,} tokens. `exact` stores nothing: it is the model's own float32 cache.",
        "",
        "| scheme | bits | loss, nats per token | increase | ± (95%, over tokens) |",
        "|---|---|---|---|---|",
    ]
    for name, row in loss.iterrows():
        lines.append(
            f"| {name} | {row['bits']:.2f} | {row['loss']:.4f} | {row['increase']:+.4f} | "
            f"{1.96 * row['standard_error']:.4f} |"
        )
    return lines


def _capacity_lines(capacity: pd.DataFrame) -> list[str]:
    sizes = capacity.pivot(index="context", columns="scheme", values="bytes_per_session") / 1e9
    lines = [
        "",
        "## KV cache of a Kolibri-1 session (`capacity`), computed",
        "| context, tokens | stock (fp8), GB | rotated 4-bit (hadamard-int4), GB | ratio |",
        "|---|---|---|---|",
    ]
    for context, row in sizes.iterrows():
        stock, ours = row["fp8"], row["hadamard-int4"]
        lines.append(f"| {context:,} | {stock:.3f} | {ours:.3f} | {stock / ours:.2f} |")
    return lines
