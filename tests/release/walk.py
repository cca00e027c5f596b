"""What a stranger does with the wheel alone, and the tests that other versions of the packages can break."""

import os
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.processes import ROOT

CONDITIONS = "greedy,temp,ps,blend_greedy,blend_ps,draft_blend_ps"
SUBSET = ("tests/test_rng.py", "tests/kernel", "tests/config/test_schema.py",
          "tests/config/test_sweep.py", "tests/dataset/inputs/test_rows.py", "tests/dataset/inputs/test_prompts.py",
          "tests/dataset/test_jsonl.py", "tests/grading", "tests/statistics", "tests/sampler/test_power_mh.py",
          "tests/engine/batching/test_batched.py", "tests/draft/test_dflash.py", "tests/model",
          "tests/decoder/test_speculative_match.py", "tests/report/test_table.py",
          "tests/report/test_build.py", "tests/tracker/test_wandb.py",
          "tests/serve/test_server.py", "tests/test_api.py", "tests/grid")
"""Tests at the border of each package: torch, transformers, Hydra, NumPy, SciPy, SymPy, W&B and others."""

LIMIT_SECONDS = 3600
"""A step that takes longer has failed."""

SHOWN_LINES = 40
"""Lines that are printed of the end of a step that failed."""


_PYTEST = "import sys, torch._dynamo, pytest; sys.exit(pytest.main(sys.argv[1:]))"
"""pytest after an import by which PyTorch 2.7 adds a folder to sys.path. No test is the cause."""


class Step(NamedTuple):
    """A command of a check, and what it leaves behind."""

    name: str
    command: tuple[str, ...]
    leaves: str | None = None
    """A file below the folder of the walk that the command must have written."""
    prints: str = ""
    """A regular expression that must be found in what it prints."""


class Result(NamedTuple):
    """What a step did."""

    environment: str
    step: str
    fault: str
    """Empty if all is well."""
    seconds: float


def steps(python: Path, unpacked: Path) -> list[Step]:
    """The commands of a stranger, in order, with the interpreter of an environment.

    `unpacked` is the source distribution's content, for `launchers/local.py`, which is not in the wheel.
    """
    program, run = str(python.parent / "dflash-mcmc"), (str(python), "-m", "dflash_mcmc")
    (example,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.DOTALL | re.MULTILINE)
    where = f"import dflash_mcmc as dm; assert dm.__file__.startswith({str(python.parent.parent)!r}), dm.__file__"
    return [
        Step("packages fit together", (str(python), "-m", "pip", "check")),
        Step("the installed package is imported", (str(python), "-c", where)),
        Step("help of a group", (str(python), "-m", "dflash_mcmc", "--help", "sampler"), prints="power_mh"),
        Step("demo", (program, "-m", "experiment=demo", f"condition={CONDITIONS}", "dataset.limit=8"),
             prints=r"\| draft_blend_ps +\|"),
        Step("report", (str(python), "-m", "dflash_mcmc.report", "outputs/demo"), leaves="outputs/demo/report/report.html"),
        Step("grid", (*run, "-m", "experiment=demo", "name=grid", "condition=greedy,ps", "sampler.alpha=2,4",
             "dataset.limit=4"), prints=r"\| .*alpha"),
        Step("grid, two processes", (str(python), str(unpacked / "launchers/local.py"), "--processes", "2", "-m",
             "experiment=demo", "name=shared", "condition=greedy,ps", "dataset.limit=4"), prints=r"\| ps +\|"),
        Step("Python example", (str(python), "-c", example), prints=r"log p -?[\d.]+, accepted \d+"),
        Step("wrong field", ("sh", "-c", f"! {program} sampler.alpa=4"), prints=r"sampler\.alpa"),
    ]


def walk(environment: str, python: Path, unpacked: Path, folder: Path, say: Callable[[Result], None]) -> list[Result]:
    """Does the steps in an empty folder. A step that fails does not keep the others from being done."""
    done = []
    for step in steps(python, unpacked):
        done.append(_did(environment, step, folder))
        say(done[-1])
    return done


def subset(environment: str, python: Path, unpacked: Path) -> Result:
    """Runs the tests of `SUBSET` on the content of the source distribution."""
    command = (str(python), "-c", _PYTEST, "-p", "no:cacheprovider", *SUBSET)
    return _did(environment, Step("tests", command, prints=r"\d+ passed"), unpacked)


def unpack(source: Path, folder: Path) -> Path:
    """Unpacks a source distribution. Returns its root."""
    with tarfile.open(source) as archive:
        archive.extractall(folder, filter="data")
    (root,) = folder.iterdir()
    return root


def _did(environment: str, step: Step, folder: Path) -> Result:
    begin = time.monotonic()
    try:
        done = subprocess.run(step.command, cwd=folder, env=_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, timeout=LIMIT_SECONDS)
        fault = _fault(step, folder, done.returncode, done.stdout)
        if fault:
            print(*done.stdout.splitlines()[-SHOWN_LINES:], sep="\n", file=sys.stderr, flush=True)
    except subprocess.TimeoutExpired:
        fault = f"not finished after {LIMIT_SECONDS} s"
    return Result(environment, step.name, fault, time.monotonic() - begin)


def _fault(step: Step, folder: Path, code: int, printed: str) -> str:
    last = (printed.strip().splitlines() or ["no output"])[-1][:160]
    if code:
        return f"exit code {code}: {last}"
    if step.leaves is not None and not (folder / step.leaves).is_file():
        return f"no file {step.leaves}: {last}"
    return "" if re.search(step.prints, printed) else f"does not print {step.prints}: {last}"


def _environment() -> dict[str, str]:
    """The environment of a stranger: nothing of it leads to the checkout, and no network is used."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return {**kept, "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "PYTHONDONTWRITEBYTECODE": "1"}
