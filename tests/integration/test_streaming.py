import dataclasses
import json
import os
from types import SimpleNamespace

import pytest
import torch
from checkpoint_fixtures import write_checkpoint
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import Kolibri1ForCausalLM

import kvlab
from kvlab import capture_files
from kvlab.capture_files import CaptureWriter, open_capture
from kvlab.capture_job import hidden_home, stream_to_disk, streamed_manifest
from kvlab.models import blocked_attention
from kvlab.models.checkpoint import open_checkpoint
from kvlab.models.kolibri1_config import kolibri1_config
from kvlab.models.random_weights import RandomWeights
from kvlab.models.streaming import StreamedModel

pytestmark = pytest.mark.integration

TOKENS = 70


@pytest.fixture(scope="module")
def source():
    config = kolibri1_config(
        vocab_size=128,
        hidden_size=160,
        num_hidden_layers=10,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=48,
        sliding_window=9,
        max_position_embeddings=256,
    )
    return RandomWeights(config, seed=5)


@pytest.fixture(scope="module")
def ids():
    return torch.randint(128, (1, TOKENS), generator=torch.Generator().manual_seed(0))


def whole_model(source, dtype):
    """The same weights in transformers' own model, all at once."""
    model = Kolibri1ForCausalLM(source.config).to(dtype).eval()
    weights = {f"model.{name}": t for name, t in source.embeddings().materialize("cpu", dtype).items()}
    for index in range(source.config.num_hidden_layers):
        layer = source.layer(index).materialize("cpu", dtype)
        weights |= {f"model.layers.{index}.{name}": tensor for name, tensor in layer.items()}
    head = source.head().materialize("cpu", dtype)
    weights |= {"model.norm.weight": head["norm.weight"], "lm_head.weight": head["lm_head.weight"]}
    model.load_state_dict(weights, strict=True, assign=True)
    return model.requires_grad_(False)


def relative(ours, theirs):
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()


def final(model, ids):
    return model.model(ids, use_cache=False).last_hidden_state


@pytest.mark.parametrize("chunk_tokens", [8192, 16, 9, 1])
def test_hidden_states_are_transformers_in_float32(source, ids, monkeypatch, chunk_tokens):
    monkeypatch.setattr(blocked_attention, "QUERY_BLOCK", 7)
    model = whole_model(source, torch.float32)
    streamed = StreamedModel(source, "cpu", torch.float32, chunk_tokens)
    hidden = streamed.embed(ids)
    assert list(streamed.run(hidden)) == list(range(10))
    assert relative(streamed.finish(hidden), final(model, ids)) < 1e-5
    logits = model(ids, use_cache=False).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(logits.mT, ids[:, 1:], reduction="none")
    assert relative(streamed.losses(hidden, ids), losses) < 1e-5
    assert [times.layer for times in streamed.times] == list(range(10))
    assert all(times.attention > 0 and times.experts > 0 for times in streamed.times)


@pytest.mark.parametrize("chunk_tokens", [8192, 16])
def test_bfloat16_is_as_near_to_float32_as_transformers_is(source, ids, chunk_tokens):
    """Rounding flips experts here and there, in both alike: at most twice the error of the plain model."""
    exact = final(whole_model(source, torch.float32), ids)
    streamed = StreamedModel(source, "cpu", torch.bfloat16, chunk_tokens)
    hidden = streamed.embed(ids)
    list(streamed.run(hidden))
    theirs = relative(final(whole_model(source, torch.bfloat16), ids), exact)
    assert 0 < relative(streamed.finish(hidden), exact) < 2 * theirs


def manifest(source, **changes):
    made = streamed_manifest(source, "a text", 0, TOKENS, num_queries=8)
    return dataclasses.replace(made, **changes)


def test_a_capture_on_disk_is_what_hooks_see(source, ids, tmp_path):
    writer = CaptureWriter(tmp_path, manifest(source))
    stored = stream_to_disk(source, ids, writer, dtype=torch.float32, chunk_tokens=16)
    model = whole_model(source, torch.float32)
    with kvlab.capture(model, num_queries=8) as hooked, torch.no_grad():
        model(ids, use_cache=False)
    assert list(stored.layers) == [4, 9] == list(hooked.layers)
    for index, layer in hooked.layers.items():
        ours = stored.layers[index]
        assert torch.equal(ours.positions, layer.positions)
        assert ours.scaling == layer.scaling and ours.folds_gain
        assert torch.equal(ours.k_gain, layer.k_gain) and torch.equal(ours.q_gain, layer.q_gain)
        for name in ("q", "k", "v", "normed_keys"):
            assert getattr(ours, name).shape == getattr(layer, name).shape
            # One rounding to BF16 (2⁻⁹ at most), two for k: the normalised key and its product with the gain.
            assert relative(getattr(ours, name), getattr(layer, name)) < 2**-8, name
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "layer-004.safetensors",
        "layer-009.safetensors",
        "manifest.json",
    ]


def test_of_the_last_layer_only_what_attention_sees_is_computed(source, ids, tmp_path, monkeypatch):
    attended, attend = set(), blocked_attention.blocked_attention

    def noted(module, *args, **kwargs):
        attended.add(module.layer_idx)
        return attend(module, *args, **kwargs)

    monkeypatch.setattr(blocked_attention, "blocked_attention", noted)
    stored = stream_to_disk(source, ids, CaptureWriter(tmp_path, manifest(source)))
    assert attended == set(range(9))
    assert [times.experts > 0 for times in stored.times] == [True] * 9 + [False]
    # As it was for whoever comes next.
    model = StreamedModel(source)
    assert list(model.run(model.embed(ids))) == list(range(10))
    assert 9 in attended


def test_keys_on_disk_are_the_models_own_bits(source, ids, tmp_path):
    """The gain is applied on reading: BF16 gain times BF16 normalised key, as the model does it."""
    stored = stream_to_disk(source, ids, CaptureWriter(tmp_path, manifest(source)), dtype=torch.bfloat16)
    seen = {}
    streamed = StreamedModel(source, "cpu", torch.bfloat16)

    class Watch:
        def __init__(self, index, layer):
            self.handle = layer.self_attn.k_norm.register_forward_hook(
                lambda _m, _a, output: seen.__setitem__(index, output)
            )

        def __enter__(self):
            return None

        def __exit__(self, *_):
            self.handle.remove()

    list(streamed.run(streamed.embed(ids), hook=Watch))
    for index, layer in stored.layers.items():
        assert torch.equal(layer.k, seen[index])


class StopError(Exception):
    pass


@pytest.mark.parametrize("fatal_layer", [2, 5, 7])
def test_an_interrupted_capture_resumes_behind_the_last_finished_layer(source, ids, tmp_path, fatal_layer):
    class Failing(RandomWeights):
        def layer(self, index, *, pin=False):
            if index == fatal_layer:
                raise StopError
            return super().layer(index, pin=pin)

    whole = stream_to_disk(source, ids, CaptureWriter(tmp_path / "whole", manifest(source)))
    out = tmp_path / "parts"
    with pytest.raises(StopError):
        stream_to_disk(Failing(source.config, seed=5), ids, CaptureWriter(out, manifest(source)))
    finished = ["layer-004.safetensors"] if fatal_layer > 4 else []
    assert sorted(path.name for path in out.glob("layer*")) == finished
    with pytest.raises(ValueError, match=r"layer [49] is missing; run the same kvlab capture again"):
        open_capture(out)

    read = []

    class Counting(RandomWeights):
        def layer(self, index, *, pin=False):
            read.append(index)
            return super().layer(index, pin=pin)

    resumed = stream_to_disk(Counting(source.config, seed=5), ids, CaptureWriter(out, manifest(source)))
    assert read[0] == (5 if finished else 0)
    for index in (4, 9):
        for name in ("q", "k", "v"):
            assert torch.equal(getattr(resumed.layers[index], name), getattr(whole.layers[index], name))
    read.clear()
    stream_to_disk(Counting(source.config, seed=5), ids, CaptureWriter(out, manifest(source)))
    assert read == []


@pytest.mark.parametrize(
    ("name", "value"), [("text_hash", "another"), ("tokens", 71), ("config_hash", "x"), ("num_queries", 9)]
)
def test_another_capture_in_the_folder_is_refused(source, tmp_path, name, value):
    CaptureWriter(tmp_path, manifest(source))
    with pytest.raises(ValueError, match=f"holds a capture with {name}"):
        CaptureWriter(tmp_path, manifest(source, **{name: value}))


def test_folders_and_files_that_are_no_capture(source, ids, tmp_path):
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ValueError, match="holds other files; accepted: an empty folder or a capture"):
        CaptureWriter(tmp_path, manifest(source))
    with pytest.raises(ValueError, match="cannot be written"):
        CaptureWriter(tmp_path / "file" / "under", manifest(source))
    with pytest.raises(ValueError, match="accepted: a folder written by kvlab capture"):
        open_capture(tmp_path)
    out = tmp_path / "capture"
    stream_to_disk(source, ids, CaptureWriter(out, manifest(source)))
    whole = (out / "layer-004.safetensors").read_bytes()
    (out / "layer-004.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"layer-004\.safetensors is damaged"):
        open_capture(out)
    # The same capture mends it, bit for bit.
    stream_to_disk(source, ids, CaptureWriter(out, manifest(source)))
    assert (out / "layer-004.safetensors").read_bytes() == whole
    (out / "layer-009.safetensors").write_bytes(whole)
    with pytest.raises(ValueError, match=r"layer-009\.safetensors is of another layer"):
        open_capture(out)
    document = json.loads((out / "manifest.json").read_text())
    damages = ({"extra": 1}, {"tokens": "x"}, {"layers": ["a"]})
    changes = [({"format": "kvlab-capture/9"}, "has format 'kvlab-capture/9'"), *((d, "damaged") for d in damages)]
    for change, message in changes:
        (out / "manifest.json").write_text(json.dumps(document | change))
        with pytest.raises(ValueError, match=message):
            open_capture(out)
    (out / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        open_capture(out)


@pytest.mark.parametrize("damage", ["garbage", "short", "no metadata", "gone"])
def test_damaged_hidden_states_only_cost_time(source, ids, tmp_path, damage):
    whole = stream_to_disk(source, ids, CaptureWriter(tmp_path / "whole", manifest(source)))
    out = tmp_path / "out"
    writer = CaptureWriter(out, manifest(source))
    writer.write(whole.layers[4])
    before = (out / "layer-004.safetensors").stat().st_mtime_ns
    hidden = torch.zeros(1, 3 if damage == "short" else TOKENS, 160, dtype=torch.bfloat16)
    if damage == "garbage":
        (out / "hidden.safetensors").write_bytes(b"garbage")
    elif damage != "gone":
        metadata = None if damage == "no metadata" else {"layer": "4"}
        save_file({"hidden": hidden}, out / "hidden.safetensors", metadata=metadata)
    resumed = stream_to_disk(source, ids, CaptureWriter(out, manifest(source)))
    assert torch.equal(resumed.layers[9].q, whole.layers[9].q)
    assert (out / "layer-004.safetensors").stat().st_mtime_ns == before
    assert not (out / "hidden.safetensors").exists()


def test_what_killed_writers_left_is_cleared(source, tmp_path):
    (tmp_path / ".writing-4194304999").mkdir()
    (tmp_path / f".writing-{os.getpid()}").mkdir()
    CaptureWriter(tmp_path, manifest(source))
    assert [path.name for path in tmp_path.glob(".writing-*")] == []


def test_a_disk_that_fills_up_is_one_line(source, ids, tmp_path, monkeypatch):
    def full(*_args, **_kwargs):
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(capture_files, "save_file", full)
    with pytest.raises(ValueError, match=r"layer-004\.safetensors cannot be written \(No space left on device\)"):
        stream_to_disk(source, ids, CaptureWriter(tmp_path, manifest(source)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json"]


def test_a_full_disk_is_noticed_before_starting(source, tmp_path, monkeypatch):
    import shutil

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=1000))
    with pytest.raises(ValueError, match=r"with 0\.0 GB free; accepted: a disk with"):
        CaptureWriter(tmp_path / "out", manifest(source))


def test_too_many_tokens_for_the_model(source):
    with pytest.raises(ValueError, match="tokens is 257; accepted: at most the model's 256"):
        streamed_manifest(source, "a text", 0, 257, num_queries=8)


def test_tokens_outside_the_vocabulary(source):
    with pytest.raises(ValueError, match="input_ids go from 3 to 128; accepted: 0 to 127"):
        StreamedModel(source).embed(torch.tensor([[3, 128]]))


def test_a_stored_capture_is_measured_like_any_other(source, ids, tmp_path):
    stored = stream_to_disk(source, ids, CaptureWriter(tmp_path, manifest(source)))
    outliers = kvlab.outlier_table(stored)
    assert outliers["form"].nunique() == 4
    errors = kvlab.attention_error_table(stored, ["hadamard-int4", "hadamard-int4-with-gain"], stored=["K"])
    assert errors["layer"].unique().tolist() == [4, 9]
    assert errors["error"].between(0.001, 1).all()


@pytest.mark.parametrize(
    ("free_gib", "home"), [(22.0, "cuda"), (7.0, "cpu"), (3.0, None)], ids=["24 GB card", "tight", "too small"]
)
def test_hidden_states_go_where_there_is_room(monkeypatch, free_gib, home):
    """Kolibri-1's own shape at 262,144 tokens: 1.3 GiB of hidden states, 4.2 GiB of weights."""
    config = kolibri1_config()
    released = RandomWeights(config, seed=0)
    described = streamed_manifest(released, "a text", 0, 262_144, num_queries=256)
    model = SimpleNamespace(device=torch.device("cuda"), config=config, chunk_tokens=8192)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (int(free_gib * 2**30), 0))
    if home:
        assert hidden_home(model, described).type == home
    else:
        with pytest.raises(ValueError, match=r"device has 3\.0 GiB free; accepted: \d+\.\d GiB for 262144 tokens"):
            hidden_home(model, described)


@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
def test_a_checkpoint_on_disk_gives_transformers_hidden_states(source, ids, tmp_path, dtype):
    """Three shards, split within layers; the FP8 one is dequantized to what the seed's weights are."""
    write_checkpoint(tmp_path, source, num_shards=3, dtype=dtype)
    files = open_checkpoint(tmp_path)
    streamed = StreamedModel(files, "cpu", torch.float32, chunk_tokens=16)
    hidden = streamed.embed(ids)
    list(streamed.run(hidden))
    if dtype == "fp8":
        theirs = whole_model(source, torch.float32)
    else:
        theirs = Kolibri1ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert relative(streamed.finish(hidden), final(theirs.eval().requires_grad_(False), ids)) < 1e-5
