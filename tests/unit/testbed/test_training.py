"""Data and training of the testbed, at a size that a test can wait for."""

import dataclasses
import json
import random
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from task_cases import NATURAL, PARTS

from kvlab.testbed import prepared as preparing
from kvlab.testbed.batches import ANSWER, CONTEXT, TEXT, batches, held_out_batch
from kvlab.testbed.config import Stage, TrainingPlan, default_config
from kvlab.testbed.export import export
from kvlab.testbed.model import attention_masks
from kvlab.testbed.prepared import Prepared, prepare, read_prepared
from kvlab.testbed.samples import END
from kvlab.testbed.scoring import greedy_answer, held_out_text, next_token_losses, task_table, write_scores
from kvlab.testbed.tokenizer import SPECIAL, train_tokenizer
from kvlab.testbed.training import CURVE, STATE, _sums, read_model, train

pytestmark = pytest.mark.unit

VOCABULARY = 600
PLAN = TrainingPlan(
    stages=(Stage(256, 0.5), Stage(512, 0.5)), steps=20, tokens_per_step=1024, task_share=0.5, warmup=0.1, decay=0.5
)


def config():
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2}
    kinds = ["sliding_attention"] * 2 + ["full_attention"]
    return default_config(**sizes, vocab_size=VOCABULARY, sliding_window=33, num_hidden_layers=3, layer_types=kinds)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("testbed")
    pages = NATURAL.split(". ")
    documents = [
        {
            "package": "p",
            "language": ("en", "de")[number % 2],
            "name": str(number),
            "text": text,
            "held_out": number % 7 == 0,
        }
        for number, text in enumerate(". ".join(pages[start : start + 20]) for start in range(0, len(pages), 20))
    ]
    (made / "text.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparing, "VOCABULARY", VOCABULARY)
        prepare(made / "text.jsonl", made / "prepared", PARTS)
    return made / "prepared"


def run(folder, out, **changes):
    plan = dataclasses.replace(PLAN, **changes.pop("plan", {}))
    return train(folder, out, plan=plan, config=config(), device="cpu", workers=0, compiled=False, **changes)


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


def drawn(folder, first_step=0, workers=0):
    return [
        (stage.length, batch["ids"], batch["kinds"])
        for stage, batch in batches(folder, PLAN, first_step=first_step, workers=workers)
    ]


def test_batches_are_the_plans(folder):
    found = drawn(folder)
    assert [length for length, _, _ in found] == [256] * 10 + [512] * 10
    tokenizer = read_prepared(folder).tokenizer
    kinds = set()
    for length, ids, kind in found:
        assert ids.shape == (1024 // length, length + 1) and kind.shape == (1024 // length, length)
        for row, row_kinds in zip(ids, kind, strict=True):
            of_row = set(row_kinds.tolist())
            assert of_row == {TEXT} or of_row == {CONTEXT, ANSWER}
            kinds |= of_row
            # An answer's last token is the end of its text.
            ends = (row_kinds == ANSWER) & (torch.cat([row_kinds[1:], torch.tensor([CONTEXT])]) == CONTEXT)
            assert (row[1:][ends] == tokenizer.token_to_id(END)).all()
    assert kinds == {CONTEXT, TEXT, ANSWER}


def same(one, other):
    return len(one) == len(other) and all(
        a[0] == b[0] and torch.equal(a[1], b[1]) and torch.equal(a[2], b[2]) for a, b in zip(one, other, strict=True)
    )


def test_batches_do_not_depend_on_workers_or_where_one_begins(folder):
    everything = drawn(folder)
    assert same(drawn(folder, workers=2), everything)
    for first_step in (3, 10, 13):
        assert same(drawn(folder, first_step), everything[first_step:])


@pytest.mark.parametrize("language", ["en", "de"])
def test_the_held_out_sample_is_the_same_at_every_length(folder, language):
    opened = read_prepared(folder)
    short, long = (held_out_batch(opened, PLAN, length, language) for length in (256, 512))
    assert short["ids"].shape == (4, 257) and long["ids"].shape == (2, 513)
    assert torch.equal(short["ids"][:, 1:].flatten(), long["ids"][:, 1:].flatten())
    assert torch.equal(short["ids"][:, :-1].flatten(), long["ids"][:, :-1].flatten())
    assert (short["kinds"] == TEXT).all() and short["kinds"].shape == (4, 256)
    held_out, trained_on = (opened.tokens(split, language).tolist() for split in ("held_out", "train"))
    begin = long["ids"][0, :30].tolist()
    assert begin == held_out[:30]
    assert not any(trained_on[start : start + 30] == begin for start in range(len(trained_on)))


def test_answers_of_a_sequence_weigh_by_the_root_of_their_number():
    generator = torch.Generator().manual_seed(0)
    head, hidden = torch.randn(16, 8, generator=generator), torch.randn(2, 64, 8, generator=generator)
    kinds = torch.full((2, 64), CONTEXT, dtype=torch.int8)
    kinds[0], kinds[1, 10:14] = TEXT, ANSWER
    targets = torch.randint(16, (2, 64), generator=generator)
    found = _sums(head, hidden, targets, kinds, 3.0)
    # Four answers of 64 tokens: 3 · √(4 · 64) in all.
    want = (found["text"] + 12 * found["answer"]) / (64 + 48)
    torch.testing.assert_close(found["loss"], want)


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    return out, run(folder, out)


def test_it_learns(trained):
    out, progress = trained
    assert progress.step == PLAN.steps
    (row,) = pd.read_csv(out / CURVE).to_dict("records")
    assert row["step"] == 20 and row["tokens"] == 20 * 1024 and row["length"] == 512
    # The plan's last batch has two tasks.
    assert np.isnan(row["text_loss"])
    # From the uniform distribution's.
    for loss in ("answer_loss", "held_out_en", "held_out_de"):
        assert row[loss] < np.log(VOCABULARY) - 0.4


def test_the_curves_last_losses_of_held_out_text_are_the_trained_models(folder, trained):
    (row,) = pd.read_csv(trained[0] / CURVE).to_dict("records")
    model = read_model(trained[0], config(), training=True)
    for language in ("en", "de"):
        rows = held_out_batch(read_prepared(folder), PLAN, 512, language)["ids"]
        losses = torch.stack([next_token_losses(model, ids[None])[0] for ids in rows])
        # The curve's is in bfloat16, of 8 bits.
        assert row[f"held_out_{language}"] == pytest.approx(losses.mean().item(), rel=2**-7)


def test_pieces_are_the_run_in_one(folder, trained, tmp_path, monkeypatch):
    # Time is asked for with each row, and is up when it is first asked for.
    monkeypatch.setattr("kvlab.testbed.training.LOG_EVERY", 6)
    # That held-out text is scored more often must leave no trace.
    monkeypatch.setattr("kvlab.testbed.training.HELD_OUT_EVERY", 12)
    steps = [run(folder, tmp_path, minutes=0).step for _ in range(4)]
    assert steps == [6, 12, 18, 20]
    one, other = (torch.load(out / STATE, weights_only=True)["model"] for out in (trained[0], tmp_path))
    assert all(torch.equal(one[name], other[name]) for name in one)
    curve = pd.read_csv(tmp_path / CURVE)
    assert curve["step"].tolist() == steps
    assert curve["held_out_en"].notna().tolist() == [False, True, False, True]
    for column in ("answer_loss", "busiest_expert", "held_out_de"):
        assert curve[column].iloc[-1] == pd.read_csv(trained[0] / CURVE)[column].iloc[-1]


def test_rows_of_a_piece_that_was_lost_are_dropped(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("kvlab.testbed.training.LOG_EVERY", 1)
    run(folder, tmp_path, minutes=0)
    with (tmp_path / CURVE).open("a") as curve:
        curve.write("2,2048,9,256,0,9,9,9,9,,\n")
    run(folder, tmp_path, minutes=0)
    assert pd.read_csv(tmp_path / CURVE)["busiest_expert"].tolist()[-1] != 9


def test_another_plans_run_is_refused_and_stays(folder, trained):
    before = (trained[0] / STATE).read_bytes()
    with pytest.raises(ValueError, match=r"holds another training; accepted: a new folder, or the same plan$"):
        run(folder, trained[0], plan={"seed": 5})
    assert (trained[0] / STATE).read_bytes() == before


def test_a_folder_without_a_run_has_no_model(tmp_path):
    with pytest.raises(ValueError, match=r"which has no state.pt; accepted: a folder that kvlab testbed train wrote$"):
        read_model(tmp_path)


def test_what_is_read_is_what_was_trained(trained):
    model = read_model(trained[0], config())
    state = torch.load(trained[0] / STATE, weights_only=True)["model"]
    assert all(torch.equal(model.state_dict()[name], state[name]) for name in state)


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


def test_a_run_without_data_is_refused_and_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match=r"which lacks tokenizer.json, .*; accepted: a folder that kvlab testbed prep"):
        train(tmp_path / "nothing", tmp_path / "out", device="cpu")
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


def test_text_is_as_long_as_the_longest_sequence_or_refused(folder, tmp_path):
    # Whatever the text: a sequence has a token more than its length, and a start is drawn.
    longest = read_prepared(folder).shortest("train") - 2
    plan = {"steps": 1, "task_share": 0, "warmup": 0}
    message = rf"^prepared is .*, with {longest + 2} tokens of a language to train on; accepted: at least {longest + 3}"
    with pytest.raises(ValueError, match=message):
        too_long = longest + 1
        run(folder, tmp_path / "out", plan={**plan, "stages": (Stage(too_long, 1),), "tokens_per_step": too_long})
    assert not (tmp_path / "out").exists()
    opened = read_prepared(folder)
    for number in range(4):
        assert len(opened.text(random.Random(number), longest + 1)) == longest + 1


def test_a_damaged_run_is_refused(folder, trained, tmp_path):
    for content in (b"garbage", b""):
        (tmp_path / STATE).write_bytes(content)
        with pytest.raises(ValueError, match=r"^run is .*, whose state.pt is damaged; accepted: a folder that kvlab"):
            read_model(tmp_path, config())
    torch.save({}, tmp_path / STATE)
    with pytest.raises(ValueError, match=r"^out is .*, whose state.pt is damaged; accepted: a folder that kvlab"):
        run(folder, tmp_path)
    with pytest.raises(ValueError, match=r"^run is .*, which holds another model; accepted: a run of this one$"):
        read_model(trained[0])


def test_lengths_beyond_the_text_or_the_model_are_refused(folder, trained, tmp_path, monkeypatch):
    sizes = {"tasks": ["pairs"], "lengths": [1024], "prompts": 1, "text_length": 64}
    shortest = min(len(read_prepared(folder).tokens("held_out", language)) for language in ("en", "de"))
    with pytest.raises(ValueError, match=rf"^text_length is {shortest + 1}; accepted: at most {shortest}, the tokens"):
        write_scores(trained[0], folder, tmp_path / "out", device="cpu", **sizes | {"text_length": shortest + 1})
    monkeypatch.setattr("kvlab.testbed.scoring.read_model", lambda *_, **__: read_model(trained[0], config()))
    with pytest.raises(ValueError, match=r"^length is 262145; accepted: at most the model's 262144$"):
        write_scores(trained[0], folder, tmp_path / "out", device="cpu", **sizes | {"lengths": [1024, 262_145]})
    assert not (tmp_path / "out").exists()


def test_text_without_a_language_is_refused_and_leaves_nothing(folder, tmp_path, monkeypatch):
    lines = (folder.parent / "text.jsonl").read_text().splitlines()
    (tmp_path / "text.jsonl").write_text("\n".join(line for line in lines if '"en"' in line))
    monkeypatch.setattr(preparing, "VOCABULARY", VOCABULARY)
    with pytest.raises(ValueError, match=r"^text is .*, which has no train documents of language 'de'; accepted: "):
        prepare(tmp_path / "text.jsonl", tmp_path / "out", PARTS)
    assert not (tmp_path / "out").exists()


def test_a_file_where_a_folder_goes_is_refused_before_any_work(folder, trained, tmp_path):
    out = tmp_path / "out"
    out.write_text("kept")
    sizes = {"tasks": ["pairs"], "lengths": [1024], "prompts": 1, "text_length": 64, "device": "cpu"}
    for write in (
        lambda: prepare(folder.parent / "text.jsonl", out, PARTS),
        lambda: run(folder, out),
        lambda: export(read_model(trained[0], config()), out),
        lambda: write_scores(trained[0], folder, out, **sizes),
    ):
        with pytest.raises(ValueError, match=r"^out is .*, which cannot be written \(.* is no folder\); accepted: "):
            write()
    assert out.read_text() == "kept"
