"""What the testbed is: its sizes, and how long its training takes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlab.models.kolibri1_config import kolibri1_config

if TYPE_CHECKING:
    from transformers import Kolibri1Config

VOCABULARY = 8192
NUM_LAYERS = 10
FULL_EVERY = 5
"""Layers 4 and 9 attend to everything, as every fifth of Kolibri-1's 50."""


def default_config(**changes: object) -> Kolibri1Config:
    """Return the testbed's config: Kolibri-1's with fewer and narrower layers, all else unchanged.

    Window 513, head_dim 128, RoPE on sliding layers only and 262,144 positions are Kolibri-1's. The smallest experts
    that still make 64 of them fit: what is stored is limited, what a token computes is not, hence 8 of them a token.

    Parameters
    ----------
    changes
        Fields to set otherwise, for tests.
    """
    fields = {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "num_hidden_layers": NUM_LAYERS,
        "layer_types": [
            "sliding_attention" if (layer + 1) % FULL_EVERY else "full_attention" for layer in range(NUM_LAYERS)
        ],
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 64,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": None,
    }
    return kolibri1_config(**{**fields, **changes})


@dataclass(frozen=True)
class Stage:
    """A part of the training at one length.

    Attributes
    ----------
    length
        Tokens of a sequence.
    share
        Of the training's steps.
    """

    length: int
    share: float


@dataclass(frozen=True)
class TrainingPlan:
    """How the testbed is trained.

    Attributes
    ----------
    stages
        One after the other, sequences growing.
    steps
        Of the optimizer, in all.
    tokens_per_step
        A multiple of every stage's length.
    learning_rate
        The highest, of matrices and embeddings; `gain_rate` that of the norms' gains.
    warmup, decay
        Shares of the steps in which the rates rise from 0, and fall to 0 at the end; straight lines.
    weight_decay
        Of matrices; forgets in 1 / (weight_decay · learning_rate) steps, some 3,000, what is not read again: text comes
        back many times, and should not be learnt by heart.
    answer_weight
        What the answers of a task's sequence weigh in the loss against natural text, which weighs 1 a token: this times
        the square root of answers' tokens · all tokens, in all. Between a weight for each token, with which copying has
        most of the loss and counting two thousandths, and one for each sequence, with which ten words weigh as much as
        thousands. The rest of a task weighs 0.
    task_share
        Of the sequences, that are synthetic tasks; unlike text they never come back.
    balance_rate
        What a step moves the router's bias of an expert that had too many or too few tokens.
    seed
        Of the weights and of what is drawn from the data.
    """

    stages: tuple[Stage, ...] = (Stage(2048, 0.5), Stage(8192, 0.3), Stage(16384, 0.2))
    steps: int = 6000
    tokens_per_step: int = 131_072
    learning_rate: float = 3e-3
    gain_rate: float = 1e-2
    warmup: float = 0.03
    decay: float = 0.3
    weight_decay: float = 0.1
    answer_weight: float = 2.0
    task_share: float = 0.4
    balance_rate: float = 2e-3
    seed: int = 0

    def __post_init__(self) -> None:
        """Check that stages fill the steps and steps hold whole sequences."""
        if not math.isclose(sum(stage.share for stage in self.stages), 1):
            raise ValueError(f"stages have shares {[s.share for s in self.stages]}; accepted: shares that add up to 1")
        for stage in self.stages:
            if self.tokens_per_step % stage.length:
                raise ValueError(
                    f"tokens_per_step is {self.tokens_per_step}; accepted: a multiple of every length, of "
                    f"{stage.length} too"
                )

    def ends(self) -> list[int]:
        """Return the step after the last one of each stage."""
        shares = [sum(stage.share for stage in self.stages[: index + 1]) for index in range(len(self.stages))]
        return [round(share * self.steps) for share in shares]

    def factor(self, step: int) -> float:
        """Return what the rates are multiplied with at a step: rise, plateau, fall."""
        rise = (step + 1) / max(1, round(self.warmup * self.steps))
        fall = (self.steps - step) / max(1, round(self.decay * self.steps))
        return min(1.0, rise, fall)
