import json

import pytest
import torch

from kvlab.bench import cases, layer, timing
from kvlab.bench.cases import DecodeCase
from kvlab.cli import main

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")
# The last token alone in its block, within one, and a session of one token.
CASE = DecodeCase(4, 2, (65, 70, 1), "ragged")


@pytest.fixture(autouse=True)
def few_sets(monkeypatch):
    monkeypatch.setattr(cases, "ROTATED_BYTES", 1)


@pytest.mark.parametrize("scheme", layer.LAYERS)
def test_a_step_stores_attends_and_comes_back(scheme):
    torch.manual_seed(0)
    entry = layer.layer_step(CASE, CPU, layer.LAYERS[scheme])
    # bfloat16 rounds once, and with mapped values the decode kernel's output too.
    assert 0 < entry.error() < (2 if "values" in scheme else 1) * 2**-9


def test_mapped_values_come_back_as_they_were():
    torch.manual_seed(0)
    folding, inverse, mean = layer.LAYERS["unequal bits, refitted, values mapped"](2, CPU)
    x = torch.randn(2, 50, 128)
    there = x @ folding.v_matrix.mT + folding.v_bias[:, None]
    back = there @ inverse.float() + mean[:, None]
    # The inverse is rounded to bfloat16.
    assert (back - x).norm() <= 2**-8 * there.norm()


def test_bytes_are_the_caches_and_the_new_tokens():
    entry = layer.layer_step(CASE, CPU)
    new = 3 * (2 * (2 * 4 + 2 * 2) * 128 + 2 * 136)
    assert entry.num_bytes == 136 * 2 * 136 + new


def test_the_command(capsys, monkeypatch, tmp_path):
    class StandInClock:
        device = CPU

        def copy_us(self):
            return 4_000_000, 1_000.0

        def single_us(self, calls):
            calls[0]()
            return 5.0

        def graph_us(self, calls, single_us):
            return 2.0

    monkeypatch.setattr(layer, "CudaClock", StandInClock)
    monkeypatch.setattr(layer, "CONTEXT", 33)
    monkeypatch.setattr(layer, "BATCHES", (1, 2))
    with pytest.raises(SystemExit) as stop:
        main(["bench", "layer", "--json", "--out", str(tmp_path / "layer.csv")])
    assert stop.value.code == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["scheme"] for row in rows[1:]] == list(layer.LAYERS) * 4
    assert {row["command"] for row in rows} == {"kvlab bench layer"}
    assert (tmp_path / "layer.csv").is_file()


def test_without_a_gpu_the_command_says_so(capsys, monkeypatch):
    monkeypatch.setattr(timing.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        main(["bench", "layer"])
    assert stop.value.code == 2
    assert capsys.readouterr().err == "kvlab: device is 'cuda'; accepted: a CUDA device that torch finds\n"
