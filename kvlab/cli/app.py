"""What every command hangs on."""

from __future__ import annotations

import os
import shlex
import sys
from typing import Annotated

import typer

import kvlab

app = typer.Typer(
    name="kvlab",
    help="Study, calibrate and serve a rotated 4-bit KV cache.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]


def typed_command() -> str:
    """Return the command as it was typed, for the record of what it writes."""
    return shlex.join(["kvlab", *sys.argv[1:]])


def _version(wanted: bool) -> None:  # noqa: FBT001 (typer's callback form)
    if wanted:
        typer.echo(f"kvlab {kvlab.__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    # Everything the commands need is on disk; a hub is asked only by commands that name a model there.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
