"""A real, private SLURM cluster on this machine: munged, MariaDB and slurmdbd, slurmctld, and a slurmd for each node.

    from tests.launchers.cluster import Cluster

    with Cluster(nodes=4, cpus=2) as cluster:                     # every node is idle
        job = cluster.submit("python -m ...", "--partition=main", "--mem=500")    # sbatch --wrap; else run("sbatch", ...)
        cluster.wait_until(lambda: cluster.state(job) == "RUNNING")
        cluster.run("scancel", "--signal=USR2", str(job))         # any command of SLURM; raises an error if it fails
        cluster.kill_node("n2")                                   # it crashes with its jobs, which are requeued
        cluster.start_node("n2")
        cluster.wait_until(lambda: cluster.states(job) == ["NODE_FAIL", "COMPLETED"])   # each start of the job
        subprocess.Popen([...], env=cluster.environment)          # programs that submit jobs themselves

Nodes are n1, n2, ... Partitions: `main` (preempted by `high`: signal, 10 s of grace, requeue), `high`, `short` (1 minute).
A requeued job starts again after 6 s. Tests use the fixture `slurm`: one cluster of 4 nodes for all tests. After each test its
jobs are cancelled and all nodes are started again. These tests have the marker `slurm` and are run by `make test-slurm`.

slurmctld counts time limits in minutes and checks them every 30 s, so send signals with scancel. The accounting (`states`) is
delayed by seconds, so wait for it. Node names do not resolve to addresses.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from tests.launchers import cluster_cleanup, cluster_settings
from tests.launchers.cluster_packages import SEARCH_PATH, install
from tests.processes import HANG

LONGEST_FOLDER = 60
"""Maximal length of the folder's path. Paths of sockets in it must be shorter than 108 characters, a limit of the kernel."""


class ClusterError(Exception):
    """A daemon, or a command given to SLURM, failed."""


class Job(NamedTuple):
    """A row of squeue, which also lists a job for an hour after its end."""

    id: str  # with the index of a job of an array: 12_3
    state: str
    name: str
    partition: str
    node: str
    reason: str


class Cluster:
    """A cluster with accounting, started by `with` (or `start`) and always removed at its end (or by `stop`).

    `cpus`, `memory_mb` and `gpus` are the resources of each node that SLURM schedules. They may exceed those of the machine.
    GPUs are only scheduled (CUDA_VISIBLE_DEVICES is set), and cannot compute. `extra_lines` are appended to slurm.conf.
    Raises CannotInstall if SLURM is missing and cannot be installed, and ClusterError if a daemon does not start.
    """

    def __init__(self, nodes: int = 4, cpus: int = 2, memory_mb: int = 16_000, gpus: int = 0, extra_lines: Sequence[str] = ()):
        self.nodes = [f"n{number}" for number in range(1, nodes + 1)]
        self._shape = {"nodes": nodes, "cpus": cpus, "memory_mb": memory_mb, "gpus": gpus, "lines": tuple(extra_lines)}
        self._daemons: dict[str, subprocess.Popen] = {}
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self) -> None:
        """Installs missing packages, starts every daemon and waits until each node is idle."""
        install()
        with contextlib.ExitStack() as undo:
            undo.callback(self.stop)
            self._make_folder()
            self._start_munge()
            self._start_accounting()
            self._start_daemon("slurmctld", "slurmctld", "-D", "-f", self._conf)
            self._wait_for_daemon("slurmctld", "scontrol", "ping")
            for name in self.nodes:
                self._start_slurmd(name)
            self._wait_until_idle()
            undo.pop_all()

    def stop(self) -> None:
        """Kills every process of the cluster, including its jobs, and deletes its folder. It may be called repeatedly."""
        self._exit.close()

    def run(self, *command: str, timeout: float = HANG, **options: Any) -> subprocess.CompletedProcess:
        """Runs a command with the cluster's environment; `options` go to subprocess.run.

        If the command fails, raises ClusterError with its output, unless `check=False`.
        """
        check = options.pop("check", True)
        answer = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=timeout, **options)
        if check and answer.returncode:
            raise ClusterError(f"{' '.join(command)}: exit code {answer.returncode}: {answer.stderr.strip()}")
        return answer

    def submit(self, commands: str, *options: str) -> int:
        """Submits a job that runs `commands` in a shell with sbatch and its `options`, and returns its number."""
        quiet = [] if any(option.startswith("--output") for option in options) else ["--output=/dev/null"]
        return int(self.run("sbatch", "--parsable", *quiet, *options, f"--wrap={commands}").stdout)

    def jobs(self) -> list[Job]:
        """Every job that waits, runs, or ended within the hour."""
        rows = self.run("squeue", "--noheader", "--array", "--states=all", "--format=%i|%T|%j|%P|%N|%r").stdout
        return [Job(*row.split("|")) for row in rows.splitlines()]

    def live(self) -> list[str]:
        """Ids of the jobs that wait or run, including requeued jobs."""
        ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
        return [job.id for job in self.jobs() if job.state not in ends]

    def state(self, job: int | str) -> str:
        """State of a job by slurmctld: PENDING, RUNNING, COMPLETED... Raises KeyError for an unknown job."""
        return {row.id: row.state for row in self.jobs()}[str(job)]

    def states(self, job: int | str) -> list[str]:
        """The accounting's last state of each start of a job, in order: ["REQUEUED", "COMPLETED"]. Delayed by seconds."""
        rows = self.run("sacct", "--noheader", "--parsable2", "--allocations", "--duplicates", "--format=State",
                        f"--jobs={job}")
        return [row.split()[0] for row in rows.stdout.splitlines()]  # "CANCELLED by 0"

    def node_states(self) -> dict[str, str]:
        """State of each node: idle, allocated, mixed, down... A * after the state marks a node that does not answer."""
        rows = self.run("sinfo", "--noheader", "--Node", "--format=%N %T").stdout.splitlines()
        return dict(row.split() for row in rows)

    def kill_node(self, name: str, noticed: bool = True) -> None:
        """A node crashes: its slurmd and all processes of its jobs die at once.

        With `noticed`, slurmctld is informed at once; otherwise it notices after 15 to 20 s. It then requeues the jobs.
        """
        cluster_cleanup.kill(self.folder, name)
        self._daemons[f"slurmd.{name}"].wait()
        if noticed:
            self.run("scontrol", "update", f"nodename={name}", "state=down", "reason=crashed")

    def start_node(self, name: str) -> None:
        """Starts a killed node again and waits until jobs can run on it."""
        self._start_slurmd(name)
        usable = {"idle", "mixed", "allocated", "completing"}
        self.wait_until(lambda: self.node_states()[name] in usable, f"node {name} to be usable")

    def reset(self) -> None:
        """Cancels every job and starts every node that is down. It runs after every test, also after a failed one."""
        self.run("scancel", "--full", f"--user={cluster_settings.user()}")
        for name, state in self.node_states().items():
            if self._daemons[f"slurmd.{name}"].poll() is not None:
                self._start_slurmd(name)
            elif state.startswith(("down", "drain")):
                self.run("scontrol", "update", f"nodename={name}", "state=resume")
        self._wait_until_idle()

    def _wait_until_idle(self) -> None:
        self.wait_until(self._is_idle, "every node to be idle")

    def _is_idle(self) -> bool:
        for name in self._daemons:
            self._check(name)
        return set(self.node_states().values()) == {"idle"}

    def wait_until(self, predicate: Callable[[], Any], what: str = "the condition", seconds: float = HANG) -> Any:
        """Polls until the predicate is true, and returns its value. Raises TimeoutError that shows the nodes and jobs."""
        end = time.monotonic() + seconds
        while not (value := predicate()):
            if time.monotonic() > end:
                raise TimeoutError(f"waited {seconds} s for {what}: {self.node_states()}, {self.jobs()}")
            time.sleep(0.1)
        return value

    def _make_folder(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="sl.")).resolve()
        guard = self._start_guard()
        self._exit.callback(self._remove, guard)
        if len(str(self.folder)) > LONGEST_FOLDER:
            raise ClusterError(f"{self.folder} has more than {LONGEST_FOLDER} characters: set TMPDIR to a shorter path")
        self._conf = str(self.folder / "slurm.conf")
        # If the test itself runs in a job, the cluster must not inherit the variables of that job.
        foreign = ("SLURM", "SBATCH_", "SRUN_", "SUBMITIT_", "SALLOC_")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        self.environment = {**inherited, "SLURM_CONF": self._conf, "PATH": SEARCH_PATH}
        self._ports, claim = cluster_settings.claim_ports()
        self._exit.callback(claim.close)
        (self.folder / "state").mkdir()
        version = cluster_settings.slurm_version(self.run("slurmctld", "-V").stdout)
        cluster_settings.write_files(self.folder, self._ports, version=version, **self._shape)

    def _start_guard(self) -> subprocess.Popen:
        """Starts the program that removes the cluster when `stop` asks for it, or when this process ends."""
        return subprocess.Popen([sys.executable, cluster_cleanup.__file__, str(self.folder)], stdin=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True, start_new_session=True)

    def _remove(self, guard: subprocess.Popen) -> None:
        _, errors = guard.communicate("\n", timeout=HANG)
        if guard.returncode:
            raise ClusterError(f"the cluster in {self.folder} could not be removed: {errors.strip()}")
        for daemon in self._daemons.values():
            daemon.wait()
        self._daemons.clear()

    def _start_munge(self) -> None:
        folder = self.folder
        self._start_daemon("munged", "munged", "--foreground", "--force", "--num-threads=2", f"--key-file={folder}/munge.key",
                           f"--socket={folder}/munge.sock", f"--pid-file={folder}/munged.pid",
                           f"--seed-file={folder}/munge.seed")
        self._wait_for_daemon("munged", "munge", f"--socket={folder}/munge.sock", "--no-input")

    def _start_accounting(self) -> None:
        options = f"--defaults-file={self.folder}/database.cnf"
        self.run("mariadb-install-db", options, "--auth-root-authentication-method=normal", "--skip-test-db")
        self._start_daemon("mariadbd", "mariadbd", options, f"--init-file={self.folder}/first.sql")
        self._wait_for_daemon("mariadbd", "sh", "-c", f"test -S {self.folder}/database.sock")
        self._start_daemon("slurmdbd", "slurmdbd", "-D")
        self._wait_for_daemon("slurmdbd", "sacctmgr", "--noheader", "show", "cluster")
        self.run("sacctmgr", "--immediate", "add", "cluster", "local")

    def _start_slurmd(self, name: str) -> None:
        self._start_daemon(f"slurmd.{name}", "slurmd", "-D", "-N", name, "-f", self._conf)

    def _start_daemon(self, name: str, *command: str) -> None:
        with self._output(name).open("a") as output:
            environment = {**self.environment, "SLURMD_NODENAME": name.removeprefix("slurmd.")}
            self._daemons[name] = subprocess.Popen(command, env=environment, cwd=self.folder, stdin=subprocess.DEVNULL,
                                                   stdout=output, stderr=output, start_new_session=True)

    def _output(self, name: str) -> Path:
        return self.folder / f"{name}.out"

    def _wait_for_daemon(self, name: str, *question: str) -> None:
        """Repeats a command until it succeeds, which means that the daemon answers."""
        end = time.monotonic() + 60
        while (answer := self.run(*question, check=False)).returncode:
            self._check(name)
            if time.monotonic() > end:
                raise ClusterError(f"{name} does not answer: {answer.stderr.strip()}\n{self._output(name).read_text()}")
            time.sleep(0.05)

    def _check(self, name: str) -> None:
        ended = self._daemons[name].poll()
        if ended is not None:
            raise ClusterError(f"{name} ended with exit code {ended}:\n{self._output(name).read_text()}")
