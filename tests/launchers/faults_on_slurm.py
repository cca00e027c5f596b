"""Faults of a cluster: the jobs of a grid are killed, signalled, requeued or submitted twice, or lose their nodes."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable

import psutil

from tests.launchers.faults import SWEEP, Campaign, Watch
from tests.launchers.test_grid import Submitter

JOBS = ("hardware=slurm_cpu", "hardware.num_slots=2", "cpus=1", "memory_gb=1", "shards=2")
GRID = (*[text for text in SWEEP if not text.startswith("hardware")], "hardware.grace_seconds=2")


class Jobs:
    """The jobs of one sweep, which may be submitted as several grids."""

    def __init__(self, campaign: Campaign, submitter: Submitter):
        self.campaign, self.submitter = campaign, submitter
        self.watch = Watch(campaign, submitter.folder / "outputs")

    def submit(self) -> None:
        """Submits the sweep; every call makes another grid."""
        self.submitter.run("submit", *GRID, *JOBS)

    def signal_one(self, part: str, number: signal.Signals) -> None:
        """Sends a signal to a random process of the jobs whose command line contains `part`."""
        folder, found = str(self.submitter.folder), []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                line = " ".join(process.cmdline())
                if part in line and folder in line:
                    found.append(process)
        if found:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.campaign.random.choice(found).send_signal(number)

    def command_one(self, *command: str) -> None:
        """Runs a command of SLURM for a random job. The command may fail, because the job may have ended."""
        live = self.submitter.cluster.live()
        if live:
            self.submitter.cluster.run(*command, self.campaign.random.choice(live), check=False)

    def lose_a_node(self) -> None:
        """Kills a random node with its jobs, and starts it again."""
        node = self.campaign.random.choice(self.submitter.cluster.nodes)
        self.submitter.cluster.kill_node(node)
        time.sleep(1)
        self.submitter.cluster.start_node(node)

    def finish(self) -> None:
        """Resumes the grid until no sample is missing, and checks all records and logs."""
        for _ in range(5):
            self.submitter.cluster.wait_until(lambda: not self.submitter.cluster.live(), "the grid's jobs to end")
            if "nothing is missing" in self.submitter.run("resume").stdout:
                break
        self.watch.end()
        for log in self.submitter.folder.glob("outputs/*/grids/*/logs/*"):
            if log.is_file():
                self.campaign.check("Traceback" not in log.read_text(errors="replace"), f"{log}: a traceback")


FAULTS: dict[str, Callable[[Jobs], None]] = {
    "kill -9 of a worker": lambda jobs: jobs.signal_one("dflash_mcmc.grid.work", signal.SIGKILL),
    "kill -9 of a supervisor": lambda jobs: jobs.signal_one("submitit.core._submit", signal.SIGKILL),
    "SIGUSR1 by SLURM": lambda jobs: jobs.command_one("scancel", "--signal=USR1"),
    "SIGTERM by SLURM": lambda jobs: jobs.command_one("scancel", "--signal=TERM"),
    "requeue": lambda jobs: jobs.command_one("scontrol", "requeue"),
    "cancel": lambda jobs: jobs.command_one("scancel"),
    "node down": Jobs.lose_a_node,
    "two submissions": Jobs.submit}


def disturb(campaign: Campaign, submitter: Submitter, faults: int) -> None:
    """Runs a sweep of two runs on the cluster, with `faults` faults at random moments, and then until its end."""
    jobs = Jobs(campaign, submitter)
    jobs.submit()
    for _ in range(faults):
        campaign.inject(FAULTS, jobs, 4.0)
    jobs.finish()
