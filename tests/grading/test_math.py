"""The pool: it grades hostile answers in bounded time and memory, without side effects, in parallel with the run."""

import multiprocessing
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from dflash_mcmc.errors import UserError
from dflash_mcmc.grading.math import pool as math_pools
from dflash_mcmc.grading.math.pool import MathPool
from dflash_mcmc.grading.verdicts import GIVEN, Decision
from dflash_mcmc.types import Grade
from tests.grading import golds
from tests.grading.hostile import ANSWERS
from tests.processes import wait_until

GOLDS = (r"\frac{7}{13}", r"\sqrt{7919}+q", "(8,9)", r"\text{southwest}", r"\begin{pmatrix}7\\8\end{pmatrix}", "52_7")


def graded(pool: MathPool, pairs: list[tuple[str, str]]) -> list:
    for tag, (gold, answer) in enumerate(pairs):
        pool.submit_answer(tag, answer, gold)
    found = dict(pool.finished(wait=True))
    return [found[tag] for tag in range(len(pairs))]


@pytest.fixture
def start():
    """Starts a pool of the test's own: start(timeout, GiB). It is closed at the end of the test."""
    pools = []

    def started(timeout_seconds: float, memory_gib: float, **options) -> MathPool:
        pools.append(MathPool(timeout_seconds, memory_gib, **{"num_workers": 1, **options}))
        return pools[-1]

    yield started
    for pool in pools:
        pool.close()


def test_verdicts(math_pool):
    pairs = [(r"\boxed{042}", "42"), (r"\boxed{41}", "42"), ("none", "42"), (r"\boxed{\frac{2}{4}}", r"\frac12"),
                          (r"\boxed{0.5}", r"\frac{1}{2}"), (r"\boxed{\text{circle}}", r"\text{line}"), (r"\boxed{}", "3"),
                          (r"\boxed{(3, \frac{\pi}{2})}", r"\left( 3, \frac{\pi}{2} \right)"), (r"\boxed{[0,1)}", "[0,1]"),
                          (r"<think>\boxed{42}", "42"), (r"\boxed{\sum_{n=1}^5 n}", "15"),
                          (rf"\boxed{{{'1+' * 250}1}}", "251")]
    found = golds.graded(math_pool, pairs)
    assert [g.verdict for g in found] == ["correct", "wrong", "no_answer", "correct", "correct", "wrong", "wrong", "correct",
                                         "wrong", "no_answer", "unsupported", "unsupported"]
    assert [g.rule for g in found] == ["integer", "integer", "no_box", "number", "string", "text", "empty", "tuple",
                                      "interval", "unfinished_thinking", "sum", "length"]
    assert all(grade.grade_seconds is not None and grade.grade_seconds >= 0 for grade in found)
    found = [grade._replace(grade_seconds=None) for grade in found]
    assert found[0] == Grade("correct", "042", "integer", same_string=True)
    assert found[3] == Grade("correct", r"\frac{2}{4}", "number", same_string=False)  # it is not reduced


def test_hostile_answers_are_graded_in_bounded_time_without_side_effects(math_pool, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pool = math_pool
    graded(pool, [("1", "1")])
    before = psutil.Process().memory_info().rss
    for text in ANSWERS:
        for gold in GOLDS[:1] if len(text) > 1000 else GOLDS:
            started = time.process_time()
            pool.submit((text, gold), rf"so \boxed{{{text}}}", gold)
            assert time.process_time() - started < 2  # submitting does not block
    started = seconds_of_workers()
    found = dict(pool.finished(wait=True))
    assert seconds_of_workers() - started < 0.1 * len(found)
    assert {text for text, _ in found} == set(ANSWERS)
    assert {tag: grade for tag, grade in found.items() if grade.verdict == "correct"} == {}
    assert {grade.verdict for grade in found.values()} <= set(GIVEN)
    assert psutil.Process().memory_info().rss - before < 200 << 20
    assert list(tmp_path.iterdir()) == []
    assert graded(pool, [(r"\frac13", r"\frac{2}{6}")])[0].verdict == "correct"


def test_a_real_answer_that_hangs_the_library_is_decided_as_wrong(math_pool):
    found = graded(math_pool, [(gold, r"1 - \frac{1}{(1+\omega)^{1997}}") for gold in ("1", "0", r"\frac{1}{3}")])
    assert {(grade.verdict, grade.rule) for grade in found} == {("wrong", "algebra")}


def test_a_worker_has_its_own_session_no_network_no_environment_and_limited_memory(math_pool):
    graded(math_pool, [("1", "1")])
    session, left, interfaces = in_worker(math_pool, surroundings)
    assert session != os.getsid(0)
    assert left == {}
    if os.geteuid() == 0:  # other users may not be allowed to create a namespace
        assert [name for _, name in interfaces] == ["lo"]
    with pytest.raises(MemoryError):
        in_worker(math_pool, bytearray, 5 << 30)


def in_worker(pool: MathPool, function, *arguments):
    """The result of a function in a worker of a pool."""
    return pool._threads.submit(pool._call, 60, function, *arguments).result()


def surroundings() -> tuple:
    """Session id, environment and network interfaces of the current process."""
    return os.getsid(0), dict(os.environ), socket.if_nameindex()


@pytest.fixture
def light_workers(monkeypatch):
    """Makes workers load no library, so that they start quickly."""
    monkeypatch.setattr(math_pools, "begin", nothing)
    monkeypatch.setattr(math_pools, "self_test", nothing)


def nothing(*ignored: object) -> None:
    """Replaces the start and the self-test of a worker."""


@pytest.mark.slow
@pytest.mark.usefixtures("light_workers")
def test_an_answer_that_takes_all_memory_is_an_error_and_the_pool_continues(start):
    first, second = graded(start(20, 2, judge=takes_all_memory), [("1", "everything"), ("1", "1")])
    assert (first.verdict, first.rule) == ("error", "memory")
    assert second.verdict == "correct"


def takes_all_memory(gold: str, answer: str, question: str, cpu_seconds: float):
    """A judge that allocates too much memory for one of the answers, as an algebra library may."""
    rule = (lambda *pair: bytearray(1 << 50)) if answer == "everything" else (lambda *pair: Decision("correct", "x"))
    return math_pools.within(cpu_seconds, rule, gold, answer), False


@pytest.mark.slow
@pytest.mark.usefixtures("light_workers")
def test_a_worker_that_dies_is_replaced_and_the_answer_tried_again(start, tmp_path):
    pool = start(300, 4, judge=dies_once)
    (tried,) = graded(pool, [("1", str(tmp_path / "died"))])
    (lost,) = graded(pool, [("1", "always")])
    assert tried.verdict == "correct"
    assert (lost.verdict, lost.rule) == ("ungradable", "process")
    assert lost.reason == "the grading process died 3 times, at last by SIGKILL"


@pytest.mark.slow
@pytest.mark.usefixtures("light_workers")
def test_a_worker_that_is_killed_from_outside_while_it_waits_is_replaced(start):
    pool = start(300, 4, num_workers=2, judge=says_correct)
    for number in range(4):
        assert [grade.verdict for grade in graded(pool, [("1", "1")] * 4)] == ["correct"] * 4
        for process in pool._workers[:1 + number % 2]:
            os.kill(process.process.pid, 9)


def says_correct(gold: str, answer: str, question: str, cpu_seconds: float):
    """A judge without a library."""
    return Decision("correct", "x"), False


def dies_once(gold: str, answer: str, question: str, cpu_seconds: float):
    """A judge whose process is killed: every time for `always`, otherwise only once, noted in the file named `answer`."""
    if answer == "always" or not os.path.exists(answer):
        if answer != "always":
            open(answer, "w").close()
        os.kill(os.getpid(), 9)
    return Decision("correct", "x"), False


def test_an_exception_of_the_library_gives_the_verdict_error():
    decision = math_pools.within(1.0, lambda *pair: 1 // 0, "1", "1")
    assert (decision.verdict, decision.rule, decision.reason) == ("error", "exception", "ZeroDivisionError")


@pytest.mark.slow
def test_the_start_does_not_block_and_a_failed_self_test_decides_nothing(start):
    before = set(multiprocessing.active_children())
    pool = start(4, 4)
    pool.submit(0, r"\boxed{2/4}", r"\frac12")
    assert list(pool.finished()) == []
    assert len(list(pool.finished(wait=True))) == 1
    pool._tested = pool._threads.submit(lambda: ["1/2 = 2/4"])  # of an incompatible version of a library
    pool.submit(1, r"\boxed{2/4}", r"\frac12")
    with pytest.raises(UserError, match="their self-test reports 1/2 = 2/4"):
        list(pool.finished(wait=True))
    assert list(pool.finished()) == list(pool.finished(wait=True)) == []  # the error is raised once
    pool.close()
    assert set(multiprocessing.active_children()) <= before


def test_the_self_test_finds_a_broken_rule(monkeypatch):
    assert math_pools.self_test() == []
    monkeypatch.setattr("dflash_mcmc.grading.math.algebra.agree", lambda a, b: True)
    assert r"\sqrt{x^2} != x" in math_pools.self_test()
    monkeypatch.setattr("math_verify.verify", lambda *sides, **settings: False)
    assert "(a+5)(b+2) = ab+2a+5b+10" in math_pools.self_test()


def seconds_of_workers() -> float:
    """Processor time of all child processes of this process, including those that have ended."""
    ended = os.times()
    alive = sum(sum(child.cpu_times()[:2]) for child in psutil.Process().children(recursive=True))
    return ended.children_user + ended.children_system + alive


def test_a_too_slow_answer_is_a_timeout_and_the_pool_continues(start):
    """The limit is on processor time, because wall-clock time depends on the load of the machine."""
    slow = "(1+x+y+xy)^{40}(1+z)^{40}(1+u+v+uv)^{30}"
    late, good = graded(start(0.3, 4), [("(1+x)^{40}(1+y)^{40}(1+z)^{40}(1+u)^{30}(1+v)^{30}", slow), (r"\frac13", "2/6")])
    assert (late.verdict, late.rule) == ("timeout", "timeout")
    assert good.verdict == "correct"


@pytest.mark.slow
def test_workers_that_cannot_run_decide_nothing(start):
    """Otherwise, correct answers would be recorded as wrong."""
    before = set(multiprocessing.active_children())
    pool = start(8, 0.05)
    with pytest.raises(UserError, match="grading processes cannot run"):
        graded(pool, [(r"\frac13", r"\frac{2}{6}")])
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
    pool._threads.submit(pool._call, 600, pow, 3, 10**9)
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
