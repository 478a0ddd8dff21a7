"""The trained testbed, served in stock's cache and in 4 bits, answers RULER's needles: really, and equally well."""

import json
import re

import pytest
from engines import CACHE_DTYPE, ENVIRONMENT, STOCK

from kvlab.cli import main
from kvlab.evaluation.samples import read_samples
from kvlab.serving import launch
from kvlab.testbed.export import write_bf16

pytest.importorskip("vllm", reason="needs vLLM: .ci/install-serving-cpu installs its CPU build")
pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: the extra 'eval'")
pytestmark = pytest.mark.serving

INT4 = "hadamard-int4"
# One needle in noise, and one needle among others; both make their prompts without data from the network.
TASKS = ("niah_single_1", "niah_multikey_2")
# With answers; twice the sliding layers' window, so that half of the needles are seen by full attention only.
LENGTH, PROMPTS = 1024, 30
FOUND = 0.9
START_SECONDS = 300
ARGUMENTS = ["--max-model-len", "2048", "--max-num-seqs", "8", "--enforce-eager"]


def kvlab(*arguments):
    """Run the command line as a shell does; it has to succeed."""
    with pytest.raises(SystemExit) as stop:
        main([*map(str, arguments)])
    assert stop.value.code == 0


@pytest.fixture(scope="module")
def testbed(tmp_path_factory):
    """In BF16: vLLM's CPU build multiplies FP8 weights on few CPUs."""
    folder = tmp_path_factory.mktemp("testbed") / "bf16"
    write_bf16(folder)
    return folder


@pytest.fixture(scope="module")
def samples(testbed, tmp_path_factory):
    """Scheme → folder of what `kvlab eval ruler` logged of its server."""
    folder = tmp_path_factory.mktemp("samples")
    tasks = [part for task in TASKS for part in ("--task", task)]
    asked = [*tasks, "--length", LENGTH, "--prompts", PROMPTS, "--concurrent", 8, "--tokenizer", testbed]
    for scheme in (STOCK, INT4):
        arguments, log = [*ARGUMENTS, "--kv-cache-dtype", CACHE_DTYPE], folder / f"{scheme}.log"
        with launch(
            testbed,
            scheme=scheme,
            arguments=arguments,
            environment=ENVIRONMENT,
            timeout=START_SECONDS,
            log_path=log,
        ) as server:
            kvlab("eval", "ruler", "--base-url", server.base_url, "--scheme", scheme, "--out", folder / scheme, *asked)
        assert ("layers 4, 9 store hadamard-int4" in log.read_text()) == (scheme == INT4)
    return folder


@pytest.mark.parametrize("scheme", [STOCK, INT4])
def test_needles_are_found(samples, scheme):
    logged = read_samples(samples / scheme)
    for task in TASKS:
        answers = [sample for sample in logged if sample.task == task]
        assert len(answers) == PROMPTS
        # Numbers of seven digits, each prompt's own.
        assert all(re.fullmatch(r"\s*\d{7}\D*", sample.response) for sample in answers)
        assert len({sample.response for sample in answers}) == PROMPTS
        assert sum(sample.target[0] in sample.response for sample in answers) > FOUND * PROMPTS
        assert sum(sample.scores["score"] for sample in answers) > FOUND * PROMPTS


def test_four_bits_find_as_many(samples, capsys):
    kvlab("compare", samples / STOCK, samples / INT4, "--json")
    rows = {row["task"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows.keys() == {*TASKS, "all"}
    for row in rows.values():
        assert row["low"] <= 0 <= row["high"], row
