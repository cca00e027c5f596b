"""In a job: starts the worker, starts it again where it dies, and requeues the job where SLURM takes its place away.

A worker ends with 0 when nothing is left to claim, with 2 for a mistake of the user's, which no retry mends, and with 143 when
it was asked to stop. Everything else, and every signal, is a death. Worker and supervisor are apart, so that a worker can be
killed for its memory, and so that SLURM's requeue, which sends SIGTERM to all processes of the job, finds it ended.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from dflash_mcmc.errors import UserError
from dflash_mcmc.grid import cluster
from dflash_mcmc.grid.folder import Grid, SlurmJob, node
from dflash_mcmc.grid.launcher import Slurm
from dflash_mcmc.process.program import STOPPED, USER_ERROR
from dflash_mcmc.process.ranks import SHARD
from dflash_mcmc.store.records import record_files

ENDINGS = "DFLASH_MCMC_ENDINGS"
"""Environment variable: where processes of a launch note their ends, since the launcher has one exit code for all of them."""
_LAUNCHER = "accelerate.commands.launch"
GRACE_SHARE = 0.9
"""Of the grace time, for the worker; the rest is for the requeue."""
_NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_PDEATHSIG = 1
_POLL_SECONDS, _REPEAT_SECONDS, _SETTLE_SECONDS = 0.2, 2.0, 1.0
_LAST_LINES, _LAST_BYTES = 3, 8000
_BAR = re.compile(r"\d+%\|")
"""Of progress."""


@dataclass(slots=True)
class Supervisor:
    """What submitit calls in a job. Everything else is in the grid's folder."""

    folder: str
    token: str
    point: int
    shard: int
    shards: int
    launcher: Slurm
    """Of this job's submission: those of a resumed grid can differ."""
    _noted: list[signal.Signals] = field(default_factory=list)
    _worker: subprocess.Popen | None = None
    _over: bool = False

    def __call__(self) -> None:
        """Returns when nothing is left to draw; ends the process otherwise."""
        try:
            grid, job = self._grid(), SlurmJob(id=_job_id(), point=self.point, shard=self.shard, shards=self.shards)
        except UserError as error:
            _end(USER_ERROR, str(error))
        for number in (*_NOTICES, signal.SIGTERM):
            signal.signal(number, lambda number, frame: self._noted.append(signal.Signals(number)))
        _note(grid, job, "started", _restarts())
        while True:
            code = self._work(grid, job)
            if code == 0:
                _note(grid, job, "complete")
                return
            if code == USER_ERROR:
                self._give_up(grid, job, code, _last_lines(grid.log_file(job), 1))
            if self._asked_to_stop():
                self._stop(grid, job)
            reason, recorded = _reason(code, grid.log_file(job)), _recorded(grid, job)
            deaths = _deaths_since(grid.events(job), recorded)
            if deaths >= self.launcher.max_restarts:
                self._give_up(grid, job, 1, f"the worker died {deaths + 1} times without a new record, more than "
                                            f"max_restarts={self.launcher.max_restarts}; the last time: {reason}")
            _note(grid, job, "died", reason, recorded=recorded)
            print(f"the worker died and is started again: {reason}", file=sys.stderr, flush=True)

    def _grid(self) -> Grid:
        """Raises UserError."""
        folder = Path(self.folder)
        if not (folder / "grid.json").is_file() or (grid := Grid.read(folder)).token != self.token:
            raise UserError(f"paths.outputs: {folder} is not a folder that is shared with node {node()}; allowed: one that "
                            "every node of the partition sees under the same name")
        if not Path(__file__).resolve().is_relative_to((folder / "code").resolve()):
            raise UserError(f"hydra.launcher.python: Python on node {node()} has imported {Path(__file__)} in place of the "
                            f"code in {folder / 'code'}; allowed: a command that keeps PYTHONPATH and PYTHONSAFEPATH")
        return grid

    def _work(self, grid: Grid, job: SlurmJob) -> int:
        """Runs a worker to its end; what is noted meanwhile is told to it. Returns its exit code."""
        endings = grid.folder / "jobs" / f"{job.name}.{job.id}.endings"
        endings.unlink(missing_ok=True)
        with grid.log_file(job).open("ab") as log:
            self._worker = subprocess.Popen(
                _command(grid, job, self.launcher), stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=_as_worker,
                env={**os.environ, SHARD: f"{job.shard}/{job.shards}", ENDINGS: str(endings), **_launch(self.launcher)})
        self._wait(grid, job)
        _tell(grid, job, signal.SIGKILL)  # processes of a launch can outlive their launcher
        return _joined(self._worker.returncode, endings)

    def _wait(self, grid: Grid, job: SlurmJob) -> None:
        """Until the worker has ended; it is told what is noted, and killed where it does not heed it."""
        told, deadline = 0.0, None
        while self._worker.poll() is None:
            now = time.monotonic()
            if self._noted and now - told > _REPEAT_SECONDS:  # again: it may not have been ready for the first
                deadline = deadline or now + GRACE_SHARE * self.launcher.grace_seconds
                told = now
                self._look_whether_over(grid, job)  # now: SLURM may not wait for the worker's end
                _tell(grid, job, self._noted[0] if now < deadline else signal.SIGKILL)
                if now > deadline + _REPEAT_SECONDS:  # a launcher without its processes
                    self._worker.kill()
            time.sleep(_POLL_SECONDS)

    def _asked_to_stop(self) -> bool:
        """SLURM tells worker and supervisor at once, and the worker may be the first to end."""
        until = time.monotonic() + _SETTLE_SECONDS
        while not self._noted and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
        return bool(self._noted)

    def _stop(self, grid: Grid, job: SlurmJob) -> None:
        """Requeues the job where it is to go on, and ends."""
        heard = " and ".join(dict.fromkeys(number.name for number in self._noted))
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

    def _look_whether_over(self, grid: Grid, job: SlurmJob) -> None:
        """SIGTERM comes when SLURM ends the job, and requeues it or not; and ahead of that, while it lets the job run on."""
        if signal.SIGTERM not in self._noted or self._over:
            return
        try:
            state = cluster.state(job.id)
        except UserError:  # it does not answer: then it does not requeue either, and says why
            return
        if state != "RUNNING":
            self._over = True
            _note(grid, job, "stopped", f"SIGTERM: SLURM has ended the job ({state})")

    def _give_up(self, grid: Grid, job: SlurmJob, code: int, reason: str) -> None:
        _note(grid, job, "failed", reason)
        _end(code, reason)


def _note(grid: Grid, job: SlurmJob, event: str, reason: str = "", **more: int) -> None:
    """A job whose notes cannot be written, on a full disk, is requeued and restarted all the same."""
    try:
        grid.note(job, event, reason, **more)
    except UserError as error:
        print(f"{event}: {reason}; this could not be noted: {error}", file=sys.stderr, flush=True)


def _recorded(grid: Grid, job: SlurmJob) -> int:
    """Bytes that are recorded of the job's run: more of them are progress."""
    return sum(path.stat().st_size for path in record_files(Path(grid.points[job.point].folder)).values())


def _deaths_since(events: list[dict], recorded: int) -> int:
    """Deaths of the job with as many bytes recorded as now. One that kills is given up in the end, and so recorded."""
    return sum(event["event"] == "died" and event.get("recorded") == recorded for event in events)


def die_with_parent() -> None:
    """This process is killed when the one that started it dies: without a supervisor a worker would keep its claims.

    SLURM sees to it where it tracks processes by cgroups, and not everywhere else.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _as_worker() -> None:
    """Notices are ignored by launchers, which would die of them, and until the worker heeds them itself."""
    die_with_parent()
    for number in _NOTICES:
        signal.signal(number, signal.SIG_IGN)


def _arguments(grid: Grid, job: SlurmJob) -> list[str]:
    """How every worker's command ends."""
    return ["-m", "dflash_mcmc.grid.work", str(grid.folder), str(job.point)]


def _command(grid: Grid, job: SlurmJob, launcher: Slurm) -> list[str]:
    """The worker, or the launcher of several."""
    work = _arguments(grid, job)
    processes = launcher.num_processes
    if processes == 1:
        return [sys.executable, *work]
    # Port 0 takes a free one: two jobs can share a node.
    return [sys.executable, "-m", _LAUNCHER, "--multi_gpu", "--num_machines", "1", "--num_processes",
            str(processes), "--main_process_port", "0", "--mixed_precision", "no", "--dynamo_backend", "no", *work]


def _launch(launcher: Slurm) -> dict[str, str]:
    """Accelerate starts several processes on CPUs only where it is asked for several GPUs and told that there are none."""
    return {"ACCELERATE_USE_CPU": "true"} if launcher.num_processes > 1 and not launcher.gpus else {}


def _tell(grid: Grid, job: SlurmJob, number: signal.Signals) -> None:
    """Sends a signal to the job's workers, not to their launcher, which waits for them."""
    import psutil

    here = os.environ.get("SLURM_JOB_ID")
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
            if (command[-4:] == _arguments(grid, job) and _LAUNCHER not in command
                    and process.environ().get("SLURM_JOB_ID") == here):
                process.send_signal(number)
        except psutil.Error:  # it has just ended, or is another user's
            continue


def _joined(code: int, endings: Path) -> int:
    """The exit code for a launch: where all of its processes came to an end of their own, the one that matters."""
    if code or not endings.is_file():
        return code
    codes = {int(line) for line in endings.read_text().split()}
    return next((code for code in (USER_ERROR, STOPPED) if code in codes), 0)


def _reason(code: int, log: Path) -> str:
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"{how}: {_last_lines(log, _LAST_LINES)}"


def _last_lines(log: Path, count: int) -> str:
    """Of what a worker wrote, as one line."""
    content = log.read_bytes()[-_LAST_BYTES:].decode(errors="replace") if log.is_file() else ""
    lines = [" ".join(line.split()) for line in content.replace("\r", "\n").split("\n")]
    told = [line for line in lines if line and not _BAR.search(line)]
    return " | ".join(told[-count:]).removeprefix("error: ") or "no word"


def _job_id() -> str:
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ["SLURM_JOB_ID"]


def _restarts() -> str:
    count = int(os.environ.get("SLURM_RESTART_COUNT", 0))
    return f"after being requeued {count} time{'s' * (count != 1)}" if count else ""


def _end(code: int, line: str) -> None:
    print(f"error: {line}" if code != STOPPED else line, file=sys.stderr, flush=True)
    sys.exit(code)
