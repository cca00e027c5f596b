"""The supervisor in a job: starts the worker, restarts it when it dies, and requeues the job when SLURM ends it early.

A worker ends with 0 when nothing is left to claim, with 2 for a mistake of the user, which no retry repairs, and with 143 when
it was asked to stop. Every other exit code and every signal is a death.

Worker and supervisor are separate processes, because a worker can be killed for its memory use. Also, a worker must have
ended before the job is requeued: the requeue sends SIGTERM to all processes of the job.
"""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from dflash_mcmc.config.schema import Slurm
from dflash_mcmc.errors import UserError, tell
from dflash_mcmc.grid import cluster
from dflash_mcmc.grid.folder import Grid, SlurmJob
from dflash_mcmc.process.machine import node
from dflash_mcmc.process.program import STOPPED, USER_ERROR
from dflash_mcmc.process.ranks import SHARD
from dflash_mcmc.process.worker import die_with_parent
from dflash_mcmc.store.files import open_to_append, read_regular
from dflash_mcmc.store.records import record_files

ENDINGS = "DFLASH_MCMC_ENDINGS"
"""Environment variable: the file in which the processes of a launch note their exit codes. The launcher returns only one."""
_LAUNCHER = "accelerate.commands.launch"
GRACE_SHARE = 0.9
"""The worker's share of the grace time; the rest is for the requeue."""
_NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
_POLL_SECONDS, _REPEAT_SECONDS, _SETTLE_SECONDS = 0.2, 2.0, 1.0
_LAST_LINES, _LAST_BYTES = 3, 8000
_BAR = re.compile(r"\d+%\|")
"""A progress bar in a log."""


@dataclass(slots=True)
class Supervisor:
    """The function that submitit calls in a job. Everything else is in the grid's folder."""

    folder: str
    token: str
    point: int
    shard: int
    shards: int
    launcher: Slurm
    """The fields of this job's submission. After a resume they can differ from the fields of the grid."""
    _noted: list[signal.Signals] = field(default_factory=list)
    _over: bool = False

    def __call__(self) -> None:
        """Returns when nothing is left to draw; ends the process otherwise."""
        try:
            array = os.environ.get("SLURM_ARRAY_JOB_ID")
            number = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ["SLURM_JOB_ID"]
            grid, job = self._grid(), SlurmJob(id=number, point=self.point, shard=self.shard, shards=self.shards)
        except UserError as error:
            _end(USER_ERROR, str(error))
        for notice in (*_NOTICES, signal.SIGTERM):
            signal.signal(notice, lambda number, frame: self._noted.append(signal.Signals(number)))
        count = int(os.environ.get("SLURM_RESTART_COUNT", 0))
        _note(grid, job, "started", f"after being requeued {count} time{'s' * (count != 1)}" if count else "")
        while True:
            try:
                code = self._work(grid, job)
            except UserError as error:
                self._give_up(grid, job, USER_ERROR, str(error))
            if code == 0:
                _note(grid, job, "complete")
                return
            if code == USER_ERROR:
                self._give_up(grid, job, code, _last_lines(grid.log_file(job), 1))
            # SLURM signals worker and supervisor at once, and the worker may end first.
            until = time.monotonic() + _SETTLE_SECONDS
            while not self._noted and time.monotonic() < until:
                time.sleep(_POLL_SECONDS)
            if self._noted:
                self._stop(grid, job)
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            reason = f"{how}: {_last_lines(grid.log_file(job), _LAST_LINES)}"
            files = record_files(Path(grid.points[job.point].folder), others=True).values()
            recorded = sum(path.lstat().st_size for path in files)  # in bytes: growth is progress
            # Recording that a sample was given up is progress, too: only deaths since then count.
            deaths = sum(event["event"] == "died" and event.get("recorded") == recorded for event in grid.events(job))
            if deaths >= self.launcher.max_restarts:
                self._give_up(grid, job, 1, f"the worker died {deaths + 1} times without a new record, more than "
                                            f"max_restarts={self.launcher.max_restarts}; the last time: {reason}")
            _note(grid, job, "died", reason, recorded=recorded)
            tell(f"the worker died and is started again: {reason}")

    def _stop(self, grid: Grid, job: SlurmJob) -> None:
        """Requeues the job, unless SLURM has ended it, and ends the process."""
        heard = " and ".join(dict.fromkeys(noted.name for noted in self._noted))
        self._look_whether_over(grid, job)
        if self._over:
            _end(STOPPED, "stopped: SLURM has ended the job")
        requeued = sum(event["event"] == "requeued" for event in grid.events(job))
        if requeued >= self.launcher.max_requeues:
            self._give_up(grid, job, 1, f"stopped by {heard}, and requeued {requeued} times before: "
                                        f"max_requeues={self.launcher.max_requeues}")
        _note(grid, job, "requeued", heard)
        try:
            cluster.requeue(job.id)
        except UserError as error:
            self._give_up(grid, job, 1, f"stopped by {heard}, and SLURM does not requeue it: {error}")
        _end(STOPPED, f"requeued: {heard}")

    def _grid(self) -> Grid:
        """The grid of this job. Raises UserError."""
        folder = Path(self.folder)
        if not (folder / "grid.json").is_file() or (grid := Grid.read(folder)).token != self.token:
            raise UserError(f"paths.outputs: {folder} is not a folder that is shared with node {node()}; allowed: one that "
                            "every node of the partition sees under the same name")
        if not Path(__file__).resolve().is_relative_to((folder / "code").resolve()):
            raise UserError(f"hydra.launcher.python: Python on node {node()} has imported {Path(__file__)} instead of the "
                            f"code in {folder / 'code'}; allowed: a command that keeps PYTHONPATH and PYTHONSAFEPATH")
        return grid

    def _work(self, grid: Grid, job: SlurmJob) -> int:
        """Runs a worker to its end and passes signals on to it. Returns its exit code."""
        endings = grid.folder / "jobs" / f"{job.name}.{job.id}.endings"
        endings.unlink(missing_ok=True)
        with open_to_append(grid.log_file(job)) as log:
            worker = subprocess.Popen(
                _command(grid, job, self.launcher), stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=_as_worker,
                env={**os.environ, SHARD: f"{job.shard}/{job.shards}", ENDINGS: str(endings), **_launch(self.launcher)})
        # Waits for the worker's end
        signalled, deadline = 0.0, None
        while worker.poll() is None:
            now = time.monotonic()
            if self._noted and now - signalled > _REPEAT_SECONDS:  # repeated: the worker may have missed the first one
                deadline = deadline or now + GRACE_SHARE * self.launcher.grace_seconds
                signalled = now
                self._look_whether_over(grid, job)  # here, since SLURM may not wait for the worker's end
                _signal(grid, job, self._noted[0] if now < deadline else signal.SIGKILL)
                if now > deadline + _REPEAT_SECONDS:  # the workers are dead, and their launcher hangs
                    worker.kill()
            time.sleep(_POLL_SECONDS)
        _signal(grid, job, signal.SIGKILL)  # processes of a launch can outlive their launcher
        return _joined(worker.returncode, endings)

    def _look_whether_over(self, grid: Grid, job: SlurmJob) -> None:
        """Notes whether SLURM has ended the job. SIGTERM alone does not show it: SLURM also sends it to jobs that continue."""
        if signal.SIGTERM not in self._noted or self._over:
            return
        try:
            state = cluster.state(job.id)
        except UserError:  # SLURM does not answer; the requeue will fail as well and report why
            return
        if state != "RUNNING":
            self._over = True
            _note(grid, job, "stopped", f"SIGTERM: SLURM has ended the job ({state})")

    def _give_up(self, grid: Grid, job: SlurmJob, code: int, reason: str) -> None:
        _note(grid, job, "failed", reason)
        _end(code, reason)


def _note(grid: Grid, job: SlurmJob, event: str, reason: str = "", **more: int) -> None:
    """Notes an event. If it cannot be written, for example on a full disk, requeues and restarts still happen."""
    try:
        grid.note(job, event, reason, **more)
    except UserError as error:
        print(f"{event}: {reason}; this could not be noted: {error}", file=sys.stderr, flush=True)


def _as_worker() -> None:
    """Ignores the signals of SLURM: launchers would die of them, and the worker sets its own handlers later.

    A worker without a supervisor would keep its claims. SLURM kills it itself only where it tracks processes by cgroups.
    """
    die_with_parent()
    for number in _NOTICES:
        signal.signal(number, signal.SIG_IGN)


def _arguments(grid: Grid, job: SlurmJob) -> list[str]:
    """The last arguments of every worker's command."""
    return ["-m", "dflash_mcmc.grid.work", str(grid.folder), str(job.point)]


def _command(grid: Grid, job: SlurmJob, launcher: Slurm) -> list[str]:
    """The command of the worker, or of the launcher of several workers."""
    work = _arguments(grid, job)
    processes = launcher.num_processes
    if processes == 1:
        return [sys.executable, *work]
    # Port 0 selects a free port: two jobs can share a node.
    return [sys.executable, "-m", _LAUNCHER, "--multi_gpu", "--num_machines", "1", "--num_processes",
            str(processes), "--main_process_port", "0", "--mixed_precision", "no", "--dynamo_backend", "no", *work]


def _launch(launcher: Slurm) -> dict[str, str]:
    """Environment of the launcher. Accelerate starts several CPU processes only with `--multi_gpu` and this variable."""
    return {"ACCELERATE_USE_CPU": "true"} if launcher.num_processes > 1 and not launcher.gpus else {}


def _signal(grid: Grid, job: SlurmJob, number: signal.Signals) -> None:
    """Sends a signal to the job's workers, but not to their launcher, which waits for them."""
    import psutil

    here = os.environ.get("SLURM_JOB_ID")
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
            if (command[-4:] == _arguments(grid, job) and _LAUNCHER not in command
                    and process.environ().get("SLURM_JOB_ID") == here):
                process.send_signal(number)
        except psutil.Error:  # the process has just ended, or belongs to another user
            continue


def _joined(code: int, endings: Path) -> int:
    """The exit code of a launch: the launcher's code if it is not 0, else the most important code that a process has noted."""
    if code or not endings.is_file():
        return code
    codes = {int(line) for line in endings.read_text().split()}
    return next((code for code in (USER_ERROR, STOPPED) if code in codes), 0)


def _last_lines(log: Path, count: int) -> str:
    """The last lines of a worker's output, as one line and without progress bars."""
    content = read_regular(log, max(0, log.stat().st_size - _LAST_BYTES) if log.is_file() else 0) or b""
    lines = [" ".join(line.split()) for line in content.decode(errors="replace").replace("\r", "\n").split("\n")]
    shown = [line for line in lines if line and not _BAR.search(line)]
    return " | ".join(shown[-count:]).removeprefix("error: ") or "no output"


def _end(code: int, line: str) -> None:
    tell(f"error: {line}" if code != STOPPED else line)
    sys.exit(code)
