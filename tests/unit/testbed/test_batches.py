"""Batches as the plan has them, whoever draws them."""

import pytest
import torch
from training_cases import PLAN

from kvlab.testbed.batches import ANSWER, CONTEXT, TEXT, batches, held_out_batch
from kvlab.testbed.prepared import read_prepared
from kvlab.testbed.samples import END

pytestmark = pytest.mark.unit


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
