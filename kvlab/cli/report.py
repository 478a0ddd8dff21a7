"""One page of a set of measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvlab.cli.app import app


@app.command(name="report")
def report_command(
    sources: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FOLDER or FILE]...",
            help="What kvlab wrote: folders of figures and tables, CSV, JSON, Markdown, SVG, PNG. Default: figures.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The page.")] = Path("report.html"),
) -> None:
    """Put measurements on one HTML page: figures, tables and provenance, in a file that needs no other."""
    from kvlab.report import write_report

    sections = write_report(sources or [Path("figures")], out)
    typer.echo(f"{len(sections)} sections in {out}")
