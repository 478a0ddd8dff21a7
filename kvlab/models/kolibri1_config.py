"""Kolibri-1's config: from a checkpoint's ``config.json``, checked, and hashed."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import Kolibri1Config

MODEL_TYPE = "kolibri1"
BLOCK_SIZE = [128, 128]
LAYER_TYPES = ("full_attention", "sliding_attention")
SIZES = (
    "head_dim",
    "hidden_size",
    "max_position_embeddings",
    "moe_intermediate_size",
    "num_attention_heads",
    "num_experts",
    "num_experts_per_tok",
    "num_hidden_layers",
    "num_key_value_heads",
    "num_local_experts",
    "shared_expert_intermediate_size",
    "sliding_window",
    "vocab_size",
)

# What a forward pass depends on; how the weights are stored is no part of it.
ARCHITECTURE_FIELDS = (
    "head_dim",
    "hidden_act",
    "hidden_size",
    "layer_types",
    "max_position_embeddings",
    "model_type",
    "moe_intermediate_size",
    "norm_topk_prob",
    "num_attention_heads",
    "num_experts",
    "num_experts_per_tok",
    "num_hidden_layers",
    "num_key_value_heads",
    "shared_expert_intermediate_size",
    "sliding_window",
    "tie_word_embeddings",
    "vocab_size",
)


def kolibri1_config(**changes: Any) -> Kolibri1Config:
    """Return the config of the released Kolibri-1, 78 B parameters, with ``changes`` to its fields.

    Raises
    ------
    ValueError
        transformers refuses a value.
    """
    fields = {"rope_theta": 10_000.0, "use_sliding_window": True, "vocab_size": 128_000, "pad_token_id": None}
    return parse_config({"model_type": MODEL_TYPE, **fields, **changes}, "config")


def read_config(folder: Path) -> Kolibri1Config:
    """Read and check ``config.json`` of a checkpoint folder.

    Raises
    ------
    ValueError
        There is none, or `parse_config` refuses it.
    """
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; accepted: a checkpoint folder with its config.json") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); accepted: a transformers config") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON ({error}); accepted: a transformers config") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path} holds a {type(raw).__name__}; accepted: a transformers config, a JSON object")
    return parse_config(raw, str(path))


def parse_config(raw: dict[str, Any], where: str) -> Kolibri1Config:
    """Build a Kolibri1Config from the fields of a ``config.json``, without what says how weights are stored.

    Parameters
    ----------
    raw
        The fields; ``rope_theta`` at top level or in ``rope_parameters``.
    where
        The file's name in errors.

    Raises
    ------
    ValueError
        Another architecture, no ``use_sliding_window`` or ``rope_theta``, another quantization, sizes or layers
        that make no model, no full-attention layer, or a field that transformers refuses.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import Kolibri1Config

    if raw.get("model_type") != MODEL_TYPE:
        raise ValueError(f"{where} has model_type {raw.get('model_type')!r}; accepted: {MODEL_TYPE!r}")
    if raw.get("use_sliding_window") is not True:
        # With anything else vLLM's plugin drops the window and refuses the model.
        raise ValueError(f"{where} has use_sliding_window {raw.get('use_sliding_window', 'missing')}; accepted: true")
    for name in SIZES:
        value = raw.get(name, 1)
        if type(value) is not int or value < 1:
            raise ValueError(f"{where} has {name} {value!r}; accepted: a positive integer")
    _check_rope(raw, where)
    _check_quantization(raw.get("quantization_config"), where)
    _check_layer_types(raw.get("layer_types"), raw.get("num_hidden_layers", Kolibri1Config.num_hidden_layers), where)
    stored = ("quantization_config", "dtype", "torch_dtype", "head_dtype")
    try:
        config = Kolibri1Config(**{key: value for key, value in raw.items() if key not in stored})
    except (StrictDataclassError, TypeError, ValueError, KeyError, AttributeError) as error:
        # All lines: transformers names the field in one and says what is wrong with it in the next.
        reason = " ".join(str(error).split())
        raise ValueError(f"{where}: {reason}; accepted: what transformers' Kolibri1Config takes") from error
    _check_model(config, where)
    return config


def disk_config(config: Kolibri1Config, dtype: str = "fp8") -> dict[str, Any]:
    """Return the fields of a ``config.json`` as the release's two repositories spell them.

    Parameters
    ----------
    config
        The model's.
    dtype
        What the projections are stored in: "fp8" or "bf16".

    Raises
    ------
    ValueError
        Another ``dtype``.
    """
    if dtype not in ("fp8", "bf16"):
        raise ValueError(f"dtype is {dtype!r}; accepted: 'fp8', 'bf16'")
    fields = config.to_dict()
    # Of the transformers that runs here, not of the model.
    fields.pop("transformers_version", None)
    rope = fields.pop("rope_parameters")
    fields |= {
        "architectures": ["Kolibri1ForCausalLM"],
        "rope_theta": rope["rope_theta"],
        "use_sliding_window": True,
        "dtype": "bfloat16",
        "head_dtype": "float32",
    }
    if dtype == "fp8":
        fields["quantization_config"] = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": BLOCK_SIZE,
            "modules_to_not_convert": [f"model.layers.{i}.mlp.gate" for i in range(config.num_hidden_layers)],
        }
    return fields


def _check_rope(raw: dict[str, Any], where: str) -> None:
    rope = raw.get("rope_parameters")
    if not isinstance(rope, dict | None):
        raise ValueError(f"{where} has rope_parameters {rope!r}; accepted: an object")
    found = [fields["rope_theta"] for fields in (raw, rope or {}) if fields.get("rope_theta") is not None]
    for theta in found:
        if not _is_positive(theta):
            raise ValueError(f"{where} has rope_theta {theta!r}; accepted: a positive number")
    if len(set(found)) != 1:
        thetas = " and ".join(map(str, found)) or "missing"
        raise ValueError(f"{where} has rope_theta {thetas}; accepted: one value, at top level or in rope_parameters")


def _check_quantization(quantization: object, where: str) -> None:
    if quantization is None:
        return
    if not isinstance(quantization, dict):
        raise ValueError(f"{where} has quantization_config {quantization!r}; accepted: none, or an object")
    method, block = quantization.get("quant_method"), quantization.get("weight_block_size")
    if method != "fp8" or block != BLOCK_SIZE:
        raise ValueError(
            f"{where} has quantization_config with quant_method {method!r}, weight_block_size {block}; "
            f"accepted: none, or 'fp8' with {BLOCK_SIZE}"
        )


def _check_layer_types(layer_types: object, num_layers: int, where: str) -> None:
    if layer_types is None:
        return
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        found = f"of length {len(layer_types)}" if isinstance(layer_types, list) else repr(layer_types)
        raise ValueError(f"{where} has layer_types {found}; accepted: a list of num_hidden_layers = {num_layers}")
    for kind in layer_types:
        if kind not in LAYER_TYPES:
            raise ValueError(f"{where} has layer_types with {kind!r}; accepted: {' and '.join(map(repr, LAYER_TYPES))}")


def _check_model(config: Kolibri1Config, where: str) -> None:
    """Check what takes several fields, defaults among them; transformers has checked their types."""
    from transformers.activations import ACT2FN
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if "full_attention" not in config.layer_types:
        raise ValueError(
            f"{where} has layer_types without 'full_attention' ({config.num_hidden_layers} layers); accepted: at least "
            "one such layer, since only those are captured"
        )
    if config.num_experts_per_tok > config.num_experts:
        raise ValueError(
            f"{where} has num_experts_per_tok {config.num_experts_per_tok}; accepted: at most num_experts = "
            f"{config.num_experts}"
        )
    if config.num_attention_heads % config.num_key_value_heads:
        raise ValueError(
            f"{where} has num_attention_heads {config.num_attention_heads}; accepted: a multiple of "
            f"num_key_value_heads = {config.num_key_value_heads}"
        )
    if config.hidden_act not in ACT2FN:
        raise ValueError(f"{where} has hidden_act {config.hidden_act!r}; accepted: one of transformers' activations")
    kinds = ["default", *ROPE_INIT_FUNCTIONS]
    if config.rope_parameters.get("rope_type") not in kinds:
        found = config.rope_parameters.get("rope_type")
        raise ValueError(f"{where} has rope_type {found!r} in rope_parameters; accepted: {', '.join(kinds)}")
    if config.tie_word_embeddings:
        raise ValueError(f"{where} has tie_word_embeddings true; accepted: false, as released")
    if not _is_positive(config.rms_norm_eps):
        raise ValueError(f"{where} has rms_norm_eps {config.rms_norm_eps}; accepted: a positive number")


def _is_positive(value: object) -> bool:
    return type(value) in (int, float) and 0 < value <= sys.float_info.max


def architecture(config: Kolibri1Config) -> dict[str, Any]:
    """Return the fields of a config that the forward pass depends on, in one form whatever file they came from."""
    fields = {name: getattr(config, name) for name in ARCHITECTURE_FIELDS}
    rope = {
        key: float(value) if isinstance(value, int | float) else value for key, value in config.rope_parameters.items()
    }
    return {**fields, "rms_norm_eps": float(config.rms_norm_eps), "rope_parameters": rope}


def config_hash(config: Kolibri1Config) -> str:
    """SHA-256, in hexadecimal, over the canonical JSON of `architecture`: keys sorted, no spaces, ASCII."""
    canonical = json.dumps(architecture(config), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()
