"""The testbed's weights on disk: the release's format, read back by kvlab and by transformers."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from kvlab.models.checkpoint import CheckpointFiles
from kvlab.models.dequantize import dequantize
from kvlab.testbed import export as exporting
from kvlab.testbed.config import default_config
from kvlab.testbed.export import LARGEST, export, quantize_blocks, write_bf16
from kvlab.testbed.loading import checkpoint_folder, load_checkpoint, load_testbed
from kvlab.testbed.model import training_model
from kvlab.testbed.prepared import TOKENIZER_FILES

pytestmark = pytest.mark.unit


@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(1, 300), columns=st.integers(1, 300), seed=st.integers(0, 99), size=st.sampled_from([1e-6, 1, 1e6])
)
def test_blocks_return_to_half_a_step_of_fp8(rows, columns, seed, size):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * size
    codes, scales = quantize_blocks(weight)
    assert codes.shape == weight.shape and scales.shape == (-(-rows // 128), -(-columns // 128))
    back = dequantize(codes, scales, torch.empty(rows, columns))
    factors = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    # e4m3: three bits behind the leading one, and steps of 2⁻⁹ below 2⁻⁶; half a step each, and float32's own rounding.
    bound = torch.maximum(weight.abs() * 2**-4, factors * 2**-10) * (1 + 1e-6)
    assert ((back - weight).abs() <= bound).all()
    # The largest of the first block is hit but for that rounding.
    block = weight[:128, :128].abs()
    assert torch.isclose(back[:128, :128].abs().max(), block.max(), rtol=1e-6)
    assert codes.float().abs().max() == LARGEST


def test_a_block_of_zeros_stays_zero():
    codes, scales = quantize_blocks(torch.zeros(130, 5))
    assert not codes.float().any() and (scales == 1).all()


@pytest.fixture(scope="module")
def model():
    sizes = {"hidden_size": 160, "vocab_size": 301, "num_attention_heads": 4, "head_dim": 32, "sliding_window": 17}
    model = training_model(default_config(**sizes, moe_intermediate_size=24), seed=3)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.mlp.gate.e_score_correction_bias)
    return model.eval()


@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
def test_what_is_written_is_read(model, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "SHARD_BYTES", 1_000_000)
    export(model, tmp_path, dtype=dtype)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2 and all(shard.stat().st_size < 1_400_000 for shard in shards)
    assert CheckpointFiles(tmp_path).config.layer_types == model.config.layer_types
    read = load_checkpoint(tmp_path).state_dict()
    written = model.state_dict()
    assert read.keys() == written.keys()
    for name, tensor in written.items():
        if "correction_bias" in name:
            assert torch.equal(read[name], tensor)
        elif dtype == "bf16" or "_proj" not in name:
            assert torch.equal(read[name], tensor.to(torch.bfloat16).float()), name
        else:
            # Of normal numbers, whose largest in a block is some four standard deviations.
            assert (read[name] - tensor).norm() < 0.03 * tensor.norm(), name


def test_transformers_reads_it_too(model, tmp_path):
    export(model, tmp_path, dtype="bf16")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.arange(60)[None]
    ours = load_checkpoint(tmp_path)
    with torch.no_grad():
        assert torch.equal(theirs(ids).logits, ours(ids).logits)


def test_another_format_is_refused_and_nothing_is_written(model, tmp_path):
    with pytest.raises(ValueError, match=r"^dtype is 'int4'; accepted: 'fp8', 'bf16'$"):
        export(model, tmp_path / "out", dtype="int4")
    assert not (tmp_path / "out").exists()


def test_the_config_is_the_releases(model, tmp_path):
    export(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["Kolibri1ForCausalLM"] and config["use_sliding_window"] is True
    assert config["quantization_config"]["weight_block_size"] == [128, 128]


def test_an_installation_without_the_testbed_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr("kvlab.testbed.loading.data_folder", lambda: tmp_path)
    with pytest.raises(FileNotFoundError, match="holds no checkpoint; accepted: a checkout, or a wheel"):
        checkpoint_folder()


@pytest.fixture
def shipped(model, tmp_path, monkeypatch):
    folder = tmp_path / "testbed"
    export(model, folder)
    for name in TOKENIZER_FILES:
        (folder / name).write_text(name)
    monkeypatch.setattr("kvlab.testbed.loading.data_folder", lambda: tmp_path)
    return folder


def test_the_testbed_in_bf16_has_the_fp8_checkpoints_weights(shipped, tmp_path):
    out = tmp_path / "bf16"
    write_bf16(out)
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    assert [(out / name).read_text() for name in TOKENIZER_FILES] == list(TOKENIZER_FILES)
    written = load_checkpoint(out).state_dict()
    for name, tensor in load_checkpoint(shipped).state_dict().items():
        exact = "correction_bias" in name
        assert torch.equal(written[name], tensor if exact else tensor.to(torch.bfloat16).float()), name


def test_a_damaged_tokenizer_is_one_line(shipped):
    with pytest.raises(ValueError, match=r"has a damaged tokenizer \(.*\); accepted: the testbed's own$") as caught:
        load_testbed()
    assert "\n" not in str(caught.value)


def test_a_bf16_checkpoint_is_whole_or_not_there(shipped, tmp_path):
    (shipped / TOKENIZER_FILES[-1]).unlink()
    with pytest.raises(FileNotFoundError):
        write_bf16(tmp_path / "bf16")
    assert list(tmp_path.iterdir()) == [shipped]
    with pytest.raises(ValueError, match="which is not empty; accepted: an empty folder, or a new one"):
        write_bf16(shipped)
    with pytest.raises(ValueError, match="which is not empty"):
        write_bf16(tmp_path / "missing" / "..")
    assert list(tmp_path.iterdir()) == [shipped]
