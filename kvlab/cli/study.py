"""Figures, captures, measurements, calibration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kvlab.cli.app import JsonOption, app, typed_command


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
    """Measure the embedded default model and the testbed (or captures) and draw every figure, with its numbers."""
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
    model: Annotated[str, typer.Argument(help="A folder, a hub name, or SmolLM2-135M-Instruct, which is embedded.")],
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
    calibration: Annotated[
        list[Path] | None,
        typer.Option(help="A calibration file, measured under its name without the ending; may be repeated."),
    ] = None,
    exact_first: Annotated[int, typer.Option(min=0, help="So many first tokens are not stored.")] = 0,
    exact_recent: Annotated[
        int, typer.Option(min=0, help="So many of the last tokens that a query sees are not stored.")
    ] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="The errors as CSV, written capture by capture; one that exists is continued."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: cuda where there is one.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Outlier ratios and attention-output error per layer, of one or several captures of a model."""
    from kvlab import measure_job

    tables = measure_job.measure(
        captures,
        scheme,
        calibration or [],
        device,
        exact_first=exact_first,
        exact_recent=exact_recent,
        out=out,
        command=typed_command(),
    )
    typer.echo(json.dumps(measure_job.as_document(tables)) if as_json else measure_job.as_text(tables))


@app.command(name="calibrate")
def calibrate_command(
    captures: Annotated[list[Path], typer.Argument(help="Folders written by kvlab capture, one per text.")],
    out: Annotated[Path, typer.Option(help="The calibration file.")],
    holdout: Annotated[
        list[Path] | None,
        typer.Option(help="Captures of other texts that decide; default: every second query decides."),
    ] = None,
    scheme: Annotated[
        str,
        typer.Option(
            help="The rotated scheme to start from; hadamard-int4-refit searches scale and offset of keys too."
        ),
    ] = "hadamard-int4",
    seeds: Annotated[int, typer.Option(min=1, help="How many rotation seeds to try per layer.")] = 200,
    tokens: Annotated[int | None, typer.Option(min=2, help="Tokens per seed, evenly spaced; default: all.")] = None,
    finder: Annotated[
        str | None,
        typer.Option(
            help="Find a matrix per KV head too, which takes the rotation's place where that helps held-out text: "
            "unequal (eight bits for some directions and none for as many, or balanced where that is better), balanced "
            "(the best one for equal bits), scaled_query_basis, channel_scales or query_basis.",
        ),
    ] = None,
    values: Annotated[
        bool, typer.Option("--values", help="Find a mean and a matrix per KV head of the values too.")
    ] = False,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: cuda where there is one.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Find each layer's rotation seed, key means and, where asked for, maps; write a calibration file."""
    from kvlab import measure_job

    document = measure_job.calibrate_captures(
        captures, holdout or [], out, scheme, seeds, tokens, finder, device, values=values
    )
    typer.echo(json.dumps(document) if as_json else measure_job.calibration_as_text(document, out))
