"""Faults of a cluster: the jobs of a grid are killed, told to go, requeued, doubled, and lose their nodes."""

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
    """The jobs of one sweep, of as many grids as were submitted of it."""

    def __init__(self, campaign: Campaign, submitter: Submitter):
        self.campaign, self.submitter = campaign, submitter
        self.watch = Watch(campaign, submitter.folder / "outputs")

    def submit(self) -> None:
        """The sweep, once more where it was submitted before."""
        self.submitter.run("submit", *GRID, *JOBS)

    def live(self) -> list[str]:
        """Ids of the jobs that wait or run."""
        ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
        return [job.id for job in self.submitter.cluster.jobs() if job.state not in ends]

    def signal_one(self, part: str, number: signal.Signals) -> None:
        """A process of the jobs whose command line has this part."""
        folder, found = str(self.submitter.folder), []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                line = " ".join(process.cmdline())
                if part in line and folder in line:
                    found.append(process)
        if found:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.campaign.random.choice(found).send_signal(number)

    def tell_one(self, *command: str) -> None:
        """A command of SLURM for one of the jobs; it can have ended meanwhile."""
        live = self.live()
        if live:
            self.submitter.cluster.run(*command, self.campaign.random.choice(live), check=False)

    def lose_a_node(self) -> None:
        """It crashes with its jobs, and comes back."""
        node = self.campaign.random.choice(self.submitter.cluster.nodes)
        self.submitter.cluster.kill_node(node)
        time.sleep(1)
        self.submitter.cluster.start_node(node)

    def finish(self) -> None:
        """Has what is missing submitted again until nothing is."""
        for _ in range(5):
            self.submitter.cluster.wait_until(lambda: not self.live(), 240, "the grid's jobs to end")
            if "nothing is missing" in self.submitter.run("resume").stdout:
                break
        self.watch.end()
        for log in self.submitter.folder.glob("outputs/*/grids/*/logs/*"):
            if log.is_file():
                self.campaign.check("Traceback" not in log.read_text(errors="replace"), f"{log}: a traceback")


FAULTS: dict[str, Callable[[Jobs], None]] = {
    "kill -9 of a worker": lambda jobs: jobs.signal_one("dflash_mcmc.grid.work", signal.SIGKILL),
    "kill -9 of a supervisor": lambda jobs: jobs.signal_one("submitit.core._submit", signal.SIGKILL),
    "SIGUSR1 by SLURM": lambda jobs: jobs.tell_one("scancel", "--signal=USR1"),
    "SIGTERM by SLURM": lambda jobs: jobs.tell_one("scancel", "--signal=TERM"),
    "requeue": lambda jobs: jobs.tell_one("scontrol", "requeue"),
    "cancel": lambda jobs: jobs.tell_one("scancel"),
    "node down": Jobs.lose_a_node,
    "two submissions": Jobs.submit}


def disturb(campaign: Campaign, submitter: Submitter, faults: int) -> None:
    """A sweep of two runs on the cluster, with so many faults at random moments; then it is let come to its end."""
    jobs = Jobs(campaign, submitter)
    jobs.submit()
    for _ in range(faults):
        campaign.inject(FAULTS, jobs, 4.0)
    jobs.finish()
