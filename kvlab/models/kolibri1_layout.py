"""Which tensors a Kolibri-1 checkpoint holds: their names on disk and in transformers, shapes and dtypes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvlab.models.dequantize import BLOCK

if TYPE_CHECKING:
    from transformers import Kolibri1Config

SCALE_SUFFIX = "_scale_inv"
EXPERT_BIAS = "mlp.gate.e_score_correction_bias"
DISK_NAMES = {
    EXPERT_BIAS: "moe.router.expert_bias",
    "post_self_attn_layernorm.weight": "post_attn_norm.weight",
    "post_mlp_layernorm.weight": "post_ffn_norm.weight",
}

PROJECTION = (torch.float8_e4m3fn, torch.bfloat16)
PLAIN = (torch.bfloat16,)
BIAS = (torch.bfloat16, torch.float32)
SCALE = (torch.float32,)


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a checkpoint.

    Attributes
    ----------
    name
        transformers' parameter name, relative to the decoder layer (or to the model, outside layers).
    disk_name
        The full name in the safetensors files.
    shape
        Its sizes.
    dtypes
        Those accepted, the FP8 release's own first.
    """

    name: str
    disk_name: str
    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]

    @property
    def quantized(self) -> bool:
        """Whether the FP8 release holds this tensor in FP8, with scales beside it."""
        return self.dtypes[0] == torch.float8_e4m3fn

    @property
    def bytes_on_disk(self) -> int:
        """What the FP8 release stores it in, its scales among them."""
        size = math.prod(self.shape) * self.dtypes[0].itemsize
        return size + self.scale.bytes_on_disk if self.quantized else size

    @property
    def scale(self) -> TensorSpec:
        """The float32 scales of this weight, one for each block of 128×128, those at the border partial."""
        blocks = tuple(math.ceil(size / BLOCK) for size in self.shape)
        return TensorSpec(self.name + SCALE_SUFFIX, self.disk_name + SCALE_SUFFIX, blocks, SCALE)


def layer_specs(config: Kolibri1Config, index: int) -> list[TensorSpec]:
    """Return the tensors of decoder layer ``index``, scales not among them (`TensorSpec.scale`)."""
    hidden, head_dim = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    projections = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        **_gated_mlp("mlp.shared_experts", hidden, config.shared_expert_intermediate_size),
    }
    for expert in range(config.num_experts):
        projections |= _gated_mlp(f"mlp.experts.{expert}", hidden, config.moe_intermediate_size)
    plain = {
        "self_attn.q_norm": (head_dim,),
        "self_attn.k_norm": (head_dim,),
        "input_layernorm": (hidden,),
        "post_self_attn_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "post_mlp_layernorm": (hidden,),
        "mlp.gate": (config.num_experts, hidden),
    }
    rows = [(f"{module}.weight", shape, PROJECTION) for module, shape in projections.items()]
    rows += [(f"{module}.weight", shape, PLAIN) for module, shape in plain.items()]
    rows += [(EXPERT_BIAS, (config.num_experts,), BIAS)]
    return [
        TensorSpec(name, f"model.layers.{index}.{DISK_NAMES.get(name, name)}", shape, dtypes)
        for name, shape, dtypes in rows
    ]


def _gated_mlp(module: str, hidden: int, inner: int) -> dict[str, tuple[int, int]]:
    return {
        f"{module}.gate_proj": (inner, hidden),
        f"{module}.up_proj": (inner, hidden),
        f"{module}.down_proj": (hidden, inner),
    }


def embedding_specs(config: Kolibri1Config) -> list[TensorSpec]:
    """Return the token embeddings."""
    return [
        TensorSpec("embed_tokens.weight", "model.embed_tokens.weight", (config.vocab_size, config.hidden_size), PLAIN)
    ]


def head_specs(config: Kolibri1Config) -> list[TensorSpec]:
    """Return the final norm and the LM head."""
    return [
        TensorSpec("norm.weight", "model.norm.weight", (config.hidden_size,), PLAIN),
        TensorSpec("lm_head.weight", "lm_head.weight", (config.vocab_size, config.hidden_size), PLAIN),
    ]
