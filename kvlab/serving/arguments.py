"""Checks of what vLLM's command line is handed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvlab.checks import check_list

ADDITIONAL_CONFIG = "--additional-config"


def check_model(model: str | Path) -> str:
    """Check that ``model`` can be a folder or a hub name.

    Raises
    ------
    TypeError, ValueError
        It is neither a string nor a path, it is empty, or an option.
    """
    accepted = "accepted: a folder or a hub name, before vLLM's own arguments"
    if not isinstance(model, str | Path):
        raise TypeError(f"model is {model!r}; {accepted}")
    model = str(model)
    if not model or model.startswith("-"):
        raise ValueError(f"model is {model!r}; {accepted}")
    return model


def check_calibration(calibration: str | Path, model: str) -> None:
    """Check that a calibration file has the layers and heads of a model that is a folder; the hub's is not asked for.

    Raises
    ------
    ValueError
        It has not, or one of the two cannot be read.
    """
    if not Path(model).is_dir():
        return
    from kvlab.calibrate import Calibration
    from kvlab.models.kolibri1_config import read_config

    config, loaded = read_config(Path(model)), Calibration.load(calibration)
    layers = [index for index, kind in enumerate(config.layer_types) if kind == "full_attention"]
    # Its own hash: a config that differs in what the cache does not see, such as the longest context, is served.
    own = loaded.manifest["config_hash"]
    loaded.check_applies(own, layers, config.num_key_value_heads, config.head_dim)


def check_arguments(arguments: Sequence[str], *, cache: Sequence[str] = ()) -> list[str]:
    """Check that ``arguments`` are vLLM's options and their values.

    Parameters
    ----------
    arguments
        The user's own.
    cache
        Those that ask for what the cache stores: an additional config among them is not to be replaced.

    Raises
    ------
    TypeError, ValueError
        They are no list of strings, begin with a word that belongs to no option, or would replace that config.
    """
    accepted = "a list of strings, such as ['--max-num-seqs', '64']"
    words = check_list(arguments, "arguments", accepted)
    if not all(isinstance(word, str) for word in words):
        raise TypeError(f"arguments is {arguments!r}; accepted: {accepted}")
    if words and not words[0].startswith("-"):
        raise ValueError(f"arguments begin with {words[0]!r}; accepted: options of vLLM, which begin with -")
    if ADDITIONAL_CONFIG in cache:
        # vLLM keeps the last one only, and would then serve stock.
        refuse(words, ADDITIONAL_CONFIG, "without it; scheme, calibration and rotation_seed say what is in it")
    return words


def refuse(arguments: Sequence[str], option: str, accepted: str) -> None:
    """Refuse an option of vLLM in any of its spellings: ``--a-b X``, ``--a_b=X``, ``--a-b.key X``, and cut short.

    vLLM completes an option that is the beginning of one only; where it is that of several, vLLM refuses it itself.

    Raises
    ------
    ValueError
        It is among ``arguments``; the error says what is ``accepted``.
    """
    for argument in arguments:
        name = argument.split("=")[0].split(".")[0].replace("_", "-")
        if name.startswith("--") and name != "--" and option.startswith(name):
            raise ValueError(f"arguments has {argument!r}; accepted: {accepted}")
