"""What the trained testbed can do: predict held-out text, and find what stands far back."""

from __future__ import annotations

import lzma
import random
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from tokenizers import Tokenizer
from torch.nn import functional
from tqdm import tqdm
from transformers import Kolibri1ForCausalLM

from kvlab.capture_job import choose_device
from kvlab.paths import check_out
from kvlab.provenance import machine, today, versions
from kvlab.testbed.model import attention_masks, compile_layers
from kvlab.testbed.prepared import LANGUAGES, Prepared, read_prepared
from kvlab.testbed.samples import END, PieceTokenizer, encode
from kvlab.testbed.task_material import Material
from kvlab.testbed.tasks import TASKS
from kvlab.testbed.training import read_model

LOGIT_TOKENS = 8192
"""Positions whose logits exist at once."""

WRITTEN = {"vt", "cwe", "fwe"}
"""Tasks whose answer is several words, right in any order: as in RULER, what the model writes has to contain them."""

NUMBERING = re.compile(r"\d+\.")
"""What is no word of an answer: of "1. house 2. tree" two are."""


@torch.no_grad()
def next_token_losses(
    model: Kolibri1ForCausalLM, ids: torch.Tensor, *, full_window: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each next token, and whether it was the most probable one.

    Parameters
    ----------
    model
        From `kvlab.testbed.model.training_model`, weights loaded.
    ids
        int64 ``[1, tokens]`` on the model's device.
    full_window
        What the full-attention layers may see, in tokens; None is everything.

    Returns
    -------
    losses, hits
        float32 nats and bool, ``[tokens − 1]``.
    """
    hidden = _hidden_states(model, ids, full_window)
    with torch.autocast(ids.device.type, dtype=torch.bfloat16, enabled=ids.is_cuda):
        losses, hits = [], []
        for start in range(0, len(hidden), LOGIT_TOKENS):
            targets = ids[0, start + 1 : start + 1 + LOGIT_TOKENS]
            logits = model.lm_head(hidden[start : start + len(targets)]).float()
            losses.append(functional.cross_entropy(logits, targets, reduction="none"))
            hits.append(logits.argmax(dim=-1) == targets)
    return torch.cat(losses), torch.cat(hits)


def _hidden_states(model: Kolibri1ForCausalLM, ids: torch.Tensor, full_window: int | None) -> torch.Tensor:
    """Return the last hidden states of all tokens but the last, ``[tokens − 1, hidden]``."""
    tokens, window = ids.shape[1] - 1, model.config.sliding_window
    masks = attention_masks(window, tokens, ids.device)
    if full_window is not None:
        masks = {**masks, "full_attention": attention_masks(full_window, tokens, ids.device)["sliding_attention"]}
    with torch.autocast(ids.device.type, dtype=torch.bfloat16, enabled=ids.is_cuda):
        return model.model(input_ids=ids[:, :-1], attention_mask=masks, use_cache=False).last_hidden_state[0]


@torch.no_grad()
def greedy_answer(
    model: Kolibri1ForCausalLM, ids: torch.Tensor, begin: int, end: int, *, full_window: int | None = None
) -> torch.Tensor:
    """Return what greedy decoding writes in place of the tokens from ``begin`` to ``end``.

    All of them are guessed at once and read again until nothing changes: then each is the most probable one after
    those before it, which is what one token at a time would give. The first k are final after k passes, most sooner.

    Parameters
    ----------
    model, ids, full_window
        See `next_token_losses`.
    begin, end
        Of the answer; 0 < ``begin`` < ``end`` ≤ tokens.
    """
    ids = ids.clone()
    for _ in range(begin, end):
        hidden = _hidden_states(model, ids, full_window)[begin - 1 : end - 1]
        with torch.autocast(ids.device.type, dtype=torch.bfloat16, enabled=ids.is_cuda):
            guess = model.lm_head(hidden).argmax(dim=-1)
        if torch.equal(guess, ids[0, begin:end]):
            break
        ids[0, begin:end] = guess
    return ids[0, begin:end]


def held_out_text(model: Kolibri1ForCausalLM, prepared: Prepared, *, length: int) -> pd.DataFrame:
    """Measure how well held-out text is predicted, beside ``xz`` on the same bytes.

    Parameters
    ----------
    model
        See `next_token_losses`.
    prepared
        Whose held-out text is read, all of it, in stretches of ``length`` tokens; the rest of the last one is left.
    length
        In tokens; each stretch's first token is not predicted.

    Returns
    -------
    pandas.DataFrame
        ``language``, ``tokens``, ``bytes``, ``nats_per_token`` with the standard error over stretches,
        ``bits_per_byte``, ``xz_bits_per_byte`` (LZMA's preset 9 extreme, which sees only this text).
    """
    rows = []
    for language in LANGUAGES:
        ids = prepared.tokens("held_out", language)
        stretches = ids[: len(ids) // length * length].reshape(-1, length).astype(np.int64)
        means, text = [], []
        for stretch in tqdm(stretches, desc=f"held-out {language}", unit="stretch"):
            losses, _ = next_token_losses(model, torch.from_numpy(stretch)[None].to(model.device))
            means.append(losses.mean().item())
            text.append(prepared.tokenizer.decode(stretch.tolist(), skip_special_tokens=False))
        raw = "".join(text).replace(END, "\n").encode()
        nats = float(np.mean(means))
        rows.append(
            {
                "language": language,
                "tokens": stretches.size,
                "bytes": len(raw),
                "nats_per_token": nats,
                "standard_error": float(np.std(means, ddof=1) / np.sqrt(len(means))),
                "bits_per_byte": nats / np.log(2) * stretches.size / len(raw),
                "xz_bits_per_byte": 8 * len(lzma.compress(raw, preset=9 | lzma.PRESET_EXTREME)) / len(raw),
            }
        )
    return pd.DataFrame(rows)


def task_table(
    model: Kolibri1ForCausalLM,
    prepared: Prepared,
    names: Sequence[str],
    lengths: Sequence[int],
    *,
    prompts: int,
    seed: int,
    full_window: int | None = None,
) -> pd.DataFrame:
    """Measure how often a task's answers are right, and how much of them is.

    The answer of a task of `WRITTEN` is decoded greedily and has to contain every word, in any order; parts are words.
    Of the other tasks every token has to be the most probable one, which is when greedy decoding would write it; parts
    are tokens. One question a prompt; ``copy`` and ``pairs`` ask for everything that they have shown, thousands of
    tokens, so that ``share`` says more of them than ``right``.

    Parameters
    ----------
    model
        See `next_token_losses`.
    prepared
        Its task parts and tokenizer.
    names
        Of `kvlab.testbed.tasks`.
    lengths
        In tokens.
    prompts
        Of each task and length.
    seed
        Of the prompts; training draws others whatever it is.
    full_window
        See `next_token_losses`: with the sliding layers' window, nothing farther back can be found.

    Returns
    -------
    pandas.DataFrame
        ``task``, ``length``, ``prompts``, ``right``, ``share`` (of the answers' parts that are right, mean over
        prompts), ``full_window``.
    """
    material = Material(prepared.parts, PieceTokenizer(prepared.tokenizer), prepared.passage, alone=1)
    rows = []
    for name in names:
        for length in lengths:
            shares = []
            for number in tqdm(range(prompts), desc=f"{name}, {length} tokens", unit="prompt"):
                rng = random.Random(f"kvlab/testbed/score/{seed}/{name}/{length}/{number}")
                sample = TASKS[name](material, rng, length + 1)
                ids, answers = encode(sample, material.tokens, length + 1)
                moved = torch.from_numpy(ids.astype(np.int64))[None].to(model.device)
                if name in WRITTEN:
                    begin, end = np.flatnonzero(answers)[[0, -1]] + [0, 1]
                    written = greedy_answer(model, moved, begin, end, full_window=full_window)
                    shares.append(_contained(prepared.tokenizer, ids[begin:end], written))
                else:
                    _, hits = next_token_losses(model, moved, full_window=full_window)
                    shares.append(hits.cpu()[torch.from_numpy(answers[1:])].double().mean().item())
            row = {"task": name, "length": length, "prompts": prompts, "right": shares.count(1)}
            rows.append({**row, "share": np.mean(shares), "full_window": full_window})
    return pd.DataFrame(rows)


def _contained(tokenizer: Tokenizer, answer: np.ndarray, written: torch.Tensor) -> float:
    """Return the share of an answer's words that were written before the end of the text."""
    words, found = (
        tokenizer.decode(ids.tolist(), skip_special_tokens=False).split(END)[0].split() for ids in (answer, written)
    )
    words = [word for word in words if not NUMBERING.fullmatch(word)]
    return sum(word in found for word in words) / len(words)


def write_scores(
    run: Path,
    prepared: Path,
    out: Path,
    *,
    tasks: Sequence[str],
    lengths: Sequence[int],
    prompts: int,
    text_length: int,
    device: str | None = None,
    seed: int = 0,
) -> list[Path]:
    """Measure a run and write ``testbed_text.csv`` and ``testbed_tasks.csv``, with machine, versions and date.

    Tasks are measured twice: as trained, and with the full-attention layers seeing no farther than the others, which
    shows whether answers come from far back.

    Raises
    ------
    ValueError
        There is no run, no prepared folder or no such device, no task of a name, ``out`` cannot be written, or a
        length is beyond the model or the text.
    """
    check_out(out)
    for name in tasks:
        if name not in TASKS:
            raise ValueError(f"task is {name!r}; accepted: {', '.join(TASKS)}")
    opened = read_prepared(prepared)
    if text_length > (shortest := opened.shortest("held_out")):
        raise ValueError(f"text_length is {text_length}; accepted: at most {shortest}, the tokens of held-out text")
    model = read_model(run, training=True).to(choose_device(device))
    longest = model.config.max_position_embeddings
    for length in lengths:
        if length > longest:
            raise ValueError(f"length is {length}; accepted: at most the model's {longest}")
    if model.device.type == "cuda":
        # Without it flex attention holds every score.
        compile_layers(model)
    window = model.config.sliding_window
    tables = {
        "testbed_text": held_out_text(model, opened, length=text_length),
        "testbed_tasks": pd.concat(
            task_table(model, opened, tasks, lengths, prompts=prompts, seed=seed, full_window=full_window)
            for full_window in (None, window)
        ),
    }
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for name, table in tables.items():
        written.append(out / f"{name}.csv")
        table.assign(date=today(), machine=machine(), versions=versions()).to_csv(written[-1], index=False)
    return written
