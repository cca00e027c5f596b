"""`dataset.stop` and the reasons why answers ended, in a run: records, summary, table, problems, and the same from Python."""

from __future__ import annotations

import json

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import dflash_mcmc
from dflash_mcmc.config.identity import identity_hash, identity_of
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.grading.verdicts import NOT_DRAWN, TOO_LONG
from dflash_mcmc.report.table import overall
from dflash_mcmc.store import finishes
from dflash_mcmc.store.described import PROBLEMS, add_problems, read_problems
from dflash_mcmc.store.reading import read_records

STOP = ["er:", "="]
RUN = ("sampler=temperature", "dataset.max_new_tokens=6", f"dataset.stop={STOP}", "tracker=none")


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    return dflash_mcmc.run(*RUN, "dataset.limit=6", f"paths.outputs={tmp_path_factory.mktemp('outputs')}")


def test_records_say_why_answers_ended(done):
    records = read_records(done.folder)
    reasons = [record["finish_reason"] for record in records]
    assert set(reasons) == {finishes.STOP_STRING, finishes.LENGTH}
    tokenizer = AutoTokenizer.from_pretrained(dflash_mcmc.component("model", "tiny").path)
    for record in records:
        whole, found = tokenizer.decode(record["tokens"]), record["finish_reason"] == finishes.STOP_STRING
        assert record["ended"] == found == any(string in whole for string in STOP)
        assert not any(string in record["text"] for string in STOP)
        assert whole.startswith(record["text"])
        assert (record["num_tokens"] == 6) >= (not found)
    assert done.summary["finish_reason/length"] == reasons.count("length") > 0
    assert sum(done.summary[f"finish_reason/{reason}"] for reason in finishes.REASONS) == len(records)
    line, = (line for line in overall([done.folder]).splitlines() if "cut off" in line)
    assert line.endswith(f": {reasons.count('length')} of 6 answers were cut off at dataset.max_new_tokens=6; "
                         f"{reasons.count('stop_string')} of 6 ended with a string of dataset.stop.")


def test_python_draws_the_tokens_of_the_command_line(done):
    folder = dflash_mcmc.component("model", "tiny").path
    loaded = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    questions = {name: problem["question"] for name, problem in read_problems(done.folder).items()}
    samples = dflash_mcmc.sample(*loaded, questions, sampler="temperature", max_new_tokens=6, stop=STOP, progress=False)
    assert len(samples) == 6
    for record, sample in zip(sorted(read_records(done.folder), key=lambda each: each["problem"]), samples, strict=True):
        for name in ("text", "tokens", "finish_reason"):
            assert getattr(sample, name) == record[name]


def test_problems_are_written_once_and_completed_by_the_next_start(tmp_path):
    run = (*RUN, f"paths.outputs={tmp_path}")
    folder = dflash_mcmc.run(*run, "dataset.limit=2").folder
    first = (folder / PROBLEMS).read_text()
    problem = json.loads(first.splitlines()[0])
    assert list(problem) == ["id", "question", "gold", "prompt", "checksum"]
    assert problem["question"] in problem["prompt"]
    assert problem["prompt"].endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    dflash_mcmc.run(*run, "dataset.limit=3")
    assert (folder / PROBLEMS).read_text().startswith(first)
    (folder / PROBLEMS).unlink()
    dflash_mcmc.run(*run, "dataset.limit=4")
    assert list(read_problems(folder)) == [record["problem"] for record in read_records(folder)]


def test_problems_of_other_processes_are_kept(tmp_path):
    made = [{"id": str(number), "question": "q", "gold": "1", "prompt": "q"} for number in range(3)]
    for asked in (made[:2], made[1:]):
        add_problems(tmp_path, lambda known, asked=asked: [problem for problem in asked if problem["id"] not in known])
    assert list(read_problems(tmp_path)) == ["0", "1", "2"]
    add_problems(tmp_path, lambda known: [] if len(known) == 3 else pytest.fail("a known problem was asked for"))
    (tmp_path / PROBLEMS).write_text("{\n")
    with pytest.raises(dflash_mcmc.errors.UserError, match=r"problems\.jsonl: line 1: JSON: .*; delete the file"):
        read_problems(tmp_path)


def test_reasons_of_older_records_are_derived():
    older = [({"verdict": "correct", "ended": True}, "stop_id"), ({"verdict": "wrong", "ended": False}, "length"),
             ({"verdict": NOT_DRAWN, "ended": False}, "not_drawn"), ({"verdict": TOO_LONG, "ended": False}, "too_long"),
             ({"verdict": "wrong", "ended": True, "finish_reason": "stop_string"}, "stop_string")]
    assert [finishes.of_record(record) for record, _ in older] == [reason for _, reason in older]
    assert finishes.remark({}, 64) == ""
    assert finishes.remark({"finish_reason/stop_id": 2, "finish_reason/length": 24}, 64) == (
        "24 of 26 answers were cut off at dataset.max_new_tokens=64")


def test_stops_are_identity_only_where_there_are_some(make_config):
    without, some = make_config(), make_config("dataset.stop=[a]")
    assert "dataset.stop" not in identity_of(without)
    assert identity_of(some)["dataset.stop"] == ["a"]
    assert identity_hash(some) != identity_hash(without)


@pytest.mark.parametrize(("overrides", "said"), [
    (["dataset.stop=['']"], "dataset.stop: given ''; allowed: texts of at least one character"),
    ([f"dataset.stop=[{'a' * 129}]"], "dataset.stop: given 'a text of 129 characters'; allowed: at most"),
    (["dataset.stop=[a]", "probe=difficulty", "draft=tiny"], "dataset.stop: given ['a']; allowed: [] with probe=difficulty"),
], ids=str)
def test_what_cannot_stop_is_refused(make_config, overrides, said):
    with pytest.raises(ConfigError) as caught:
        make_config(*overrides)
    assert str(caught.value).startswith(said)


def test_a_backslash_and_an_n_are_no_line_feed(make_config, capsys):
    make_config(r"dataset.stop=['\nQuestion:','\nabla']")
    said = capsys.readouterr().err
    assert said.count("has a backslash and an n") == 1
    assert make_config('dataset.stop=["\nQuestion:"]').dataset.stop == ["\nQuestion:"]
    assert not capsys.readouterr().err
