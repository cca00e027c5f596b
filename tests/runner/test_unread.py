"""The line after a run with more than half of its answers unread: its likely cause, and the command that helps."""

import re
import shlex

import pytest

from dflash_mcmc import regrade
from dflash_mcmc.runner import tasks
from dflash_mcmc.store.records import read_records
from tests.runs import execute


def record(rule: str = "no_box", verdict: str = "no_answer", reason: str = "stop_id") -> dict:
    return {"verdict": verdict, "rule": rule, "finish_reason": reason, "ended": reason != "length"}


READ = record("integer", "wrong")


@pytest.mark.parametrize(("records", "said"), [
    ([record(), record(), READ], "2 of 3 answers were not read, since they have no box: python -m dflash_mcmc.regrade a/run "
                                 "grader=math grader.extract=auto"),
    ([record(reason="length"), record(reason="length"), record()],
     "3 of 3 answers were not read, since they were cut off at dataset.max_new_tokens=32: repeat the command with "
     "dataset.max_new_tokens=128"),
    ([record("unfinished_thinking", reason="length")],
     "1 of 1 answers were not read, since their thinking did not end: repeat the command with dataset.max_new_tokens=128, or "
     "with model.enable_thinking=false"),
    ([record("unfinished_thinking", reason="stop_string")],
     "1 of 1 answers were not read, since their thinking ended at a string of dataset.stop: repeat the command with "
     "dataset.stop=[]"),
    ([record("nothing_extracted")], "1 of 1 answers were not read, since grader=math finds none in their texts "
                                    "(nothing_extracted): read some in a/run/records.jsonl"),
    ([record("integer", "wrong", "length"), record("integer", "correct", "length"), READ],
     "2 of 3 answers were cut off at dataset.max_new_tokens=32: repeat the command with dataset.max_new_tokens=128"),
    ([record(), READ], ""), ([record(verdict="not_drawn")], ""), ([], ""),
], ids=["no box", "cut off", "thinking", "stop string", "other", "read but cut off", "half", "not drawn", "nothing"])
def test_the_line_has_the_cause_and_the_command(make_config, tmp_path, records, said):
    config = make_config("dataset.max_new_tokens=32")
    assert tasks.unread(config, records, type(tmp_path)("a/run")) == said


@pytest.mark.slow
def test_the_command_of_the_line_reads_the_answers(make_config, tmp_path, capsys, monkeypatch):
    """Answers that stop before their box are read by what the line says."""
    monkeypatch.chdir(tmp_path)
    done = execute(make_config("condition=greedy", "dataset.ids=[arith-001,arith-002,arith-003]",
                               'dataset.stop=[" The answer"," Answer"]', "dataset.max_new_tokens=64"))
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "3 of 3 answers were not read" in line]
    with pytest.raises(SystemExit, match="0"):
        regrade.main(shlex.split(re.search(r"python -m dflash_mcmc\.regrade (.*)", line)[1]))
    verdicts = {folder == done.folder: {record["verdict"] for record in read_records(folder)}
                for folder in done.folder.parent.iterdir()}
    assert verdicts == {True: {"no_answer"}, False: {"correct"}}
