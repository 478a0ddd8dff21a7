import json

import pandas as pd
import pytest

from kvlab.bench import kernels, timing
from kvlab.bench.cases import DecodeCase, Entry, StoreCase
from kvlab.cli import main
from kvlab.serving import stock_kernels

pytestmark = pytest.mark.unit

CASES = [DecodeCase(24, 2, (100, 100)), DecodeCase(24, 2, (10, 3), "ragged", q_len=4)]
GB_PER_S = 4000.0


class StandInClock:
    """A call takes as many microseconds as it returns."""

    device = "cpu"

    def copy_us(self):
        return 4_000_000, 1.0

    def single_us(self, calls):
        return calls[0]() + 5.0

    def graph_us(self, calls, single_us):
        assert single_us == calls[0]() + 5.0
        return calls[0]()

    def sustained_us(self, calls, single_us):
        return calls[0](), 1.1 * calls[0]()


@pytest.fixture
def clock(monkeypatch):
    clock = StandInClock()
    monkeypatch.setattr(StandInClock, "copy_us", lambda self: (4_000_000, 1_000.0))
    return clock


def entrant(time_us, **others):
    return lambda case, device: Entry([lambda: time_us], case.cache_bytes(100), **others)


def failing(error):
    def prepare(case, device):
        raise error

    return prepare


def test_rows_say_time_rate_floor_and_speedup(clock):
    bench = kernels.KernelBench(clock)
    ours = entrant(2.0, once_per_step=lambda: 1.0, error=lambda: 3e-4)
    bench.run("decode", {kernels.OURS: ours, "fp8": entrant(5.0)}, CASES, progress=False)
    table = bench.table("made up")
    assert table["kernel"].tolist() == ["copy", *["decode"] * 4]
    assert table["gb_per_s"].iloc[0] == bench.gb_per_s == 4.0
    row = table.iloc[1]
    assert (row["time_us"], row["time_single_us"], row["step_us"], row["error"]) == (2.0, 7.0, 6.0, 3e-4)
    # 200 tokens of 2 KV heads at 100 bytes: 40,000 bytes; in 2 µs 20 GB/s; at the copy's 4 GB/s 10 µs.
    assert (row["bytes"], row["gb_per_s"], row["floor_us"]) == (40_000, 20.0, 10.0)
    assert table["speedup_over_fp8"].tolist()[1:] == [2.5, 1.0, 2.5, 1.0]
    assert table[["machine", "versions", "date", "command"]].notna().all(axis=None)


def test_a_missing_package_and_a_failure_are_named_once(clock, capsys):
    bench = kernels.KernelBench(clock)
    entrants = {
        kernels.OURS: entrant(2.0),
        "bf16": failing(ImportError("No module named 'vllm'")),
        "turboquant-4bit": failing(ValueError("q_len is 4")),
    }
    bench.run("decode", entrants, CASES, progress=False)
    assert bench.notes == [
        "decode, bf16: not measured: ImportError: No module named 'vllm'",
        "decode, turboquant-4bit: not measured: ValueError: q_len is 4",
    ]
    assert capsys.readouterr().err == "".join(f"kvlab: {note}\n" for note in bench.notes)
    assert bench.table("")["speedup_over_fp8"].isna().all()


def test_our_own_failure_is_not_hidden(clock):
    bench = kernels.KernelBench(clock)
    with pytest.raises(RuntimeError, match="wrong"):
        bench.run("decode", {kernels.OURS: failing(RuntimeError("wrong"))}, CASES, progress=False)


def test_a_sustained_competitor_that_is_missing_is_named(clock):
    bench = kernels.KernelBench(clock)
    bench.run_sustained({kernels.OURS: entrant(2.0), "fp8": failing(ImportError("No module named 'vllm'"))}, CASES[:1])
    assert bench.notes == ["decode, sustained, fp8: not measured: ImportError: No module named 'vllm'"]
    assert len(bench.rows) == 3


def test_sustained_rows_are_first_and_last(clock):
    bench = kernels.KernelBench(clock)
    bench.run_sustained({kernels.OURS: entrant(2.0)}, CASES[:1])
    rows = bench.table("").iloc[1:]
    assert rows["lengths"].tolist() == ["first 0.2 s", "last 0.2 s"]
    assert rows["time_us"].tolist() == pytest.approx([2.0, 2.2])


@pytest.fixture
def whole(clock):
    bench = kernels.KernelBench(clock)
    ours, stock = entrant(2.0, error=lambda: 3e-4), entrant(5.0)
    bench.run("decode", {kernels.OURS: ours, "fp8": stock}, CASES, progress=False)
    store = {kernels.OURS: lambda case, device: Entry([lambda: 3.0], case.moved_bytes(136), error=lambda: 1e-3)}
    bench.run("store", store, [StoreCase(24, 2, 8)], progress=False)
    bench.run_sustained({kernels.OURS: ours}, CASES[:1])
    return bench.table("made up")


def test_the_file_reads_back(whole, tmp_path):
    kernels.write_table(whole, ["decode, bf16: not measured"], tmp_path / "table.csv")
    back = pd.read_csv(tmp_path / "table.csv", comment="#")
    assert back.columns.tolist() == whole.columns.tolist()
    assert back["bytes"].tolist() == whole["bytes"].tolist()
    assert "# decode, bf16: not measured\n" in (tmp_path / "table.csv").read_text()


def test_the_text_has_a_line_a_case_and_the_copy(whole):
    text = kernels.as_text(whole, ["a note"])
    assert text.startswith("copy from device to device: 4 GB/s")
    assert text.endswith("a note")
    ragged = next(line for line in text.splitlines() if "ragged" in line)
    assert ragged.split()[:6] == ["24", "2", "2", "10", "ragged", "4"]
    assert ragged.split()[6:8] == ["2", "5"]
    assert "store, µs per launch" in text and "last 0.2 s" in text


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main(["bench", "kernels", *arguments])
    captured = capsys.readouterr()
    return stop.value.code, captured.out, captured.err


def test_without_a_gpu_the_command_says_so(capsys, monkeypatch):
    monkeypatch.setattr(timing.torch.cuda, "is_available", lambda: False)
    code, out, err = run(capsys)
    assert (code, out) == (2, "")
    assert err == "kvlab: device is 'cuda'; accepted: a CUDA device that torch finds\n"


@pytest.mark.parametrize("out", ["no/such/folder.csv", "."])
def test_a_file_that_cannot_be_written_is_named_before_anything_runs(capsys, monkeypatch, tmp_path, out):
    monkeypatch.setattr(kernels, "bench_kernels", lambda *args, **options: pytest.fail("it ran"))
    code, printed, err = run(capsys, "--out", str(tmp_path / out))
    assert (code, printed) == (2, "")
    assert err == f"kvlab: out is {str(tmp_path / out)!r}; accepted: a file in a folder that can be written\n"


def test_the_command_prints_one_document_and_writes_the_file(capsys, monkeypatch, tmp_path, whole):
    given = {}

    def made(decode, store, prefill, **options):
        given.update(options, decode=decode, store=store, prefill=prefill)
        return whole, ["a note"]

    monkeypatch.setattr(kernels, "bench_kernels", made)
    code, out, _ = run(capsys, "--quick", "--json", "--out", str(tmp_path / "table.csv"))
    document = json.loads(out)
    assert code == 0
    assert document["notes"] == ["a note"]
    assert len(document["rows"]) == len(whole) == len(pd.read_csv(tmp_path / "table.csv", comment="#"))
    assert given["quick"] and given["command"] == "kvlab bench kernels --quick"
    assert given["decode"] is stock_kernels.DECODE
    assert given["prefill"] is stock_kernels.PREFILL
    assert run(capsys)[1].startswith("copy from device to device")


@pytest.mark.parametrize("flag", [[], ["--quick"]])
def test_all_of_it_runs_on_stand_ins(clock, monkeypatch, flag):
    monkeypatch.setattr(kernels, "CudaClock", lambda: clock)
    monkeypatch.setattr(kernels.ours, "decode", entrant(2.0))
    monkeypatch.setattr(kernels.ours, "store", lambda case, device, **_: Entry([lambda: 3.0], case.moved_bytes(136)))
    monkeypatch.setattr(kernels.ours, "prefill", lambda case, device, flash: Entry([lambda: flash], None))
    others = {"fp8": entrant(4.0)}, {}, {"fp8": lambda case, device: Entry([lambda: 45.0], None)}
    table, notes = kernels.bench_kernels(*others, flash=35.0, quick=bool(flag), progress=False, command="made up")
    assert notes == []
    assert set(table["kernel"]) == {"copy", "decode", "store", "prefill", "decode, sustained"}
    assert set(table[table["kernel"] == "store"]["scheme"]) == {"hadamard-int4", "hadamard-int4-refit"}
    stock = table[(table["scheme"] == "fp8") & (table["kernel"] != "decode, sustained")]
    assert (stock["speedup_over_fp8"] == 1).all()
    prefill = table[(table["kernel"] == "prefill") & (table["scheme"] == kernels.OURS)]
    # A graph captures no prefill: 5 µs of the clock's single launch on top, on both sides.
    assert (prefill["time_us"] == 40).all() and (prefill["speedup_over_fp8"] == 50 / 40).all()
    assert prefill["floor_us"].isna().all()
