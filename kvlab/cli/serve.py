"""The server."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from kvlab.cli.app import app


@app.command(name="serve", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve_command(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A checkpoint folder or a hub name.")],
    scheme: Annotated[
        str | None,
        typer.Option(
            help="hadamard-int4 (the default), hadamard-int4-refit, hadamard-int4-refit-kv, int4, calibrated, or "
            "stock's: fp8, bf16."
        ),
    ] = None,
    calibration: Annotated[Path | None, typer.Option(help="A calibration file, served as 'calibrated'.")] = None,
    rotation_seed: Annotated[
        int | None, typer.Option(min=0, help="Of the rotation of keys; default: the library's.")
    ] = None,
    host: Annotated[str, typer.Option(help="Where it listens; the default is reached from this machine only.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=1, max=65_535, help="Where it listens.")] = 8000,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command and do not run it.")] = False,
) -> None:
    """Serve Kolibri-1 in vLLM; every option that is not listed here is handed to vLLM, after the model."""
    from kvlab.serving import server

    command = server.serve_command(
        model,
        scheme=scheme,
        calibration=calibration,
        rotation_seed=rotation_seed,
        host=host,
        port=port,
        arguments=context.args,
    )
    if dry_run:
        typer.echo(shlex.join(command))
        return
    program = server.runnable(command, os.environ)
    typer.echo(shlex.join(command), err=True)
    # In the place of this process: signals and the exit code are the server's own.
    os.execv(program[0], program)
