"""`kvlab eval` through lm-evaluation-harness: a tiny model in process, and a server that this file plays."""

import json
import re
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from kvlab.cli import main
from kvlab.evaluation import job
from kvlab.evaluation.samples import read_samples
from kvlab.evaluation.setups import InProcess
from kvlab.models.default import MODEL_NAME

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: the extra 'eval'")
pytestmark = pytest.mark.integration

OFFLINE = [task for task, (_, source) in job.RULER_TASKS.items() if source is None]


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main(["eval", *map(str, arguments)])
    captured = capsys.readouterr()
    return stop.value.code, captured.out, captured.err.strip().splitlines()[-1] if captured.err else ""


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """No test reaches for the hub, and lm-eval's own data are asked for once only."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A random Llama with the embedded model's tokenizer: one forward is a millisecond."""
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = AutoTokenizer.from_pretrained(InProcess(MODEL_NAME).tokenizer())
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class Answers(BaseHTTPRequestHandler):
    """Finds single needles, names itself and its context, and fails when it is told to."""

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.reply({"data": [{"id": self.server.model, "max_model_len": 2048}]})

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(request)
        if len(self.server.requests) > self.server.dies_after:
            self.send_error(500)
            return
        prompt = request.get("prompt") or request["messages"][0]["content"]
        key = re.search(r"magic number for (\S+) mentioned", prompt)
        found = re.search(rf"for {key[1]} is: (\d+)", prompt)[1] if key else "none"
        message = {"text": f" {found}", "message": {"content": f" {found}"}}
        self.reply({"choices": [{"index": 0, **message}]} if self.server.says is None else self.server.says)

    def reply(self, document):
        body = document if isinstance(document, bytes) else json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def server(tiny):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    server.model, server.requests, server.dies_after, server.says = str(tiny), [], float("inf"), None
    server.url = f"http://127.0.0.1:{server.server_port}/v1"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


FEW = ["--length", "1024", "--prompts", "2", "--generation", "max_gen_toks=2"]


def test_the_tasks_without_data_run_offline_and_under_a_scheme(tiny, tmp_path, capsys):
    tasks = [part for task in OFFLINE for part in ("--task", task)]
    scheme = ["--scheme", "hadamard-int4"]
    code, out, _ = run(capsys, "ruler", "--model", tiny, *scheme, "--out", tmp_path / "a", *tasks, *FEW, "--json")
    document = json.loads(out)
    assert code == 0
    assert [row["task"] for row in document["rows"]] == OFFLINE
    record = json.loads((tmp_path / "a" / "run.json").read_text())
    assert (record["scheme"], record["seed"], record["lm_eval"]) == (
        "hadamard-int4",
        0,
        job.metadata.version("lm_eval"),
    )
    assert {path.name for path in (tmp_path / "a").iterdir()} == {
        "run.json",
        *(f"{task}-1024.jsonl" for task in OFFLINE),
    }
    for sample in read_samples(tmp_path / "a"):
        assert re.fullmatch("[0-9a-f]{64}", sample.prompt_hash) and set(sample.scores) == {"score"}


def test_prompts_do_not_depend_on_what_ran_before(tiny, tmp_path):
    setup, settings = InProcess(str(tiny)), job.Settings(prompts=2, generation={"max_gen_toks": 1})
    hashes = []
    for name, tasks in (("a", ["niah_multikey_2", "cwe", "vt"]), ("b", ["vt", "cwe"])):
        job.ruler(setup, tmp_path / name, tasks=tasks, lengths=[1024], settings=settings)
        hashes.append({(s.task, s.prompt): s.prompt_hash for s in read_samples(tmp_path / name)})
    assert hashes[1].items() <= hashes[0].items()
    assert len(set(hashes[0].values())) == 6


def test_a_server_and_this_process_get_the_same_prompts(tiny, server, tmp_path, capsys):
    out = [tmp_path / "server", tmp_path / "here"]
    settings = job.Settings(prompts=3, generation={"max_gen_toks": 2})
    job.ruler(InProcess(str(tiny)), out[1], tasks=["niah_single_1"], lengths=[1024], settings=settings)
    code, text, _ = run(capsys, "ruler", "--base-url", server.url, "--out", out[0], "--task", "niah_single_1",
                        "--length", 1024, "--prompts", 3, "--generation", "max_gen_toks=2")  # fmt: skip
    assert code == 0 and "niah_single_1" in text
    assert [sample.scores for sample in read_samples(out[0])] == [{"score": 1.0}] * 3
    assert {request["max_tokens"] for request in server.requests} == {2}
    with pytest.raises(SystemExit) as stop:
        main(["compare", *map(str, out), "--json"])
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (stop.value.code, row["mean_a"], row["prompts"]) == (0, 1.0, 3)


def test_through_the_chat_template(server, tmp_path, capsys):
    code, _, _ = run(capsys, "ruler", "--base-url", server.url, "--chat", "--concurrent", 2, "--out", tmp_path,
                     "--task", "niah_single_1", *FEW)  # fmt: skip
    assert code == 0
    assert [message["role"] for message in server.requests[0]["messages"]] == ["user", "assistant"]


def test_a_server_that_dies_is_named_and_what_was_answered_is_not_asked_again(server, tmp_path, capsys):
    arguments = ["ruler", "--base-url", server.url, "--out", tmp_path, "--length", "1024", "--prompts", "4",
                 "--task", "niah_single_1", "--task", "niah_multikey_2"]  # fmt: skip
    server.dies_after = 6
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    # In a line of its own, not behind the progress bar.
    assert err.startswith(f"kvlab: the server at {server.url} failed") and "run it again" in err
    assert (tmp_path / "niah_single_1-1024.jsonl").exists() and not (tmp_path / "niah_multikey_2-1024.jsonl").exists()
    server.requests.clear()
    server.dies_after = float("inf")
    assert run(capsys, *arguments)[0] == 0
    assert len(server.requests) == 2
    assert not list(tmp_path.glob(".*"))
    server.requests.clear()
    assert run(capsys, *arguments)[0] == 0
    assert not server.requests


NULL = {"choices": [{"index": 0, "text": None, "message": {}}]}


@pytest.mark.parametrize(
    ("says", "kind"),
    [(NULL, []), (NULL, ["--chat"]), (NULL, ["--concurrent", "2"]), (b"[" * 100_000, [])],
    ids=lambda x: str(x)[:30],
)
def test_what_is_no_answer_is_the_servers_failure_and_scores_nothing(server, tmp_path, capsys, monkeypatch, says, kind):
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda _: None)
    server.says = says
    arguments = ["ruler", "--base-url", server.url, "--out", tmp_path, "--task", "niah_single_1", *FEW, *kind]
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "") and err.startswith(f"kvlab: the server at {server.url} failed")
    assert not list(tmp_path.glob("*.jsonl"))
    server.says = None
    assert run(capsys, *arguments)[0] == 0


def test_damaged_answers_are_asked_for_again_and_what_is_named_twice_once(server, tmp_path, capsys):
    arguments = ["ruler", "--base-url", server.url, "--out", tmp_path, "--task", "niah_single_1", "--length", "1024"]
    arguments += [*FEW, "--task", "niah_single_1"]
    server.dies_after = 1
    assert run(capsys, *arguments)[0] == 2
    (cache,) = tmp_path.glob(".*")
    cache.write_bytes(cache.read_bytes()[:7000])
    server.requests.clear()
    server.dies_after = float("inf")
    code, out, _ = run(capsys, *arguments, "--json")
    assert (code, len(server.requests)) == (0, 2)
    assert [row["prompts"] for row in json.loads(out)["rows"]] == [2]


def test_another_evaluation_is_not_mixed_in(server, tmp_path, capsys):
    arguments = ["ruler", "--base-url", server.url, "--out", tmp_path, "--task", "niah_single_1"]
    assert run(capsys, *arguments, *FEW)[0] == 0
    code, _, err = run(capsys, *arguments, *FEW, "--seed", "3")
    assert (code, "seed is 3, but" in err) == (2, True)
    (tmp_path / "run.json").write_text("{")
    assert "out has a damaged run.json" in run(capsys, *arguments, *FEW)[2]


@pytest.fixture
def questions(monkeypatch):
    """A stand-in for the gated questions, in their columns."""
    datasets = pytest.importorskip("datasets")
    rows = [
        {"Question": f"What is {i} + {i}?", "Correct Answer": str(2 * i)}
        | {f"Incorrect Answer {wrong}": str(2 * i + wrong) for wrong in (1, 2, 3)}
        for i in range(5)
    ]
    made = datasets.DatasetDict(train=datasets.Dataset.from_list(rows))
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: made)


def test_gpqa_runs_share_prompts_and_differ_in_seed(questions, server, tmp_path, capsys):
    arguments = ["gpqa", "--base-url", server.url, "--task", "gpqa_diamond_cot_zeroshot", "--max-tokens", 7]
    arguments += ["--generation", "temperature=0.6"]
    for name in "ab":
        code, _, _ = run(capsys, *arguments, "--out", tmp_path / name, "--runs", 2, "--scheme", "fp8")
        assert code == 0
    # The model's name is the same whatever the server stores.
    code, _, err = run(capsys, *arguments, "--out", tmp_path / "a", "--runs", 2, "--scheme", "hadamard-int4")
    assert code == 2 and "scheme is 'hadamard-int4', but" in err and "was begun with 'fp8'" in err
    samples = read_samples(tmp_path / "a")
    assert {(sample.prompt, sample.run) for sample in samples} == {(i, r) for i in range(5) for r in (1, 2)}
    assert len({sample.prompt_hash for sample in samples}) == 5
    assert set(samples[0].scores) == {"exact_match, strict-match", "exact_match, flexible-extract"}
    assert {request["seed"] for request in server.requests} == {1, 2}
    assert {request["max_tokens"] for request in server.requests} == {7}
    with pytest.raises(SystemExit) as stop:
        main(["compare", str(tmp_path / "a"), str(tmp_path / "b")])
    assert stop.value.code == 0


def unavailable(*_, **__):
    raise OSError("no network")


def test_data_that_cannot_be_had_are_named_before_anything_runs(server, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("datasets.load_dataset", unavailable)
    monkeypatch.setattr("lm_eval.tasks.ruler.qa_utils.read_squad", unavailable)
    for task, source in {"qa_squad": "SQuAD 2.0", "niah_single_3": "paul_graham_essays"}.items():
        arguments = ["--base-url", server.url, "--out", tmp_path / "x", "--task", "vt", "--task", task, *FEW]
        code, _, err = run(capsys, "ruler", *arguments)
        assert code == 2 and f"task {task} needs" in err and source in err and "accepted without: niah_single_1" in err
    arguments = ["--base-url", server.url, "--out", tmp_path / "x", "--max-tokens", 9, "--runs", 1]
    code, _, err = run(capsys, "gpqa", "--task", "gpqa_diamond_cot_zeroshot", *arguments)
    assert code == 2 and "accept its terms at https://huggingface.co/datasets/Idavidrein/gpqa" in err
    assert not server.requests and not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--length", "4096"], "length is 4096; accepted: at most the model's 2048 tokens"),
        (["--length", "100"], "length is 100; accepted: an integer of at least 1024"),
        (["--task", "niah"], "task is 'niah'; accepted: niah_single_1"),
        (["--model", "other"], "model is 'other'; accepted at"),
        (["--length", "1024", "--tokenizer", "/nope"], "tokenizer is '/nope', which cannot be loaded ("),
        (["--scheme", "int5"], "int5"),
        (["--device", "cpu"], "device is 'cpu'; accepted: only for a model run here"),
        (["--generation", "temperature"], "accepted: KEY=VALUE"),
    ],
)
def test_a_mistake_is_one_line(server, tmp_path, capsys, arguments, message):
    known = ["--task", "vt"] if "--task" not in arguments else []
    code, out, err = run(capsys, "ruler", "--base-url", server.url, "--out", tmp_path / "x", *known, *arguments)
    assert (code, out) == (2, "") and message in err
    assert not (tmp_path / "x").exists()


def test_no_server_and_no_model(tmp_path, capsys):
    for arguments, message in (
        ([], "model is missing"),
        (["--base-url", "http://127.0.0.1:9/v1"], "where no server names its models"),
        (["--model", tmp_path / "none"], "which cannot be read"),
        (["--model", "x", "--scheme", "int5"], "int5"),
        (["--model", "x", "--concurrent", "2"], "only for a server"),
    ):
        code, _, err = run(capsys, "ruler", "--out", tmp_path / "x", "--task", "vt", *FEW, *arguments)
        assert code == 2 and message in err
    shutil.rmtree(tmp_path)


def test_the_embedded_model_finds_a_needle(tmp_path):
    settings = job.Settings(prompts=1, generation={"max_gen_toks": 8})
    table = job.ruler(InProcess(MODEL_NAME), tmp_path, tasks=["niah_single_1"], lengths=[1024], settings=settings)
    assert table["mean"].tolist() == [1.0]
