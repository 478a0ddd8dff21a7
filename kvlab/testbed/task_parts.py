"""What RULER's prompts are made of, read from the installed lm-evaluation-harness (lm-eval).

The testbed is trained on tasks worded as those it is later scored by. Their sentences stay the harness's: they are read
from prompts it makes, with what is random cut out, and handed as JSON to the machine that trains.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import random
import re
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

INSTALL = "pip install 'kvlab[eval]'"
FAMILY = "lm_eval.tasks.ruler"
UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")

ROOM = 1_000
"""Words of a prompt that is only read: enough for its question and some lines of its context."""


def read_parts() -> dict[str, Any]:
    """Read templates, needles, noise, word lists and the beginnings of answers from the installed harness.

    Returns
    -------
    dict
        Plain JSON data. ``version`` is the harness's; ``numbers`` and ``uuids`` are needle tasks with such values,
        ``vt``, ``cwe`` and ``fwe`` the tasks of these names, each with ``head`` (before the context) and ``ask`` (after
        it: question, delimiter, beginning of the answer); ``words`` are lists of words.

    Raises
    ------
    ModuleNotFoundError
        The harness, or what its RULER tasks need, is not installed; the message gives the command.
    """
    with _reading():
        niah, tracking = _module("prepare_niah"), _module("vt_utils")
        common, frequent = _module("cwe_utils"), _module("fwe_utils")
        kinds = {kind: _needles(niah, _module("niah_utils").TEMPLATE, kind) for kind in ("numbers", "uuids")}
        return {
            "version": metadata.version("lm_eval"),
            **kinds,
            "vt": {**_wording("vt", *tracking.CONFIG.values()), **_assignments(tracking)},
            "cwe": _wording("cwe", common.CONFIG),
            "fwe": _wording("fwe", frequent.CONFIG),
            "words": {
                "adjectives": sorted(set(niah.adjs)),
                "nouns": sorted(set(niah.nouns)),
                "common": sorted(common.WORDS),
            },
        }


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(f"{FAMILY}.{name}")
    # The harness turns a missing word list into an ImportError of its own.
    except ImportError as error:
        reason = str(error).splitlines()[0]
        raise ModuleNotFoundError(f"the testbed's tasks need lm-evaluation-harness ({reason}); {INSTALL}") from None


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    """Keep what the harness prints to itself, and leave the global random states as they were."""
    # The harness draws from both.
    state, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            random.seed(0)
            yield
    finally:
        random.setstate(state)
        np.random.set_state(of_numpy)  # noqa: NPY002


def _delimiter(task: str) -> str:
    """Return what the harness puts between a task's question and the beginning of its answer."""
    from lm_eval.tasks._yaml_loader import load_yaml

    folder = Path(_module("common_utils").__file__).parent
    return load_yaml(folder / f"{task}.yaml", resolve_func=False)["target_delimiter"]


def _needles(niah: ModuleType, template: str, kind: str) -> dict[str, str]:
    """Take a prompt apart whose one needle has a uuid as its key."""
    noise = niah.get_haystack(type_haystack="repeat")
    [made] = niah.generate_samples(
        noise,
        TOKENIZER=lambda text: SimpleNamespace(input_ids=text.split()),
        max_seq_length=ROOM,
        template=template,
        type_haystack="repeat",
        type_needle_k="uuids",
        type_needle_v=kind,
        num_samples=1,
    )
    value = made["outputs"][0]
    key = UUID.search(made["gen_prefix"])[0]
    head, *context, question = made["input"].split("\n")
    needle = next(line for line in context if value in line)
    ask = f"{question}{_delimiter('niah_single_1')}{made['gen_prefix']}"
    return {
        "head": head,
        "noise": noise,
        "needle": needle.replace(key, "{key}").replace(value, "{value}"),
        "ask": ask.replace(key, "{key}"),
    }


def _wording(task: str, config: dict[str, Any]) -> dict[str, str]:
    head, question = config["template"].split("{context}")
    return {"head": head, "ask": f"{question}{_delimiter(task)}{config['answer_prefix'].strip()}"}


def _assignments(tracking: ModuleType) -> dict[str, str]:
    """Take a chain of two variables apart, and find the sentences it is hidden in."""
    [[name, following]], [[first, then]] = tracking.generate_chains(1, 1)
    value = first.split("=")[-1].strip()
    text, _ = tracking.generate_input_output(num_noises=ROOM // 100, num_chains=1, num_hops=1)
    [(noise, _)] = Counter(line.strip() for line in text.splitlines()).most_common(1)
    return {
        "noise": noise,
        "first": first.replace(name, "{name}").replace(value, "{value}"),
        "then": then.replace(following, "{name}").replace(name, "{of}"),
    }
