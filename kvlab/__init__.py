"""kvlab: study, calibrate and serve a rotated 4-bit KV cache.

Names load on first use (PEP 562): importing kvlab imports neither torch nor transformers and touches
neither a GPU nor the network.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_NAMES = {
    "kvlab.applying": ("apply",),
    "kvlab.capture_files": ("open_capture",),
    "kvlab.measure": (
        "attention_error_table",
        "attention_output_error",
        "loss_table",
        "outlier_ratio",
        "outlier_table",
        "relative_error",
        "rounding_table",
    ),
    "kvlab.models.default": ("default_model", "default_text", "tokenize"),
    "kvlab.recording": ("Capture", "LayerCapture", "capture"),
    "kvlab.schemes": ("Scheme", "StoredAs", "get_scheme", "list_schemes", "register_scheme"),
    "kvlab.stats": ("paired_bootstrap",),
    "kvlab.transforms": ("FoldedQKNorm", "RandomizedHadamard", "randomized_hadamard"),
}
_MODULES = (
    "calibrate",
    "checks",
    "codec",
    "figures",
    "measure",
    "models",
    "plots",
    "quantizers",
    "recording",
    "schemes",
    "stats",
    "tables",
    "transforms",
)
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted([*_HOME, *_MODULES, "__version__"])

if TYPE_CHECKING:
    # ruff: noqa: F401 (re-exported for type checkers; at run time __getattr__ loads them)
    from kvlab.applying import apply
    from kvlab.capture_files import open_capture
    from kvlab.measure import (
        attention_error_table,
        attention_output_error,
        loss_table,
        outlier_ratio,
        outlier_table,
        relative_error,
        rounding_table,
    )
    from kvlab.models.default import default_model, default_text, tokenize
    from kvlab.recording import Capture, LayerCapture, capture
    from kvlab.schemes import Scheme, StoredAs, get_scheme, list_schemes, register_scheme
    from kvlab.stats import paired_bootstrap
    from kvlab.transforms import FoldedQKNorm, RandomizedHadamard, randomized_hadamard


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"kvlab.{name}")
    raise AttributeError(f"module 'kvlab' has no attribute {name!r}; it has: {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
