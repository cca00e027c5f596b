"""Applies each wrong edit to a copy of the tree and runs its tests: `python -m tests.mutants`, or `make mutants`.

An edit that no test fails under is a survivor: a hole of the tests. The exit code is 1 if an edit survives and is not marked
harmless, if a harmless one is caught, or if a result is unclear: tests that fail without the edit, run out of time or cannot
be started. Results are stored as they come. They are used again while the edit, the edited file and its test files are the
same. `--fresh` forgets them, which is right before a release.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import NamedTuple

from tabulate import tabulate

from tests import processes
from tests.mutants.edits import FOLDER, Edit, read

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("dflash_mcmc", "conf", "tests", "launchers", "docs", "pyproject.toml", "README.md", "CHANGELOG.md")
CAUGHT, SURVIVED, OUT_OF_TIME, NOT_RUN = "caught", "survived", "out of time", "not run"
_STARTING = Lock()
_FAILED, _PASSED, _NONE = 1, 0, 5
"""Exit codes of pytest. Others say that no test was run to its end."""
_HERE = "not slurm and not vllm and not gpu and not harness"
"""Marks of tests that need another machine or environment are left out."""


class Outcome(NamedTuple):
    """What the tests of an edit did."""

    name: str
    digest: str
    result: str
    seconds: float
    last: str
    """The failed test, or the last line that pytest printed."""

    def wanted(self, edit: Edit) -> bool:
        """Whether the outcome is as the list says."""
        return self.result == (SURVIVED if edit.harmless else CAUGHT)


def copied(root: Path, folder: Path) -> Path:
    """A copy of the tree in which tests can be run."""
    for name in COPIED:
        if (root / name).is_dir():
            shutil.copytree(root / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif (root / name).exists():
            shutil.copy2(root / name, folder / name)
    return folder


def run_tests(tree: Path, tests: Iterable[str], limit: float, which: str = "not slow") -> tuple[str, str]:
    """(result, last line) of a run of tests in a tree that ends with the first failure.

    Where none of them is quick, the slow ones are run. Processes that the tests leave are ended: under a wrong edit of the
    sandbox, programs that fork for ever.
    """
    tests = list(tests)
    command = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=no", "-m", f"{which} and {_HERE}", *tests]
    with _STARTING:
        program = processes.start(command, tree, contained=True, PYTHONPATH=str(tree), OMP_NUM_THREADS="1")
    with program:
        try:
            output, errors = program.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            return OUT_OF_TIME, f"no result in {limit:g} s"
    if program.returncode == _NONE and which == "not slow":
        return run_tests(tree, tests, limit, "slow")
    lines = (output + errors).strip().splitlines() or [""]
    named = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {_FAILED: CAUGHT, _PASSED: SURVIVED}.get(program.returncode, NOT_RUN), [*lines[-1:], *named][-1]


def judged(edit: Edit, tree: Path, limit: float) -> Outcome:
    """The outcome of an edit in a copy of the tree, which is as before afterwards."""
    began, path = time.monotonic(), tree / edit.file
    text, times = path.read_text(encoding="utf-8"), path.stat()
    try:
        path.write_text(edit.applied(text), encoding="utf-8")
        # Python tells a compiled file from an outdated one by the time of the source in seconds, and by its size.
        os.utime(path, (times.st_atime, times.st_mtime + 1.0 + zlib.crc32(repr(edit).encode())))
        result, last = run_tests(tree, edit.tests, limit)
        if result == SURVIVED and not edit.harmless:
            slow = run_tests(tree, edit.tests, limit, "slow")
            result, last = slow if slow[0] != NOT_RUN else (result, last)
    finally:
        path.write_text(text, encoding="utf-8")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    return Outcome(edit.name, edit.digest(tree), result, round(time.monotonic() - began, 1), last)


def red_without(edits: Iterable[Edit], tree: Path, jobs: int, limit: float) -> str:
    """The last lines of those tests of these edits that do not pass on the tree as it is; an empty text if all do."""
    of_files: dict[str, set[str]] = {}
    for test in (test for edit in edits for test in edit.tests):
        of_files.setdefault(test.partition("::")[0], set()).add(test)
    # A file that is named as a whole contains the tests that are named by themselves.
    runs = [[file] if file in tests else sorted(tests) for file, tests in of_files.items()]
    with ThreadPoolExecutor(jobs) as pool:
        found = list(pool.map(lambda tests: run_tests(tree, tests, limit), runs))
    return "\n".join(f"{tests[0]}: {result}: {last}" for tests, (result, last) in zip(runs, found, strict=True)
                     if result != SURVIVED)


def stored(path: Path) -> dict[str, Outcome]:
    """Outcomes of earlier runs by digest."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {outcome.digest: outcome for outcome in (Outcome(**json.loads(line)) for line in lines)}


def outcomes(edits: list[Edit], root: Path, results: Path, jobs: int, limit: float) -> list[Outcome]:
    """The outcomes of all edits, in their order. Those that are not stored are found by `jobs` processes at a time."""
    known = stored(results)
    missing = [edit for edit in edits if edit.digest(root) not in known]
    trees: SimpleQueue[Path] = SimpleQueue()
    results.parent.mkdir(parents=True, exist_ok=True)
    digests = [edit.digest(root) for edit in edits]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, results.open("a", encoding="utf-8") as file:
        for number in range(min(jobs, max(1, len(missing)))):
            trees.put(copied(root, Path(folder, str(number))))

        def judge(edit: Edit) -> Outcome:
            tree = trees.get()
            try:
                return judged(edit, tree, limit)
            finally:
                trees.put(tree)

        with ThreadPoolExecutor(jobs) as pool:
            for future in as_completed([pool.submit(judge, edit) for edit in missing]):
                outcome = future.result()
                known[outcome.digest] = outcome
                file.write(json.dumps(outcome._asdict()) + "\n")
                file.flush()
                print(f"{outcome.result}: {outcome.name} ({outcome.seconds:g} s)", flush=True)
    return [known[digest] for digest in digests]


def table(edits: list[Edit], found: list[Outcome]) -> str:
    """The edits whose outcome is not as the list says, and the counts."""
    rows = [(outcome.result, edit.name, edit.file, outcome.last) for edit, outcome in zip(edits, found, strict=True)
            if not outcome.wanted(edit)]
    counts = Counter(outcome.result for outcome in found)
    harmless = sum(bool(edit.harmless) for edit in edits)
    summary = (f"{len(edits)} edits: " + ", ".join(f"{count} {result}" for result, count in counts.most_common())
               + f" ({harmless} marked harmless)")
    return (tabulate(rows, ("result", "edit", "file", "last line")) + "\n\n" if rows else "") + summary


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """The command. Returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", default="", help="edits whose name or file contains this text")
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1), help="edits at a time")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for the tests of an edit")
    parser.add_argument("--results", type=Path, default=root / "outputs" / "mutants.jsonl", help="file of stored outcomes")
    parser.add_argument("--edits", type=Path, default=FOLDER, help="folder of the list")
    parser.add_argument("--fresh", action="store_true", help="forget stored outcomes")
    given = parser.parse_args(arguments)
    os.environ.update(processes.OF_TESTS)
    edits = [edit for edit in read(given.edits) if given.only in edit.name or given.only in edit.file]
    if not edits:
        parser.error(f"--only: given {given.only!r}; allowed: a part of the name or the file of an edit")
    if given.fresh:
        given.results.unlink(missing_ok=True)
    for edit in edits:
        edit.applied((root / edit.file).read_text(encoding="utf-8"))
    found = outcomes(edits, root, given.results, given.jobs, given.limit)
    print(table(edits, found))
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:  # last, since survivors are what one waits for
        if red := red_without(edits, copied(root, Path(folder, "whole")), given.jobs, given.limit):
            print(f"not green without an edit, so that these tests catch nothing:\n{red}")
            return 1
    return int(not all(outcome.wanted(edit) for edit, outcome in zip(edits, found, strict=True)))


if __name__ == "__main__":
    sys.exit(main())
