import hashlib

import pytest
import torch
from checkpoint_fixtures import tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.models.dequantize import dequantize
from kvlab.models.random_weights import RandomWeights

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def source():
    return RandomWeights(tiny_config(), seed=3)


def digest(raw):
    joined = b"".join(bytes(raw[name].view(torch.uint8).flatten().tolist()) for name in raw.places)
    return hashlib.sha256(joined).hexdigest()


def test_bytes_depend_on_seed_and_layer_and_on_no_order(source):
    again = RandomWeights(tiny_config(), seed=3)
    backwards = [digest(again.layer(index)) for index in reversed(range(5))]
    assert backwards[::-1] == [digest(source.layer(index)) for index in range(5)]
    assert len({*backwards, digest(RandomWeights(tiny_config(), seed=4).layer(0))}) == 6


def test_bytes_are_pinned(source):
    """The same on any machine and with any version of torch: they come from SHAKE-256 and exact arithmetic."""
    assert digest(source.layer(0)) == "076bbb00d5e2f68a79e992e9e2f2c8ec856fdfd2ef99a2e661050c983f134fe4"
    assert digest(source.embeddings()) == "0e75361c6dcb080e8cf289092ec8f4c0f71fc93d40a26e41926afb9784848295"


def test_no_two_experts_are_equal(source):
    weights = source.layer(0).materialize("cpu", torch.float32)
    for name in ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"):
        assert len({tuple(expert.flatten().tolist()) for expert in weights[name]}) == 8
    gate_up = weights["mlp.experts.gate_up_proj"]
    assert not torch.equal(gate_up[0, :40], gate_up[0, 40:])


def test_sizes_of_the_numbers():
    # Wide enough for many blocks: 8 × 8 factors of relative standard deviation 0.29 move the RMS by some
    # 0.29 / √64 = 4%; the pool's numbers add less than 0.2%. Four of those are the tolerance.
    wide = RandomWeights(tiny_config(hidden_size=1024, num_attention_heads=32), seed=0)
    weights = wide.layer(0).materialize("cpu", torch.float32)
    for name in ("self_attn.q_proj.weight", "self_attn.o_proj.weight"):
        assert weights[name].std().item() * 32 == pytest.approx(1, rel=0.16)
        assert abs(weights[name].mean().item()) < 0.01 * weights[name].std().item()
    gains = weights["input_layernorm.weight"]
    assert gains.min() > 0
    # 1,024 gains of standard deviation 0.2: their mean is off by 0.006.
    assert gains.mean().item() == pytest.approx(1, abs=0.03)
    # 97 · 1,024 numbers: the standard deviation of their standard deviation is 0.2%.
    embeddings = wide.embeddings().materialize("cpu", torch.float32)["embed_tokens.weight"]
    assert embeddings.std().item() == pytest.approx(1, rel=0.01)
    assert len({tuple(row.tolist()) for row in embeddings}) == 97


def test_seed_is_checked():
    with pytest.raises(ValueError, match="seed is -1; accepted: an integer of at least 0"):
        RandomWeights(tiny_config(), -1)
    with pytest.raises(TypeError, match="seed is 'x'"):
        RandomWeights(tiny_config(), "x")
    with pytest.raises(ValueError, match=f"seed is {2**63}; accepted: an integer of at most {2**63 - 1}"):
        RandomWeights(tiny_config(), 2**63)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 300), st.integers(1, 300), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 99))
def test_dequantising_blocks_of_any_size(rows, columns, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(2, rows, columns, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(2, -(-rows // 128), -(-columns // 128), generator=generator)
    spread = scale.repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :rows, :columns]
    # Into every other column: out need not be contiguous.
    out = torch.full((2, rows, 2 * columns), float("nan"), dtype=dtype)[..., ::2]
    assert dequantize(weight, scale, out).equal((weight.float() * spread).to(dtype))
