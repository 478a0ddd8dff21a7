"""The testbed's loss on held-out text under stored caches, stretch by stretch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from kvlab.calibrate import Calibration, check_names
from kvlab.capture_job import choose_device
from kvlab.checks import check_integer
from kvlab.measure.loss import EXACT, loss_table
from kvlab.models.kolibri1_config import config_hash, read_config
from kvlab.paths import check_out
from kvlab.point_table import PointTable
from kvlab.provenance import machine, today, versions
from kvlab.schemes import get_schemes
from kvlab.testbed.loading import checkpoint_folder, load_testbed
from kvlab.testbed.prepared import LANGUAGES, Prepared, read_prepared

TABLE = "testbed_loss.csv"
TEXT = ("language", "text")
KEY = (*TEXT, "scheme")
NUMBERS = ("bits", "tokens", "loss", "increase", "standard_error")
COLUMNS = (*KEY, *NUMBERS, "date", "machine", "versions")
NOTES = (
    "text: the first token of its stretch. loss: nats per token. increase, standard_error: over the exact cache, over",
    "tokens.",
)


def write_losses(
    prepared: Path,
    out: Path,
    schemes: Sequence[str],
    calibrations: Sequence[Path] = (),
    *,
    texts: int,
    length: int,
    device: str | None = None,
) -> Path:
    """Measure the loss on held-out text when the testbed's full-attention layers store their cache under each scheme.

    Parameters
    ----------
    prepared
        A folder of `kvlab testbed prepare`.
    out
        Folder of ``testbed_loss.csv``, which is whole after every stretch; one of the same arguments is continued. A
        row is a stretch and a scheme: ``language``, ``text``, `kvlab.measure.loss.loss_table`'s columns, and where they
        come from; to be paired by stretch.
    schemes
        Names; the exact cache is measured besides.
    calibrations
        Files, each measured under its name without the ending.
    texts
        Stretches of each language, at equal distances.
    length
        Tokens of a stretch.
    device
        cuda or cpu; None is cuda where there is one.

    Returns
    -------
    pathlib.Path
        The table.

    Raises
    ------
    TypeError, ValueError
        Two rows of a stretch would have one name, there is no such scheme, file or device, ``prepared`` is of another
        tokenizer or has fewer tokens, or ``out`` cannot be written or holds a table of other arguments.
    """
    check_out(out)
    texts, length = check_integer(texts, "texts", minimum=1), check_integer(length, "length", minimum=2)
    named = get_schemes(schemes)
    check_names(calibrations, [EXACT, *(scheme.name for scheme in named)])
    opened = read_prepared(prepared)
    if texts * length > (shortest := opened.shortest("held_out")):
        raise ValueError(f"texts · length is {texts * length}; accepted: at most {shortest}, all held-out tokens")
    own = config_hash(read_config(checkpoint_folder()))
    measured = [*named, *(Calibration.load(path, config_hash=own).scheme(path.stem) for path in calibrations)]
    device = choose_device(device)
    model, tokenizer = load_testbed()
    if opened.tokenizer.get_vocab() != tokenizer.get_vocab():
        raise ValueError(f"prepared is {str(prepared)!r}, of another tokenizer; accepted: the testbed's own")
    model.to(device)
    out.mkdir(parents=True, exist_ok=True)
    settings = {
        "held_out": _digest(*(np.asarray(opened.tokens("held_out", language)) for language in LANGUAGES)),
        "texts": texts,
        "length": length,
        "schemes": [scheme.name for scheme in named],
        "calibrations": {path.stem: _digest(path.read_bytes()) for path in calibrations},
    }
    numbers = ("text", *NUMBERS)
    table = PointTable(
        out / TABLE, columns=COLUMNS, key=KEY, numbers=numbers, settings=settings, notes=NOTES, needed=numbers
    )
    rows_of_text = [{"scheme": name} for name in (EXACT, *(scheme.name for scheme in measured))]
    stretches = [
        (point, ids)
        for point, ids in _stretches(opened, texts, length)
        if table.lacking(point | row for row in rows_of_text)
    ]
    every = texts * len(LANGUAGES)
    origin = {"date": today(), "machine": machine(), "versions": versions()}
    with tqdm(total=every, initial=every - len(stretches), desc="losses", unit="text") as bar:
        for point, ids in stretches:
            rows = loss_table(model, ids.to(device), measured).assign(**point, **origin)
            # Of a stretch some rows may be there: a line was taken out of the file.
            table.append(table.lacking(rows.to_dict("records")))
            bar.update()
    return table.path


def _digest(*parts: np.ndarray | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _stretches(prepared: Prepared, texts: int, length: int) -> Iterator[tuple[dict[str, object], torch.Tensor]]:
    """Yield each stretch's language and first token, and its tokens, int64 ``[1, length]``."""
    for language in LANGUAGES:
        ids = np.asarray(prepared.tokens("held_out", language)).astype(np.int64)
        for start in (len(ids) // texts * np.arange(texts)).tolist():
            yield {"language": language, "text": start}, torch.from_numpy(ids[start : start + length])[None]
