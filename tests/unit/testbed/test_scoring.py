"""Scores of a trained model: held-out text and tasks."""

import random

import numpy as np
import pytest
import torch
from training_cases import config

from kvlab.testbed.model import attention_masks
from kvlab.testbed.prepared import read_prepared
from kvlab.testbed.samples import END
from kvlab.testbed.scoring import greedy_answer, held_out_text, next_token_losses, task_table, write_scores
from kvlab.testbed.training import read_model

pytestmark = pytest.mark.unit


def test_scores_are_those_of_the_plain_model(folder, trained):
    opened = read_prepared(folder)
    model, plain = read_model(trained[0], config(), training=True), read_model(trained[0], config())
    ids = torch.from_numpy(opened.text(random.Random(0), 200).astype(np.int64))[None]
    losses, hits = next_token_losses(model, ids)
    with torch.no_grad():
        logits = plain(ids[:, :-1]).logits[0]
    want = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
    torch.testing.assert_close(losses, want, rtol=1e-5, atol=1e-5)
    assert torch.equal(hits, logits.argmax(-1) == ids[0, 1:])
    near, _ = next_token_losses(model, ids, full_window=33)
    assert torch.equal(near[:33], losses[:33]) and not torch.equal(near[-20:], losses[-20:])


def test_held_out_text_is_measured_beside_xz(folder, trained):
    table = held_out_text(read_model(trained[0], config(), training=True), read_prepared(folder), length=128)
    assert table["language"].tolist() == ["en", "de"]
    # A model of 20 steps is worse than xz; both are better than 8 bits.
    assert (table["xz_bits_per_byte"] < table["bits_per_byte"]).all() and (table["bits_per_byte"] < 8).all()
    bits = table["nats_per_token"] / np.log(2) * table["tokens"] / table["bytes"]
    np.testing.assert_allclose(table["bits_per_byte"], bits)


def test_tasks_are_counted(folder, trained):
    model = read_model(trained[0], config(), training=True)
    table = task_table(model, read_prepared(folder), ["niah_single"], [300, 400], prompts=3, seed=0)
    assert table["prompts"].tolist() == [3, 3] and table["length"].tolist() == [300, 400]
    # Seven digits by chance.
    assert not table["right"].any() and table["share"].between(0, 0.9).all()


def test_a_model_that_knows_the_answers_has_all_of_them(folder, trained, monkeypatch):
    def knows(_model, ids, *, full_window=None):
        hits = torch.ones(ids.shape[1] - 1, dtype=torch.bool)
        # Wrong somewhere in the context, which is not asked for.
        hits[:10] = False
        return hits.float(), hits

    monkeypatch.setattr("kvlab.testbed.scoring.next_token_losses", knows)
    model = read_model(trained[0], config(), training=True)
    table = task_table(model, read_prepared(folder), ["niah_single", "pairs"], [300], prompts=4, seed=0)
    assert table["right"].tolist() == [4, 4]


def test_greedy_answers_are_those_of_one_token_at_a_time(folder, trained):
    model = read_model(trained[0], config(), training=True)
    ids = torch.from_numpy(read_prepared(folder).text(random.Random(1), 120).astype(np.int64))[None]
    want = ids[:, :100]
    for _ in range(15):
        with torch.no_grad():
            padded = torch.cat([want, want.new_zeros(1, 120 - want.shape[1])], dim=1)
            masks = attention_masks(33, 119, ids.device)
            hidden = model.model(input_ids=padded[:, :-1], attention_mask=masks, use_cache=False).last_hidden_state
            token = model.lm_head(hidden[:, want.shape[1] - 1]).argmax(dim=-1)
        want = torch.cat([want, token[:, None]], dim=1)
    before = ids.clone()
    assert torch.equal(greedy_answer(model, ids, 100, 115), want[0, 100:])
    assert torch.equal(ids, before)


@pytest.mark.parametrize(
    ("write", "right", "share"),
    [
        (lambda words: words, 3, 1),
        (lambda words: words[::-1], 3, 1),
        (lambda words: [*words[:-1], END, words[-1]], 0, 0.8),
        (lambda words: [words[0]] * 5, 0, 0.2),
    ],
)
def test_words_are_right_in_any_order_before_the_end(folder, trained, monkeypatch, write, right, share):
    opened = read_prepared(folder)
    encode = opened.tokenizer.encode

    def written(_model, ids, begin, end, *, full_window=None):
        words = opened.tokenizer.decode(ids[0, begin:end].tolist()).split()
        assert len(words) == 5
        return torch.tensor(encode(f" {' '.join(write(words))}{END}").ids)

    monkeypatch.setattr("kvlab.testbed.scoring.greedy_answer", written)
    model = read_model(trained[0], config(), training=True)
    (row,) = task_table(model, opened, ["vt"], [2048], prompts=3, seed=0).to_dict("records")
    assert row["right"] == right and row["share"] == pytest.approx(share)


def test_scores_of_no_task_are_refused(folder, trained, tmp_path):
    with pytest.raises(ValueError, match=r"^task is 'needles'; accepted: niah_single, "):
        write_scores(
            trained[0],
            folder,
            tmp_path / "out",
            tasks=["needles"],
            lengths=[1024],
            prompts=1,
            text_length=64,
            device="cpu",
        )
    assert not (tmp_path / "out").exists()


def test_lengths_beyond_the_text_or_the_model_are_refused(folder, trained, tmp_path, monkeypatch):
    sizes = {"tasks": ["pairs"], "lengths": [1024], "prompts": 1, "text_length": 64}
    shortest = min(len(read_prepared(folder).tokens("held_out", language)) for language in ("en", "de"))
    with pytest.raises(ValueError, match=rf"^text_length is {shortest + 1}; accepted: at most {shortest}, the tokens"):
        write_scores(trained[0], folder, tmp_path / "out", device="cpu", **sizes | {"text_length": shortest + 1})
    monkeypatch.setattr("kvlab.testbed.scoring.read_model", lambda *_, **__: read_model(trained[0], config()))
    with pytest.raises(ValueError, match=r"^length is 262145; accepted: at most the model's 262144$"):
        write_scores(trained[0], folder, tmp_path / "out", device="cpu", **sizes | {"lengths": [1024, 262_145]})
    assert not (tmp_path / "out").exists()
