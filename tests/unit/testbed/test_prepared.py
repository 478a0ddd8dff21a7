"""The prepared text: its tokenizer, splits and what is refused of it."""

import json
import random
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from task_cases import PARTS
from training_cases import VOCABULARY, run

from kvlab.testbed import prepared as preparing
from kvlab.testbed.prepared import Prepared, prepare, read_prepared
from kvlab.testbed.samples import END
from kvlab.testbed.tokenizer import SPECIAL, train_tokenizer

pytestmark = pytest.mark.unit


def test_every_document_is_in_its_split_and_ends(folder):
    opened = read_prepared(folder)
    end = opened.tokenizer.token_to_id(END)
    texts = [json.loads(line) for line in (folder.parent / "text.jsonl").read_text().splitlines()]
    for split in ("train", "held_out"):
        for language in ("en", "de"):
            tokens = opened.tokens(split, language)
            assert tokens.dtype == np.uint16 and tokens[-1] == end
            found = opened.tokenizer.decode(tokens.tolist(), skip_special_tokens=False).split(END)[:-1]
            held_out = split == "held_out"
            assert found == [t["text"] for t in texts if (t["language"], t["held_out"]) == (language, held_out)]


def test_languages_are_drawn_by_the_roots_of_their_sizes(folder, monkeypatch):
    sizes = {"en": 9_000, "de": 1_000}
    monkeypatch.setattr(Prepared, "tokens", lambda _self, _split, language: np.full(sizes[language], sizes[language]))
    rng = random.Random(0)
    german = sum(int(read_prepared(folder).text(rng, 10)[0]) == 1_000 for _ in range(400))
    # 100 expected, with a standard deviation of 8.7.
    assert 65 <= german <= 135


@given(text=st.text())
def test_any_text_comes_back(folder, text):
    tokenizer = read_prepared(folder).tokenizer
    ids = tokenizer.encode(text.replace("<|", "")).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text.replace("<|", "")


def test_digits_stand_alone_and_special_tokens_come_first(folder):
    tokenizer = read_prepared(folder).tokenizer
    assert tokenizer.encode("1234567").tokens == list("1234567")
    assert [tokenizer.token_to_id(token) for token in SPECIAL] == [0, 1, 2]
    assert tokenizer.get_vocab_size() == VOCABULARY


@pytest.mark.parametrize(("vocabulary", "message"), [(10, "accepted: at least 259"), (90_000, "accepted: more text")])
def test_a_vocabulary_that_cannot_be_filled_is_refused(vocabulary, message):
    with pytest.raises(ValueError, match=f"^vocabulary is {vocabulary}.*{message}"):
        train_tokenizer(["some text, some more"], vocabulary)


def test_a_folder_that_lacks_something_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"which lacks tokenizer.json, .*accepted: a folder that kvlab testbed prep"):
        read_prepared(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"\(No such file or directory\)"),
        ("", ", which holds no documents"),
        ("{", ", which holds no documents"),
        ('{"text": ""}\n', ", which holds no documents"),
    ],
)
def test_a_file_that_is_no_text_is_refused(content, message, tmp_path):
    path = tmp_path / "text.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=rf"^text is .*{message}; accepted: a file of kvlab testbed text$"):
        prepare(path, tmp_path / "out", PARTS)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "task_parts.json", "train-en.npy", "held_out-de.npy"]
)
@pytest.mark.parametrize("content", ["garbage", "{}"])
def test_a_damaged_folder_is_refused_and_nothing_is_begun(folder, name, content, tmp_path):
    broken = tmp_path / "prepared"
    shutil.copytree(folder, broken)
    (broken / name).write_text(content)
    message = rf"^prepared is .*, whose {name} is damaged; accepted: a folder that kvlab testbed prepare wrote$"
    with pytest.raises(ValueError, match=message):
        run(broken, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_tokens_beyond_the_vocabulary_are_refused(folder, tmp_path):
    broken = tmp_path / "prepared"
    shutil.copytree(folder, broken)
    np.save(broken / "held_out-de.npy", np.full(9, read_prepared(folder).tokenizer.get_vocab_size(), dtype=np.uint16))
    with pytest.raises(ValueError, match=r"whose held_out-de\.npy is damaged"):
        read_prepared(broken)


def test_text_without_a_language_is_refused_and_leaves_nothing(folder, tmp_path, monkeypatch):
    lines = (folder.parent / "text.jsonl").read_text().splitlines()
    (tmp_path / "text.jsonl").write_text("\n".join(line for line in lines if '"en"' in line))
    monkeypatch.setattr(preparing, "VOCABULARY", VOCABULARY)
    with pytest.raises(ValueError, match=r"^text is .*, which has no train documents of language 'de'; accepted: "):
        prepare(tmp_path / "text.jsonl", tmp_path / "out", PARTS)
    assert not (tmp_path / "out").exists()
