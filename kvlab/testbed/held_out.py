"""Held-out text of the testbed's corpus: as files for captures, and the loss on it under stored caches."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from kvlab.checks import check_integer
from kvlab.measure.loss import loss_table
from kvlab.paths import check_out, written_whole
from kvlab.schemes import Scheme, get_schemes
from kvlab.testbed.prepared import LANGUAGES, Prepared
from kvlab.testbed.samples import END


def write_texts(prepared: Prepared, out: Path) -> list[Path]:
    """Write the held-out documents of each language into one text file, ``{en,de}.txt``.

    Parameters
    ----------
    prepared
        An opened folder.
    out
        A folder, made where missing.

    Returns
    -------
    list of pathlib.Path
        The files, which `kvlab capture --text` reads.

    Raises
    ------
    ValueError
        ``out`` cannot be written.
    """
    check_out(out)
    out.mkdir(parents=True, exist_ok=True)
    end, written = prepared.tokenizer.token_to_id(END), []
    for language in LANGUAGES:
        ids = np.asarray(prepared.tokens("held_out", language))
        documents = np.split(ids, np.flatnonzero(ids == end) + 1)
        written.append(out / f"{language}.txt")
        with written_whole(written[-1]) as scratch:
            texts = (prepared.tokenizer.decode(document.tolist()) for document in documents if len(document))
            scratch.write_text("\n\n".join(texts), encoding="utf-8")
    return written


def held_out_losses(
    model: PreTrainedModel,
    prepared: Prepared,
    schemes: Iterable[str | Scheme],
    *,
    texts: int,
    length: int,
    progress: bool = False,
) -> pd.DataFrame:
    """Measure the loss on stretches of held-out text when full-attention layers store their cache under each scheme.

    Parameters
    ----------
    model
        The testbed, from `kvlab.testbed.loading`.
    prepared
        An opened folder.
    schemes
        Names or `Scheme` objects; the exact cache is measured besides.
    texts
        Stretches of each language, at equal distances.
    length
        Tokens of a stretch.
    progress
        Show a progress bar on standard error.

    Returns
    -------
    pandas.DataFrame
        ``language``, ``text`` (its first token), and the columns of `kvlab.measure.loss_table`: a row per stretch and
        scheme, to be paired by stretch.

    Raises
    ------
    TypeError, ValueError
        ``texts`` or ``length`` is no positive integer, a language has fewer tokens, or a scheme is unknown.
    """
    schemes = get_schemes(schemes)
    texts, length = check_integer(texts, "texts", minimum=1), check_integer(length, "length", minimum=2)
    if texts * length > (shortest := prepared.shortest("held_out")):
        raise ValueError(f"texts · length is {texts * length}; accepted: at most {shortest}, all held-out tokens")
    tables = []
    with tqdm(total=texts * len(LANGUAGES), desc="losses", unit="text", disable=not progress) as bar:
        for language in LANGUAGES:
            ids = np.asarray(prepared.tokens("held_out", language)).astype(np.int64)
            for start in (len(ids) // texts * np.arange(texts)).tolist():
                stretch = torch.from_numpy(ids[start : start + length])[None].to(model.device)
                own = loss_table(model, stretch, schemes)
                own.insert(0, "text", start)
                own.insert(0, "language", language)
                tables.append(own)
                bar.update()
    return pd.concat(tables, ignore_index=True)
