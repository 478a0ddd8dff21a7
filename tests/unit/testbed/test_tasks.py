"""The testbed's tasks, on wording made up for tests."""

import random
import re
import sys
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from scipy.stats import chisquare
from task_cases import PARTS, answered, passages, train
from tokenizers import Tokenizer, models

from kvlab.testbed import task_parts
from kvlab.testbed.samples import END, Piece, PieceTokenizer, Sample, encode
from kvlab.testbed.task_material import Material, TooShortError
from kvlab.testbed.tasks import TASKS, WEIGHTS, TaskMixture

pytestmark = pytest.mark.unit

SHORTEST = {"niah_single": 257, "niah_multikey": 257, "fwe": 257, "copy": 257, "pairs": 257, "niah_essay": 2048,
            "niah_uuid": 2048, "vt": 2048, "cwe": 2048}  # fmt: skip
CASES = [(task, length) for task in TASKS for length in (257, 2048, 16384) if length >= SHORTEST[task]]


@pytest.fixture(scope="module")
def tokenizer():
    return train()


@pytest.fixture
def material(tokenizer):
    return Material(PARTS, PieceTokenizer(tokenizer), passages)


def needle(read):
    [*_, key] = re.findall(r"What does (.+?) hold\?", read)
    [value] = re.findall(rf"(?:^|[ \n])Note: {re.escape(key)} holds (\S+)\.(?=[ \n])", read)
    return f" {value}."


def variables(read):
    [*_, value] = re.findall(r"names are (\d+)\?", read)
    # After the example: its names have three letters.
    found = re.findall(rf"SET ([A-Z]{{5}}) = {value} ", read)
    while following := re.findall(rf"SET ([A-Z]{{5}}) = SET {found[-1]} ", read):
        found += following
    return "".join(f" {name}" for name in found)


def listed(read):
    words = re.findall(r" ?\d+\. ([^\d\n]+?)(?= \d|\n)", read)
    counts = Counter(words)
    most = max(counts.values())
    return sorted(word for word in counts if counts[word] == most)


def coded(read):
    counts = Counter(read.split("\n")[0].removeprefix("A text. ").split())
    return "".join(f" {word}" for word, _ in counts.most_common(4)[1:])


def recalled(read):
    [*_, key] = read.split("\n")
    [value] = re.findall(rf"\n{re.escape(key)}( .*)", read)
    return value


def numbered(said):
    """Take the words out of an answer that numbers them, as any order of them is right."""
    words = re.findall(r" \d+\. ([^\d\n]+?)(?= \d|<)", said)
    assert said == "".join(f" {place}. {word}" for place, word in enumerate(words, 1)) + END
    return sorted(words)


SAYS = {"vt": variables, "cwe": listed, "fwe": coded, "copy": recalled, "pairs": recalled}


@pytest.mark.parametrize(("task", "length"), CASES)
def test_a_sample_is_as_long_as_asked_and_answers_what_its_context_says(material, tokenizer, task, length):
    questions = set()
    for seed in range(6 if length < 16384 else 2):
        ids, answer = encode(TASKS[task](material, random.Random(seed), length), material.tokens, length)
        assert (ids.dtype, ids.shape, answer.dtype, answer.shape) == (np.uint16, (length,), bool, (length,))
        found = answered(tokenizer, ids, answer)
        questions.add(len(found))
        # Every third of the many questions of a long sample.
        for read, said in found[:: 1 if length < 16384 else 3]:
            if task == "cwe":
                assert numbered(said) == listed(read)
            else:
                assert said == SAYS.get(task, needle)(read) + END
    assert min(questions) >= 1
    if length == 2048 and task not in ("cwe", "fwe"):
        assert max(questions) >= 2


@pytest.mark.parametrize("task", TASKS)
def test_tokens_are_those_of_the_whole_text(material, tokenizer, task):
    for seed in range(4):
        sample = TASKS[task](material, random.Random(seed), 2500)
        ids, answer = encode(sample, material.tokens, 2500)
        whole = tokenizer.encode(sample.text, add_special_tokens=False).ids
        assert ids[: len(whole)].tolist() == whole
        assert (ids[len(whole) :] == material.tokens.end).all() and not answer[len(whole) :].any()
        # What a model is given, and what it is to say after it.
        first = next(place for place, piece in enumerate(sample.pieces) if piece.answer)
        prompt = "".join(piece.text for piece in sample.pieces[:first])
        assert tokenizer.encode(prompt, add_special_tokens=False).ids == whole[: answer.argmax()]


@pytest.mark.parametrize("task", ["niah_single", "niah_multikey", "niah_uuid", "vt", "pairs"])
@pytest.mark.parametrize("length", [2048, 16384])
def test_samples_fill_their_length(material, task, length):
    # Less than one more sentence, which takes at most this many tokens.
    sentence = max(material.tokens.counts([PARTS["vt"]["noise"], f"Note: {'0f' * 16} holds {'0f' * 16}. ----"])) * 2
    for seed in range(5):
        sample = TASKS[task](material, random.Random(seed), length)
        assert length - sentence <= material.tokens.count(piece.text for piece in sample.pieces) <= length


@pytest.mark.parametrize("task", TASKS)
def test_mixtures_are_full_and_the_same_for_the_same_seed(tokenizer, task):
    mixture, other = (TaskMixture(PARTS, tokenizer, passages, {task: 1}) for _ in range(2))
    for length in (257, 2048):
        drawn = [mixture.draw(random.Random(seed), length) for seed in range(4)]
        again = [other.draw(random.Random(seed), length) for seed in reversed(range(4))][::-1]
        for (ids, answer), (ids_again, answer_again) in zip(drawn, again, strict=True):
            assert np.array_equal(ids, ids_again) and np.array_equal(answer, answer_again)
            assert answer.any() and len(ids) == length
            # A pair of names is two lines of at most 32 tokens each.
            assert length - np.flatnonzero(ids != mixture.material.tokens.end)[-1] <= 64
            said = [said for _, said in answered(tokenizer, ids, answer)]
            assert all(text.endswith(END) and text.count(END) == 1 for text in said)
        assert len({ids.tobytes() for ids, _ in drawn}) == 4


def test_weights_decide_what_is_drawn(tokenizer):
    mixture = TaskMixture(PARTS, tokenizer, passages, {"niah_single": 3, "fwe": 1, "copy": 0})
    rng = random.Random(0)
    heads = Counter()
    for _ in range(200):
        ids, _ = mixture.draw(rng, 257)
        heads[tokenizer.decode(ids[:4].tolist())[:6]] += 1
    assert set(heads) == {"Keep i", "A text"}
    # 150 of 200 expected, with a standard deviation of 6.1.
    assert 125 <= heads["Keep i"] <= 175
    assert TaskMixture(PARTS, tokenizer, passages).weights == WEIGHTS and set(WEIGHTS) == set(TASKS)


@pytest.mark.parametrize("task", ["niah_single", "niah_multikey", "niah_uuid"])
def test_what_is_asked_lies_anywhere(material, task):
    rng, depths = random.Random(7), []
    for seed in range(150):
        sample = TASKS[task](material, random.Random(seed), 2048)
        lines = [piece.text for piece in sample.pieces if piece.text.startswith(("\nNote", "\nRain"))]
        for piece in sample.pieces:
            if key := re.search(r"does (.+?) hold", piece.text):
                [place] = [place for place, line in enumerate(lines) if f" {key[1]} " in line]
                # Spread over its line; the last line is never asked for.
                depths.append((place + rng.random()) / (len(lines) - 1))
    assert len(depths) > 300 and max(depths) < 1
    counts, _ = np.histogram(depths, bins=10, range=(0, 1))
    assert chisquare(counts).pvalue > 1e-3


def test_about_three_in_ten_have_one_question(material):
    alone = sum(
        sum(piece.answer for piece in TASKS["niah_multikey"](material, random.Random(seed), 2048).pieces) == 1
        for seed in range(200)
    )
    # 60 expected, with a standard deviation of 6.5.
    assert 40 <= alone <= 80


def test_the_order_of_common_words_tells_nothing_of_the_list(material):
    rises = 0
    for seed in range(60):
        pieces = TASKS["cwe"](material, random.Random(seed), 2048).pieces
        shown = [piece.text for piece in pieces if not piece.answer]
        said = [piece.text for piece in pieces if piece.answer][1::2]
        rises += sum(shown.index(one) < shown.index(other) for one, other in pairwise(said))
    # Half of 540, with a standard deviation of at most sqrt(540 / 4) = 11.6.
    assert abs(rises - 270) < 60


def test_copies_reach_from_near_to_half_the_length(material):
    distances = []
    for seed in range(40):
        sample = TASKS["copy"](material, random.Random(seed), 4096)
        texts = [piece.text for piece in sample.pieces]
        for place, piece in enumerate(sample.pieces):
            if piece.answer and not sample.pieces[place - 1].answer:
                shown = texts.index(texts[place - 1])
                distances.append(material.tokens.count(texts[shown : place - 1]))
    assert min(distances) < 60 and max(distances) > 1500


def test_natural_text_may_come_as_tokens(tokenizer):
    def as_tokens(rng, size):
        return np.array(tokenizer.encode(passages(rng, size)).ids, dtype=np.uint16)

    samples = [
        TASKS["niah_essay"](Material(PARTS, PieceTokenizer(tokenizer), source), random.Random(1), 2048)
        for source in (passages, as_tokens)
    ]
    assert samples[0] == samples[1]
    # Sentences and needles are one space apart.
    assert "  " not in samples[0].text


@pytest.mark.parametrize(("task", "length"), [("vt", 257), ("cwe", 257), ("niah_uuid", 200), ("fwe", 64), ("copy", 24)])
def test_what_does_not_fit_is_refused(material, task, length):
    with pytest.raises(TooShortError, match=f"^length is {length}; accepted for {task}: more"):
        TASKS[task](material, random.Random(0), length)


def test_bad_input_is_told(material, tokenizer):
    def mixture(**weights):
        return TaskMixture(PARTS, tokenizer, passages, weights)

    with pytest.raises(TypeError, match=r"tokenizer is a str; accepted: a tokenizers\.Tokenizer"):
        TaskMixture(PARTS, "gpt2", passages)
    with pytest.raises(ValueError, match=r"tokenizer has no token <\|endoftext\|>"):
        PieceTokenizer(Tokenizer(models.BPE()))
    wide = Tokenizer(models.WordLevel({str(token): token for token in range(65_537)}, unk_token="0"))
    with pytest.raises(ValueError, match="tokenizer has 65537 tokens; accepted: at most 65536"):
        PieceTokenizer(wide)
    with pytest.raises(ValueError, match="weights has task 'qa'; accepted: niah_single, "):
        mixture(qa=1)
    for weight in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"weights has {weight} for vt; accepted: finite numbers of at least 0"):
            mixture(vt=weight)
    with pytest.raises(ValueError, match="weights are all 0"):
        mixture(vt=0)
    with pytest.raises(ValueError, match="length is 127; accepted: at least 128 tokens"):
        mixture(vt=1).draw(random.Random(0), 127)
    with pytest.raises(ValueError, match="passages gave no text"):
        TaskMixture(PARTS, tokenizer, lambda *_: " \n", {"niah_essay": 1}).draw(random.Random(0), 2048)
    with pytest.raises(ValueError, match="length is 2; accepted for this sample of x: at least 3 tokens"):
        encode(Sample("x", (Piece("1"), Piece(f"2{END}", answer=True))), material.tokens, 2)


def test_without_the_harness_it_says_what_to_install(monkeypatch):
    for name in ("lm_eval", f"{task_parts.FAMILY}.prepare_niah"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=r"need lm-evaluation-harness .*pip install 'kvlab\[eval\]'"):
        task_parts.read_parts()
