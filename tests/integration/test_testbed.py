"""The trained testbed as it lies in the repository."""

import pytest
import torch
from transformers import Kolibri1ForCausalLM

import kvlab
from kvlab.measure.loss import token_losses
from kvlab.testbed.config import TrainingPlan, default_config
from kvlab.testbed.loading import checkpoint_folder, load_testbed, loss_curve
from kvlab.testbed.training import CURVE_COLUMNS, HELD_OUT_EVERY, LOG_EVERY

pytestmark = pytest.mark.integration

IN_ALL, SHARD = 24_000_000, 15_000_000
"""Bytes that the repository has room for."""


@pytest.fixture(scope="module")
def testbed():
    return load_testbed()


def test_it_is_transformers_own_model_at_the_sizes_described(testbed):
    model, tokenizer = testbed
    assert type(model) is Kolibri1ForCausalLM and not model.training
    with torch.device("meta"):
        described = Kolibri1ForCausalLM(default_config())
    assert {name: p.shape for name, p in model.named_parameters()} == {
        name: p.shape for name, p in described.named_parameters()
    }
    assert round(model.num_parameters() / 1e6) == 18
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert len(tokenizer) == model.config.vocab_size


def test_it_is_trained(testbed):
    model, tokenizer = testbed
    losses = token_losses(model, kvlab.tokenize(tokenizer, kvlab.default_text(), 512))
    # What 100 of its 6,000 steps had reached on other English text; an untrained one is at ln 8,192, or 9.0.
    assert losses.mean() < loss_curve()["held_out_en"].dropna().iloc[0]


def test_it_fits_the_repository():
    sizes = {path.name: path.stat().st_size for path in checkpoint_folder().iterdir()}
    assert sum(sizes.values()) <= IN_ALL
    assert max(size for name, size in sizes.items() if name.endswith(".safetensors")) <= SHARD


def test_its_curve_is_the_whole_plans():
    curve, plan = loss_curve(), TrainingPlan()
    assert tuple(curve.columns) == CURVE_COLUMNS
    assert list(curve["step"]) == list(range(LOG_EVERY, plan.steps + 1, LOG_EVERY))
    assert (curve["tokens"] == curve["step"] * plan.tokens_per_step).all()
    assert dict(curve.groupby("length")["step"].max()) == {
        stage.length: end for stage, end in zip(plan.stages, plan.ends(), strict=True)
    }
    assert set(curve.loc[curve["held_out_de"].notna(), "step"]) == set(
        range(HELD_OUT_EVERY, plan.steps + 1, HELD_OUT_EVERY)
    )
