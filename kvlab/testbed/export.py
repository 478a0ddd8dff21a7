"""The trained weights in the format of the Kolibri-1 release: FP8 with block scales, in shards."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from kvlab.models.dequantize import BLOCK
from kvlab.models.kolibri1_config import disk_config
from kvlab.models.kolibri1_layout import TensorSpec, embedding_specs, head_specs, layer_specs
from kvlab.paths import check_out
from kvlab.testbed.loading import checkpoint_folder, load_checkpoint
from kvlab.testbed.prepared import TOKENIZER_FILES

if TYPE_CHECKING:
    from transformers import Kolibri1ForCausalLM

SHARD_BYTES = 12_000_000
"""Of a shard's tensors, at most; a shard begins where the next tensor would not fit."""
LARGEST = torch.finfo(torch.float8_e4m3fn).max


def quantize_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix in FP8 and the scale of each 128×128 block: its largest number becomes the format's largest.

    Parameters
    ----------
    weight
        ``[rows, columns]``, finite; any sizes.

    Returns
    -------
    codes, scales
        float8_e4m3fn ``[rows, columns]``; float32 ``[⌈rows/128⌉, ⌈columns/128⌉]``, 1 where a block is all zeros.

    References
    ----------
    DeepSeek-AI 2024, arXiv:2412.19437.
    """
    rows, columns = weight.shape
    blocks = -(-rows // BLOCK), -(-columns // BLOCK)
    padded = torch.zeros(blocks[0] * BLOCK, blocks[1] * BLOCK)
    padded[:rows, :columns] = weight
    tiles = padded.view(blocks[0], BLOCK, blocks[1], BLOCK)
    largest = tiles.abs().amax(dim=(1, 3))
    scales = torch.where(largest > 0, largest / LARGEST, 1.0)
    codes = (tiles / scales[:, None, :, None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return codes.reshape(padded.shape)[:rows, :columns].contiguous(), scales


def export(model: Kolibri1ForCausalLM, folder: Path, *, dtype: str = "fp8") -> None:
    """Write ``config.json`` and the weights as the release names them.

    Parameters
    ----------
    model
        transformers' model, on the CPU.
    folder
        Gets the config, shards ``model-0000N-of-0000M.safetensors`` and their index.
    dtype
        "fp8" as the release, or "bf16" as its other repository.

    Raises
    ------
    ValueError
        Another ``dtype``, or a ``folder`` that cannot be written.
    """
    check_out(folder)
    config = disk_config(model.config, dtype)
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, torch.Tensor]] = [{}]
    filled = 0
    for name, tensor in _tensors(model, dtype):
        if filled + tensor.nbytes > SHARD_BYTES and shards[-1]:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.nbytes
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    listing = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(listing, indent=0) + "\n")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    ends = {"eos_token_id": model.config.eos_token_id, "pad_token_id": model.config.eos_token_id}
    (folder / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n")


def write_bf16(folder: Path) -> None:
    """Write the trained testbed in BF16, ready to be served.

    vLLM multiplies FP8 weights in blocks of 128 columns, where the testbed's experts have 16, and on CPUs with AMX
    only. Each weight is the FP8 checkpoint's code times its block's scale, rounded to BF16.

    Parameters
    ----------
    folder
        Gets what `export` writes, and the tokenizer; it appears whole or not at all.

    Raises
    ------
    FileNotFoundError
        This installation lacks the testbed.
    ValueError
        ``folder`` is not empty, or cannot be written.
    """
    check_out(folder)
    folder = folder.resolve()
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"out is {str(folder)!r}, which is not empty; accepted: an empty folder, or a new one")
    shipped = checkpoint_folder()
    scratch = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        export(load_checkpoint(shipped), scratch, dtype="bf16")
        for name in TOKENIZER_FILES:
            shutil.copyfile(shipped / name, scratch / name)
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _tensors(model: Kolibri1ForCausalLM, dtype: str) -> list[tuple[str, torch.Tensor]]:
    named = []
    for spec, weight in _weights(model):
        if not spec.quantized or dtype == "bf16":
            # The steps that balance the router are finer than BF16 near 1.
            plain = torch.float32 if torch.float32 in spec.dtypes else torch.bfloat16
            named.append((spec.disk_name, weight.to(plain).contiguous()))
        else:
            codes, scales = quantize_blocks(weight)
            named += [(spec.disk_name, codes), (spec.scale.disk_name, scales)]
    return named


def _weights(model: Kolibri1ForCausalLM) -> list[tuple[TensorSpec, torch.Tensor]]:
    """Return each tensor of the release with the model's weight; experts, which transformers fuses, taken apart."""
    config, state = model.config, {name: tensor.detach().float() for name, tensor in model.state_dict().items()}
    pairs = [(spec, state[f"model.{spec.name}"]) for spec in embedding_specs(config)]
    for index in range(config.num_hidden_layers):
        layer = {name.removeprefix(f"model.layers.{index}."): tensor for name, tensor in state.items()}
        gate_up, down = layer["mlp.experts.gate_up_proj"], layer["mlp.experts.down_proj"]
        for expert in range(config.num_experts):
            gate, up = gate_up[expert].chunk(2)
            weights = {"gate_proj": gate, "up_proj": up, "down_proj": down[expert]}
            layer |= {f"mlp.experts.{expert}.{name}.weight": tensor for name, tensor in weights.items()}
        pairs += [(spec, layer[spec.name]) for spec in layer_specs(config, index)]
    norm, head = head_specs(config)
    return [*pairs, (norm, state[f"model.{norm.name}"]), (head, state[head.name])]
