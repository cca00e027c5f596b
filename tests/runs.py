"""Runs of the embedded model, in this process or in a program of their own, and what they have recorded."""

import json
import time
from pathlib import Path

import pytest

from dflash_mcmc.config.schema import Config, Job
from dflash_mcmc.runner import loop
from dflash_mcmc.store.files import CHECKSUM
from dflash_mcmc.store.records import RECORDS
from tests import processes
from tests.composing import composed
from tests.targets import rows_do_not_depend_on_the_batch

TIMES = ("seconds", "share_seconds", "prefill_seconds", "grade_seconds")
QUICK = ("condition=ps", "sampler.num_blocks=4", "sampler.num_steps=1", "dataset.max_new_tokens=48")
WHOLE = ("dataset.limit=8", "num_chains=2")
NUM_WHOLE = 16
"""Overrides of the quick run, over 8 problems with 2 chains, and the number of its records."""


def execute(config: Config) -> loop.RunResult:
    """Executes a configuration that does not come from a command line."""
    return loop.execute(Job(config))


def start(folder: Path, *overrides: str, until: int | None = None) -> processes.Program:
    """A program that draws the quick run, with its outputs below the folder; see `held` for `until`."""
    command = ["-m", "dflash_mcmc"] if until is None else held(until)
    return processes.start([*command, "experiment=demo", *QUICK, *overrides], folder)


_SHARED = """
import os, sys, time
from pathlib import Path
from dflash_mcmc.__main__ import main
from dflash_mcmc.store.folder import RunStore
from tests.tracker import lines
lines.use()
claim = RunStore.claim
def claim_and_wait(store, key):
    claimed = claim(store, key)
    if claimed:
        Path(f"claimed.{os.getpid()}").touch()
        while len(list(Path().glob("claimed.*"))) < 2:
            time.sleep(0.02)
    return claimed
RunStore.claim = claim_and_wait
main(sys.argv[1:])
"""


def shared(*overrides: str) -> list[str]:
    """The quick run for two processes, each of which waits until the other one has claimed a sample, too."""
    return ["-c", _SHARED, "experiment=demo", *QUICK, *overrides]


_HELD = """
import sys, time
from dflash_mcmc.__main__ import main
from dflash_mcmc.process import stopping
from dflash_mcmc.store.folder import RunStore
from tests.tracker import lines
lines.use()
left, append = [int(sys.argv.pop(1))], RunStore.append
def wait_and_append(store, record):
    left[0] -= 1
    while left[0] == -1 and not stopping.requested():
        time.sleep(0.02)
    append(store, record)
RunStore.append = wait_and_append
main(sys.argv[1:])
"""


def held(count: int, *arguments: str) -> list[str]:
    """A command that records no more after so many records until a signal comes, which may be late."""
    return ["-c", _HELD, str(count), *arguments]


def finish(folder: Path, *overrides: str) -> dict[tuple[str, int], dict]:
    """Draws in this process what the quick run of `start` lacks, and returns all its records."""
    config = composed(folder / "outputs", "experiment=demo", *QUICK, *(overrides or WHOLE))
    return records_of(execute(config).folder)


def folder_of(folder: Path) -> Path:
    """The folder of the one quick run below a folder."""
    (found,) = (folder / "outputs/demo").glob("power_mh-*")
    return found


def records_of(folder: Path) -> dict[tuple[str, int], dict]:
    """Records by problem and chain, without times and checksums, which depend on them. Fails on a repeated one."""
    found = {}
    for path in folder.glob("records*.jsonl"):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            key = (record["problem"], record["chain"])
            assert key not in found
            found[key] = {name: value for name, value in record.items() if name not in (*TIMES, CHECKSUM)}
    return found


def same(a: dict, b: dict) -> None:
    """Everything equal; floating-point numbers to the last bit, where the machine's arithmetic allows it."""
    if rows_do_not_depend_on_the_batch():
        assert a == b
        return
    assert a.keys() == b.keys()
    for key in a:
        assert _without_floats(a[key]) == _without_floats(b[key])
        assert a[key]["log_p"] == pytest.approx(b[key]["log_p"], abs=1e-4)


def _without_floats(node):
    if isinstance(node, dict):
        return {name: _without_floats(value) for name, value in node.items() if not isinstance(value, float)}
    return [_without_floats(value) for value in node] if isinstance(node, list) else node


def wait_for_records(folder: Path, count: int, run: processes.Program) -> None:
    """Waits until a program has so many records, or has ended well. Fails if it ends otherwise."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and run.poll() is None:
        found = list((folder / "outputs/demo").glob(f"power_mh-*/{RECORDS}"))
        if found and found[0].read_bytes().count(b"\n") >= count:
            return
        time.sleep(0.02)
    if run.poll() == 0:
        return  # it has ended: a late kill
    pytest.fail(f"the run did not record {count} samples: exit code {run.poll()}")
