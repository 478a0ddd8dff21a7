"""The model as it is trained computes what transformers' own computes."""

import pytest
import torch
from transformers import Kolibri1ForCausalLM

from kvlab.testbed.config import Stage, TrainingPlan, default_config
from kvlab.testbed.model import attention_masks, balance, routers, training_model

pytestmark = pytest.mark.unit

# Longer than four windows, that sliding layers alone would not reach its end.
WINDOW, TOKENS = 17, 80


def small(**changes):
    sizes = {"hidden_size": 64, "vocab_size": 512, "num_attention_heads": 4, "head_dim": 32, "sliding_window": WINDOW}
    return default_config(**{**sizes, **changes})


@pytest.fixture(scope="module")
def model():
    return training_model(small(), seed=1)


def ids(tokens=TOKENS):
    return torch.randint(0, 512, (2, tokens), generator=torch.Generator().manual_seed(0))


def masks(tokens=TOKENS):
    return attention_masks(WINDOW, tokens, torch.device("cpu"))


@pytest.mark.parametrize("tokens", [1, WINDOW - 1, WINDOW, WINDOW + 1, TOKENS])
def test_it_is_transformers_model(model, tokens):
    config = small()
    config._attn_implementation, config._experts_implementation = "eager", "eager"
    theirs = Kolibri1ForCausalLM(config)
    # A router that prefers some experts, so that the bias chooses otherwise than the logits alone.
    state = model.state_dict()
    for name in state:
        if "correction_bias" in name:
            state[name] = torch.linspace(-1, 1, len(state[name]))
    theirs.load_state_dict(state)
    ours = training_model(small(), seed=1)
    ours.load_state_dict(state)
    with torch.no_grad():
        want = theirs(ids(tokens)).logits
        got = ours(ids(tokens), attention_mask=masks(tokens)).logits
    # Float32 sums of 1,024 products in another order, through ten layers of unit size.
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * want.std().item() * 10)


def test_the_window_is_a_window_on_sliding_layers_only(model):
    changed = ids()
    changed[:, 0] = (changed[:, 0] + 1) % 512
    with torch.no_grad():
        states = [
            model.model(x, attention_mask=masks(), output_hidden_states=True).hidden_states for x in (ids(), changed)
        ]
    first_full = model.config.layer_types.index("full_attention")
    for layer in range(first_full + 1):
        # Each layer before the first full one lets a change reach as far again.
        reach = layer * (WINDOW - 1)
        one, other = (each[layer] for each in states)
        assert torch.equal(one[:, reach + 1 :], other[:, reach + 1 :])
        assert not torch.equal(one[:, : reach + 1], other[:, : reach + 1])
    one, other = (each[first_full + 1] for each in states)
    assert not torch.equal(one[:, -1], other[:, -1])


def test_without_a_mask_it_says_so(model):
    with pytest.raises(ValueError, match=r"^attention_mask is missing; accepted: what attention_masks returns$"):
        model(ids())


def test_the_same_seed_gives_the_same_weights():
    one, same, other = (training_model(small(), seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["lm_head.weight"], other["lm_head.weight"])


def test_balancing_moves_biases_against_the_load():
    model = training_model(small(), seed=1)
    with torch.no_grad():
        model(ids(), attention_mask=masks())
    config = model.config
    loads = [load.clone() for _, load in routers(model)]
    assert all(load.sum() == 2 * TOKENS * config.num_experts_per_tok for load in loads)
    busiest = balance(model, 0.25)
    assert busiest == max(load.max() / load.mean() for load in loads)
    for (gate, load), before in zip(routers(model), loads, strict=True):
        assert not load.any()
        bias = gate.e_score_correction_bias
        assert abs(bias.mean()) < 1e-6
        above, below = bias[before > before.mean()], bias[before < before.mean()]
        torch.testing.assert_close(below.min() - above.max(), torch.tensor(0.5))


def test_an_expert_that_all_tokens_choose_gets_its_share_in_time():
    model = training_model(small(), seed=1)
    gate, load = next(routers(model))
    # Above all logits, whose standard deviation is near 0.2.
    gate.e_score_correction_bias[3] = 2.0
    share = []
    for _ in range(50):
        with torch.no_grad():
            model(ids(), attention_mask=masks())
        share.append((load[3] / load.mean()).item())
        balance(model, 0.05)
    # Chosen by all, one of eight; in the end no busier than others are after steps of this size.
    assert share[0] == model.config.num_experts / model.config.num_experts_per_tok
    assert min(share[-5:]) < 2


def test_the_plan_ends_where_it_should():
    plan = TrainingPlan(stages=(Stage(256, 0.5), Stage(512, 0.5)), steps=100, tokens_per_step=1024)
    assert plan.ends() == [50, 100]
    assert plan.factor(0) == pytest.approx(1 / 3)
    assert plan.factor(50) == 1
    assert 0 < plan.factor(99) <= 1 / 30 + 1e-9
    factors = [plan.factor(step) for step in range(70, 100)]
    assert factors == sorted(factors, reverse=True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stages": (Stage(256, 0.5),)}, r"stages have shares \[0.5\]; accepted: shares that add up to 1"),
        ({"tokens_per_step": 3000}, "tokens_per_step is 3000; accepted: a multiple of every length, of 2048 too"),
    ],
)
def test_a_plan_that_makes_no_steps_is_refused(fields, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        TrainingPlan(**fields)
