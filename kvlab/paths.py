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


def check_path(value: object, name: str) -> Path:
    """Check that ``value`` can be a path, and return it as one; ``name`` is for the error.

    Raises
    ------
    TypeError
        It is neither a string nor a path.
    """
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{name} is {value!r}; accepted: a path")
    return Path(value)


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


def check_file(out: Path) -> None:
    """Check that a table can be written to ``out``: a file, or a new one in a folder that can be written.

    Raises
    ------
    ValueError
        It is another thing, or the folder is not there or cannot be written.
    """
    if (out.exists() and not out.is_file()) or not os.access(out.parent, os.W_OK):
        raise ValueError(f"out is {str(out)!r}; accepted: a file in a folder that can be written")


def check_out(out: Path, name: str = "out") -> None:
    """Check that ``out`` is a folder that can be written, or can become one; ``name`` is for the error.

    Raises
    ------
    ValueError
        It is not.
    """
    there = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not there.is_dir():
        raise unwritable(out, f"{there} is no folder", name)
    if not os.access(there, os.W_OK | os.X_OK):
        raise unwritable(out, f"no permission in {there}", name)


def unwritable(out: Path, reason: str, name: str = "out") -> ValueError:
    """Return the error that says why nothing can be written to a folder."""
    return ValueError(f"{name} is {str(out)!r}, which cannot be written ({reason}); accepted: a folder")
