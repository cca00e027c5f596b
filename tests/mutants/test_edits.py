"""The list of wrong edits fits the source, and the command that runs it says which edits survive."""

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from tests import processes
from tests.cases import quick
from tests.mutants.__main__ import ROOT, SURVIVED, main, run_tests
from tests.mutants.edits import Edit, read


def test_every_edit_applies_and_uses_names_that_are_defined(tmp_path):
    """The old text occurs exactly once. A test would fail at a wrong name or at wrong syntax, whatever it tests."""
    edits = read()
    assert len(edits) >= 60
    texts = {file: (ROOT / file).read_text(encoding="utf-8") for file in {edit.file for edit in edits}}
    for index, edit in enumerate(edits):
        (tmp_path / f"{index}.py").write_text(edit.applied(texts[edit.file]), encoding="utf-8")
    check = [sys.executable, "-m", "ruff", "check", "--isolated", "--select=F821", "--output-format=concise", "."]
    shown = subprocess.run(check, cwd=tmp_path, capture_output=True, text=True)
    errors = [line for line in shown.stdout.splitlines() if ".py:" in line]
    assert shown.returncode == 0, [(edits[int(line.partition(".")[0])].name, line) for line in errors]


def test_every_edit_names_tests_that_exist():
    for edit in read():
        assert edit.tests, edit.name
        for test in edit.tests:
            path, _, name = test.partition("::")
            assert f"def {name.partition('[')[0]}" in (ROOT / path).read_text(encoding="utf-8"), (edit.name, test)


def test_every_area_has_edits():
    files = [edit.file for edit in read()]
    for area in ("kernel/", "sampler/", "speculative/rules.py", "engine/batching/logits_processor.py",
                 "ops.py", "rng.py", "statistics/", "store/"):
        assert any(file.startswith(f"dflash_mcmc/{area}") or file.endswith(f"/{area}") for file in files), area


def test_an_edit_that_does_not_apply_is_refused():
    edit = Edit("x", "a.py", "one", "two", ("tests/test_a.py",))
    assert edit.applied("one three") == "two three"
    for text in ("three", "one one"):
        with pytest.raises(ValueError, match=r"times in a\.py; allowed: once"):
            edit.applied(text)


SOURCE = "def largest(a, b):\n    return a if a > b else b\n\n\ndef sign(a):\n    return 1 if a >= 0 else -1\n"
TESTS = "from tiny import largest\n\n\ndef test_largest():\n    assert largest(1, 2) == 2\n"
SIGN = "from tiny import sign\n\n\ndef test_sign():\n    assert sign(3) == 1\n"
EDITS = """
[[edit]]
name = "the smallest"
file = "dflash_mcmc/tiny.py"
old = "a > b"
new = "a < b"
tests = ["tests/test_tiny.py"]

[[edit]]
name = "the other of equals"
file = "dflash_mcmc/tiny.py"
old = "a if a > b else b"
new = "a if a >= b else b"
tests = ["tests/test_tiny.py"]
harmless = "equal numbers are equal"

[[edit]]
name = "zero has no sign"
file = "dflash_mcmc/tiny.py"
old = "a >= 0"
new = "a > 0"
tests = ["tests/test_sign.py"]
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in {"dflash_mcmc/tiny.py": SOURCE, "tests/test_tiny.py": TESTS, "tests/test_sign.py": SIGN,
                       "edits/all.toml": EDITS,
                       "pyproject.toml": "[tool.pytest.ini_options]\npythonpath = ['dflash_mcmc']\n"}.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "root"


@pytest.mark.slow
def test_survivors_are_reported_until_a_test_sees_them(tree, capsys):
    """A second run takes stored outcomes, but not those of an edit whose tests have changed."""
    given = ["--edits", str(tree / "edits"), "--jobs", "2"]
    assert main(given, tree) == 1
    said = capsys.readouterr().out
    assert "3 edits: 2 survived, 1 caught (1 marked harmless)" in said
    assert "survived  zero has no sign  dflash_mcmc/tiny.py  1 passed" in said
    assert main(given, tree) == 1
    assert "caught: " not in capsys.readouterr().out
    (tree / "tests/test_sign.py").write_text(SIGN + "    assert sign(0) == 1\n")
    assert main(given, tree) == 0
    assert "3 edits: 2 caught, 1 survived (1 marked harmless)" in capsys.readouterr().out
    assert (tree / "dflash_mcmc/tiny.py").read_text() == SOURCE


@pytest.mark.slow
def test_tests_that_fail_without_an_edit_catch_nothing(tree, capsys):
    edits = tree / "edits" / "all.toml"
    edits.write_text(edits.read_text().partition("[[edit]]\nname = \"the other")[0])
    (tree / "tests/test_tiny.py").write_text(TESTS + "    assert False\n")
    assert main(["--edits", str(tree / "edits")], tree) == 1
    said = capsys.readouterr().out
    assert "so that these tests catch nothing:\ntests/test_tiny.py: caught: FAILED tests/test_tiny.py::test_largest" in said


FORKS_ON = """
import fcntl, os, sys, time
lock = open("lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)  # held until the last process that has inherited the file has ended
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        while not os.path.exists("stop"):
            if os.fork():
                os._exit(0)
        os._exit(0)
print("forked", flush=True)
"""


@pytest.mark.parametrize("end", quick(["ends", "is killed", "is not contained"], "is killed"))
def test_no_process_of_a_contained_program_is_left(tmp_path, end):
    """Programs that leave its session and fork for ever end with it."""
    code = FORKS_ON + ("time.sleep(3600)" if end == "is killed" else "")
    try:
        with processes.start(["-c", code], tmp_path, contained=end != "is not contained") as program:
            processes.wait_until(lambda: "forked" in program.stdout)
            if end == "is killed":
                program.kill()
            assert program.wait(processes.HANG) == (-9 if end == "is killed" else 0)
        with (tmp_path / "lock").open() as lock:
            if end == "is not contained":
                with pytest.raises(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            else:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        (tmp_path / "stop").touch()


@pytest.mark.slow
def test_tests_of_an_edit_leave_no_process(tree):
    (tree / "tests/test_tiny.py").write_text(f"CODE = {FORKS_ON!r}\n\n\ndef test_largest():\n    exec(CODE)\n")
    try:
        assert run_tests(tree, ["tests/test_tiny.py"], processes.HANG)[0] == SURVIVED
        with (tree / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        (tree / "stop").touch()
