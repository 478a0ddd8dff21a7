"""What vLLM serves from the 4-bit cache is what the library simulates, however vLLM computes it."""

import pytest
import torch
from engines import PROMPTS, STOCK, TEXTS

import kvlab
from kvlab.calibrate import Calibration

pytest.importorskip("vllm", reason="needs vLLM: .ci/install-serving-cpu installs its CPU build")

pytestmark = pytest.mark.serving

SCHEMES = ("hadamard-int4", "int4", "calibrated")
every_scheme = pytest.mark.parametrize(
    "scheme", [pytest.param(name, marks=[pytest.mark.long] if name == "int4" else []) for name in SCHEMES]
)
# As much farther apart than two correct BF16 implementations as a served and a simulated scheme may be.
FACTOR = 1.25
OTHER_SUMS = 1.5
SAME = 5e-3
STANDARD_ERRORS = 3


@pytest.fixture(scope="module")
def served(answers):
    """Of an engine's name: the log-probabilities of all prompts' tokens but the first."""

    def of(name):
        return torch.tensor([x for answer in answers(name)["rounds"]["prompts"] for x in answer["prompt"]])

    return of


@pytest.fixture(scope="module")
def simulated(tiny_checkpoint, calibration):
    """The same from transformers in BF16, plain and with what the server stores in full and sliding-window layers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def of(prompt):
        logits = model(torch.tensor([prompt])).logits[0, :-1].float().log_softmax(-1)
        return logits.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]

    def of_all():
        return torch.cat([of(request["prompt"]) for request in PROMPTS])

    results = {"bf16": of_all()}
    for name in SCHEMES:
        scheme = Calibration.load(calibration).scheme() if name == "calibrated" else name
        with kvlab.apply(model, {"full": scheme, "sliding": STOCK}):
            results[name] = of_all()
    return results


def mean_with_error(x):
    return x.mean().item(), x.std().item() / len(x) ** 0.5


@every_scheme
def test_served_is_what_was_simulated(served, simulated, report, scheme):
    ours = served(scheme) - simulated[scheme]
    # How far two correct BF16 implementations are apart on this model is measured, not assumed.
    floor = served("bf16") - simulated["bf16"]
    assert ours.isfinite().all()
    mean, error = mean_with_error(ours)
    floor_mean, floor_error = mean_with_error(floor)
    against_stock, stock_error = mean_with_error(served(scheme) - served(STOCK))
    spread, distance = (ours.std() / floor.std()).item(), (ours.abs().mean() / floor.abs().mean()).item()
    report(
        f"{scheme}: mean log-probability of {len(ours):,} tokens, served - simulated {mean:+.4f} ± {error:.4f}, vLLM - "
        f"transformers in BF16 {floor_mean:+.4f} ± {floor_error:.4f}, ratio of the spreads "
        f"{spread:.2f}, of the mean distances {distance:.2f}; "
        f"served - served {STOCK} {against_stock:+.4f} ± {stock_error:.4f}"
    )
    # Of two means that are both nearly 0 the ratio is chance: of 3,800 tokens that differ by 0.1 here and there, since
    # an expert more or less far is chosen, each mean has an error of 0.0016. So the floor is what it is at most.
    assert abs(mean) <= FACTOR * (abs(floor_mean) + STANDARD_ERRORS * floor_error)
    # Without a bias |mean| is in proportion to the spread, over any number of tokens: this is the ratio itself.
    assert spread <= FACTOR


@every_scheme
def test_served_is_none_of_the_others(served, simulated, scheme):
    distances = {name: (served(scheme) - values).abs().mean().item() for name, values in simulated.items()}
    assert min(distances, key=distances.get) == scheme


@pytest.mark.parametrize("engine", ["two-ranks", "compiled"])
def test_however_it_is_computed(served, simulated, report, engine):
    other, plain = served(engine), served("hadamard-int4")
    assert other.isfinite().all()
    mean, error = mean_with_error(other - plain)
    floor = served("bf16") - simulated["bf16"]
    ratio = ((other - plain).std() / floor.std()).item()
    report(f"{engine}: {mean:+.4f} ± {error:.4f} in mean log-probability, ratio of the spreads {ratio:.2f}")
    assert abs(mean) <= SAME + STANDARD_ERRORS * error
    # Other sums of the same numbers, as vLLM's and transformers' are, and codes that flip on both sides.
    assert ratio <= OTHER_SUMS


def test_decoding_from_a_cache_that_is_made_up(answers):
    for answer, request in zip(answers("decode-bench")["rounds"]["fresh"], TEXTS, strict=False):
        assert answer["cached"] == len(request["prompt"]) - 1
        assert answer["tokens"] == request["text"]
        assert torch.tensor(answer["text"]).isfinite().all()
