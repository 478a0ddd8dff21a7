import json
import shutil

import huggingface_hub
import pytest
import torch
from checkpoint_fixtures import INDEX, disk_tensors, tiny_config, write_checkpoint
from safetensors.torch import load_file, save_file

from kvlab.models.checkpoint import CheckpointFiles, open_checkpoint
from kvlab.models.random_weights import RandomWeights

pytestmark = pytest.mark.unit

SCALE = "model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
SHARD = "model-00002-of-00003.safetensors"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("written"), RandomWeights(tiny_config(num_experts=4), seed=3))


@pytest.fixture
def folder(written, tmp_path):
    return shutil.copytree(written, tmp_path / "checkpoint")


def message(folder):
    with pytest.raises(ValueError) as caught:
        files = CheckpointFiles(folder)
        for index in range(files.config.num_hidden_layers):
            files.layer(index)
    text = str(caught.value)
    assert "\n" not in text
    assert "; accepted: " in text
    return text


def rewrite(folder, name, change):
    """Change one tensor where it is stored; None drops it from its shard and from the index."""
    index = json.loads((folder / INDEX).read_text())
    shard = folder / index["weight_map"][name]
    tensors = load_file(shard)
    changed = change(tensors.pop(name))
    if changed is None:
        del index["weight_map"][name]
        (folder / INDEX).write_text(json.dumps(index))
    else:
        tensors[name] = changed
    save_file(tensors, shard)


def edit(path, change):
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def filled(value):
    def change(scale):
        scale[0, 0] = value
        return scale

    return change


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), -1.0])
def test_bad_scales(folder, value):
    rewrite(folder, SCALE, filled(value))
    assert SCALE in message(folder)
    assert "positive finite" in message(folder)


@pytest.mark.parametrize(
    ("name", "change", "found"),
    [
        (SCALE, lambda t: None, "is missing"),
        (Q_PROJ, lambda t: None, "is missing"),
        ("model.layers.3.moe.router.expert_bias", lambda t: None, "is missing"),
        (SCALE, lambda t: t.bfloat16(), "has dtype BF16; accepted: F32"),
        (Q_PROJ, lambda t: t.float(), "has dtype F32; accepted: F8_E4M3"),
        (Q_PROJ, lambda t: t.float().to(torch.float8_e5m2), "has dtype F8_E5M2; accepted: F8_E4M3"),
        ("lm_head.weight", lambda t: t.half(), "has dtype F16; accepted: BF16"),
        (SCALE, lambda t: t[:, :1].clone(), "has shape [1, 1]; accepted: [1, 2]"),
        (Q_PROJ, lambda t: t[:191].clone(), "has shape [191, 144]; accepted: [192, 144]"),
    ],
)
def test_bad_tensors(folder, name, change, found):
    rewrite(folder, name, change)
    assert f"{name} {found}" in message(folder)


def test_missing_shard(folder):
    (folder / SHARD).unlink()
    assert f"{SHARD} is missing" in message(folder)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated_shard(folder, keep):
    data = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(data[:keep])
    assert f"{SHARD} has {len(data[:keep])} bytes" in message(folder)
    assert "truncated" in message(folder)


def test_shard_truncated_after_opening(folder):
    files = CheckpointFiles(folder)
    data = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(data[: len(data) // 4])
    with pytest.raises(ValueError, match=f"{SHARD} ends at byte {len(data) // 4}; accepted: at least"):
        files.layer(2)


def test_no_safetensors_file(folder):
    (folder / SHARD).write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "accepted: a safetensors file" in message(folder)
    (folder / SHARD).write_bytes((4).to_bytes(8, "little") + b"[1,]")
    assert "malformed header" in message(folder)


def test_offsets_that_contradict_the_shape(folder):
    header = json.dumps({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}).encode()
    (folder / SHARD).write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    assert "x has 4 bytes; accepted: 8" in message(folder)


def test_index_naming_an_absent_tensor(folder):
    edit(folder / INDEX, lambda index: index["weight_map"].update({"model.layers.9.ghost": SHARD}))
    assert f"names model.layers.9.ghost in {SHARD}, which lacks it" in message(folder)


def test_index_naming_an_absent_shard(folder):
    edit(folder / INDEX, lambda index: index["weight_map"].update({Q_PROJ: "model-00009-of-00003.safetensors"}))
    assert "model-00009-of-00003.safetensors is missing" in message(folder)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}'])
def test_malformed_index(folder, text):
    (folder / INDEX).write_text(text)
    assert f"{INDEX} is malformed" in message(folder)


def test_no_weights_and_no_config(folder):
    (folder / INDEX).unlink()
    assert f"has neither {INDEX} nor model.safetensors" in message(folder)
    (folder / "config.json").unlink()
    assert "config.json is missing" in message(folder)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda c: c.update(model_type="llama"), "has model_type 'llama'; accepted: 'kolibri1'"),
        (lambda c: c.pop("use_sliding_window"), "has use_sliding_window missing; accepted: true"),
        (lambda c: c.update(use_sliding_window=False), "has use_sliding_window False; accepted: true"),
        (lambda c: c.pop("rope_theta"), "has rope_theta missing"),
        (lambda c: c.update(rope_parameters={"rope_theta": 5e5}), "has rope_theta 10000.0 and 500000.0"),
        (lambda c: c["quantization_config"].update(quant_method="awq"), "quant_method 'awq'"),
        (lambda c: c["quantization_config"].update(weight_block_size=[64, 64]), "weight_block_size [64, 64]"),
        (lambda c: c.update(rope_theta=[1.0]), "config.json has rope_theta [1.0]; accepted: a positive number"),
        (lambda c: c.update(rope_theta="1e4"), "has rope_theta '1e4'; accepted: a positive number"),
        (lambda c: c.update(rope_theta=-1), "has rope_theta -1; accepted: a positive number"),
        (lambda c: c.update(rope_theta=float("nan")), "has rope_theta nan; accepted: a positive number"),
        (lambda c: c.update(rope_theta=10**400), "has rope_theta 1000"),
        (lambda c: c.update(rope_parameters=[1]), "has rope_parameters [1]; accepted: an object"),
        (lambda c: c.update(quantization_config="fp8"), "has quantization_config 'fp8'; accepted: none, or an object"),
        (lambda c: c.update(quantization_config=[]), "has quantization_config []; accepted: none, or an object"),
        (lambda c: c.update(hidden_size="wide"), "has hidden_size 'wide'; accepted: a positive integer"),
        (lambda c: c.update(head_dim=32.0), "has head_dim 32.0; accepted: a positive integer"),
        (lambda c: c.update(vocab_size=True), "has vocab_size True; accepted: a positive integer"),
        (lambda c: c.update(num_hidden_layers=0), "has num_hidden_layers 0; accepted: a positive integer"),
        (lambda c: c.update(sliding_window=None), "has sliding_window None; accepted: a positive integer"),
        (lambda c: c.update(num_experts_per_tok=5), "has num_experts_per_tok 5; accepted: at most num_experts = 4"),
        (lambda c: c.update(num_key_value_heads=4), "has num_attention_heads 6; accepted: a multiple of"),
        (lambda c: c.update(layer_types=["full_attention"]), "has layer_types of length 1; accepted: a list of num"),
        (lambda c: c.update(layer_types="full"), "has layer_types 'full'; accepted: a list of num_hidden_layers = 5"),
        (lambda c: c.update(layer_types=["full_attention"] * 4 + [[]]), "has layer_types with []; accepted: 'full_att"),
        (lambda c: c.update(layer_types=["sliding_attention"] * 5), "has layer_types without 'full_attention'"),
        (lambda c: c.update(layer_types=None, num_hidden_layers=4), "has layer_types without 'full_attention'"),
        (lambda c: c.update(hidden_act="swoosh"), "has hidden_act 'swoosh'; accepted: one of transformers'"),
        (lambda c: c.update(hidden_act=["silu"]), "config.json: Validation error for field 'hidden_act'"),
        (lambda c: c.update(tie_word_embeddings=True), "has tie_word_embeddings true; accepted: false"),
        (lambda c: c.update(rope_parameters={"rope_type": "zzz"}), "has rope_type 'zzz' in rope_parameters; accept"),
        (lambda c: c.update(rms_norm_eps=0.0), "has rms_norm_eps 0.0; accepted: a positive number"),
        (lambda c: c.update(id2label=3), "config.json: "),
        (lambda c: c.update(num_experts_per_tok=2, num_local_experts=5), "experts.4."),
        (lambda c: c.update(num_hidden_layers=6, layer_types=None), "model.layers.5."),
    ],
)
def test_bad_config(folder, change, found):
    edit(folder / "config.json", change)
    assert found in message(folder)


def test_config_that_is_no_json(folder):
    (folder / "config.json").write_text("{")
    assert "config.json is no JSON" in message(folder)
    (folder / "config.json").write_text("[]")
    assert "config.json holds a list" in message(folder)
    (folder / "config.json").write_bytes(b'{"a": "\xff\xfe"}')
    assert "config.json is no JSON" in message(folder)
    (folder / "config.json").write_text("[" * 100_000)
    assert "config.json is no JSON" in message(folder)
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    assert "config.json cannot be read" in message(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["input_layernorm.weight", "moe.router.expert_bias", "mlp.gate.weight"])
def test_weights_that_are_not_finite(folder, name, value):
    rewrite(folder, f"model.layers.1.{name}", lambda t: t.index_fill(0, torch.tensor([3]), value))
    raw = CheckpointFiles(folder).layer(1)
    with pytest.raises(ValueError, match=rf"safetensors: model.layers.1.{name} has a non-finite value; accepted: fin"):
        raw.materialize("cpu", torch.bfloat16)


@pytest.mark.parametrize("projection", ["gate", "up", "down"])
def test_an_fp8_expert_that_is_not_finite(folder, projection):
    def change(weight):
        weight.view(torch.uint8)[-1, -1] = 0x7F  # NaN
        return weight

    name = f"model.layers.2.mlp.experts.2.{projection}_proj.weight"
    rewrite(folder, name, change)
    with pytest.raises(ValueError, match=f"{name} has a non-finite value; accepted: finite weights"):
        CheckpointFiles(folder).layer(2).materialize("cpu", torch.bfloat16)


def test_scales_that_overflow(folder):
    rewrite(folder, SCALE, filled(3e38))
    name = SCALE.removesuffix("_scale_inv")
    with pytest.raises(ValueError, match=f"{name} has a non-finite value"):
        CheckpointFiles(folder).layer(1).materialize("cpu", torch.bfloat16)


def test_the_largest_finite_weights_are_accepted(folder):
    name = "model.layers.1.input_layernorm.weight"
    largest = torch.finfo(torch.bfloat16).max
    rewrite(folder, name, lambda t: torch.where(torch.arange(len(t)) % 2 == 0, largest, -largest).to(t.dtype))
    weights = CheckpointFiles(folder).layer(1).materialize("cpu", torch.bfloat16)
    assert weights["input_layernorm.weight"].aminmax() == (-largest, largest)


def test_a_bf16_projection_among_fp8_ones(folder):
    name = "model.layers.2.mlp.experts.1.gate_proj.weight"
    rewrite(folder, name, lambda t: t.bfloat16())
    assert f"{name} has dtype BF16; accepted: F8_E4M3" in message(folder)


def test_misaligned_tensors_are_read(tmp_path):
    """An odd header length and single bytes between tensors: nothing lies where a view could be made."""
    source = RandomWeights(tiny_config(num_experts=2), seed=3)
    write_checkpoint(tmp_path, source, num_shards=1)
    header, data = {"pad": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, bytearray(1)
    names = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3"}
    for name, tensor in disk_tensors(source).items():
        content = bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())
        place = [len(data), len(data) + len(content)]
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
        data += content + bytes(1)
    text = json.dumps(header).encode()
    text += b" " * (1 - len(text) % 2)
    (tmp_path / "model-00001-of-00001.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    files = CheckpointFiles(tmp_path)
    for name, tensor in source.layer(1).tensors().items():
        assert files.layer(1)[name].view(torch.uint8).equal(tensor.view(torch.uint8)), name


def test_no_such_layer(folder):
    with pytest.raises(ValueError, match="layer is 5; accepted: 0 to 4"):
        CheckpointFiles(folder).layer(5)


@pytest.mark.parametrize("model", ["/nowhere/at/all", "no such model", "Aleph-Alpha/Kolibri-1"])
def test_neither_a_folder_nor_in_reach(model, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=f"model is '{model}'; accepted: an existing folder or a hub id") as caught:
        open_checkpoint(model)
    assert "\n" not in str(caught.value)
