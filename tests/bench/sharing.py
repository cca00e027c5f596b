"""Measures the cost of several processes in one run: claims, the plan of a run, and the division of the samples."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dflash_mcmc.config.schema import PACKAGE
from dflash_mcmc.store.folder import RunStore
from dflash_mcmc.store.reading import read_records
from dflash_mcmc.store.records import records_file
from dflash_mcmc.store.schema import to_line
from tests.bench.measure import Sizes
from tests.bench.subject import Subject

_CLAIMS, _PROCESSES = 2000, (1, 4)
_RUN = ("experiment=demo", "condition=ps", "sampler.num_blocks=8", "dataset.limit=240", "tracker=none", "hardware.num_slots=4")
_PROBLEMS, _CHAINS = 10_000, 8
_WRITERS = 8
_GROWTH = {"tasks claimed and recorded by 8 processes": (12_500, 100_000), "points of a sweep": (1_250, 5_000)}
"""What must be linear, and the two sizes at which it is measured."""
_WRITING = """
import sys
from pathlib import Path
from dflash_mcmc.store.folder import RunStore
with RunStore.open(Path(sys.argv[1])) as store:
    for problem, chain in store.take([(str(problem), chain) for problem in range(int(sys.argv[2])) for chain in range(1)]):
        store.append({"problem": problem, "chain": chain})
"""
_COMPOSING = """
import sys
from dflash_mcmc.config.command import check_command
half = int(sys.argv[2]) // 2
jobs = check_command(["-m", "condition=ps,temp", f"seed=range(0,{half})", "sampler.num_steps=2", "dry_run=true"]).jobs
assert len(jobs) == 2 * half
"""
_PLAN = f"""
import sys, time
from pathlib import Path
from dflash_mcmc.store.folder import RunStore
started = time.perf_counter()
asked = [(str(problem), chain) for problem in range({_PROBLEMS}) for chain in range({_CHAINS})]
with RunStore.open(Path(sys.argv[1])) as store:
    pending = [key for key in asked if key not in store.recorded()]
seconds = time.perf_counter() - started
(peak,) = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(len(pending), seconds, int(peak) / 1024)
"""
"""A program that does the work of a process before its first sample. It loads no problems and no model."""


def sharing(subject: Subject, sizes: Sizes) -> list[dict]:
    """(l) Several processes in one run: samples per process, time of a claim relative to a sample, plan of a large run.

    The last rows have the processor time of one task and of one point at two sizes: their ratio is 1 where the cost is linear.
    """
    if subject.name != "tiny":
        return []
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for number in _PROCESSES:
            counts, seconds, mean = _shares(Path(folder) / str(number), number)
            claim = _claim_seconds(Path(folder) / f"claims-{number}", number)
            rows.append({"what": f"{number} process{'es' * (number > 1)}", "samples of each": " ".join(map(str, counts)),
                         "largest deviation, %": 100 * max(abs(count * number / sum(counts) - 1) for count in counts),
                         "s": seconds, "claim, us": 1e6 * claim, "claim / sample, %": 100 * claim / mean})
        rows.append(_plan(Path(folder) / "plan"))
        for (what, sizes_of), program, count in zip(_GROWTH.items(), (_WRITING, _COMPOSING), (_WRITERS, 1), strict=True):
            few, many = (_processor_seconds(program, Path(folder) / f"{what}-{size}", size, count) / size for size in sizes_of)
            rows.append({"what": f"{sizes_of[1]:,} {what}", "us of processor": 1e6 * many,
                         f"of {sizes_of[1]:,} / of {sizes_of[0]:,}": many / few})
    return rows


def _shares(folder: Path, number: int) -> tuple[list[int], float, float]:
    """(number of samples of each process, seconds, mean seconds of a sample)."""
    command = [sys.executable, "-m", PACKAGE.name, *_RUN, f"paths.outputs={folder}"]
    started = time.perf_counter()
    processes = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=PACKAGE.parent,
                                  env={**os.environ, "OMP_NUM_THREADS": "1", "DFLASH_MCMC_SHARD": f"{index}/{number}"})
                 for index in range(number)]
    if any([process.wait() for process in processes]):
        raise RuntimeError(f"a process of the run failed: {' '.join(command)}")
    (run,) = (folder / "demo").iterdir()
    counts = [path.read_bytes().count(b"\n") for path in sorted(run.glob("records*.jsonl"))]
    records = read_records(run)
    return counts, time.perf_counter() - started, sum(record["share_seconds"] for record in records) / len(records)


def _claim_seconds(folder: Path, number: int) -> float:
    """Seconds of a claim in a folder with the records of `number` processes."""
    folder.mkdir(parents=True)
    for other in range(number):
        (folder / records_file(other)).write_bytes(to_line({"problem": f"of {other}", "chain": 0}))
    with RunStore.open(folder) as store:
        started = time.perf_counter()
        for index in range(_CLAIMS):
            store.claim((f"problem {index}", 0))
        return (time.perf_counter() - started) / _CLAIMS


def _processor_seconds(program: str, folder: Path, size: int, number: int) -> float:
    """Seconds of all processors for `number` processes of a program at once, without those of a program of no size."""
    def spent(size: int) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        processes = [subprocess.Popen([sys.executable, "-c", program, f"{folder}-{size}", str(size)], cwd=PACKAGE.parent)
                     for _ in range(number)]
        if any([process.wait() for process in processes]):
            raise RuntimeError(f"a process failed: {program}")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return spent(size) - spent(2)


def _plan(folder: Path) -> dict:
    """Seconds and memory for the plan of a large run without records, measured in a separate process."""
    done = subprocess.run([sys.executable, "-c", _PLAN, folder], capture_output=True, text=True, check=True,
                          cwd=PACKAGE.parent)
    pending, seconds, megabytes = done.stdout.split()
    return {"what": f"plan of {int(pending):,} samples", "s": float(seconds), "MiB": float(megabytes)}
