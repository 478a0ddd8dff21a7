"""Benchmarks, through lm-evaluation-harness."""

from __future__ import annotations

import json
import reprlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvlab.cli.app import JsonOption, app, typed_command
from kvlab.defaults import GPQA_RUNS

if TYPE_CHECKING:
    import pandas as pd

    from kvlab.evaluation.setups import Setup

evaluation = typer.Typer(help="Run a benchmark on a server or a model; samples are logged.", rich_markup_mode=None)
app.add_typer(evaluation, name="eval")

Out = Annotated[Path, typer.Option(help="Folder of the samples; an interrupted evaluation is continued.")]
BaseUrl = Annotated[
    str | None, typer.Option(help="An OpenAI-compatible server, as http://127.0.0.1:8000/v1; else --model is run here.")
]
Model = Annotated[
    str | None,
    typer.Option(help="A folder or hub name; with --base-url what the server calls it (default: its only one)."),
]
Scheme = Annotated[
    str | None,
    typer.Option(
        help="What the cache stores: with --base-url for the record (calibrated, where it serves a calibration), "
        "without it applied to the model."
    ),
]
Device = Annotated[str | None, typer.Option(help="Without --base-url: cuda or cpu; default: cuda where there is one.")]
Concurrent = Annotated[int | None, typer.Option(min=1, help="With --base-url: requests at a time; default: 1.")]
Timeout = Annotated[int | None, typer.Option(min=1, help="With --base-url: seconds a request may take; default: 300.")]
Prompts = Annotated[int | None, typer.Option(min=1, help="The first so many prompts of a task; default: all.")]
Seed = Annotated[int, typer.Option(min=0, help="Of prompts and sampled answers.")]
Generation = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=VALUE", help="Generation setting over the task's own; may be repeated."),
]
Chat = Annotated[bool, typer.Option("--chat", help="Send prompts through the chat template (chat completions).")]


@evaluation.command(name="ruler")
def ruler_command(
    out: Out,
    base_url: BaseUrl = None,
    model: Model = None,
    scheme: Scheme = None,
    task: Annotated[list[str] | None, typer.Option(help="A task; may be repeated. Default: all 13.")] = None,
    length: Annotated[
        list[int] | None, typer.Option(help="A context length in tokens; may be repeated. Default: 4096 to 262144.")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Measures the lengths; default: the model's.")] = None,
    prompts: Prompts = None,
    seed: Seed = 0,
    generation: Generation = None,
    chat: Chat = False,
    concurrent: Concurrent = None,
    timeout: Timeout = None,
    device: Device = None,
    as_json: JsonOption = False,
) -> None:
    """Needles, variables and word counts in long contexts (RULER)."""
    from kvlab.evaluation import job

    setup = _setup(base_url, model, scheme, device, concurrent, timeout)
    settings = job.Settings(prompts, seed, _generation(generation), chat, tokenizer)
    lengths = length or job.RULER_LENGTHS
    _say(
        job.ruler(setup, out, tasks=task or (), lengths=lengths, settings=settings, command=typed_command()),
        out,
        as_json,
    )


@evaluation.command(name="gpqa")
def gpqa_command(
    out: Out,
    task: Annotated[str, typer.Option(help="The harness's variant, as gpqa_diamond_cot_zeroshot.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer, its reasoning included.")],
    base_url: BaseUrl = None,
    model: Model = None,
    scheme: Scheme = None,
    runs: Annotated[
        int, typer.Option(min=1, help="How often, with answers of other seeds; needs --generation temperature=….")
    ] = GPQA_RUNS,
    prompts: Prompts = None,
    seed: Seed = 0,
    generation: Generation = None,
    chat: Chat = False,
    concurrent: Concurrent = None,
    timeout: Timeout = None,
    device: Device = None,
    as_json: JsonOption = False,
) -> None:
    """Graduate-level questions, answered after reasoning (GPQA Diamond)."""
    from kvlab.evaluation import job

    setup = _setup(base_url, model, scheme, device, concurrent, timeout)
    settings = job.Settings(prompts, seed, _generation(generation), chat)
    table = job.gpqa(
        setup, out, task=task, max_tokens=max_tokens, runs=runs, settings=settings, command=typed_command()
    )
    _say(table, out, as_json)


def _setup(
    base_url: str | None,
    model: str | None,
    scheme: str | None,
    device: str | None,
    concurrent: int | None,
    timeout: int | None,
) -> Setup:
    from kvlab.evaluation.setups import InProcess, Server
    from kvlab.schemes import get_scheme

    foreign = {"concurrent": concurrent, "timeout": timeout}
    if base_url is not None:
        foreign = {"device": device}
    for name, value in foreign.items():
        if value is not None:
            place = "a model run here" if base_url is not None else "a server (--base-url)"
            raise ValueError(f"{name} is {value!r}; accepted: only for {place}")
    # A server has its calibration itself.
    if scheme is not None and not (base_url is not None and scheme == "calibrated"):
        get_scheme(scheme)
    if base_url is not None:
        return Server(base_url, model, concurrent, timeout, scheme)
    if model is None:
        raise ValueError("model is missing; accepted: --base-url URL of a server, or --model NAME to run here")
    return InProcess(model, scheme, device)


def _generation(pairs: list[str] | None) -> dict[str, object]:
    settings = {}
    for pair in pairs or []:
        key, equals, text = pair.partition("=")
        if not key or not equals:
            raise ValueError(f"generation is {pair!r}; accepted: KEY=VALUE, as temperature=0.6")
        try:
            settings[key] = json.loads(text)
        except json.JSONDecodeError:
            settings[key] = text
        # Numbers of thousands of digits, and brackets as deep.
        except (ValueError, RecursionError):
            raise ValueError(f"generation is {reprlib.repr(pair)}; accepted: KEY=VALUE, as temperature=0.6") from None
    return settings


def _say(table: pd.DataFrame, out: Path, as_json: bool) -> None:  # noqa: FBT001 (a flag handed through)
    if as_json:
        typer.echo(json.dumps({"out": str(out), "rows": json.loads(table.to_json(orient="records"))}))
        return
    typer.echo(table.to_string(index=False, na_rep="–", float_format="{:.3f}".format))
    typer.echo(f"samples in {out}; kvlab compare {out} OTHER compares them with those of another set-up")
