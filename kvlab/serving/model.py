"""Kolibri-1 with a 4-bit cache in its full-attention layers; everything else is aleph-alpha-inference's model."""

from __future__ import annotations

from aleph_alpha_inference.kolibri1 import Kolibri1ForCausalLM
from vllm.config import VllmConfig
from vllm.logger import init_logger

from kvlab.serving.attention import Int4FullAttention
from kvlab.serving.options import Options
from kvlab.serving.schemes import served_scheme

# Within vLLM's own names, whose handlers and level it configures.
logger = init_logger("vllm.kvlab")


class Kolibri1Int4ForCausalLM(Kolibri1ForCausalLM):
    """The model that `kvlab.serving.plugin` puts in the place of ``Kolibri1ForCausalLM``."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        scheme = served_scheme(Options.read(vllm_config.additional_config))
        layers = [index for index, layer in enumerate(self.model.layers) if layer.self_attn.rotary_emb is None]
        for index in layers:
            layer = self.model.layers[index]
            layer.self_attn = Int4FullAttention(layer.self_attn, scheme, vllm_config)
        logger.info("kvlab: layers %s store %s", ", ".join(map(str, layers)), scheme.name)
