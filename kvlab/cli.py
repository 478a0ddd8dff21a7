"""The command line: every command is a thin wrapper around a function of the library."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

import kvlab

app = typer.Typer(
    name="kvlab",
    help="Study and calibrate a rotated 4-bit KV cache.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

bench = typer.Typer(help="Measure speed, beside what ships today.", rich_markup_mode=None)
app.add_typer(bench, name="bench")

JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]


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


@app.command()
def figures(
    quick: Annotated[bool, typer.Option("--quick", help="1,024 tokens and fewer schemes, in under a minute.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for the figures, their numbers and summary.md.")] = Path("figures"),
    capture: Annotated[
        list[Path] | None, typer.Option(help="Draw from a capture on disk instead; may be repeated, one per text.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="For captures: cuda or cpu; default: cuda where there is one.")
    ] = None,
) -> None:
    """Measure the embedded default model (or captures) and draw every figure, with its numbers."""
    from kvlab import capture_files, measure_job
    from kvlab.capture_job import choose_device
    from kvlab.figures import FULL, QUICK, make_capture_figures, make_figures

    chosen = QUICK if quick else FULL
    if capture:
        captures = measure_job.open_captures(capture, choose_device(device))
        written = make_capture_figures(out, captures, capture_files.describe(captures), chosen)
    else:
        written = make_figures(out, chosen)
    typer.echo(f"{len(written)} files in {out}; start with {out / 'summary.md'}")


@app.command()
def schemes(
    head_dim: Annotated[int, typer.Option(help="Head size for the bits per number.", min=1)] = 128,
    as_json: JsonOption = False,
) -> None:
    """List every scheme with its bits per number, metadata included, and where it is defined."""
    from kvlab.schemes import StoredAs, get_scheme, list_schemes

    def bits(side: StoredAs) -> float | None:
        try:
            return side.bits_per_number(head_dim)
        except ValueError:
            return None

    rows = [
        {"scheme": name, "keys": bits(scheme.keys), "values": bits(scheme.values), "source": scheme.source}
        for name, scheme in ((name, get_scheme(name)) for name in list_schemes())
    ]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    width = max(len(row["scheme"]) for row in rows)
    for row in rows:
        keys, values = ("     –" if row[side] is None else f"{row[side]:6.3f}" for side in ("keys", "values"))
        typer.echo(f"{row['scheme']:{width}}  K {keys}  V {values}  {row['source']}".rstrip())


@app.command()
def capture(
    model: Annotated[str, typer.Argument(help="A model folder or a hub name.")],
    out: Annotated[Path, typer.Option(help="Folder of the capture; an interrupted one is continued.")],
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens.")],
    text: Annotated[Path | None, typer.Option(help="A UTF-8 text file; needed without --random-weights.")] = None,
    first_token: Annotated[int, typer.Option(min=0, help="Where in the text to start.")] = 0,
    queries: Annotated[int, typer.Option(min=1, help="Query positions to sample.")] = 256,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: cuda where there is one.")] = None,
    random_weights: Annotated[
        int | None, typer.Option(min=0, help="A dry run: Kolibri-1's shape with weights made from this seed.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run a model over a text and write its full-attention q, k, v to disk; resumes."""
    from kvlab import capture_job

    if random_weights is not None and text is not None:
        raise ValueError("text is given beside random_weights; accepted: one or the other")
    if random_weights is not None:
        stored = capture_job.dry_run(
            model, random_weights, out, tokens=tokens, num_queries=queries, device=device, progress=True
        )
    elif text is None:
        raise ValueError("text is missing; accepted: --text FILE, or --random-weights SEED for a dry run")
    else:
        stored = capture_job.capture_to_disk(
            model,
            capture_job.read_text(text),
            out,
            tokens=tokens,
            first_token=first_token,
            num_queries=queries,
            device=device,
            progress=True,
        )
    if as_json:
        typer.echo(json.dumps(capture_job.report(stored)))
    else:
        typer.echo(f"{len(stored.manifest.layers)} layers of {stored.manifest.tokens:,} tokens in {out}")


@app.command(name="measure")
def measure_command(
    captures: Annotated[list[Path], typer.Argument(help="Folders written by kvlab capture, one per text.")],
    scheme: Annotated[
        list[str] | None, typer.Option(help="A scheme to measure; may be repeated. Default: the write-up's and vLLM's.")
    ] = None,
    calibration: Annotated[Path | None, typer.Option(help="A calibration file, measured as 'calibrated'.")] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: cuda where there is one.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Outlier ratios and attention-output error per layer, of one or several captures of a model."""
    from kvlab import measure_job

    tables = measure_job.measure(captures, scheme, calibration, device)
    typer.echo(json.dumps(measure_job.as_document(tables)) if as_json else measure_job.as_text(tables))


@app.command(name="calibrate")
def calibrate_command(
    captures: Annotated[list[Path], typer.Argument(help="Folders written by kvlab capture, one per text.")],
    out: Annotated[Path, typer.Option(help="The calibration file.")],
    holdout: Annotated[
        list[Path] | None,
        typer.Option(help="Captures of other texts that decide; default: every second query decides."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many rotation seeds to try per layer.")] = 200,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens per seed, evenly spaced; default: all.")] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: cuda where there is one.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Find each layer's rotation seed and key means; write a calibration file."""
    from kvlab import measure_job

    document = measure_job.calibrate_captures(captures, holdout or [], out, seeds, tokens, device)
    typer.echo(json.dumps(document) if as_json else measure_job.calibration_as_text(document, out))


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


@app.command(name="serve", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve_command(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A checkpoint folder or a hub name.")],
    scheme: Annotated[
        str | None, typer.Option(help="hadamard-int4 (the default), int4, calibrated, or stock's: fp8, bf16.")
    ] = None,
    calibration: Annotated[Path | None, typer.Option(help="A calibration file, served as 'calibrated'.")] = None,
    rotation_seed: Annotated[int | None, typer.Option(min=0, help="Of hadamard-int4; default: the library's.")] = None,
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


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; a user's mistake is one line on standard error and exit code 2.

    With the environment variable ``KVLAB_TRACEBACK`` set, errors are raised instead.
    """
    command = typer.main.get_command(app)
    arguments = sys.argv[1:] if arguments is None else arguments
    # A job that is told to end cleans up as one that is interrupted.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        code = command.main(args=arguments or ["--help"], prog_name="kvlab", standalone_mode=False)
    except BrokenPipeError:
        # The reader of our output has left, as `head` does.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except (ValueError, TypeError, ImportError, OSError) as error:
        if os.environ.get("KVLAB_TRACEBACK"):
            raise
        code = _complain(str(error))
    except (KeyboardInterrupt, typer.Abort):
        code = _complain("interrupted; what was finished is kept", code=130)
    except Exception as error:
        # The command line parser's own errors, whichever click it is built on.
        if not hasattr(error, "format_message"):
            raise
        code = _complain(error.format_message())
    sys.exit(code or 0)


def _complain(message: str, code: int = 2) -> int:
    # Progress bars leave the cursor in their line.
    start = "\n" if code == 130 else ""
    print(f"{start}kvlab: {' '.join(message.split())}", file=sys.stderr)
    return code
