"""Injects faults at random moments into processes that share a small sweep, and checks the results.

A complete record in the folder must be kept to the end, byte for byte. A record that was lost and drawn again would differ in
its times. The records equal those of an undisturbed run, and none is missing or repeated. Every process that is not killed
ends with a readable message and without a traceback.
"""

import contextlib
import json
import os
import random  # noqa: TID251  (the moments of faults do not belong to an experiment)
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from dflash_mcmc.store.files import CHECKSUM
from tests import processes
from tests.runs import TIMES

SWEEP = ("experiment=demo", "condition=ps", "sampler.num_blocks=8", "sampler.num_steps=1",
         "seed=0,1", "dataset.limit=16", "tracker=none", "hardware.num_slots=2", "hardware.grace_seconds=2")
NUM_RECORDS = 32
_SHIFTED = """
import datetime, sys, time
shift = float(sys.argv.pop(1))
now = time.time
time.time = lambda: now() + shift
from dflash_mcmc.__main__ import main
main(sys.argv[1:])
"""
"""A program that runs `python -m dflash_mcmc` with a clock that is wrong by `shift` seconds."""
_MESSAGE = re.compile("^(error|failed): ", re.MULTILINE)
"""The start of a line about a mistake, and about a point of a sweep that has failed."""
_YEARS = 10 * 365 * 86400
KILLED, ASKED, REFUSED = (-signal.SIGKILL,), (143, 0), (2, 0)
"""Exit codes that are allowed after a fault."""


class Campaign:
    """The injected faults and the errors that were found."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.injected: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.expected: dict[tuple, str] = {}
        """Records of an undisturbed run without times, by run and sample."""

    def check(self, holds: bool, message: str) -> None:
        """Notes the message if the check fails. The campaign continues, so that it reports all errors."""
        if not holds:
            self.wrong.append(message)

    def inject(self, faults: dict[str, Callable], target: object, seconds: float) -> None:
        """Injects one of the faults after a random delay of `seconds` on average."""
        time.sleep(self.random.expovariate(1 / seconds))
        target.watch.look()
        name = self.random.choice(list(faults))
        faults[name](target)
        self.injected[name] += 1


def records(outputs: Path) -> dict[tuple, list[str]]:
    """Complete lines by run and sample. Each value is a list, to detect repeated records."""
    found: dict[tuple, list[str]] = {}
    for path in outputs.glob("demo/power_mh-*/records*.jsonl"):
        for line in path.read_text().split("\n")[:-1]:
            record = json.loads(line)
            found.setdefault((path.parent.name, record["problem"], record["chain"]), []).append(line)
    return found


def without_times(line: str) -> str:
    """The part of a record that must be the same in every run."""
    return json.dumps({name: value for name, value in json.loads(line).items()
                       if name not in (*TIMES, CHECKSUM)}, sort_keys=True)


class Watch:
    """Watches the records below a folder and checks them."""

    def __init__(self, campaign: Campaign, outputs: Path):
        self.campaign, self.outputs = campaign, outputs
        self.seen: dict[tuple, str] = {}

    def look(self) -> None:
        """Checks that earlier records are unchanged, and notes new ones."""
        now = records(self.outputs)
        for key, line in self.seen.items():
            self.campaign.check(now.get(key) == [line], f"{key}: recorded as {line[:80]}, and now {now.get(key)}")
        self.seen = {key: lines[0] for key, lines in now.items()}

    def end(self) -> None:
        """Checks that every record exists once and equals that of an undisturbed run."""
        self.look()
        found = records(self.outputs)
        self.campaign.check(all(len(lines) == 1 for lines in found.values()), "a record is repeated")
        ours = {key: without_times(lines[0]) for key, lines in found.items()}
        self.campaign.check(ours == self.campaign.expected, f"{len(ours)} records, not those of an undisturbed run: "
                                                            f"{ours.keys() ^ self.campaign.expected.keys()}")
        summaries = [json.loads(path.read_text()) for path in self.outputs.glob("demo/power_mh-*/summary.json")]
        self.campaign.check([summary["num_samples"] for summary in summaries] == [NUM_RECORDS // 2] * 2, f"{summaries}")


class Workers:
    """Two processes that share a sweep on a separate disk. A process that ends is started again."""

    def __init__(self, campaign: Campaign, disk: Path):
        self.campaign, self.disk, self.watch = campaign, disk, Watch(campaign, disk / "outputs")
        self.running: list[processes.Program] = []

    def start(self, *more: str, shift: float = 0.0) -> None:
        """Starts another process. `shift` is the error of its clock in seconds."""
        arguments = ["-m", "dflash_mcmc", "-m", *SWEEP, f"paths.outputs={self.watch.outputs}", *more]
        if shift:
            arguments = ["-c", _SHIFTED, str(shift), *arguments[2:]]
        self.running.append(processes.start(arguments, self.disk.parent))

    def fill_up(self) -> None:
        """Starts processes until two are running."""
        self.running = [worker for worker in self.running if worker.poll() is None]
        while len(self.running) < 2:
            self.start()

    def end(self, worker: processes.Program, allowed: tuple[int, ...], fault: str, seconds: float = 60) -> None:
        """Waits for a process, and checks its exit code and its messages."""
        try:
            code = worker.wait(seconds)
        except subprocess.TimeoutExpired:
            self.campaign.check(False, f"{fault}: the process still runs after {seconds} s: {worker.stderr[-500:]}")
            worker.kill()
            return
        errors = worker.stderr
        self.campaign.check(code in allowed, f"{fault}: exit code {code}: {errors[-1500:]}")
        self.campaign.check("Traceback" not in errors, f"{fault}: {errors[-1500:]}")
        if code == 2:
            self.campaign.check(_MESSAGE.search(errors) is not None, f"{fault}: no error message: {errors[-500:]}")
        self.watch.look()

    def finish(self) -> None:
        """Waits for the end of the sweep, and checks all records."""
        deadline = time.monotonic() + 240
        self.fill_up()
        for worker in self.running:
            self.end(worker, (0,), "the end", max(1.0, deadline - time.monotonic()))
        self.watch.end()


def _one(workers: Workers) -> processes.Program:
    return workers.campaign.random.choice(workers.running)


def kill(workers: Workers) -> None:
    """Kills a process and its children with SIGKILL."""
    worker = _one(workers)
    worker.kill()
    workers.end(worker, (*KILLED, 0), "kill -9")


def _ask(number: signal.Signals) -> Callable[[Workers], None]:
    def ask(workers: Workers) -> None:
        worker = _one(workers)
        worker.send_signal(number)
        # During its imports, before the handler is installed, a process dies of the signal.
        workers.end(worker, (*ASKED, -number), number.name)

    return ask


def torn(workers: Workers) -> None:
    """Simulates a machine failure: all processes are killed, and the last record of a file is incomplete."""
    for worker in workers.running:
        worker.kill()
        worker.wait()
    workers.watch.look()
    whole = [path for path in workers.watch.outputs.glob("demo/power_mh-*/records*.jsonl") if path.stat().st_size]
    if whole:
        path = workers.campaign.random.choice(whole)
        content = path.read_bytes()
        last = content.rstrip(b"\n").rfind(b"\n") + 1
        path.write_bytes(content[: workers.campaign.random.randint(last + 1, len(content) - 1)])
        if content.endswith(b"\n"):  # otherwise it was incomplete before
            record = json.loads(content[last:])
            del workers.watch.seen[path.parent.name, record["problem"], record["chain"]]


def disk_full(workers: Workers) -> None:
    """Fills the disk. The processes end with an error."""
    ballast = workers.disk / "ballast"
    free = os.statvfs(workers.disk)
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(min(1 << 16, max(1, free.f_bavail * free.f_frsize))))
    for worker in workers.running:
        workers.end(worker, REFUSED, "disk full")
    ballast.unlink()


def read_only(workers: Workers) -> None:
    """Makes the disk read-only. A process that starts then ends with an error."""
    for worker in workers.running:
        worker.send_signal(signal.SIGTERM)
        workers.end(worker, (*ASKED, -signal.SIGTERM), "SIGTERM")
    complete = len(workers.watch.seen) == NUM_RECORDS
    subprocess.run(["mount", "-o", "remount,ro", workers.disk], check=True)
    workers.start()
    workers.end(workers.running[-1], (2,), f"read-only folder, {complete=}")
    subprocess.run(["mount", "-o", "remount,rw", workers.disk], check=True)


def clock(workers: Workers) -> None:
    """Sets random times of files, and starts a process whose clock is wrong by years."""
    for path in workers.watch.outputs.glob("demo/*/*"):
        moment = time.time() + workers.campaign.random.uniform(-_YEARS, _YEARS)
        with contextlib.suppress(FileNotFoundError):
            os.utime(path, (moment, moment))
    workers.start(shift=workers.campaign.random.choice([-_YEARS, _YEARS]))


def twice(workers: Workers) -> None:
    """Starts the same command a third time."""
    workers.start()


FAULTS: dict[str, Callable[[Workers], None]] = {
    "kill -9": kill, "SIGTERM": _ask(signal.SIGTERM), "SIGUSR1": _ask(signal.SIGUSR1), "torn line": torn,
    "disk full": disk_full, "read-only folder": read_only, "clock change": clock, "two submissions": twice}


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int = 16) -> Iterator[Path]:
    """A disk that can be filled and made read-only. Raises CalledProcessError if it cannot be mounted."""
    disk = folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", disk], check=True, capture_output=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def disturb(campaign: Campaign, folder: Path, faults: int) -> None:
    """Runs a sweep of two runs on a new disk, with `faults` faults at random moments, and then until its end."""
    folder.mkdir()
    with small_disk(folder) as disk:
        workers = Workers(campaign, disk)
        for _ in range(faults):
            workers.fill_up()
            campaign.inject(FAULTS, workers, 1.5)
        workers.finish()


def undisturbed(campaign: Campaign, folder: Path) -> None:
    """Draws the records that every disturbed sweep must have at its end."""
    folder.mkdir()
    done = processes.run(["-m", "dflash_mcmc", "-m", *SWEEP, f"paths.outputs={folder}"], folder)
    assert done.returncode == 0, done.stderr
    campaign.expected = {key: without_times(lines[0]) for key, lines in records(folder).items()}
    assert len(campaign.expected) == NUM_RECORDS
