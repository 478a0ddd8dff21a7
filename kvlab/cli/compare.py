"""Two set-ups, compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kvlab.cli.app import JsonOption, app


@app.command(name="compare")
def compare_command(
    a: Annotated[str, typer.Argument(help="Samples of the one set-up: a folder of kvlab eval, or a file in it.")],
    b: Annotated[str, typer.Argument(help="Samples of the other; differences are b − a.")],
    detect: Annotated[
        float | None,
        typer.Option(help="Points for which to say how many prompts detect them; default: the difference observed."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the bootstrap.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Compare two sets of logged samples of the same prompts: means, difference, interval, McNemar's test."""
    from kvlab import compare

    for name, text in {"a": a, "b": b}.items():
        # A path of no characters would be the working directory.
        if not text:
            raise ValueError(f"{name} is ''; accepted: a file of samples, or a folder of kvlab eval")
    paths = Path(a), Path(b)
    difference = None if detect is None else compare.check_detect(detect, compare.POINTS)
    table = compare.compare(*paths, detect=difference, seed=seed)
    typer.echo(json.dumps(compare.as_document(table, *paths)) if as_json else compare.as_text(table, *paths))
