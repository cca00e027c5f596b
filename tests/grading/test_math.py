"""`grader=math`: the verdicts, slow or broken workers, and processes that end with the run."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_mcmc.config.identity import identity_of
from dflash_mcmc.errors import UserError
from dflash_mcmc.grading import VERSION
from dflash_mcmc.types import Grade
from tests.processes import wait_until


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
                          (r"\boxed{(3, \frac{\pi}{2})}", r"\left( 3, \frac{\pi}{2} \right)"), (r"\boxed{[0,1)}", "[0,1]"),
                          (r"<think>\boxed{42}", "42"), (r"\boxed{\sum_{n=1}^5 n}", "15"),
                          (rf"\boxed{{{'1+' * 250}1}}", "251")])
    assert [g.verdict for g in found] == ["correct", "wrong", "no_answer", "correct", "correct", "wrong", "wrong", "correct",
                                         "wrong", "no_answer", "unsupported", "unsupported"]
    assert [g.rule for g in found] == ["integer", "integer", "no_box", "number", "string", "text", "empty", "tuple",
                                      "interval", "unfinished_thinking", "sum", "length"]
    assert all(grade.grade_seconds is not None and grade.grade_seconds >= 0 for grade in found)
    found = [grade._replace(grade_seconds=None) for grade in found]
    assert found[0] == Grade("correct", "042", "integer", same_string=True)
    assert found[3] == Grade("correct", r"\frac{2}{4}", "number", same_string=False)  # it is not reduced


def test_a_too_slow_answer_is_a_timeout_and_the_pool_continues(make_config):
    """The limit is on processor time, because wall-clock time depends on the load of the machine."""
    slow = r"\boxed{(1+x+y+xy)^{40}(1+z)^{40}(1+u+v+uv)^{30}}"
    pool = make_config("grader.timeout_seconds=0.3").grader.start()
    try:
        late, good = grades(pool, [(slow, "(1+x)^{40}(1+y)^{40}(1+z)^{40}(1+u)^{30}(1+v)^{30}"),
                                   (r"\boxed{2/6}", r"\frac13")])
    finally:
        pool.close()
    assert (late.verdict, late.rule) == ("timeout", "timeout")
    assert good.verdict == "correct"


def test_workers_that_cannot_run_decide_nothing(make_config):
    """Otherwise, correct answers would be recorded as wrong."""
    before = set(multiprocessing.active_children())
    pool = make_config("grader.memory_gib=1").grader.start()
    pool._memory = 0.05
    try:
        with pytest.raises(UserError, match="grading processes cannot run"):
            grades(pool, [(r"\boxed{\frac{2}{6}}", r"\frac13")])
    finally:
        pool.close()
    assert set(multiprocessing.active_children()) <= before


def test_a_busy_worker_ends_with_a_killed_run(tmp_path):
    """The worker is in one long C call, in which it handles neither an alarm nor a request to stop."""
    script = tmp_path / "killed.py"
    script.write_text(r"""
import os, signal, time
from dflash_mcmc.grading.math.pool import MathPool
if __name__ == "__main__":
    pool = MathPool(600, 4, 1)
    pool.submit(0, r"\boxed{2/4}", r"\frac12")
    assert [grade.verdict for _, grade in pool.finished(wait=True)] == ["correct"]
    pool._workers.threads.submit(pool._workers.call, pow, (3, 10**9), 600)
    time.sleep(0.5)
    print(*[p for p in os.listdir("/proc") if p.isdigit() and f"\nPPid:\t{os.getpid()}\n" in open(f"/proc/{p}/status").read()],
          flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
""")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    workers = done.stdout.split()
    assert workers, done.stderr
    wait_until(lambda: not any(alive(pid) for pid in workers))


def alive(pid: str) -> bool:
    try:
        return "\nState:\tZ" not in (Path("/proc") / pid / "status").read_text()
    except OSError:
        return False


def test_the_rules_are_part_of_the_identity(make_config):
    assert identity_of(make_config())["grader.version"] == VERSION
