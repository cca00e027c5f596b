"""`grader=code`: programs for HumanEval pass or fail, and leave nothing behind on the machine."""

import contextlib
import json
import re
import time

import psutil
import pytest

from dflash_mcmc.errors import UserError
from dflash_mcmc.grading import VERSION, code as programs
from dflash_mcmc.grading.code import ProgramPool
from dflash_mcmc.grading.code.programs import CodeTask
from dflash_mcmc.grading.code.sandbox import WALLS, Ended, Sandbox
from dflash_mcmc.grading.verdicts import VERDICTS
from dflash_mcmc.store.records import read_records
from tests.grading.golds import gold_of, graded
from tests.runs import execute

ADD = CodeTask('def add(a, b):\n    """Their sum."""\n', "def check(candidate):\n    assert candidate(1, 2) == 3\n", "add")
PREPARED = ("grader=code", "grader.allow_execution=true", "grader.walls=available")


@pytest.fixture(scope="module")
def pool():
    started = ProgramPool(timeout_seconds=10, memory_gib=1, num_workers=2, all_walls=False)
    grades(started, [("    return a + b\n", ADD)] * 2)  # it starts a thread with each program until it has all of them
    yield started
    started.close()


def grades(pool, submitted) -> list:
    return graded(pool, [(text, gold_of(task)) for text, task in submitted])


@pytest.mark.slow
def test_verdicts_and_rules(pool):
    found = grades(pool, [(text, ADD) for text in (
        "    return a + b\n", "return a + b", "```python\ndef add(a, b):\n    return a + b\n```", "    return a - b\n",
        "    return (\n", "```python\ndef plus(a, b):\n    return a + b\n```\n", "    raise KeyError\n", "", "<think>hm",
        "    import sys; sys.exit(0)\n", "    import os; os._exit(0)\n",
        "    import ctypes; ctypes.string_at(0)\n", "    return '" + "x" * 200_000,
        "    return a + b\n```\n" + "\n" * 1_000_000)])
    assert [(grade.verdict, grade.rule) for grade in found] == [
        ("correct", "tests"), ("correct", "tests"), ("correct", "tests"), ("wrong", "failed_test"), ("wrong", "syntax_error"),
        ("wrong", "syntax_error"), ("wrong", "raised"), ("no_answer", "empty"), ("no_answer", "unfinished_thinking"),
        ("wrong", "raised"), ("wrong", "exited"), ("error", "killed"), ("unsupported", "length"), ("unsupported", "length")]
    assert found[6].reason == "KeyError"
    assert found[11].reason == "SIGSEGV"
    assert {grade.walls for grade in found} == {pool.walls}
    assert found[3].answer.endswith("return a - b\n")


MBPP = json.dumps({"task_id": 2, "test_list": ["assert math.isclose(area(2), 4)", "assert area(1) == 1"], "text": "Area?",
                   "test_setup_code": "", "test_imports": ["import math"]})
TESTED = [
    ("```python\ndef area(a):\n    return a * a\n```", "tests"),
    ("[BEGIN]\ndef area(a):\n    return a * a\n[DONE]\nYou are", "tests"),
    ("def area(a):\n    return a + a", "failed_test"),
    ("```\ndef other(a):\n    return a * a\n```", "missing_definition")]


def test_programs_of_mbpp(pool):
    found = graded(pool, [(text, MBPP) for text, _ in TESTED])
    assert [(grade.rule, grade.verdict) for grade in found] == [
        (rule, "correct" if rule == "tests" else "wrong") for _, rule in TESTED]


def test_no_process_is_left(pool):
    forks = "    import os\n    for _ in range(20): os.fork()\n    return 3\n"
    stays = "    import os, time\n    if os.fork() == 0:\n        os.setsid()\n        time.sleep(60)\n    return a + b\n"
    assert [grade.verdict for grade in grades(pool, [(forks, ADD), (stays, ADD)])] == ["wrong", "correct"]
    if "processes" in pool.walls:
        left = []
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # it may end during the loop
                left.append(child.cmdline())
        assert not [command for command in left if any("launch.py" in part or "descriptor" in part for part in command)]


def test_a_program_cannot_use_up_the_process_limit_of_another():
    patient = ProgramPool(timeout_seconds=30, memory_gib=1, num_workers=2, all_walls=False)
    takes_all = ("    import os, time\n    try:\n        while os.fork(): pass\n    except OSError:\n        time.sleep(2)\n"
                 "        return a + b\n    time.sleep(60)\n")
    forks = "    import os, time\n    time.sleep(1)\n    if os.fork() == 0: os._exit(0)\n    return a + b\n"
    assert [grade.verdict for grade in grades(patient, [(takes_all, ADD), (forks, ADD)])] == ["correct", "correct"]
    patient.close()


def test_a_launcher_that_is_killed_from_outside_is_started_again(pool, monkeypatch):
    lost = [Ended(False, "lost", "SIGKILL")] * 5
    monkeypatch.setattr(Sandbox, "run", lambda *given: lost.pop() if lost else Ended(True, "tests"))
    first, second = (grades(pool, [("    return a + b", ADD)])[0] for _ in range(2))
    assert (first.verdict, first.rule, first.reason, second.verdict) == ("ungradable", "lost", "SIGKILL", "correct")


def test_missing_walls_are_an_error_if_they_are_required(monkeypatch, make_config):
    monkeypatch.setattr(programs, "find_sandbox", lambda: (None, ("user", "limits")))
    with pytest.raises(UserError, match="does not support the walls network, processes"):
        make_config("grader=code", "grader.allow_execution=true").grader.start()
    pool = make_config(*PREPARED).grader.start()
    assert pool.walls == ("user", "limits")
    pool.close()


def human_eval(shared_data) -> list[tuple[str, CodeTask]]:
    rows = [json.loads(line) for line in (shared_data / "humaneval/HumanEval.jsonl").read_text().splitlines()]
    return [(row["canonical_solution"], CodeTask(row["prompt"], row["test"], row["entry_point"])) for row in rows]


def mutated(body: str) -> str:
    """The body of a function, changed so that it always returns a wrong value."""
    return re.sub(r"\breturn\b[^\n]*", "return object()", body) + "    return object()\n"


def test_an_endless_program_is_out_of_time():
    hasty = ProgramPool(timeout_seconds=1, memory_gib=1, num_workers=1, all_walls=False)
    (grade,) = grades(hasty, [("    while True: pass\n", ADD)])
    assert (grade.verdict, grade.rule) == ("timeout", "timeout")
    hasty.close()


def test_closing_the_pool_ends_the_programs():
    patient = ProgramPool(timeout_seconds=600, memory_gib=1, num_workers=2, all_walls=False)
    for number, body in enumerate(("while True: pass", "import time; time.sleep(500)", "while 1: pass")):
        patient.submit(number, f"    {body}\n", gold_of(ADD))
    time.sleep(1)
    started = time.monotonic()
    patient.close()
    assert time.monotonic() - started < 20


@pytest.mark.slow
@pytest.mark.parametrize("every", [12, 1])
def test_canonical_solutions_pass_and_fail_when_mutated(shared_data, pool, every):
    chosen = human_eval(shared_data)[::every]
    found = grades(pool, [*chosen, *((mutated(solution), task) for solution, task in chosen)])
    assert len(found) == 2 * -(-164 // every)
    for verdict, mine in (("correct", found[:len(chosen)]), ("wrong", found[len(chosen):])):
        assert [(grade.verdict, task.entry_point) for grade, (_, task) in zip(mine, chosen, strict=True)
                if grade.verdict != verdict] == []


@pytest.mark.slow
def test_a_run_records_rule_walls_and_version(make_config, tmp_path):
    rows = [{"task_id": f"T/{number}", "canonical_solution": "", **ADD._asdict(), "test": test} for number, test in enumerate(
        (ADD.test, "def check(candidate):\n    assert candidate(1, 2) is None\n"))]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = make_config(*PREPARED, "dataset=humaneval", f"dataset.path={tmp_path}/rows.jsonl", "dataset.check_rows=false",
                         "dataset.prompt=plain", "model.chat=false", "dataset.max_new_tokens=4", "num_chains=3",
                         "sampler=temperature", "tracker=none", f"paths.outputs={tmp_path}")
    result = execute(config)
    records = read_records(result.folder)
    assert len(records) == result.summary["num_samples"] == 6
    for record in records:
        assert record["grader"] == f"code {VERSION}"
        assert set(record["walls"]) <= set(WALLS)
        assert record["rule"]
        assert record["same_string"] is None
    assert sum(result.summary[verdict] for verdict in VERDICTS) == 6


@pytest.mark.parametrize(("grader", "message"), [(PREPARED, "grader=code: given the gold answer"),
                                                 (("grader=choice",), "grader=choice: given the gold answer")])
def test_gold_answers_of_another_kind_are_rejected_before_loading(make_config, tmp_path, monkeypatch, grader, message):
    config = make_config(*grader, "tracker=none", f"paths.outputs={tmp_path}")
    monkeypatch.setattr(type(config.model), "load", lambda self, device: pytest.fail("a model was loaded"))
    with pytest.raises(UserError, match=message):
        execute(config)
    assert not list(tmp_path.rglob("run.json"))
