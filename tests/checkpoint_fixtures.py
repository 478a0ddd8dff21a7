"""Tiny Kolibri-1 checkpoints in the format of the release, written by the safetensors library."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from kvlab.models.dequantize import dequantize
from kvlab.models.kolibri1_config import disk_config, kolibri1_config
from kvlab.models.kolibri1_layout import SCALE_SUFFIX, embedding_specs, head_specs, layer_specs

INDEX = "model.safetensors.index.json"

# Sizes that 128 does not divide, so that blocks at the border are partial.
TINY = {
    "vocab_size": 97,
    "hidden_size": 144,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 40,
    "sliding_window": 9,
    "max_position_embeddings": 512,
}


def tiny_config(**changes):
    return kolibri1_config(**{**TINY, **changes})


def disk_tensors(source, dtype="fp8"):
    """Every tensor of a source under its name on disk, in the release's order; as BF16 without scales."""
    tensors = {}
    for specs, raw in _parts(source):
        for spec in specs:
            weight = raw[spec.name]
            if spec.name + SCALE_SUFFIX not in raw.places:
                tensors[spec.disk_name] = weight
            elif dtype == "fp8":
                tensors |= {spec.disk_name: weight, spec.scale.disk_name: raw[spec.scale.name]}
            else:
                out = torch.empty(weight.shape, dtype=torch.bfloat16)
                tensors[spec.disk_name] = dequantize(weight, raw[spec.scale.name], out)
    return tensors


def _parts(source):
    config = source.config
    yield embedding_specs(config), source.embeddings()
    for index in range(config.num_hidden_layers):
        yield layer_specs(config, index), source.layer(index)
    yield head_specs(config), source.head()


def write_checkpoint(folder, source, num_shards=3, dtype="fp8"):
    """Write a source as a checkpoint, shards split within layers; returns the folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = disk_tensors(source, dtype)
    names = list(tensors)
    # One off an even split, which could fall between two layers.
    bounds = [0, *(len(names) * i // num_shards + 1 for i in range(1, num_shards)), len(names)]
    weight_map = {}
    for i in range(num_shards):
        shard = f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors"
        chosen = names[bounds[i] : bounds[i + 1]]
        save_file({name: tensors[name].contiguous() for name in chosen}, folder / shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(chosen, shard)
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2))
    (folder / "config.json").write_text(json.dumps(disk_config(source.config, dtype), indent=2))
    return folder
