"""RULER and GPQA Diamond on a set-up: what is run, what is recorded, and how an interrupted evaluation goes on."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import pandas as pd

from kvlab import provenance
from kvlab.checks import LARGEST, check_choice, check_integer
from kvlab.defaults import GPQA_RUNS
from kvlab.evaluation.harness import evaluate, harness, to_samples
from kvlab.evaluation.samples import ENDING, Sample, read_samples, write_samples
from kvlab.evaluation.setups import Setup
from kvlab.paths import check_out, unwritable, written_whole

ESSAYS = "the data set baber/paul_graham_essays of the Hugging Face hub and NLTK's punkt_tab"
SQUAD = "SQuAD 2.0 from rajpurkar.github.io"
HOTPOT = "HotpotQA from the Hugging Face hub (namlh2004/hotpotqa)"

RULER_TASKS: Mapping[str, tuple[str, str | None]] = {
    "niah_single_1": ("niah_single_1", None),
    "niah_single_2": ("niah_single_2", ESSAYS),
    "niah_single_3": ("niah_single_3", ESSAYS),
    "niah_multikey_1": ("niah_multikey_1", ESSAYS),
    "niah_multikey_2": ("niah_multikey_2", None),
    "niah_multikey_3": ("niah_multikey_3", None),
    "niah_multiquery": ("niah_multiquery", ESSAYS),
    "niah_multivalue": ("niah_multivalue", ESSAYS),
    "vt": ("ruler_vt", None),
    "cwe": ("ruler_cwe", None),
    "fwe": ("ruler_fwe", None),
    "qa_squad": ("ruler_qa_squad", SQUAD),
    "qa_hotpot": ("ruler_qa_hotpot", HOTPOT),
}
"""RULER's 13 tasks (Hsieh et al., 2024, arXiv:2404.06654) → the harness's name, and what it downloads."""

RULER_LENGTHS = tuple(2**power for power in range(12, 19))
"""The write-up's: 4k to 256k tokens."""

SHORTEST = 1024
"""Below, the harness's vt and cwe look forever for prompts that fit."""

GPQA_TASKS = (
    "gpqa_diamond_cot_zeroshot",
    "gpqa_diamond_cot_n_shot",
    "gpqa_diamond_generative_n_shot",
)
"""The harness's variants in which the model writes before it answers."""

GPQA_SOURCE = "a gated data set of the Hugging Face hub"
GPQA_ACCESS = (
    "accept its terms at https://huggingface.co/datasets/Idavidrein/gpqa, log in with 'hf auth login' and run it once "
    "with the network"
)
RECORD = "run.json"


@dataclass(frozen=True)
class Settings:
    """How a benchmark is run, checked; what is left out is the harness's own setting.

    Attributes
    ----------
    prompts
        Prompts a task; None takes all (RULER: 500 per length).
    seed
        Of the prompts and, where the model samples, with the run's number added, of the answers.
    generation
        Generation settings over the task's own, as ``max_gen_toks`` or ``temperature``.
    chat
        Whether prompts go through the chat template.
    tokenizer
        What RULER measures lengths with; None takes the model's.

    Raises
    ------
    TypeError, ValueError
        A number of another kind, or a generation setting that JSON, in which it is sent, cannot hold.
    """

    prompts: int | None = None
    seed: int = 0
    generation: Mapping[str, object] = field(default_factory=dict)
    chat: bool = False
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        """Check what can be checked without the harness."""
        if self.prompts is not None:
            check_integer(self.prompts, "prompts", minimum=1, maximum=LARGEST)
        check_integer(self.seed, "seed", minimum=0, maximum=LARGEST)
        for name, value in self.generation.items():
            found = f"generation {name} is {reprlib.repr(value)}"
            try:
                json.dumps({name: value}, ensure_ascii=False, allow_nan=False).encode()
            except (TypeError, ValueError, RecursionError):
                raise ValueError(f"{found}; accepted: what JSON can hold, numbers finite") from None
            stops = value if isinstance(value, list) else [value]
            if name == "until" and not all(isinstance(stop, str) for stop in stops):
                raise ValueError(f"{found}; accepted: a text that ends an answer, or a list of them")


@dataclass(frozen=True)
class Part:
    """What is finished at once: a task at a length, or a run."""

    task: str
    harness_task: str
    length: int | None
    run: int

    @property
    def file(self) -> str:
        """Name of its samples file."""
        return f"{self.task}-{self.length or f'run{self.run}'}{ENDING}"


def ruler(
    setup: Setup,
    out: Path,
    *,
    tasks: Sequence[str] = (),
    lengths: Sequence[int] = RULER_LENGTHS,
    settings: Settings = Settings(),
    command: str = "",
) -> pd.DataFrame:
    """Run RULER and log its samples, one file per task and length; what is finished is not run again.

    Parameters
    ----------
    setup
        What is evaluated.
    out
        Folder of the samples and their record, ``run.json``.
    tasks
        Of `RULER_TASKS`; empty runs all.
    lengths
        Context lengths, in tokens, the answer included.
    settings
        How.
    command
        Recorded.

    Returns
    -------
    pandas.DataFrame
        ``task``, ``length``, ``run``, ``metric``, ``prompts``, ``mean`` of all samples in ``out`` that were asked for.

    Raises
    ------
    ValueError
        An unknown task, a length that the model does not have, data that cannot be had, an ``out`` that is
        no folder or another evaluation's.
    ConnectionError
        The server failed; what was finished is kept.
    """
    check_out(out)
    # What is named twice is run once.
    chosen = list(dict.fromkeys(check_choice(task, "task", RULER_TASKS) for task in tasks or RULER_TASKS))
    lengths = list(dict.fromkeys(check_integer(length, "length", minimum=SHORTEST) for length in lengths))
    if not lengths:
        raise ValueError("lengths is empty; accepted: at least one context length, in tokens")
    harness()
    longest = setup.longest()
    if longest is not None and max(lengths) > longest:
        raise ValueError(f"length is {max(lengths)}; accepted: at most the model's {longest} tokens")
    _fetch(chosen)
    parts = [Part(task, RULER_TASKS[task][0], length, 1) for length in lengths for task in chosen]
    tokenizer = settings.tokenizer or setup.tokenizer()
    _check_tokenizer(tokenizer)

    def told(part: Part) -> dict[str, object]:
        return {"tokenizer": tokenizer, "max_seq_lengths": [part.length]}

    return _run(setup, out, "ruler", parts, settings, told, command)


def gpqa(
    setup: Setup,
    out: Path,
    *,
    task: str,
    max_tokens: int,
    runs: int = GPQA_RUNS,
    settings: Settings = Settings(),
    command: str = "",
) -> pd.DataFrame:
    """Run GPQA Diamond several times and log its samples, one file a run; what is finished is not run again.

    Parameters
    ----------
    setup, out, settings, command
        As in `ruler`.
    task
        Of `GPQA_TASKS`.
    max_tokens
        Tokens an answer may have, its reasoning included.
    runs
        How many; they differ in the seed of the answers, not in the prompts, so that more than one needs a
        ``temperature`` among the generation settings.

    Returns
    -------
    pandas.DataFrame
        As from `ruler`.

    Raises
    ------
    ValueError, ConnectionError
        As from `ruler`.
    """
    check_out(out)
    check_choice(task, "task", GPQA_TASKS)
    runs = check_integer(runs, "runs", minimum=1)
    if runs > 1 and not settings.generation.get("temperature"):
        # The harness's tasks answer greedily, whatever the seed.
        raise ValueError(f"runs is {runs} without a temperature; accepted: generation temperature=…, or one run")
    generation = {**settings.generation, "max_gen_toks": check_integer(max_tokens, "max_tokens", minimum=1)}
    settings = Settings(settings.prompts, settings.seed, generation, settings.chat, settings.tokenizer)
    harness()
    parts = [Part(task, task, None, run) for run in range(1, runs + 1)]
    _load("GPQA", GPQA_SOURCE, _load_gpqa, GPQA_ACCESS)
    return _run(setup, out, "gpqa", parts, settings, lambda _: {}, command)


def _run(
    setup: Setup,
    out: Path,
    benchmark: str,
    parts: list[Part],
    settings: Settings,
    told: Callable[[Part], dict[str, object]],
    command: str,
) -> pd.DataFrame:
    _record(out, benchmark, setup, settings, command)
    todo = [part for part in parts if not (out / part.file).exists()]
    for seed in sorted({settings.seed + part.run for part in todo}):
        with setup.open(seed=seed, chat=settings.chat) as lm:
            for part in (part for part in todo if settings.seed + part.run == seed):
                logged = evaluate(
                    part.harness_task,
                    benchmark,
                    lm,
                    metadata=told(part),
                    prompts=settings.prompts,
                    prompt_seed=settings.seed,
                    sampling_seed=seed,
                    generation=settings.generation,
                    chat=settings.chat,
                    cache=out / f".{part.file}.cache",
                )
                write_samples(out / part.file, to_samples(logged, part.task, length=part.length, run=part.run))
    return summary(sample for part in parts for sample in read_samples(out / part.file))


def _record(out: Path, benchmark: str, setup: Setup, settings: Settings, command: str) -> None:
    """Write the record of an evaluation, or check that what goes on is what was begun."""
    identity = {
        "benchmark": benchmark,
        **setup.described(),
        "prompts": settings.prompts,
        "seed": settings.seed,
        "generation": dict(settings.generation),
        "chat": settings.chat,
        "tokenizer": settings.tokenizer,
        "lm_eval": metadata.version("lm_eval"),
    }
    path = out / RECORD
    if path.exists():
        try:
            begun = json.loads(path.read_text(encoding="utf-8"))
            differing = [name for name, value in identity.items() if begun[name] != value]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            raise ValueError(f"out has a damaged {RECORD}; accepted: a folder of kvlab eval, or a new one") from None
        if differing:
            name = differing[0]
            begun_with = f"but {out} was begun with {begun[name]!r}"
            raise ValueError(f"{name} is {identity[name]!r}, {begun_with}; accepted: the same, or another out")
        return
    document = {
        **identity,
        "versions": provenance.versions(),
        **provenance.stamp(),
        "command": command,
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as scratch:
            scratch.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise unwritable(out, error.strerror) from None


def summary(samples: Iterable[Sample]) -> pd.DataFrame:
    """Return the mean of every metric per task, length and run, in the samples' order."""
    rows = [
        (sample.task, sample.length, sample.run, metric, score)
        for sample in samples
        for metric, score in sample.scores.items()
    ]
    by = ["task", "length", "run", "metric"]
    table = pd.DataFrame(rows, columns=[*by, "score"]).astype({"length": "Int64"})
    return table.groupby(by, sort=False, dropna=False)["score"].agg(prompts="size", mean="mean").reset_index()


def _check_tokenizer(name: str) -> None:
    """Load a tokenizer as RULER's tasks do, which keep it, so that one that cannot be had is said at once."""
    from lm_eval.tasks.ruler.common_utils import get_tokenizer

    try:
        get_tokenizer(name)
    # The hub, the disk and tokenizers' own classes each fail in their own way.
    except Exception as error:
        reason = f"which cannot be loaded ({type(error).__name__})"
        raise ValueError(f"tokenizer is {name!r}, {reason}; accepted: a folder with one, or a hub name") from None


def _fetch(tasks: Sequence[str]) -> None:
    """Load what tasks download before anything is run, so that what cannot be had is said at once."""
    needed = {RULER_TASKS[task][1]: task for task in reversed(tasks)}
    offline = ", ".join(name for name, (_, source) in RULER_TASKS.items() if source is None)
    advice = f"run it once with the network, which keeps it in a cache; accepted without: {offline}"
    for source, load in {ESSAYS: _load_essays, SQUAD: _load_squad, HOTPOT: _load_hotpot}.items():
        if source in needed:
            _load(f"task {needed[source]}", source, load, advice)


def _load(what: str, source: str, load: Callable[[], object], advice: str) -> None:
    try:
        load()
    # Hub, NLTK and plain HTTP each fail in their own way.
    except Exception as error:
        raise ValueError(f"{what} needs {source}, which cannot be loaded ({type(error).__name__}): {advice}") from None


def _load_essays() -> None:
    from lm_eval.tasks.ruler.prepare_niah import get_haystack, sent_tokenize

    sent_tokenize("One. Two.")
    get_haystack(type_haystack="essay")


def _load_squad() -> None:
    from lm_eval.tasks.ruler.qa_utils import read_squad

    read_squad()


def _load_hotpot() -> None:
    from lm_eval.tasks.ruler.qa_utils import read_hotpotqa

    read_hotpotqa()


def _load_gpqa() -> None:
    import datasets

    datasets.load_dataset("Idavidrein/gpqa", "gpqa_diamond")
