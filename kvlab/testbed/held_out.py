"""Held-out text of the testbed's corpus as files, for captures."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvlab.paths import check_out, written_whole
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
