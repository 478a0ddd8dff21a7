import json
import math

import numpy as np
import pandas as pd
import pytest

from kvlab import compare, stats
from kvlab.cli import main
from kvlab.evaluation.samples import Sample, read_samples, write_samples

pytestmark = pytest.mark.unit

PROMPTS = 40


def sample(prompt, score, *, task="vt", length=4096, run=1, metric="score", hashed=None):
    digest = hashed or f"{task}-{length}-{prompt}"
    return Sample(task, length, run, prompt, digest, {metric: score}, ["42"], "a “42”\n")


def samples(scores, **options):
    return [sample(prompt, float(score), **options) for prompt, score in enumerate(scores)]


def log(folder, name, made):
    folder.mkdir(exist_ok=True)
    write_samples(folder / name, made)
    return folder


@pytest.fixture
def scores():
    rng = np.random.default_rng(0)
    return [(rng.random(PROMPTS) < share).astype(float) for share in (0.8, 0.6, 0.5, 0.5)]


@pytest.fixture
def folders(tmp_path, scores):
    for name, (vt, cwe) in {"a": scores[:2], "b": scores[2:]}.items():
        log(tmp_path / name, "vt-4096.jsonl", samples(vt))
        log(tmp_path / name, "cwe-4096.jsonl", samples(cwe / 2, task="cwe"))
        log(tmp_path / name, "vt-8192.jsonl", samples(vt, length=8192))
    return tmp_path / "a", tmp_path / "b"


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main(["compare", *map(str, arguments)])
    captured = capsys.readouterr()
    return stop.value.code, captured.out, captured.err


def test_rows_are_the_statistics_of_the_scores(folders, scores):
    table = compare.compare(*folders).set_index(["task", "length"])
    assert list(table.index) == [("cwe", 4096), ("vt", 4096), ("vt", 8192), ("all", 4096)]
    row = table.loc[("vt", 4096)]
    difference = stats.paired_bootstrap(scores[0], scores[2])
    assert tuple(row[["difference", "low", "high"]]) == difference
    assert tuple(row[["only_a", "only_b", "p_value"]]) == stats.mcnemar(scores[0], scores[2])
    assert (row["mean_a"], row["mean_b"], row["prompts"]) == (scores[0].mean(), scores[2].mean(), PROMPTS)
    deviation = (scores[2] - scores[0]).std(ddof=1)
    assert row["prompts_needed"] == stats.prompts_needed(difference.difference, deviation)
    assert table.loc[("cwe", 4096), ["only_a", "p_value"]].isna().all(), "half points are not binary"


def test_the_mean_over_tasks_resamples_within_them(folders, scores):
    row = compare.compare(*folders).set_index(["task", "length"]).loc[("all", 4096)]
    pairs = [(scores[1] / 2, scores[3] / 2), (scores[0], scores[2])]
    assert tuple(row[["difference", "low", "high"]]) == stats.stratified_bootstrap(pairs)
    assert row["prompts"] == 2 * PROMPTS


def test_order_of_files_and_lines_does_not_matter(folders, tmp_path, scores):
    made = [line for path in sorted(folders[1].iterdir()) for line in read_samples(path)]
    file = tmp_path / "one.jsonl"
    write_samples(file, made[::-1])
    assert compare.compare(folders[0], file).equals(compare.compare(*folders))


def test_runs_stay_inside_their_question(tmp_path):
    rng = np.random.default_rng(1)
    a, b = ((rng.random((30, 4)) < 0.7).astype(float) for _ in range(2))
    for name, scores in {"a": a, "b": b}.items():
        for r in range(4):
            made = samples(scores[:, r], task="gpqa", length=None, run=r + 1, metric="exact_match")
            log(tmp_path / name, f"gpqa-run{r + 1}.jsonl", made)
    (row,) = compare.compare(tmp_path / "a", tmp_path / "b").to_dict("records")
    assert (row["prompts"], row["runs"]) == (30, 4)
    assert (row["difference"], row["low"], row["high"]) == stats.paired_bootstrap(a, b)
    # Four runs of a question are not independent, which McNemar's test would need.
    assert math.isnan(row["p_value"])


def test_json_is_one_document(folders, capsys):
    code, out, err = run(capsys, *folders, "--json")
    document = json.loads(out, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))
    assert (code, err) == (0, "")
    assert [row["task"] for row in document["rows"]] == ["cwe", "vt", "vt", "all"]
    assert document["rows"][0]["p_value"] is None
    assert set(document["rows"][0]) == set(compare.COLUMNS)
    assert isinstance(document["rows"][1]["only_a"], int)


def test_for_people_in_points(folders, scores, capsys):
    code, out, _ = run(capsys, *folders, "--detect", "5")
    assert code == 0
    difference, low, high = (f"{100 * x:+.1f}".replace("-", "−") for x in stats.paired_bootstrap(scores[0], scores[2]))
    needed = stats.prompts_needed(0.05, (scores[2] - scores[0]).std(ddof=1))
    assert difference in out and f"{low} to {high}" in out and f"{needed:,}" in out


def test_constant_scores_have_an_interval_of_one_value(tmp_path, capsys):
    folders = [log(tmp_path / name, "x.jsonl", samples(np.full(20, value))) for name, value in (("a", 1), ("b", 0))]
    code, out, err = run(capsys, *folders, "--json")
    (row,) = json.loads(out)["rows"]
    assert (code, err) == (0, "")
    assert (row["difference"], row["low"], row["high"], row["only_a"]) == (-1, -1, -1, 20)
    assert row["prompts_needed"] is None
    (row,) = json.loads(run(capsys, folders[0], folders[0], "--json")[1])["rows"]
    assert (row["difference"], row["low"], row["high"], row["p_value"]) == (0, 0, 0, 1)


def cut_off(path):
    text = path.read_text()
    path.write_text(text[:-20])


def cut_off_at_a_brace(path):
    path.write_text(path.read_text().removesuffix("\n"))


def other_prompt(path):
    lines = path.read_text().splitlines()
    for line in (7, 9):
        lines[line] = lines[line].replace("vt-4096-", "other-")
    path.write_text("\n".join(lines) + "\n")


def fewer(path):
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def twice(path):
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines, lines[3]]))


def edit(old, new):
    return lambda path: path.write_text(path.read_text().replace(old, new, 1))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_off, "is cut off in line 40"),
        (cut_off_at_a_brace, "is cut off in line 40"),
        (other_prompt, "prompt 7, run 1 of vt at 4,096 tokens differs: hash vt-4096-7"),
        (fewer, "prompts differ in number"),
        (twice, "has prompt 3, run 1 of vt at 4,096 tokens twice"),
        (edit('"run": 1', '"run": 2'), "runs differ"),
        (edit('"prompt": 5,', '"prompt": 99,'), "lacks prompt 5, run 1"),
        (edit('"score": ', '"other": '), "other metrics"),
        (edit('{"score": 1.0}', '{"score": NaN}'), "has score nan; accepted: a score from 0 to 1"),
        (edit('{"score": 1.0}', '{"score": 59.5}'), "has score 59.5; accepted: a score from 0 to 1"),
        (edit('{"score": 1.0}', '{"score": -0.5}'), "has score -0.5"),
        (edit('{"score": 1.0}', '{"score": 1.7e308}'), "has score 1.7e+308"),
        (edit('{"score": 1.0}', f'{{"score": 1{400 * "0"}}}'), "has score 1000"),
        (edit('{"score": 1.0}', f'{{"score": {5000 * "1"}}}'), "is no JSON"),
        (edit('{"score": 1.0}', "{}"), "has no score; accepted: one metric at least"),
        (edit('"length": 4096', f'"length": {2**63}'), "has length 9223372036854775808; accepted"),
        (lambda path: path.write_text("[" * 100_000 + "\n"), "line 1 is no JSON"),
        (edit('"task": "', '"task": "\\ud800'), "line 1 is no JSON"),
        (edit('"prompt": 5,', '"prompt": "5",'), "has prompt '5'"),
        (edit('"response"', '"answer"'), "line 1 is no sample"),
        (edit("{", "["), "line 1 is no JSON"),
        (lambda path: path.write_bytes(b"\xff\xfe\n"), "is no UTF-8 text"),
        (lambda path: path.write_text(""), "which is empty"),
        (lambda path: path.unlink(), "where there are none"),
    ],
)
def test_bad_samples_are_one_line_and_exit_2(tmp_path, capsys, scores, damage, message):
    a, b = (log(tmp_path / name, "vt-4096.jsonl", samples(scores[0])) for name in "ab")
    damage(b / "vt-4096.jsonl")
    code, out, err = run(capsys, a, b)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_a_folder_in_a_files_place_is_passed_over(folders):
    table = compare.compare(*folders)
    (folders[0] / "x.jsonl").mkdir()
    assert compare.compare(*folders).equals(table)


def test_a_byte_order_mark_is_no_text(folders):
    table = compare.compare(*folders)
    path = folders[0] / "vt-4096.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert compare.compare(*folders).equals(table)


def test_no_task_is_called_as_the_mean_is(tmp_path, capsys):
    folders = [log(tmp_path / name, "x.jsonl", samples([1, 0], task="all")) for name in "ab"]
    code, _, err = run(capsys, *folders)
    assert (code, "has a task named 'all'; accepted: other names" in err) == (2, True)


@pytest.mark.parametrize("points", ["nan", "1e-300", "0", "101"])
def test_points_that_cannot_be_detected(folders, capsys, points):
    code, out, err = run(capsys, *folders, "--detect", points)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"detect is {float(points)}; accepted: a difference of 0.0001 to 100 points" in err
    with pytest.raises(ValueError, match=r"detect is .*; accepted: a difference of 1e-06 to 1, or"):
        compare.compare(*folders, detect=2 * float(points))


def test_points_of_either_sign_are_detected_alike(folders, capsys):
    assert run(capsys, *folders, "--detect", "5") == run(capsys, *folders, "--detect", "-5")


@pytest.mark.parametrize("empty", [("", "b"), ("a", "")])
def test_a_path_of_no_characters_is_no_folder(capsys, empty):
    code, _, err = run(capsys, *empty)
    assert (code, f"{'ab'[empty.index('')]} is ''; accepted" in err) == (2, True)


def test_rounding_is_no_difference_to_detect(tmp_path):
    # 0.1 + 0.2 against 0.3.
    pairs = {"a": [0.1 + 0.2, 0.5, 0.7], "b": [0.3, 0.5, 0.7]}
    a, b = (log(tmp_path / name, "x.jsonl", samples(scores)) for name, scores in pairs.items())
    (row,) = compare.compare(a, b).to_dict("records")
    assert 0 < abs(row["difference"]) < 1e-15
    assert pd.isna(row["prompts_needed"])


def test_a_task_that_one_lacks(folders, capsys):
    (folders[1] / "vt-8192.jsonl").unlink()
    for pair in (folders, folders[::-1]):
        code, _, err = run(capsys, *pair)
        assert (code, f"{folders[1]} has no samples of vt at 8,192 tokens" in err) == (2, True)


def test_one_prompt_has_no_interval(tmp_path, capsys):
    folders = [log(tmp_path / name, "vt.jsonl", samples([1])) for name in "ab"]
    code, _, err = run(capsys, *folders)
    assert (code, "has 1 prompt of vt at 4,096 tokens; accepted: at least 2" in err) == (2, True)


def test_runs_that_one_lacks(tmp_path, capsys):
    options = {"task": "gpqa", "length": None}
    for name, runs in (("a", 4), ("b", 1)):
        made = [line for r in range(runs) for line in samples([1, 0, 1], run=r + 1, **options)]
        log(tmp_path / name, "gpqa.jsonl", made)
    code, _, err = run(capsys, tmp_path / "a", tmp_path / "b")
    assert (code, "has 4 of gpqa and" in err) == (2, True)


def test_samples_survive_the_disk(tmp_path):
    made = samples([1, 0.25], task="niah")
    write_samples(tmp_path / "x.jsonl", made)
    assert read_samples(tmp_path) == read_samples(tmp_path / "x.jsonl") == made
    with pytest.raises(TypeError):
        write_samples(tmp_path / "y.jsonl", [*made, sample(0, object())])
    assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]
