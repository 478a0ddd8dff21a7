"""Speed, beside what ships today."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from kvlab.cli.app import JsonOption, app

bench = typer.Typer(help="Measure speed, beside what ships today.", rich_markup_mode=None)
app.add_typer(bench, name="bench")


@bench.command(name="kernels")
def bench_kernels_command(
    quick: Annotated[bool, typer.Option("--quick", help="One shape and fewer batches and contexts.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the whole table to this CSV file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Time decode attention, the store and prefill on this GPU, beside vLLM's kernels and a plain copy."""
    from kvlab.bench import kernels
    from kvlab.serving import stock_kernels as stock
    from kvlab.serving.flash import flash_attention_3

    if out is not None and (out.is_dir() or not os.access(out.parent, os.W_OK)):
        raise ValueError(f"out is {str(out)!r}; accepted: a file in a folder that can be written")
    command = "kvlab bench kernels" + (" --quick" if quick else "")
    table, notes = kernels.bench_kernels(
        stock.DECODE, stock.STORE, stock.PREFILL, flash=flash_attention_3(), quick=quick, command=command
    )
    if out is not None:
        kernels.write_table(table, notes, out)
    if as_json:
        typer.echo(json.dumps({"rows": json.loads(table.to_json(orient="records")), "notes": notes}))
    else:
        typer.echo(kernels.as_text(table, notes))
