"""Speed, beside what ships today."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvlab.cli.app import JsonOption, app
from kvlab.defaults import DECODE_STEPS, REQUESTS

if TYPE_CHECKING:
    import pandas as pd

    from kvlab.serving.throughput import Setup

bench = typer.Typer(help="Measure speed, beside what ships today.", rich_markup_mode=None)
app.add_typer(bench, name="bench")


TableOption = Annotated[Path | None, typer.Option("--out", help="Write the whole table to this CSV file.")]


@bench.command(name="kernels")
def bench_kernels_command(
    quick: Annotated[bool, typer.Option("--quick", help="One shape and fewer batches and contexts.")] = False,
    out: TableOption = None,
    as_json: JsonOption = False,
) -> None:
    """Time decode attention, the store and prefill on this GPU, beside vLLM's kernels and a plain copy."""
    from kvlab.bench import kernels
    from kvlab.serving import stock_kernels as stock
    from kvlab.serving.flash import flash_attention_3

    _check_table_file(out)
    command = "kvlab bench kernels" + (" --quick" if quick else "")
    table, notes = kernels.bench_kernels(
        stock.DECODE, stock.STORE, stock.PREFILL, flash=flash_attention_3(), quick=quick, command=command
    )
    _show(table, notes, out, as_json=as_json)


@bench.command(name="layer")
def bench_layer_command(out: TableOption = None, as_json: JsonOption = False) -> None:
    """Time a full-attention layer's share of a decode step on this GPU: what calibration costs there."""
    from kvlab.bench.layer import bench_layer

    _check_table_file(out)
    table, notes = bench_layer(command="kvlab bench layer")
    _show(table, notes, out, as_json=as_json)


def _check_table_file(out: Path | None) -> None:
    from kvlab.paths import check_file

    if out is not None:
        check_file(out)


def _show(table: pd.DataFrame, notes: list[str], out: Path | None, *, as_json: bool) -> None:
    from kvlab.bench import kernels

    if out is not None:
        kernels.write_table(table, notes, out)
    if as_json:
        typer.echo(json.dumps({"rows": json.loads(table.to_json(orient="records")), "notes": notes}))
    else:
        typer.echo(kernels.as_text(table, notes))


# What is not listed is vLLM's, as for kvlab serve.
REST = {"allow_extra_args": True, "ignore_unknown_options": True}
ModelArgument = Annotated[str, typer.Argument(help="A checkpoint folder or a hub name.")]
SchemeOption = Annotated[
    list[str] | None,
    typer.Option(
        help="As for kvlab serve, or vLLM's int4-per-token-head; may be repeated. Default: fp8 and hadamard-int4."
    ),
]
ContextOption = Annotated[list[int], typer.Option(min=2, help="Tokens per session; may be repeated.")]
ParallelOption = Annotated[
    list[int] | None, typer.Option(min=1, help="GPUs that share a model; may be repeated. Default: 1.")
]
CacheOption = Annotated[
    float | None,
    typer.Option(help="Cache per GPU, in 1e9 bytes; default: what vLLM's --gpu-memory-utilization leaves."),
]
CalibrationOption = Annotated[Path | None, typer.Option(help="A calibration file, for scheme calibrated.")]
RandomOption = Annotated[bool, typer.Option("--random-weights", help="Draw them; the folder needs a config.json only.")]
OutOption = Annotated[
    Path | None, typer.Option(help="The table as CSV, written point by point; one that exists is continued.")
]
LogsOption = Annotated[
    Path | None, typer.Option(help="A folder that keeps what vLLM prints; default: only of an engine that fails.")
]


@bench.command(name="throughput", context_settings=REST)
def bench_throughput_command(
    rest: typer.Context,
    model: ModelArgument,
    context: ContextOption,
    sessions: Annotated[list[str], typer.Option(help="How many decode, or 'full': as many as fit. May be repeated.")],
    scheme: SchemeOption = None,
    tensor_parallel: ParallelOption = None,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps that are timed at each point.")] = DECODE_STEPS,
    repeat: Annotated[int, typer.Option(min=1, help="How often each curve is measured.")] = 1,
    cache_gb: CacheOption = None,
    calibration: CalibrationOption = None,
    random_weights: RandomOption = False,
    out: OutOption = None,
    logs: LogsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Time decode steps of the whole engine, filled without prefill; every other option is handed to vLLM."""
    from kvlab.serving.throughput import bench_throughput

    setup = _setup(
        rest,
        scheme,
        tensor_parallel,
        model=model,
        contexts=context,
        cache_gb=cache_gb,
        calibration=calibration,
        random_weights=random_weights,
        out=out,
        logs=logs,
    )
    numbers = [_number(one) for one in sessions]
    _print(bench_throughput(setup, sessions=numbers, steps=steps, repeats=repeat), as_json=as_json)


@bench.command(name="first-token", context_settings=REST)
def bench_first_token_command(
    rest: typer.Context,
    model: ModelArgument,
    context: ContextOption,
    scheme: SchemeOption = None,
    tensor_parallel: ParallelOption = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests that are timed at each context.")] = REQUESTS,
    cache_gb: CacheOption = None,
    calibration: CalibrationOption = None,
    random_weights: RandomOption = False,
    out: OutOption = None,
    logs: LogsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Time one request from its arrival to its first token; every option that is not listed is handed to vLLM."""
    from kvlab.serving.throughput import bench_first_token

    setup = _setup(
        rest,
        scheme,
        tensor_parallel,
        model=model,
        contexts=context,
        cache_gb=cache_gb,
        calibration=calibration,
        random_weights=random_weights,
        out=out,
        logs=logs,
    )
    _print(bench_first_token(setup, requests=requests), as_json=as_json)


def _setup(rest: typer.Context, scheme: list[str] | None, tensor_parallel: list[int] | None, **others: object) -> Setup:
    from kvlab.serving.throughput import Setup

    schemes, parallel = scheme or ("fp8", "hadamard-int4"), tensor_parallel or (1,)
    return Setup(schemes=schemes, tensor_parallel=parallel, arguments=rest.args, command=_as_typed(rest), **others)


def _number(text: str) -> int | str:
    """Return the integer that a text spells, or the text where it spells none that Python reads."""
    try:
        return int(text)
    except ValueError:
        return text


def _as_typed(context: typer.Context) -> str:
    """Return the command with the options that were given."""
    from kvlab.serving.throughput.job import without_secrets

    words = context.command_path.split()
    for parameter in context.command.params:
        value = context.params[parameter.name]
        name = [option for option in parameter.opts[:1] if option.startswith("-")]
        for one in value if isinstance(value, list | tuple) else [value]:
            if one is True:
                words += name
            elif one not in (None, False, parameter.default):
                words += [*name, str(one)]
    return shlex.join([*words, *without_secrets(context.args)])


def _print(table: pd.DataFrame, *, as_json: bool) -> None:
    if as_json:
        typer.echo(table.to_json(orient="records"))
        return
    shown = [name for name in table.columns if name not in ("weights", "machine", "versions", "date", "command")]
    typer.echo(table[shown].to_string(index=False, float_format="%.5g"))
