"""`kvlab capacity`: what it prints, and what it says of what it cannot read."""

import json
import logging

import pytest
from transformers import LlamaConfig, MambaConfig, Qwen3Config, Qwen3NextConfig, WhisperConfig

from kvlab import capacity
from kvlab.cli import main
from kvlab.paging import FULL

pytestmark = pytest.mark.unit

GB = capacity.GB
CONTEXTS = [65_536, 262_144]


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main(["capacity", *map(str, arguments)])
    captured = capsys.readouterr()
    return stop.value.code, captured.out, captured.err


def test_a_context_given_twice_counts_once(capsys):
    once, twice = (run(capsys, "--cache-gb", 30, "--context", *contexts) for contexts in ([65_536], [65_536] * 2))
    assert once == twice


def test_command_line_rows(capsys):
    code, out, err = run(capsys, "--context", 65_536, 262_144, "--cache-gb", 30, "--tp", 2, "--json")
    rows = json.loads(out)
    assert (code, err) == (0, "")
    assert {(row["scheme"], row["context"]) for row in rows} == {
        (scheme, context) for scheme in ("fp8", "hadamard-int4") for context in CONTEXTS
    }
    table = capacity.capacity_table(CONTEXTS, 30 * GB, tp=2)
    assert rows == table.to_dict("records")
    repeated = run(capsys, "--context", 65_536, "--context", 262_144, "--cache-gb", 30, "--tp", 2, "--json")
    assert repeated[1] == out


def test_command_line_takes_weights_off_gpus(capsys):
    code, out, _ = run(capsys, "--context", 65_536, "--gpus", 4, "--gpu-memory-gb", 80, "--tp", 2, "--json")
    memory = capacity.cache_bytes_per_gpu(80 * GB, capacity.kolibri1_weight_bytes(), tp=2)
    assert code == 0
    assert json.loads(out) == capacity.capacity_table([65_536], memory, tp=2, replicas=2).to_dict("records")


def test_command_line_for_people_and_of_another_model(capsys, tmp_path):
    Qwen3NextConfig().save_pretrained(tmp_path)
    code, out, err = run(capsys, "--context", 4096, "--cache-gb", 10, "--model", tmp_path, "--scheme", "bf16")
    assert (code, err) == (0, "")
    assert "10 GB of cache on each of 1 GPU, TP 1" in out
    assert "bf16   4,096" in out


def test_a_context_beyond_the_model_is_counted_and_noted(capsys):
    code, out, err = run(capsys, "--context", 1_048_576, "--cache-gb", 30, "--json")
    assert (code, len(json.loads(out))) == (0, 2)
    assert err == "kvlab: note: context 1,048,576 is longer than the model's 262,144 tokens\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cache-gb", 1], "--context"),
        (["--context", 4096], "memory is not given; accepted: --cache-gb, or --gpus with --gpu-memory-gb"),
        (["--context", 4096, "--gpus", 2], "memory is not given"),
        (["--context", 4096, "--cache-gb", 1, "--gpus", 2], "gpus is 2 beside cache-gb"),
        *(
            (
                ["--context", 4096, "--cache-gb", value],
                f"cache-gb is {value}; accepted: a positive number, at most 1e+09",
            )
            for value in ("-3.0", "1e+300", "nan", "0.0")
        ),
        *(
            (
                ["--context", 4096, "--gpus", 2, "--gpu-memory-gb", 80, f"--{name}", value],
                f"{name} is {value}; accepted",
            )
            for name in ("gpu-memory-gb", "weights-gb", "gpu-memory-utilization")
            for value in ("-3.0", "1e+300", "nan")
        ),
        (
            ["--context", 4096, "--gpus", 5, "--gpu-memory-gb", 80],
            "gpus (and tp, by default) is 5; accepted: a divisor of 48 query heads",
        ),
        (["--context", 4096, "--gpus", 1, "--gpu-memory-gb", 24], "of weights on each of 1 GPU\n"),
        (["--context", -1, "--cache-gb", 1], "context is -1"),
        (["--context", 10**400, "--cache-gb", 1], "0000; accepted: an integer from 1 to 1000000000"),
        (
            ["--context", 4096, "--gpus", 10**400, "--tp", 1, "--gpu-memory-gb", 80],
            "0000; accepted: an integer from 1 to 1000000000",
        ),
        (
            ["--context", 4096, "--cache-gb", 1, "--max-num-batched-tokens", 10**400],
            "0000; accepted: an integer from 1 to 1000000000",
        ),
        (["--context", "64k", "--cache-gb", 1], "Invalid value for '--context'"),
        (
            ["--context", 4096, "--gpus", 3, "--gpu-memory-gb", 80, "--tp", 2],
            "gpus is 3; accepted: a multiple of tp = 2",
        ),
        (["--context", 4096, "--gpus", 2, "--gpu-memory-gb", 24], "more than the 39.4 GB of weights"),
        (["--context", 4096, "--gpus", 0, "--gpu-memory-gb", 80], "gpus is 0"),
        (["--context", 4096, "--gpus", 1, "--gpu-memory-gb", 80, "--model", "x"], "weights-gb is missing"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line_and_exit_2(capsys, arguments, message):
    code, out, err = run(capsys, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


LLAMA = LlamaConfig().to_dict()
QWEN3 = Qwen3Config(num_hidden_layers=2).to_dict()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "which has no config.json; accepted: a folder with a transformers config.json, or a hub name"),
        (b"", "whose config.json is empty"),
        (b"\xff\xfe\x00", "whose config.json is no text"),
        (b"{", "whose config.json is no JSON (Expecting"),
        (b"[" * 100_000, "whose config.json is no JSON"),
        (b"null", "whose config.json holds null, no object"),
        ({}, "has model_type None; accepted: a model type that transformers knows"),
        ({"model_type": "nothing"}, "has model_type 'nothing'"),
        ({"model_type": []}, "has model_type []"),
        (LLAMA | {"num_key_value_heads": "8"}, "num_key_value_heads"),
        (LLAMA | {"max_position_embeddings": None}, "max_position_embeddings"),
        (LLAMA | {"max_position_embeddings": "long"}, "max_position_embeddings"),
        (QWEN3 | {"layer_types": [FULL]}, "layer_types"),
        (QWEN3 | {"layer_types": FULL}, "layer_types"),
        (QWEN3 | {"layer_types": ["unknown", FULL]}, "unknown"),
        (MambaConfig().to_dict(), "MambaConfig without num_attention_heads"),
    ],
    ids=lambda x: "" if not isinstance(x, str) else x[:40],
)
def test_a_config_that_cannot_be_read_is_one_line(capsys, tmp_path, content, message):
    if content is not None:
        made = content if isinstance(content, bytes) else json.dumps(content).encode()
        (tmp_path / "config.json").write_bytes(made)
    code, out, err = run(capsys, "--context", 4096, "--cache-gb", 1, "--model", tmp_path)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_what_transformers_warns_of_in_a_config_is_no_line_beside_the_error(capsys, tmp_path):
    # Its special tokens are beyond the vocabulary.
    (tmp_path / "config.json").write_text(json.dumps(WhisperConfig().to_dict() | {"vocab_size": 100}))
    said = []
    handler = logging.Handler()
    handler.emit = said.append
    logging.getLogger("transformers").addHandler(handler)
    try:
        code, _, err = run(capsys, "--context", 4096, "--cache-gb", 1, "--model", tmp_path)
    finally:
        logging.getLogger("transformers").removeHandler(handler)
    assert (code, said) == (2, []) and "is_encoder_decoder" in err


def test_a_model_of_no_name_is_no_folder(capsys):
    code, _, err = run(capsys, "--context", 4096, "--cache-gb", 1, "--model", "")
    assert (code, "model is '', which is no name; accepted" in err) == (2, True)


@pytest.mark.parametrize("name", ["nonexistent", "a/b/c", "config.json"])
def test_a_path_is_not_asked_of_the_hub(capsys, tmp_path, monkeypatch, name):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: pytest.fail("asked"))
    code, _, err = run(capsys, "--context", 4096, "--cache-gb", 1, "--model", f"m/{name}")
    assert (code, err.count("\n")) == (2, 1)
    assert f"model is 'm/{name}', which cannot be read: there is no such folder; accepted" in err


def test_a_hub_that_cannot_be_reached_is_one_line(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    # A port that nobody listens at.
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    code, _, err = run(capsys, "--context", 4096, "--cache-gb", 1, "--model", "nobody/nothing")
    assert (code, err.count("\n")) == (2, 1)
    assert "model is 'nobody/nothing', which is no folder and cannot be had from the hub (" in err


def test_little_memory_is_no_none(capsys):
    assert run(capsys, "--context", 4096, "--cache-gb", 0.0001)[1].startswith("0.0001 GB of cache on each of 1 GPU,")
