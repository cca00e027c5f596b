"""Checks a release: `python -m tests.release`, or `make release-check`. `make test-versions` runs its tests alone.

It builds the wheel and the source distribution and looks into them. Then it makes an environment with the oldest allowed
versions on the oldest Python, and one with the newest versions on each Python that is here. In each of them it installs the
wheel, does what a stranger would do in an empty folder, and runs the tests that other versions can break. A table of all
checks is the end. The exit code is 1 if anything failed.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tabulate import tabulate

from tests.processes import ROOT
from tests.release import artifacts, environments, walk
from tests.release.environments import Environment
from tests.release.walk import Result


def main(arguments: list[str] | None = None) -> int:
    """Runs the check. Returns the exit code."""
    given = _parser().parse_args(arguments)
    folder = given.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    plan = [environment for environment in environments.planned() if given.only in environment.name]
    if not plan:
        names = ", ".join(environment.name for environment in environments.planned())
        print(f"--only: given {given.only}; allowed: a part of {names}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as text:
        temporary = Path(text)
        wheel, source = artifacts.build(environments.make_builder(folder), temporary / "built")
        results = [] if given.only_tests else _contents(wheel, source)
        for environment in plan:
            results += _in_environment(environment, folder, wheel, source, temporary / environment.name, given.only_tests)
    print(tabulate([(r.environment, r.step, r.fault or "ok", f"{r.seconds:,.0f}") for r in results],
                   headers=["environment", "check", "result", "seconds"], tablefmt="github", disable_numparse=True))
    return int(any(result.fault for result in results))


def _contents(wheel: Path, source: Path) -> list[Result]:
    files = artifacts.tracked()
    found = {"wheel's content": artifacts.faults_of_wheel(wheel, files),
             "source's content": artifacts.faults_of_source(source, files),
             "version": artifacts.faults_of_version()}
    return [Result("-", name, "; ".join(faults), 0) for name, faults in found.items()]


def _in_environment(environment: Environment, folder: Path, wheel: Path, source: Path, temporary: Path,
                    only_tests: bool) -> list[Result]:
    """The results of an environment, which are also printed as they come."""
    begin = time.monotonic()
    try:
        python = environments.make(environment, folder, wheel)
    except subprocess.CalledProcessError as error:
        return [Result(environment.name, "installation", str(error)[-160:], time.monotonic() - begin)]
    results = [Result(environment.name, "installation", "", time.monotonic() - begin)]
    _say(results[0])
    unpacked = walk.unpack(source, temporary / "source")
    if not only_tests:
        (temporary / "walk").mkdir()
        results += walk.walk(environment.name, python, unpacked, temporary / "walk", _say)
    results.append(walk.subset(environment.name, python, unpacked))
    _say(results[-1])
    return results


def _say(result: Result) -> None:
    print(f"{result.environment}: {result.step}: {result.fault or 'ok'} ({result.seconds:,.0f} s)", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.release", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", metavar="TEXT",
                        help="only environments whose name has this text: oldest, newest-3.13")
    parser.add_argument("--only-tests", action="store_true", help="only the tests in each environment")
    parser.add_argument("--folder", type=Path, default=ROOT / ".venv-release", help="where the environments are kept")
    return parser


if __name__ == "__main__":
    sys.exit(main())
