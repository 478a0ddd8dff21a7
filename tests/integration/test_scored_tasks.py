"""The testbed's tasks beside the prompts that the harness makes."""

import json
import random
import re
from collections import Counter

import numpy as np
import pytest
from task_cases import PARTS, answered, passages, train
from transformers import PreTrainedTokenizerFast

from kvlab.evaluation.harness import evaluate
from kvlab.evaluation.job import RULER_TASKS
from kvlab.testbed import task_parts
from kvlab.testbed.samples import END, PieceTokenizer, encode
from kvlab.testbed.task_material import Material
from kvlab.testbed.tasks import TASKS

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: the extra 'eval'")
pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def tokenizer():
    return train()


@pytest.fixture(scope="module")
def parts():
    return task_parts.read_parts()


def without_what_is_random(task, prompt, parts):
    """Return a prompt without its random content and its length, and what of it is countable."""
    if task == "vt":
        noise = re.escape(parts["vt"]["noise"])
        # An assignment comes with the space after it: noise follows.
        texts = [re.subn(r"VAR [A-Z]+ = (?:\d{5}|VAR [A-Z]+ ) ", "", text) for text in prompt.split("\n\n\n\n")]
        [(example, _), (asked, _)] = texts
        # Where an assignment was hidden before a line break, the harness leaves a space.
        example = example.replace(". \n", ".\n")
        example = re.sub(r"they are:  [A-Z]{3}(?: [A-Z]{3}){4}$", "they are:  NAMES", example)
        asked = re.sub(rf"(?:{noise}\n )+(?={noise})", "", asked)
        return [re.sub(r"\b\d{5}\b", "N", text) for text in (example, asked)], [hidden for _, hidden in texts]
    if task == "cwe":
        head, context, *rest = prompt.split("\n")
        numbers, words = zip(*re.findall(r"(\d+)\. (.+?)(?= \d+\.|$)", context), strict=True)
        assert context == " ".join(f"{number}. {word}" for number, word in zip(numbers, words, strict=True))
        assert [int(number) for number in numbers] == list(range(1, len(words) + 1))
        times = Counter(Counter(words).values())
        return [head, *rest], (sorted(times), times[max(times)])
    if task == "fwe":
        head = parts["fwe"]["head"]
        context, *rest = prompt.removeprefix(head).split("\n")
        words = context.split(" ")
        assert all(re.fullmatch(r"\.\.\.|[a-z]{6}", word) for word in words)
        often = [count for _, count in Counter(words).most_common(3)]
        return [prompt[: len(head)], *rest], [round(often[0] / count) for count in often]
    prompt = re.sub(task_parts.UUID, "U", prompt)
    prompt = re.sub(r"(?<= for )\S[^:\n]*?(?= is: | mentioned)", "K", prompt)
    head, *context, question = re.sub(r"\b\d{7}\b", "N", prompt).split("\n")
    needle = [line for line in set(context) if line != parts["numbers"]["noise"]]
    # In a haystack of needles all have become the same.
    return [head, question, sorted(set(context))], context.count(needle[0]) == 1 if len(set(context)) > 1 else None


SCORED = {"niah_single": "niah_single_1", "niah_multikey": "niah_multikey_2", "niah_uuid": "niah_multikey_3",
          "vt": "vt", "cwe": "cwe", "fwe": "fwe"}  # fmt: skip
# With a tokenizer as poor as this one the harness has no room for the words of cwe in 1,024.
SCORED_LENGTH = 2048


@pytest.fixture(scope="module")
def scored(parts, tokenizer, tmp_path_factory):
    """Make the harness's prompts of a task, as a model gets them."""
    from lm_eval.api.model import LM

    folder = tmp_path_factory.mktemp("scored")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(folder)

    class Listening(LM):
        def loglikelihood(self, requests):
            raise NotImplementedError

        loglikelihood_rolling = loglikelihood

        def generate_until(self, requests):
            self.prompts = [request.args[0] for request in requests]
            return [""] * len(requests)

    def prompts(task):
        listening = Listening()
        told = {"tokenizer": str(folder), "max_seq_lengths": [SCORED_LENGTH]}
        settings = {"prompts": 3, "prompt_seed": 1, "sampling_seed": 1, "generation": {}, "chat": False}
        name, _ = RULER_TASKS[SCORED[task]]
        evaluate(name, "ruler", listening, metadata=told, cache=folder / task, **settings)
        return listening.prompts

    return prompts


@pytest.mark.parametrize("task", SCORED)
def test_one_question_reads_as_the_harness_asks_it(parts, tokenizer, scored, task):
    material = Material(parts, PieceTokenizer(tokenizer), passages)
    expected = [without_what_is_random(task, prompt, parts) for prompt in scored(task)]
    assert len(expected) == 3
    seen = 0
    for seed in range(40):
        sample = TASKS[task](material, random.Random(seed), SCORED_LENGTH)
        ids, answer = encode(sample, material.tokens, SCORED_LENGTH)
        [(prompt, said), *others] = answered(tokenizer, ids, answer)
        if not others:
            seen += 1
            assert without_what_is_random(task, prompt, parts) in expected
            assert said.startswith(" ") and said.endswith(END)
            whole = tokenizer.encode(prompt, add_special_tokens=False).ids
            assert whole == ids[: answer.argmax()].tolist()
    assert seen >= 5


def test_parts_are_json_and_reading_them_changes_no_random_state(parts):
    before = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    assert json.loads(json.dumps(task_parts.read_parts())) == parts
    assert before == (random.getstate(), np.random.get_state()[1].tolist())  # noqa: NPY002
    assert parts["version"] == task_parts.metadata.version("lm_eval")
    shaped = {name: sorted(part) for name, part in parts.items() if isinstance(part, dict)}
    assert shaped == {name: sorted(part) for name, part in PARTS.items() if isinstance(part, dict)}


@pytest.mark.parametrize("task", SCORED)
def test_answers_score_full_marks(parts, tokenizer, task):
    from lm_eval.tasks.ruler.common_utils import postprocess_pred, string_match_all

    material = Material(parts, PieceTokenizer(tokenizer), passages)
    ids, answer = encode(TASKS[task](material, random.Random(3), 4096), material.tokens, 4096)
    for read, said in answered(tokenizer, ids, answer):
        if task == "vt":
            value = re.findall(r"the value (\d+)", read)[-1]
            expected = re.findall(rf"VAR ([A-Z]{{5}}) = {value} ", read)
            while following := re.findall(rf"VAR ([A-Z]{{5}}) = VAR {expected[-1]} ", read):
                expected += following
        elif task in ("cwe", "fwe"):
            words = re.findall(r"\d+\. ([^\d\n]+?)(?= \d|\n)|\b([a-z]{6})\b", read.split("?")[0])
            number = {"cwe": 10, "fwe": 3}[task]
            expected = [word for word, _ in Counter(map(max, words)).most_common(number)]
        else:
            key = re.findall(r"for (.+?) mentioned", read)[-1]
            expected = re.findall(rf"for {key} is: (\S+)\.", read)
        assert expected and string_match_all(postprocess_pred([said]), [expected]) == 1
