"""Random weights in a model that vLLM has built: for measuring speed without a checkpoint."""

from __future__ import annotations

import torch
from torch import nn
from vllm.config import ModelConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

LOAD_FORMAT = "kvlab-random"


class WorkerExtension:
    """Adds nothing to a worker; vLLM imports this module with it before it loads a model."""


@register_model_loader(LOAD_FORMAT)
class RandomModelLoader(DummyModelLoader):
    """Draws weights under which hidden states stay of the order of 1 and tokens go to different experts.

    Under vLLM's own dummy weights gains and router are so small that the router's bias decides: every token goes to
    the same few experts, and a step reads a fraction of what it reads with a trained model.
    """

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Fill every parameter."""
        std = model_config.get_hidden_size() ** -0.5
        for seed, (name, parameter) in enumerate(model.named_parameters()):
            draw(name, parameter.data, std, seed)


@torch.no_grad()
def draw(name: str, x: torch.Tensor, std: float, seed: int) -> None:
    """Fill one parameter by its role.

    Parameters
    ----------
    name
        In the model: gains have ``norm`` in it, scales of quantized weights ``scale``, embeddings ``embed``.
    x
        The parameter; scalars, which are the cache's scales, stay as they are.
    std
        Standard deviation of weights: 1/√hidden_size.
    seed
        Of this parameter: what all ranks hold a copy of is the same in all.
    """
    if x.ndim == 0:
        return
    if "scale" in name:
        # The weights beside it are drawn with variance 1.
        x.fill_(std)
    elif x.ndim == 1:
        # Gains are 1, the router's bias 0.
        x.fill_(1.0 if "norm" in name else 0.0)
    else:
        scale = 1.0 if x.element_size() == 1 or "embed" in name else std
        generator = torch.Generator(x.device).manual_seed(seed)
        # Row by row of a stack of experts, whose float32 numbers would take as much memory as the model.
        for part in x if x.ndim > 2 else [x]:
            part.copy_(torch.randn(part.shape, generator=generator, device=x.device) * scale)
