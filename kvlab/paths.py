"""Where kvlab keeps what it makes once and uses again, and how it writes files."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_folder() -> Path:
    """Return where converted models and compiled kernels are kept.

    ``$KVLAB_CACHE``, else ``kvlab`` under the user's cache folder.
    """
    if folder := os.environ.get("KVLAB_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvlab"


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a path beside ``path`` to write to: what is there at the end replaces ``path``; where it fails it goes.

    So a file is whole or not there, whatever stops the process, and several may write the same one.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        yield scratch
        scratch.replace(path)
    finally:
        # Where there is no folder there is no file in it either.
        if scratch.parent.is_dir():
            scratch.unlink(missing_ok=True)
