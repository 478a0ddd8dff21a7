"""Weights that are drawn keep numbers of the order of 1 and send tokens to different experts."""

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: .ci/install-serving-cpu installs its CPU build")

from kvlab.serving.throughput.weights import LOAD_FORMAT, draw

pytestmark = pytest.mark.serving

HIDDEN = 256
STD = HIDDEN**-0.5


def drawn(name, *shape, dtype=torch.bfloat16, seed=0):
    x = torch.full(shape, float("nan"), dtype=dtype)
    draw(name, x, STD, seed)
    return x


def test_every_parameter_by_its_role():
    assert (drawn("layers.0.self_attn.q_norm.weight", 128) == 1).all()
    assert (drawn("layers.0.mlp.gate.e_score_correction_bias", 64, dtype=torch.float32) == 0).all()
    assert (drawn("layers.0.mlp.experts.w13_weight_scale_inv", 4, 2, 2, dtype=torch.float32) == STD).all()
    # The standard deviation of so many normal numbers, to ten times its own standard error.
    tolerance = 10 / (2 * 64 * HIDDEN) ** 0.5
    assert drawn("lm_head.weight", 64, HIDDEN).float().std() == pytest.approx(STD, rel=tolerance)
    assert drawn("model.embed_tokens.weight", 64, HIDDEN).float().std() == pytest.approx(1, rel=tolerance)
    experts = drawn("layers.0.mlp.experts.w13_weight", 4, 64, HIDDEN, dtype=torch.float8_e4m3fn).float()
    # E4M3 has three bits behind the first: rounding adds at most 2⁻⁸ of a number's square.
    assert experts.std() == pytest.approx(1, rel=tolerance + 2**-8)
    assert not torch.equal(experts[0], experts[1])


def test_scalars_stay():
    scale = torch.tensor(-1.0)
    draw("layers.0.attn.k_scale", scale, STD, 0)
    assert scale == -1


def test_copies_agree_between_ranks_and_parameters_differ():
    one, other = drawn("gate.weight", 8, HIDDEN, seed=3), drawn("gate.weight", 8, HIDDEN, seed=4)
    assert torch.equal(one, drawn("gate.weight", 8, HIDDEN, seed=3)) and not torch.equal(one, other)


def test_tokens_go_to_different_experts():
    tokens, experts, top = 64, 384, 6
    gate = drawn("layers.0.mlp.gate.weight", experts, HIDDEN, dtype=torch.float32)
    bias = drawn("layers.0.mlp.gate.e_score_correction_bias", experts, dtype=torch.float32)
    hidden = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(1))
    hit = len((hidden @ gate.T + bias).topk(top).indices.unique())
    # As many as independent choices would hit, within a tenth.
    assert hit == pytest.approx(experts * (1 - (1 - top / experts) ** tokens), rel=0.1)


def test_vllm_knows_the_load_format():
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    assert type(get_model_loader(LoadConfig(load_format=LOAD_FORMAT))).__name__ == "RandomModelLoader"
