"""`grader=math`: the last balanced box, verdicts apart, and nothing that hangs or kills."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dflash_mcmc.errors import UserError
from dflash_mcmc.grader.math import equivalent, extract_answer


@pytest.mark.parametrize(("text", "answer"), [
    (r"so \boxed{42}.", "42"),
    (r"\boxed{1} then \boxed{2}", "2"),
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\fbox{7}", "7"),
    (r"\boxed {7}", "7"),
    (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    (r"\boxed{5} and \boxed{6", "5"),
    (r"<think>\boxed{1}</think> \boxed{2}", "2"),
    (r"<think>\boxed{1}</think> nothing", None),
    (r"<think>\boxed{1}", None),
    ("no box", None),
    (r"\boxed{unclosed", None),
    (r"\boxed 5", None),
    ("", None),
    (r"\boxed{}", ""),
    (r"\boxed{" * 3000, None),
])
def test_extraction(text, answer):
    assert extract_answer(text) == answer


@pytest.fixture
def pool(make_config):
    started = make_config("grader.timeout_seconds=8").grader.start()
    yield started
    started.close()


def grades(pool, pairs) -> list:
    for tag, (text, gold) in enumerate(pairs):
        pool.submit(tag, text, gold)
    found = dict(pool.finished(wait=True))
    return [found[tag] for tag in range(len(pairs))]


def test_verdicts(pool):
    found = grades(pool, [(r"\boxed{042}", "42"), (r"\boxed{41}", "42"), ("none", "42"), (r"\boxed{\frac{2}{4}}", r"\frac12"),
                          (r"\boxed{0.5}", r"\frac{1}{2}"), (r"\boxed{\text{circle}}", r"\text{line}"), (r"\boxed{}", "3"),
                          (r"\boxed{(3, \frac{\pi}{2})}", r"\left( 3, \frac{\pi}{2} \right)"), (r"\boxed{[0,1)}", "[0,1]")])
    assert [g.verdict for g in found] == ["correct", "wrong", "unparsed", "correct", "correct", "wrong", "wrong", "correct",
                                         "wrong"]
    assert found[2].reason == "no_box"
    assert found[0].answer == "042"


HOSTILE = [r"9^{9^{9^{9}}}", "9**9**9**9", "99999999!", "1e999999999", "1.5E+99999999", "7" * 5000, "(" * 2000 + ")" * 2000,
           "__import__('os').system('touch hostile')", "\x00", "\ud800", r"1 - \frac{1}{(1+\omega)^{1997}}", "{" * 300]


def test_hostile_answers_are_graded_and_the_pool_goes_on(make_config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pool = make_config("grader.timeout_seconds=2").grader.start()
    try:
        hostile = [(rf"\boxed{{{text}}}", r"\frac{1}{3}") for text in HOSTILE]
        found = grades(pool, [*hostile, (r"\boxed{\frac{2}{6}}", r"\frac13")])
    finally:
        pool.close()
    assert [g.verdict for g in found[:-1]].count("correct") == 0
    assert found[-1].verdict == "correct"
    assert not (tmp_path / "hostile").exists()
    assert not [child for child in multiprocessing.active_children() if "pebble" in child.name.lower()]


def test_workers_that_cannot_run_decide_nothing(make_config):
    """They would otherwise mark right answers wrong, for good."""
    pool = make_config("grader.memory_gib=1").grader.start()
    pool._settings.memory_gib = 0.05
    try:
        with pytest.raises(UserError, match="grading processes cannot run"):
            pool.submit(0, r"\boxed{\frac{2}{6}}", r"\frac13")
    finally:
        pool.close()


def test_a_busy_worker_ends_with_a_killed_run(tmp_path):
    """The answer is one long C call: neither an alarm nor a request to stop would reach it."""
    script = tmp_path / "killed.py"
    script.write_text(r"""
import os, signal, time
from dflash_mcmc.grader.math import MathGrader
if __name__ == "__main__":
    pool = MathGrader(timeout_seconds=600, memory_gib=4, num_workers=1).start()
    pool.submit(0, r"\boxed{1.5E+99999999}", r"\frac13")
    time.sleep(1)
    print(*[p for p in os.listdir("/proc") if p.isdigit() and f"\nPPid:\t{os.getpid()}\n" in open(f"/proc/{p}/status").read()],
          flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
""")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    workers = done.stdout.split()
    assert workers, done.stderr
    deadline = time.monotonic() + 20
    while any(alive(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(alive(pid) for pid in workers)


def alive(pid: str) -> bool:
    try:
        return "\nState:\tZ" not in (Path("/proc") / pid / "status").read_text()
    except OSError:
        return False


def test_an_answer_that_is_not_judged_in_time_is_wrong_with_the_reason(make_config):
    pool = make_config("grader.timeout_seconds=1").grader.start()
    try:
        (grade,) = grades(pool, [(r"\boxed{1.5E+99999999}", r"\frac13")])
    finally:
        pool.close()
    assert (grade.verdict, grade.reason) == ("wrong", "timeout")


def test_real_gold_answers_equal_themselves(shared_data):
    """All 500 through math-verify itself, with none of the shortcuts."""
    rows = [json.loads(line) for line in (shared_data / "math500/test.jsonl").read_text().splitlines()]
    rejected = [row["answer"] for row in rows if not equivalent(row["answer"], row["answer"])]
    assert rejected == []


def test_real_solutions_hold_their_gold_answer(shared_data):
    rows = [json.loads(line) for line in (shared_data / "math500/test.jsonl").read_text().splitlines()]
    boxed = [extract_answer(row["solution"]) for row in rows]
    different = [(row["answer"], answer) for row, answer in zip(rows, boxed, strict=True)
                 if answer is None or not (answer == row["answer"] or equivalent(row["answer"], answer))]
    assert different == []
