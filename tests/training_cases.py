"""A plan and a model of the testbed's kind at a size that a test can wait for."""

import dataclasses

from kvlab.testbed.config import Stage, TrainingPlan, default_config
from kvlab.testbed.training import train

VOCABULARY = 600
PLAN = TrainingPlan(
    stages=(Stage(256, 0.5), Stage(512, 0.5)), steps=20, tokens_per_step=1024, task_share=0.5, warmup=0.1, decay=0.5
)


def config():
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2}
    kinds = ["sliding_attention"] * 2 + ["full_attention"]
    return default_config(**sizes, vocab_size=VOCABULARY, sliding_window=33, num_hidden_layers=3, layer_types=kinds)


def run(folder, out, **changes):
    plan = dataclasses.replace(PLAN, **changes.pop("plan", {}))
    return train(folder, out, plan=plan, config=config(), device="cpu", workers=0, compiled=False, **changes)
