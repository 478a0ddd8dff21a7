"""From a checkpoint on disk to figures, by the command line only."""

import json
import shlex
import shutil
import sys

import pandas as pd
import pytest
import torch
from checkpoint_fixtures import tiny_config, write_checkpoint
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvlab import figures
from kvlab.calibrate import Calibration
from kvlab.capture_files import open_capture
from kvlab.cli import main
from kvlab.models.random_weights import RandomWeights

pytestmark = pytest.mark.integration

TEXTS = {
    "first": "The window is closed, and the key lies under the stone. " * 12,
    "second": "Ein Schlüssel liegt unter dem Stein, doch das Fenster ist zu. " * 12,
    "third": "Nobody remembers the third text, which only decides. " * 12,
}


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return stop.value.code, captured.out, captured.err


def write_tokenizer(folder):
    """Bytes as tokens: 256 of them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kolibri")
    write_checkpoint(folder, RandomWeights(tiny_config(vocab_size=256, max_position_embeddings=512), seed=3))
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for name, text in TEXTS.items():
        (folder / f"{name}.txt").write_text(text)
    return folder


@pytest.fixture(scope="module")
def captures(checkpoint, texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("captures")
    for name in TEXTS:
        out = ["--out", str(folder / name), "--tokens", "300", "--queries", "16", "--device", "cpu"]
        with pytest.raises(SystemExit) as stop:
            main(["capture", str(checkpoint), "--text", str(texts / f"{name}.txt"), *out])
        assert stop.value.code == 0
    return folder


def test_the_manifest_says_what_was_captured(checkpoint, captures):
    manifest = open_capture(captures / "first").manifest
    assert manifest.model == checkpoint.name
    assert (manifest.tokens, manifest.first_token, manifest.num_queries) == (300, 0, 16)
    assert len(manifest.text_hash) == len(manifest.config_hash) == 64


def test_capturing_again_changes_nothing(capsys, checkpoint, texts, captures):
    before = {path.name: path.stat().st_mtime_ns for path in (captures / "first").iterdir()}
    arguments = ["--text", texts / "first.txt", "--out", captures / "first", "--tokens", 300, "--queries", 16]
    code, out, _ = run(capsys, "capture", checkpoint, *arguments, "--device", "cpu", "--json")
    assert code == 0
    assert json.loads(out)["layers"] == []
    assert {path.name: path.stat().st_mtime_ns for path in (captures / "first").iterdir()} == before
    code, _, err = run(capsys, "capture", checkpoint, *arguments, "--first-token", 1)
    assert (code, err.count("\n")) == (2, 1)
    assert "first_token" in err


def test_measuring_several_texts_gives_means_and_spread(capsys, captures):
    code, out, _ = run(capsys, "measure", captures / "first", captures / "second", "--device", "cpu", "--json")
    document = json.loads(out)
    assert code == 0
    assert {row["text"] for row in document["outliers"]} == {"first", "second"}
    assert {row["form"] for row in document["outliers"]} == {
        "raw", "rotated", "without gain", "without gain, rotated",
    }  # fmt: skip
    rows = {(row["scheme"], row["stored"]): row for row in document["errors_over_texts"]}
    assert rows["hadamard-int4", "K"]["texts"] == 2
    assert rows["hadamard-int4", "K"]["spread"] > 0


def test_measuring_one_text_for_people(capsys, captures):
    code, out, _ = run(capsys, "measure", captures / "first", "--scheme", "fp8", "--scheme", "int4", "--device", "cpu")
    assert code == 0
    assert "Attention-output error" in out and "fp8" in out and "lower in" in out


def test_calibrating_and_measuring_what_was_calibrated(capsys, captures, tmp_path):
    file = tmp_path / "calibration.safetensors"
    code, out, _ = run(
        capsys,
        "calibrate",
        captures / "first",
        *("--holdout", captures / "second", "--out", file),
        *("--seeds", 6, "--device", "cpu", "--json"),
    )
    assert code == 0
    assert set(json.loads(out)["layers"]) == {str(index) for index in open_capture(captures / "first").layers}
    code, out, _ = run(
        capsys, "measure", captures / "third", "--calibration", file, "--scheme", "int4", "--device", "cpu", "--json"
    )
    assert code == 0
    # Under its file's name.
    assert {row["scheme"] for row in json.loads(out)["attention_error"]} == {"int4", "calibration"}
    for text, role in (("first", "calibrated on"), ("second", "decided by")):
        code, _, err = run(capsys, "measure", captures / text, "--calibration", file, "--device", "cpu")
        assert code == 2
        assert role in err


@pytest.fixture(scope="module")
def calibrations(captures, tmp_path_factory):
    """Two files of one name, of one seed and of several."""
    files = []
    for seeds in (1, 3):
        files.append(tmp_path_factory.mktemp("calibrations") / "own.safetensors")
        with pytest.raises(SystemExit) as stop:
            main(
                [
                    "calibrate",
                    str(captures / "first"),
                    "--out",
                    str(files[-1]),
                    "--seeds",
                    str(seeds),
                    "--device",
                    "cpu",
                ]
            )
        assert stop.value.code == 0
    return files


def test_a_table_of_captures_is_written_and_repeating_the_command_changes_nothing(
    capsys, captures, calibrations, tmp_path, monkeypatch
):
    other = shutil.copy(calibrations[1], tmp_path / "other.safetensors")
    out = tmp_path / "errors.csv"
    arguments = [
        *("measure", captures / "second", captures / "third", "--scheme", "int4", "--device", "cpu"),
        *("--calibration", calibrations[0], "--calibration", other, "--exact-first", 4, "--exact-recent", 32),
    ]
    typed = [str(argument) for argument in (*arguments, "--out", out)]
    monkeypatch.setattr(sys, "argv", ["kvlab", *typed])
    code, said, _ = run(capsys, *typed)
    assert code == 0
    table = pd.read_csv(out, comment="#")
    rows = {"capture": ["second", "third"], "scheme": ["int4", "other", "own"], "stored": ["K", "KV", "V"]}
    assert {name: sorted(table[name].unique()) for name in rows} == rows
    (layers,) = {len(open_capture(captures / name).layers) for name in ("second", "third")}
    assert len(table) == layers * 2 * 3 * 3
    assert (table["exact_first"].unique().item(), table["exact_recent"].unique().item()) == (4, 32)
    assert table["command"].unique().item() == shlex.join(["kvlab", *typed])
    # What it prints is what is in the table, and what it prints without one.
    assert (code, said) == run(capsys, *arguments)[:2]
    before = out.read_bytes()
    code, again, err = run(capsys, *typed)
    # No bar: nothing was measured.
    assert (code, again, err) == (0, said, "")
    assert out.read_bytes() == before
    # All but these are stored, so with fewer of them exact the error is larger.
    assert run(capsys, *arguments[:-2], "--exact-recent", 0, "--out", out)[0] == 0
    both = pd.read_csv(out, comment="#").pivot_table(index=["scheme", "stored"], columns="exact_recent", values="error")
    assert (both[0] > both[32]).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--calibration", "{0}", "--calibration", "{1}"], "but other rows are called 'own'; accepted: files whose"),
        (["--calibration", "{0}", "--scheme", "int4", "--scheme", "int4"], "schemes has 2 named 'int4'"),
        (["--out", "none/errors.csv"], "out is 'none/errors.csv'; accepted: a file in a folder that can be written"),
        (["--out", "{0}"], "without a line of settings that can be read; accepted: a new file, or one that"),
        (["--exact-first", "-1"], "--exact-first"),
        (["--device", "meta"], "device is 'meta'; accepted: cpu, or cuda where torch finds a GPU"),
    ],
)
def test_measuring_refuses_before_it_begins(capsys, captures, calibrations, options, message):
    options = [option.format(*calibrations) for option in options]
    code, out, err = run(capsys, "measure", captures / "third", *options)
    # No bar of a measurement that began.
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("kvlab: ") and message in err


def test_a_calibration_that_lacks_a_layer_is_refused_before_anything_is_measured(capsys, captures, tmp_path):
    file = tmp_path / "calibration.safetensors"
    assert run(capsys, "calibrate", captures / "first", "--out", file, "--seeds", 2, "--device", "cpu")[0] == 0
    found = Calibration.load(file)
    (layer,) = found.layers
    manifest = found.manifest | {"layers": {"0": found.manifest["layers"][str(layer)]}}
    Calibration({0: found.seeds[layer]}, {0: found.key_means[layer]}, manifest).save(file)
    code, _, err = run(capsys, "measure", captures / "third", "--calibration", file, "--device", "cpu")
    # No bar of a measurement that began.
    message = f"calibration lacks layers [{layer}]; accepted: one with every full-attention layer"
    assert (code, err) == (2, f"kvlab: {message}\n")


def test_a_text_cannot_decide_about_itself(capsys, captures, tmp_path):
    code, _, err = run(
        capsys, "calibrate", captures / "first", "--holdout", captures / "first", "--out", tmp_path / "file"
    )
    assert (code, err.count("\n")) == (2, 1)
    assert not (tmp_path / "file").exists()


def test_figures_of_captures(capsys, captures, tmp_path):
    out = tmp_path / "figures"
    code, said, _ = run(
        capsys, "figures", "--quick", "--capture", captures / "first", "--capture", captures / "second", "--out", out
    )
    assert (code, said) == (0, f"10 files in {out}; start with {out / 'summary.md'}\n")
    summary = (out / "summary.md").read_text()
    assert "first (SHA-256" in summary and "second (SHA-256" in summary
    assert "lower in" in summary


def test_notebooks_run_on_a_capture_that_the_environment_names(captures, monkeypatch):
    monkeypatch.setenv("KVLAB_CAPTURE", str(captures / "first"))
    captured = figures.capture_default(figures.QUICK)
    assert captured.manifest.tokens == 300
    assert "300 tokens of first (SHA-256" in figures.source_of(captured)


def test_any_other_decoder_comes_in_the_same_format(capsys, texts, tmp_path):
    write_llama(tmp_path / "llama")
    arguments = ["--text", texts / "first.txt", "--out", tmp_path / "out", "--tokens", 100, "--device", "cpu"]
    assert run(capsys, "capture", tmp_path / "llama", *arguments)[0] == 0
    code, out, _ = run(capsys, "measure", tmp_path / "out", "--scheme", "fp8", "--device", "cpu", "--json")
    assert code == 0
    assert {row["form"] for row in json.loads(out)["outliers"]} == {"raw", "rotated"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--tokens": 5000}, "text has"),
        ({"--text": "nowhere.txt"}, "text is 'nowhere.txt'"),
        ({"--device": "tpu"}, "device is 'tpu'"),
        ({"--queries": 0}, "--queries"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(capsys, checkpoint, texts, tmp_path, change, message):
    options = {"--text": texts / "first.txt", "--out": tmp_path / "out", "--tokens": 50, "--device": "cpu"} | change
    code, _, err = run(capsys, "capture", checkpoint, *(part for pair in options.items() for part in pair))
    assert (code, err.count("\n")) == (2, 1)
    assert message in err
    assert not (tmp_path / "out").exists()


def write_llama(folder, **changes):
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, **changes)).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def test_missing_weights_are_not_made_up(capsys, texts, tmp_path):
    folder = write_llama(tmp_path / "llama")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.self_attn.k_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    options = ("--text", texts / "first.txt", "--out", tmp_path / "out", "--tokens", 50, "--device", "cpu")
    code, _, err = run(capsys, "capture", folder, *options)
    assert code == 2
    assert "model.layers.0.self_attn.k_proj.weight" in err
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:5000])
    code, _, err = run(capsys, "capture", folder, *options)
    assert code == 2
    assert "which cannot be loaded" in err
    assert not (tmp_path / "out").exists()


def test_more_tokens_than_positions(capsys, texts, tmp_path):
    folder = write_llama(tmp_path / "llama")
    options = ("--text", texts / "first.txt", "--out", tmp_path / "out", "--tokens", 200, "--device", "cpu")
    code, _, err = run(capsys, "capture", folder, *options)
    assert (code, err.splitlines()[-1]) == (2, "kvlab: tokens is 200; accepted: at most the model's 128")


def test_a_text_twice_is_no_second_text(capsys, captures, tmp_path):
    shutil.copytree(captures / "first", tmp_path / "copy")
    for command in (["measure"], ["calibrate", "--out", tmp_path / "file"]):
        code, _, err = run(capsys, command[0], captures / "first", tmp_path / "copy", *command[1:])
        assert (code, err.count("\n")) == (2, 1)
        assert "have a text twice" in err


def test_captures_of_other_weights_do_not_mix(capsys, captures, texts, tmp_path):
    other = tmp_path / "other"
    write_checkpoint(other, RandomWeights(tiny_config(vocab_size=256, max_position_embeddings=512), seed=4))
    write_tokenizer(other)
    options = ("--text", texts / "third.txt", "--out", tmp_path / "out", "--tokens", 100, "--device", "cpu")
    assert run(capsys, "capture", other, *options)[0] == 0
    code, _, err = run(capsys, "measure", captures / "first", tmp_path / "out")
    assert code == 2
    assert "captures are of 2 revisions of a model" in err


def test_a_model_that_is_nowhere(capsys, texts, tmp_path):
    code, _, err = run(
        capsys, "capture", tmp_path / "none", "--text", texts / "first.txt", "--out", tmp_path / "out", "--tokens", 5
    )
    assert (code, err.count("\n")) == (2, 1)
    assert "accepted: a model folder or a hub name" in err


def test_a_dry_run_needs_neither_weights_nor_text(capsys, checkpoint, tmp_path):
    options = ("--out", tmp_path / "out", "--tokens", 40, "--device", "cpu", "--json")
    code, out, _ = run(capsys, "capture", checkpoint, "--random-weights", 1, *options)
    assert code == 0
    assert all(layer["total"] > 0 for layer in json.loads(out)["layers"])
