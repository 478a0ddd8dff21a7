"""How the testbed is made: text, preparation, training, weights, scores."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvlab.cli.app import app

testbed_app = typer.Typer(help="Make the testbed, a small model of Kolibri-1's architecture.", rich_markup_mode=None)
app.add_typer(testbed_app, name="testbed")

PreparedOption = Annotated[Path, typer.Option(help="Folder that `kvlab testbed prepare` wrote.")]
RunOption = Annotated[Path, typer.Option(help="Folder of the training run.")]
DeviceOption = Annotated[str | None, typer.Option(help="cuda or cpu; default: cuda where there is one.")]


@testbed_app.command()
def text(
    packages: Annotated[Path, typer.Option(help="Folder for the Debian packages; those already there are used.")],
    out: Annotated[Path, typer.Option(help="File for the text, JSON lines.")],
) -> None:
    """Fetch the documentation that the testbed reads, and make plain text of it."""
    from kvlab.testbed.corpus import fetch, write_text

    fetch(packages)
    write_text(packages, out)


@testbed_app.command()
def prepare(
    text: Annotated[Path, typer.Option(help="From `kvlab testbed text`.")],
    out: Annotated[Path, typer.Option(help="Folder for tokenizer, tokens and parts of tasks.")],
) -> None:
    """Train the tokenizer and tokenize the text; the parts of tasks come from lm-evaluation-harness."""
    from kvlab.paths import check_out
    from kvlab.testbed.prepared import check_text
    from kvlab.testbed.prepared import prepare as write
    from kvlab.testbed.task_parts import read_parts

    # Before the parts, which take a minute.
    check_text(text)
    check_out(out)
    write(text, out, read_parts())


@testbed_app.command()
def train(
    prepared: PreparedOption,
    out: RunOption,
    minutes: Annotated[float | None, typer.Option(min=0, help="Stop after so many; run again to go on.")] = None,
    workers: Annotated[int, typer.Option(min=0, help="Processes that draw the data.")] = 12,
    device: DeviceOption = None,
) -> None:
    """Train, or go on where the last call stopped."""
    from kvlab.testbed.config import TrainingPlan
    from kvlab.testbed.training import train as run

    plan = TrainingPlan()
    progress = run(prepared, out, plan=plan, device=device, minutes=minutes, workers=workers)
    typer.echo(f"{progress.step} of {plan.steps} steps in {progress.seconds:.0f} s; {out}")


@testbed_app.command()
def export(
    run: RunOption,
    prepared: PreparedOption,
    out: Annotated[Path, typer.Option(help="Folder for the checkpoint.")],
    dtype: Annotated[str, typer.Option(help="fp8, as the release, or bf16.")] = "fp8",
) -> None:
    """Write a run's weights in the release's format, with the tokenizer."""
    from kvlab.testbed.export import export as write
    from kvlab.testbed.prepared import read_prepared
    from kvlab.testbed.training import read_model

    opened = read_prepared(prepared)
    write(read_model(run), out, dtype=dtype)
    opened.copy_tokenizer(out)


@testbed_app.command()
def bf16(out: Annotated[Path, typer.Option(help="A new folder for the checkpoint.")]) -> None:
    """Write the trained testbed in BF16, to be served: vLLM does not multiply FP8 weights of experts as narrow."""
    from kvlab.testbed.export import write_bf16

    write_bf16(out)
    typer.echo(out)


@testbed_app.command()
def score(
    run: RunOption,
    prepared: PreparedOption,
    out: Annotated[Path, typer.Option(help="Folder for the tables.")],
    length: Annotated[list[int], typer.Option(min=1024, help="Tokens of a prompt; may be repeated.")],
    task: Annotated[list[str], typer.Option(help="A task, as niah_single; may be repeated.")],
    prompts: Annotated[int, typer.Option(min=1, help="Of each task and length.")] = 500,
    text_length: Annotated[int, typer.Option(min=2, help="Tokens of a stretch of held-out text.")] = 8192,
    device: DeviceOption = None,
) -> None:
    """Measure a run: held-out text beside xz, tasks with everything in view and with the distant keys hidden."""
    from kvlab.testbed.scoring import write_scores

    for path in write_scores(
        run, prepared, out, tasks=task, lengths=length, prompts=prompts, text_length=text_length, device=device
    ):
        typer.echo(path)


@testbed_app.command("held-out")
def held_out(
    prepared: PreparedOption,
    out: Annotated[Path, typer.Option(help="Folder for en.txt and de.txt.")],
) -> None:
    """Write the held-out text of each language as a file, for `kvlab capture --text`."""
    from kvlab.testbed.held_out import write_texts
    from kvlab.testbed.prepared import read_prepared

    for path in write_texts(read_prepared(prepared), out):
        typer.echo(path)


@testbed_app.command()
def loss(
    prepared: PreparedOption,
    out: Annotated[Path, typer.Option(help="Folder for testbed_loss.csv, a row per stretch and scheme.")],
    scheme: Annotated[list[str], typer.Option(help="A name of `kvlab schemes`; may be repeated.")],
    calibration: Annotated[list[Path] | None, typer.Option(help="A calibration file; may be repeated.")] = None,
    texts: Annotated[int, typer.Option(min=1, help="Stretches of each language.")] = 16,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a stretch.")] = 4096,
    device: DeviceOption = None,
) -> None:
    """Measure the testbed's loss on held-out text under stored caches, to be paired by stretch; resumes."""
    from kvlab.testbed.losses import write_losses

    typer.echo(write_losses(prepared, out, scheme, calibration or [], texts=texts, length=length, device=device))
