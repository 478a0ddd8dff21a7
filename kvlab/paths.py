"""Where kvlab keeps what it makes once and uses again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return where converted models and compiled kernels are kept.

    ``$KVLAB_CACHE``, else ``kvlab`` under the user's cache folder.
    """
    if folder := os.environ.get("KVLAB_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvlab"
