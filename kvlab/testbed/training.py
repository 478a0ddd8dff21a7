"""The training run: resumable pieces, a loss curve, the weights."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from tqdm import tqdm

from kvlab.capture_job import choose_device
from kvlab.paths import check_out, written_whole
from kvlab.testbed.batches import ANSWER, TEXT, batches, held_out_batch
from kvlab.testbed.config import TrainingPlan, default_config
from kvlab.testbed.model import attention_masks, balance, compile_layers, routers, training_model
from kvlab.testbed.prepared import LANGUAGES, Prepared, read_prepared

if TYPE_CHECKING:
    from transformers import Kolibri1Config, Kolibri1ForCausalLM

STATE = "state.pt"
CURVE = "loss.csv"
CURVE_COLUMNS = (
    "step",
    "tokens",
    "seconds",
    "length",
    "rate",
    "text_loss",
    "answer_loss",
    "answer_accuracy",
    "busiest_expert",
    "held_out_en",
    "held_out_de",
)
LOG_EVERY = 25
"""Steps between two rows of the curve; a row is the last step's, which costs a wait for the device."""
HELD_OUT_EVERY = 100
"""Steps between two rows with the losses of held-out text: two forward passes, each about a third of a step."""
SAVE_EVERY = 500
"""Steps between two states on disk."""
CLIP = 1.0
"""Norm that gradients are clipped to."""


@dataclasses.dataclass
class Progress:
    """How far a training is: steps done, and the seconds they took."""

    step: int = 0
    seconds: float = 0.0


def train(
    prepared: Path,
    out: Path,
    *,
    plan: TrainingPlan | None = None,
    config: Kolibri1Config | None = None,
    device: str | None = None,
    minutes: float | None = None,
    workers: int = 12,
    compiled: bool = True,
) -> Progress:
    """Train the testbed, or go on where an earlier call stopped.

    Parameters
    ----------
    prepared
        From `kvlab.testbed.prepared.prepare`.
    out
        A folder; gets ``state.pt`` (weights, the optimizer's state, the step) and ``loss.csv``.
    plan
        How to train; `TrainingPlan`'s defaults.
    config
        What to train; `default_config`'s.
    device
        Where; None is CUDA where there is one.
    minutes
        After how many to stop, with everything written; None runs to the end.
    workers
        Processes that draw the data; the data does not depend on their number.
    compiled
        Whether layers and loss go through ``torch.compile``.

    Raises
    ------
    ValueError
        ``prepared`` or the device is none, the text is too short, or ``out`` cannot be written, is damaged or holds a
        training of another plan or model.
    """
    plan, config, device = plan or TrainingPlan(), config or default_config(), choose_device(device)
    check_out(out)
    opened = read_prepared(prepared)
    # With the token after it, and somewhere to begin.
    least = max(stage.length for stage in plan.stages) + 2
    if (shortest := opened.shortest("train")) < least:
        raise ValueError(
            f"prepared is {str(prepared)!r}, with {shortest} tokens of a language to train on; "
            f"accepted: at least {least}, for the plan's longest sequences"
        )
    out.mkdir(parents=True, exist_ok=True)
    model = training_model(config, plan.seed).to(device)
    model.train()
    optimizer = _optimizer(model, plan)
    progress = _resume(out, plan, model, optimizer)
    sums = _sums
    if compiled:
        compile_layers(model)
        sums = torch.compile(_sums, dynamic=False)
    deadline = time.monotonic() + 60 * minutes if minutes is not None else float("inf")
    started = time.monotonic() - progress.seconds
    feed = batches(prepared, plan, first_step=progress.step, workers=workers)
    with (
        tqdm(total=plan.steps, initial=progress.step, unit="step", desc="training") as bar,
        _curve(out, progress.step) as curve,
    ):
        for stage, batch in feed:
            factor = plan.factor(progress.step)
            for group in optimizer.param_groups:
                group["lr"] = factor * group["peak"]
            moved = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
            measured = _losses(model, moved, plan.answer_weight, sums)
            measured["loss"].backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP, foreach=True)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            busiest = balance(model, plan.balance_rate)
            progress.step += 1
            bar.update()
            if progress.step % LOG_EVERY == 0 or progress.step == plan.steps:
                progress.seconds = time.monotonic() - started
                row = _row(measured)
                if progress.step % HELD_OUT_EVERY == 0 or progress.step == plan.steps:
                    row |= _held_out(model, opened, plan, stage.length, sums)
                curve(
                    step=progress.step,
                    tokens=progress.step * plan.tokens_per_step,
                    seconds=round(progress.seconds, 1),
                    length=stage.length,
                    rate=factor * plan.learning_rate,
                    busiest_expert=round(busiest.item(), 3),
                    **row,
                )
                bar.set_postfix({name: f"{value:.3f}" for name, value in row.items()})
                # Asked here only, where the device has been waited for.
                if time.monotonic() > deadline:
                    break
            if progress.step % SAVE_EVERY == 0:
                _save(out, plan, model, optimizer, progress)
    progress.seconds = time.monotonic() - started
    _save(out, plan, model, optimizer, progress)
    return progress


def _losses(
    model: Kolibri1ForCausalLM, batch: dict[str, torch.Tensor], answer_weight: float, sums: Callable[..., Any]
) -> dict[str, torch.Tensor]:
    """Return the loss and the sums that the curve is made of; see `_sums`."""
    ids = batch["ids"]
    masks = attention_masks(model.config.sliding_window, ids.shape[1] - 1, ids.device)
    with torch.autocast(ids.device.type, dtype=torch.bfloat16):
        hidden = model.model(input_ids=ids[:, :-1], attention_mask=masks, use_cache=False).last_hidden_state
    return sums(model.lm_head.weight, hidden, ids[:, 1:], batch["kinds"], answer_weight)


def _held_out(
    model: Kolibri1ForCausalLM, prepared: Prepared, plan: TrainingPlan, length: int, sums: Callable[..., Any]
) -> dict[str, float]:
    """Return the mean loss of a fixed sample of held-out text, in nats a token, by language; leave no trace.

    With gradients on, though none are computed: without them, or in batches of another shape, layers would be compiled
    once more for each stage.
    """
    losses = {}
    for language in LANGUAGES:
        batch = held_out_batch(prepared, plan, length, language)
        moved = {name: tensor.to(model.device) for name, tensor in batch.items()}
        measured = _losses(model, moved, plan.answer_weight, sums)
        losses[f"held_out_{language}"] = round((measured["text"] / measured["texts"]).item(), 5)
    # What the router has just been balanced for must not count again.
    for _, load in routers(model):
        load.zero_()
    return losses


def _sums(
    head: torch.Tensor, hidden: torch.Tensor, targets: torch.Tensor, kinds: torch.Tensor, answer_weight: float
) -> dict[str, torch.Tensor]:
    """Weigh the negative log-probabilities.

    Parameters
    ----------
    head
        The LM head, ``[vocabulary, hidden]``.
    hidden
        ``[sequences, tokens, hidden]``.
    targets, kinds
        Of the next tokens, ``[sequences, tokens]``.
    answer_weight
        See `TrainingPlan`; natural text weighs 1 a token, a task's context nothing.

    Returns
    -------
    dict
        Scalars: ``loss``, the weighted mean; of text and of answers the summed loss and the number; how many answers'
        tokens were the most probable.
    """
    logits = functional.linear(hidden.to(torch.bfloat16), head.to(torch.bfloat16)).float().flatten(0, 1)
    loss = functional.cross_entropy(logits, targets.flatten(), reduction="none")
    text, answer = (kinds == TEXT).float(), (kinds == ANSWER).float()
    answers = answer.sum(dim=1, keepdim=True).clamp(min=1)
    weights = (text + answer_weight * answer * (kinds.shape[1] / answers).sqrt()).flatten()
    text, answer = text.flatten(), answer.flatten()
    with torch.no_grad():
        hits = (logits.argmax(dim=-1) == targets.flatten()).float()
    return {
        "loss": (weights * loss).sum() / weights.sum().clamp(min=1),
        "text": (text * loss.detach()).sum(),
        "texts": text.sum(),
        "answer": (answer * loss.detach()).sum(),
        "answers": answer.sum(),
        "hits": (answer * hits).sum(),
    }


def _optimizer(model: nn.Module, plan: TrainingPlan) -> torch.optim.Optimizer:
    """AdamW; gains have a higher rate, and neither they nor embeddings decay."""
    gains = [p for p in model.parameters() if p.ndim == 1]
    matrices = [p for name, p in model.named_parameters() if p.ndim > 1 and "embed_tokens" not in name]
    embeddings = [model.model.embed_tokens.weight]
    groups = [
        {"params": matrices, "peak": plan.learning_rate, "weight_decay": plan.weight_decay},
        {"params": embeddings, "peak": plan.learning_rate, "weight_decay": 0.0},
        {"params": gains, "peak": plan.gain_rate, "weight_decay": 0.0},
    ]
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=plan.learning_rate, betas=(0.9, 0.95), eps=1e-10, fused=fused)


def _row(sums: dict[str, torch.Tensor]) -> dict[str, float]:
    values = {name: value.item() for name, value in sums.items()}

    # Not a number where a batch has no text, or no task.
    def mean(total: str, number: str) -> float:
        return round(values[total] / values[number], 5) if values[number] else math.nan

    return {
        "text_loss": mean("text", "texts"),
        "answer_loss": mean("answer", "answers"),
        "answer_accuracy": mean("hits", "answers"),
    }


@contextlib.contextmanager
def _curve(out: Path, step: int) -> Iterator[Callable[..., None]]:
    """Yield a function that appends a row to the loss curve; rows after ``step``, of a lost piece, are dropped."""
    path, rows = out / CURVE, []
    if path.exists():
        with path.open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if int(row["step"]) <= step]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, CURVE_COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)

        def write(**row: object) -> None:
            writer.writerow(row)
            file.flush()

        yield write


def _identity(plan: TrainingPlan, model: Kolibri1ForCausalLM) -> str:
    fields = {"plan": dataclasses.asdict(plan), "sizes": [list(p.shape) for p in model.parameters()]}
    return json.dumps(fields, sort_keys=True)


def _resume(out: Path, plan: TrainingPlan, model: nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
    path = out / STATE
    if not path.exists():
        return Progress()
    state = _read_state(out, "out")
    if state["identity"] != _identity(plan, model):
        raise ValueError(f"out is {str(out)!r}, which holds another training; accepted: a new folder, or the same plan")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return Progress(state["step"], state["seconds"])


def _save(
    out: Path, plan: TrainingPlan, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress
) -> None:
    state = {
        "identity": _identity(plan, model),
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        **dataclasses.asdict(progress),
    }
    with written_whole(out / STATE) as scratch:
        torch.save(state, scratch)


def _read_state(folder: Path, name: str) -> dict[str, Any]:
    accepted = "accepted: a folder that kvlab testbed train wrote"
    if not (folder / STATE).is_file():
        raise ValueError(f"{name} is {str(folder)!r}, which has no {STATE}; {accepted}")
    try:
        state = torch.load(folder / STATE, map_location="cpu", weights_only=True)
        whole = {"identity", "model", "optimizer", "step", "seconds"} <= state.keys()
    except Exception:
        # A damaged file fails in one of many ways.
        whole = False
    if not whole:
        raise ValueError(f"{name} is {str(folder)!r}, whose {STATE} is damaged; {accepted}")
    return state


def read_model(run: Path, config: Kolibri1Config | None = None, *, training: bool = False) -> Kolibri1ForCausalLM:
    """Load the weights of a training, in float32 on the CPU.

    Parameters
    ----------
    run
        The training's folder.
    config
        Of what was trained; `default_config`'s.
    training
        Whether to return `training_model`'s form, fast on long sequences, in place of transformers' plain one.

    Raises
    ------
    ValueError
        There is no training in ``run``, or of another model.
    """
    from transformers import Kolibri1ForCausalLM

    state = _read_state(run, "run")
    config = config or default_config()
    model = training_model(config, seed=0) if training else Kolibri1ForCausalLM(config)
    try:
        model.load_state_dict(state["model"])
    except (RuntimeError, TypeError):
        raise ValueError(f"run is {str(run)!r}, which holds another model; accepted: a run of this one") from None
    return model.eval()
