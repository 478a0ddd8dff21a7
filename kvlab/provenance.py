"""Where a number comes from: machine, versions, date."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path

import torch
import transformers

import kvlab


def machine() -> str:
    """Return the machine in words: processor (or GPU) and cores."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    names = []
    if cpuinfo.is_file():
        names = [
            line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def versions() -> str:
    """Versions of kvlab, torch, transformers and Python."""
    return (
        f"kvlab {kvlab.__version__}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"Python {platform.python_version()}"
    )


def stamp() -> dict[str, str]:
    """Return version, day and machine, as manifests keep them: ``kvlab``, ``date``, ``machine``."""
    return {"kvlab": kvlab.__version__, "date": today(), "machine": machine()}


def today() -> str:
    """Today's date, ISO 8601."""
    return datetime.date.today().isoformat()
