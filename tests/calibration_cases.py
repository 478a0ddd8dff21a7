"""Calibrations that were not searched for: a seed for each full-attention layer of a config, and nothing else."""

from kvlab.calibrate import Calibration
from kvlab.models.kolibri1_config import config_hash


def seeds_only(config, **changes):
    layers = [index for index, kind in enumerate(config.layer_types) if kind == "full_attention"]
    entry = {"objectives": [0.0], "error_before": 0.0, "error_after": 0.0}
    manifest = {
        "format": "kvlab-calibration/1",
        "model": "tiny",
        "config_hash": config_hash(config),
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "scheme": "hadamard-int4",
        "ingredients": ["rotation_seeds"],
        "captures": [],
        "holdout": [],
        "search": {"seeds": [11]},
        "layers": {str(layer): entry for layer in layers},
    }
    return Calibration(dict.fromkeys(layers, 11), None, manifest | changes)
