import copy
import json

import huggingface_hub
import pytest
import torch
from checkpoint_fixtures import disk_tensors, tiny_config, write_checkpoint
from transformers import Kolibri1ForCausalLM
from transformers.models.kolibri1.modeling_kolibri1 import Kolibri1DecoderLayer

from kvlab.models.checkpoint import CheckpointFiles, open_checkpoint
from kvlab.models.kolibri1_config import config_hash, disk_config, kolibri1_config
from kvlab.models.random_weights import RandomWeights

pytestmark = pytest.mark.unit

PARTS = {"layer 0": lambda s: s.layer(0), "layer 4": lambda s: s.layer(4), "head": lambda s: s.head()}
PARTS["embeddings"] = lambda s: s.embeddings()


@pytest.fixture(scope="module")
def source():
    return RandomWeights(tiny_config(), seed=3)


@pytest.fixture(scope="module")
def fp8(source, tmp_path_factory):
    return CheckpointFiles(write_checkpoint(tmp_path_factory.mktemp("fp8"), source))


@pytest.fixture(scope="module")
def bf16(source, tmp_path_factory):
    return CheckpointFiles(write_checkpoint(tmp_path_factory.mktemp("bf16"), source, dtype="bf16"))


def as_bytes(tensors):
    return {name: (tensor.dtype, tensor.shape, tensor.view(torch.uint8).tolist()) for name, tensor in tensors.items()}


@pytest.mark.parametrize("part", PARTS)
def test_fp8_reads_back_bit_for_bit(source, fp8, part):
    assert as_bytes(PARTS[part](fp8).tensors()) == as_bytes(PARTS[part](source).tensors())


def test_bf16_reads_back_bit_for_bit(source, bf16):
    assert as_bytes(disk_tensors(bf16)) == as_bytes(disk_tensors(source, "bf16"))


def test_a_layer_lies_in_two_shards_and_a_single_file_reads_the_same(source, fp8, tmp_path):
    weight_map = json.loads((fp8.folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert len({shard for name, shard in weight_map.items() if name.startswith("model.layers.1.")}) == 2
    write_checkpoint(tmp_path, source, num_shards=1)
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "model-00001-of-00001.safetensors").rename(tmp_path / "model.safetensors")
    assert as_bytes(CheckpointFiles(tmp_path).layer(1).tensors()) == as_bytes(fp8.layer(1).tensors())


@pytest.fixture(scope="module")
def theirs(bf16):
    model, info = Kolibri1ForCausalLM.from_pretrained(bf16.folder, dtype=torch.bfloat16, output_loading_info=True)
    assert not any(info.values())
    return model


def test_transformers_reads_the_same_weights(bf16, theirs):
    expected = theirs.state_dict()
    for index in range(5):
        for name, tensor in bf16.layer(index).materialize("cpu", torch.bfloat16).items():
            assert tensor.dtype == (torch.float32 if name.endswith("correction_bias") else torch.bfloat16)
            assert torch.equal(tensor, expected.pop(f"model.layers.{index}.{name}").to(tensor.dtype)), name
    outside = bf16.head().materialize("cpu", torch.bfloat16) | bf16.embeddings().materialize("cpu", torch.bfloat16)
    for name, tensor in outside.items():
        assert torch.equal(tensor, expected.pop(name if name.startswith("lm_head") else f"model.{name}"))
    assert not expected


def test_what_transformers_saves_is_read(bf16, theirs, tmp_path):
    theirs.save_pretrained(tmp_path)
    again = CheckpointFiles(tmp_path)
    assert again.config_hash == bf16.config_hash
    for name, tensor in bf16.layer(2).materialize("cpu", torch.float32).items():
        assert torch.equal(again.layer(2).materialize("cpu", torch.float32)[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_dequantises_as_the_block_product(fp8, dtype):
    raw, result = fp8.layer(1), fp8.layer(1).materialize("cpu", dtype)
    tensors = raw.tensors()

    def naive(name):
        weight, scale = tensors[f"{name}.weight"].float(), tensors[f"{name}.weight_scale_inv"]
        rows, columns = torch.meshgrid(*(torch.arange(size) // 128 for size in weight.shape), indexing="ij")
        return (weight * scale[rows, columns]).to(dtype)

    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.shared_experts.down_proj"):
        assert torch.equal(result[f"{name}.weight"], naive(name))
    for expert in range(8):
        gate, up, down = (naive(f"mlp.experts.{expert}.{each}_proj") for each in ("gate", "up", "down"))
        assert torch.equal(result["mlp.experts.gate_up_proj"][expert], torch.cat([gate, up]))
        assert torch.equal(result["mlp.experts.down_proj"][expert], down)


@pytest.mark.parametrize("checkpoint", ["fp8", "bf16"])
def test_a_meta_layer_takes_the_result_strictly(checkpoint, request):
    files = request.getfixturevalue(checkpoint)
    with torch.device("meta"):
        layer = Kolibri1DecoderLayer(files.config, 4)
    layer.load_state_dict(files.layer(4).materialize("cpu", torch.float32), strict=True, assign=True)
    assert not any(tensor.is_meta for tensor in [*layer.parameters(), *layer.buffers()])


def test_the_result_does_not_share_the_raw_bytes(bf16):
    raw = bf16.layer(0)
    result = raw.materialize("cpu", torch.bfloat16)
    kept = {name: tensor.clone() for name, tensor in result.items()}
    raw.buffer.fill_(255)
    assert all(torch.equal(result[name], kept[name]) for name in kept)


def test_config_is_the_same_whatever_way_it_is_spelled(source, fp8, tmp_path):
    released = disk_config(source.config)
    nested = copy.deepcopy(released)
    nested["rope_parameters"] = {"rope_type": "default", "rope_theta": nested.pop("rope_theta")}
    nested["num_experts"] = nested.pop("num_local_experts")
    write_checkpoint(tmp_path, source)
    (tmp_path / "config.json").write_text(json.dumps(nested))
    assert CheckpointFiles(tmp_path).config_hash == fp8.config_hash == source.config_hash
    assert fp8.config.rope_parameters["rope_theta"] == 10_000.0
    assert config_hash(tiny_config(rope_theta=500_000.0)) != source.config_hash
    assert config_hash(tiny_config(sliding_window=10)) != source.config_hash


def test_the_released_shape():
    config = kolibri1_config()
    assert [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"] == list(range(4, 50, 5))
    # Pinned, so that a new version of transformers does not change which captures match.
    assert config_hash(config) == "c2aef84fd30a613c2f44ed4e67fc083a2b58fb2949a608666e066c9123dfd8d2"


def test_float32_expert_bias_is_accepted(source, tmp_path):
    class InFloat32(RandomWeights):
        def _make(self, specs, *, pin):
            raw = super()._make(specs, pin=pin)
            name = "mlp.gate.e_score_correction_bias"
            if name not in raw.places:
                return raw
            tensors = raw.tensors() | {name: raw[name].float()}
            wide = type(raw).empty([(n, t.dtype, t.shape) for n, t in tensors.items()], pin=pin)
            for n, tensor in tensors.items():
                wide[n].view(torch.uint8).copy_(tensor.view(torch.uint8))
            return wide

    files = CheckpointFiles(write_checkpoint(tmp_path, InFloat32(source.config, 3)))
    name = "mlp.gate.e_score_correction_bias"
    assert files.layer(2)[name].dtype == torch.float32
    assert torch.equal(files.layer(2)[name], source.layer(2)[name].float())


def test_revision_tells_two_states_apart(source, fp8, tmp_path):
    other = CheckpointFiles(write_checkpoint(tmp_path / "other", RandomWeights(source.config, seed=4)))
    same = CheckpointFiles(write_checkpoint(tmp_path / "same", source))
    assert same.revision == fp8.revision != other.revision
    assert same.name == "same"


def test_a_hub_id_opens_from_the_cache_offline(fp8, tmp_path, monkeypatch):
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--Aleph-Alpha--Kolibri-1"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / commit).symlink_to(fp8.folder, target_is_directory=True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    opened = open_checkpoint("Aleph-Alpha/Kolibri-1")
    assert (opened.name, opened.revision) == ("Aleph-Alpha/Kolibri-1", commit)
    assert opened.layer(0).buffer.equal(fp8.layer(0).buffer)
