"""Any model's config, from a folder or the hub: what cannot be read is one line that says what is wrong with it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CONFIG = "config.json"
ACCEPTED = f"a folder with a transformers {CONFIG}, or a hub name"


def read_model_config(model: str) -> PretrainedConfig:
    """Read the config of a model, transformers' own architectures only.

    Parameters
    ----------
    model
        A folder, or a name on the Hugging Face hub; what the hub's cache holds is not asked for again.

    Returns
    -------
    transformers.PretrainedConfig
        The whole model's; ``get_text_config()`` is its language model's.

    Raises
    ------
    ValueError
        There is no such model, or its ``config.json`` is missing, no JSON object, or refused by transformers.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    if not model:
        # As a path it would be the working directory.
        raise _refused(model, "which is no name")
    path = _from_hub(model) if _is_hub_name(model) else Path(model) / CONFIG
    fields = _read_fields(path, model)
    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise _refused(model, f"whose {CONFIG} has model_type {kind!r}", "a model type that transformers knows")
    try:
        # What it warns of is of other uses of a config.
        with _quiet("transformers"):
            return AutoConfig.from_pretrained(path.parent)
    # transformers' classes check their fields each in their own way, some by failing on them.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise _refused(model, f"whose {CONFIG} transformers refuses ({reason})") from error


def _refused(model: str, reason: str, accepted: str = ACCEPTED) -> ValueError:
    return ValueError(f"model is {model!r}, {reason}; accepted: {accepted}")


def _is_hub_name(model: str) -> bool:
    """Whether ``model`` can only be meant for the hub: no path, and of no folder that is here."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    path = Path(model)
    if path.exists() or (path.parent != Path() and path.parent.is_dir()):
        return False
    try:
        validate_repo_id(model)
    except HFValidationError:
        return False
    return True


def _from_hub(model: str) -> Path:
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(model, CONFIG, local_files_only=True))
    except LocalEntryNotFoundError:
        pass
    try:
        with _quiet("huggingface_hub"):
            # Asked once: the download itself tries for half a minute to reach a hub that is not there.
            get_hf_file_metadata(hf_hub_url(model, CONFIG))
            return Path(hf_hub_download(model, CONFIG))
    # The hub's client, HTTP and the disk fail each in their own way.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise _refused(model, f"which is no folder and cannot be had from the hub ({reason})") from None


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    log = logging.getLogger(name)
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def _read_fields(path: Path, model: str) -> dict[str, object]:
    if not path.parent.is_dir():
        raise _refused(model, "which cannot be read: there is no such folder")
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise _refused(model, f"which has no {CONFIG}") from None
    except OSError as error:
        raise _refused(model, f"whose {CONFIG} cannot be read ({error.strerror})") from None
    if not content.strip():
        raise _refused(model, f"whose {CONFIG} is empty")
    try:
        fields = json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise _refused(model, f"whose {CONFIG} is no text") from None
    except (ValueError, RecursionError) as error:
        raise _refused(model, f"whose {CONFIG} is no JSON ({error})") from None
    if not isinstance(fields, dict):
        raise _refused(model, f"whose {CONFIG} holds {json.dumps(fields)[:40]}, no object")
    return fields
