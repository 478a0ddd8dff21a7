import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    Kolibri1Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from kvlab.quantizers.base import Quantizer
from kvlab.schemes import Scheme, StoredAs, get_scheme

_SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "head_dim": 16,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_KOLIBRI = {
    "num_hidden_layers": 5,
    "sliding_window": 9,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
_GEMMA = {
    "head_dim": 256,
    "num_hidden_layers": 3,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
CONFIGS = {
    "gemma3": (Gemma3TextConfig, _GEMMA),
    "kolibri1": (Kolibri1Config, _KOLIBRI),
    "llama": (LlamaConfig, {}),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {}),
}


def _build(family, implementation, dtype=torch.float32, **changes):
    config_class, own = CONFIGS[family]
    config = config_class(**{**_SIZES, **own, **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        # Experts one by one: the grouped product of torch knows no float64.
        config,
        attn_implementation=implementation,
        experts_implementation="eager",
    )
    model = model.to(dtype).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 and "norm" in name:
            # Gains as uneven as real ones, so that forgetting one cannot go unnoticed.
            parameter.data += torch.empty_like(parameter).uniform_(-0.5, 2.0)
    return model.requires_grad_(False)


@pytest.fixture(scope="session")
def build():
    return _build


@pytest.fixture(scope="session", params=[f"{f}-{i}" for f in CONFIGS for i in ("eager", "sdpa")])
def model(request):
    return _build(*request.param.split("-"))


@pytest.fixture(scope="session", params=["eager", "sdpa"])
def kolibri(request):
    return _build("kolibri1", request.param)


@pytest.fixture(scope="session")
def wide_kolibri():
    """A head_dim that every format's blocks divide."""
    return _build("kolibri1", "sdpa", head_dim=64)


@pytest.fixture(scope="session")
def llama():
    return _build("llama", "sdpa")


@pytest.fixture(scope="session")
def ids():
    """Two sequences of 40 tokens: more than four sliding windows."""
    return torch.randint(2, 97, (2, 40), generator=torch.Generator().manual_seed(1))


class Exact(Quantizer):
    """Stores numbers as they are."""

    def bits_per_number(self, head_dim):
        return 32.0

    def _roundtrip(self, x):
        return x


class PerChannel(Quantizer):
    """15 steps between each channel's extremes over all tokens: KIVI's keys without its exact recent tokens."""

    per_token = False

    def bits_per_number(self, head_dim):
        return 4.0

    def _roundtrip(self, x):
        low, high = x.aminmax(dim=-2, keepdim=True)
        scale = ((high - low) / 15).clamp(min=1e-30)
        return low + scale * ((x - low) / scale).round()


def _scheme(name, keys, values, *, fold_gain=False):
    return Scheme(name, StoredAs(quantizer=keys), StoredAs(quantizer=values), fold_gain=fold_gain)


@pytest.fixture(scope="session")
def exact():
    return _scheme("exact", Exact(), Exact())


@pytest.fixture(scope="session")
def exact_folded():
    return _scheme("exact-folded", Exact(), Exact(), fold_gain=True)


@pytest.fixture(scope="session")
def coarse():
    return get_scheme("int4")


@pytest.fixture(scope="session")
def coarse_folded():
    return get_scheme("hadamard-int4")


@pytest.fixture(scope="session")
def shared():
    """A scheme whose keys share scales between tokens."""
    return _scheme("shared", PerChannel(), get_scheme("int4").values.quantizer)


@pytest.fixture(scope="session")
def traces():
    """What a context could leave behind: hooks on any module, the attention function's name."""

    def count(model):
        hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
        return hooks, model.config._attn_implementation

    return count
