"""Training of the testbed, at a size that a test can wait for."""

import random

import numpy as np
import pandas as pd
import pytest
import torch
from task_cases import PARTS
from training_cases import PLAN, VOCABULARY, config, run

from kvlab.testbed.batches import ANSWER, CONTEXT, TEXT, held_out_batch
from kvlab.testbed.config import Stage
from kvlab.testbed.export import export
from kvlab.testbed.prepared import prepare, read_prepared
from kvlab.testbed.scoring import next_token_losses, write_scores
from kvlab.testbed.training import CURVE, STATE, _sums, read_model, train

pytestmark = pytest.mark.unit


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


def test_a_run_without_data_is_refused_and_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match=r"which lacks tokenizer.json, .*; accepted: a folder that kvlab testbed prep"):
        train(tmp_path / "nothing", tmp_path / "out", device="cpu")
    assert not (tmp_path / "out").exists()


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
