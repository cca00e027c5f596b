"""`python -m dflash_mcmc.compare`: real logs of other tools, and its numbers by hand.

`logs/` has what Inspect 0.3.285 and lm-evaluation-harness 0.4.13 wrote: six problems twice, with a solver that answers at
random (the events of the .json are left out), the same once under two scorers, and the model `dummy` on twelve documents under
two filters.
"""

import csv
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import dflash_mcmc
from dflash_mcmc.report.comparison import COLUMNS, Log, compared, read, read_all
from tests.refusals import refused

LOGS = Path(__file__).parent / "logs"


def lines(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_logs_of_inspect_have_the_accuracy_that_inspect_reports():
    own = json.loads((LOGS / "inspect.json").read_text())["results"]["scores"][0]["metrics"]["accuracy"]["value"]
    log = read(LOGS / "inspect.json")
    assert [len(scores) for scores in log.scores.values()] == [2] * 6
    assert np.mean(list(log.scores.values())) == pytest.approx(own)
    assert list(read(LOGS / "inspect.eval").scores) == [f"q{number}" for number in range(6)]
    assert read(LOGS / "two_scorers.eval", "includes").scores.keys() == log.scores.keys()
    with refused("two_scorers.eval: match, includes", start="--score: not given; allowed for"):
        read(LOGS / "two_scorers.eval")


def test_logs_of_lm_eval_have_a_score_for_each_filter():
    log = read(LOGS / "samples_sums.jsonl", "flexible")
    assert log.scores == read(LOGS / "samples_sums.jsonl", "strict-match/exact_match").scores  # dummy says lol under both
    assert log.scores == {str(number): [float(number % 3 > 0)] for number in range(12)}
    with refused("strict-match/exact_match, flexible/exact_match"):
        read(LOGS / "samples_sums.jsonl", "exact_match")


def test_a_score_is_named_for_the_logs_that_have_several(tmp_path):
    logs = [str(LOGS / name) for name in ("inspect.eval", "samples_sums.jsonl")]
    assert [log.score for log in read_all(logs, "strict-match/exact_match")] == ["match", "strict-match/exact_match"]
    with refused("--score: given 'strict'; allowed: match"):
        read_all(logs[:1], "strict")


def test_csv_and_json_lines_have_words_numbers_and_chains(tmp_path):
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("question_id", "correct", "note"), ("p1", "True", "x"), ("p1", "false", "y" * 200_000),
                                    ("p2", "C", "")])
    assert read(tmp_path / "a.csv").scores == {"p1": [1.0, 0.0], "p2": [1.0]}
    path = lines(tmp_path / "b.jsonl", {"id": 7, "score": 0.25, "epoch": 2}, {"id": 7, "score": None, "epoch": 3},
                 {"id": 8, "score": 1})
    assert read(path) == Log("b", {"7": [0.25], "8": [1.0]}, 1, "score")


@pytest.mark.parametrize(("rows", "line"), [
    ([{"id": 1, "score": "maybe"}], "score: given 'maybe'; allowed: a number, C, I, P, N, true"),
    ([{"id": 1, "score": [1]}], "given [1]; allowed: a number"),
    ([{"id": 1, "score": float("nan")}], "given nan; allowed: a number"),
    ([{"id": 1, "chain": 0, "score": 1}, {"id": 1, "chain": 0, "score": 0}], "problem 1 has sample 0 twice"),
    ([{"text": "x"}], "a line has the fields text; allowed: problem, id"),
    ([{"id": 1}], "has no sample with a score"),
    ([], "a line has the fields none"),
    (["x"], "is not a run folder, a log of Inspect"),
    ([{"doc_id": 1, "metrics": ["acc"]}], "is not a run folder, a log of Inspect"),
])
def test_what_is_no_log_is_one_line(tmp_path, rows, line):
    with refused(line):
        read(lines(tmp_path / "bad.jsonl", *rows))


def test_other_files_are_one_line(tmp_path):
    (tmp_path / "x.eval").write_bytes(b"PK nothing")
    (tmp_path / "x.json").write_text('{"a": ' * 100_000)
    (tmp_path / "y.json").write_bytes(b"\xff\xfe")
    for name in ("x.eval", "x.json", "y.json"):
        with refused("is not a run folder, a log of Inspect (.eval, .json)"):
            read(tmp_path / name)
    with refused("none.csv: cannot be read"):
        read(tmp_path / "none.csv")


def test_edges():
    same = Log("same", {"a": [1.0], "b": [1.0]})
    _, row = compared([same, same._replace(name="again")]).table.rows
    assert (row["difference"], row["p_value"], row["verdict"], row["problems_needed"]) == (0.0, 1.0, "not resolved", None)
    found = compared([Log("one", {"a": [0.0]}), Log("other", {"a": [1.0], "b": [1.0]}, unscored=2)])
    row = found.table.rows[1]
    assert (row["common"], row["won"], row["lost"], row["p_value"], row["p_holm"]) == (1, 1, 0, 1.0, 1.0)
    assert row["difference_low"] == -1.0
    assert found.notes == ["other: 2 samples without a score are left out",
                           "other: 1 problems are left out, because only one of it and one has them"]
    found = compared([Log("words", {"a": [3.0], "b": [-1.0]}), Log("more", {"a": [3.0], "b": [1.0]})])
    assert tuple(row[key] for row, key in zip(found.table.rows, ("accuracy", "difference"), strict=True)) == (0.5, 0.25)
    assert found.notes == ["scores reach from -1 to 3, and are shown as shares of this range"]
    with refused(start="other: has no problem in common with same: 'c', ... and 'a', ...;"):
        compared([same, Log("other", {"c": [1.0]})])
    with refused(start="compare: given 1 log"):
        compared([same])


def test_the_command_mixes_logs_without_torch_and_writes_a_page(tmp_path):
    mine = lines(tmp_path / "mine.jsonl", *({"problem": f"q{number}", "score": 0} for number in range(6)))
    names = [f"two={LOGS / 'inspect.eval'}", str(LOGS / "inspect.json"), str(mine)]
    program = (f"import sys; sys.argv = ['compare', *{names!r}, '--out', {str(tmp_path / 'out')!r}]; import runpy\n"
               "try: runpy.run_module('dflash_mcmc.compare', run_name='__main__')\n"
               "finally: print('torch' in sys.modules, 'transformers' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path)
    table, page, loaded = done.stdout.strip().rsplit("\n", 2)
    assert loaded == "False False"
    assert "| mine " in table
    assert page == f"{tmp_path / 'out'}/report.html"
    rows = list(csv.DictReader((tmp_path / "out" / "tables" / "comparison.csv").open()))
    assert [row["run"] for row in rows] == ["two", "inspect", "mine"]
    with refused("inspect.json: has the name 'inspect' of another log; allowed: NAME="):
        dflash_mcmc.compare(names[1], names[1])
    assert float(rows[2]["accuracy"]) == 0.0
    assert 'aria-label="Differences to two with 95 % intervals."' in Path(page).read_text()
    assert {path.name for path in (tmp_path / "out" / "figures").iterdir()} == {
        f"fig_differences.{form}" for form in ("png", "svg", "pdf")}
    table = dflash_mcmc.compare(*names)
    assert list(table.columns) == list(COLUMNS)
    assert table["difference"][2] == float(rows[2]["difference"]) < 0
