"""The commands of SLURM. Every failure is an error of one line."""

import re
import shutil
import signal
import subprocess
from collections.abc import Collection, Iterable, Sequence

from dflash_mcmc.errors import ConfigError, UserError, did_you_mean

_SECONDS = 60
_OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED")
"""States of ended jobs, which SLURM still lists for some minutes."""
_ELSEWHERE = "allowed: a machine that submits to a cluster, or hydra/launcher=basic, which runs here"
_NO_CLUSTER = "Could not establish a configuration source"
"""What SLURM's commands say where they are installed and belong to no cluster."""
_MOST_ARRAY = 1000
"""Size of an array if SLURM does not report its limit: one less than its default for MaxArraySize."""


def is_here() -> bool:
    """Whether this machine has SLURM's commands."""
    return shutil.which("squeue") is not None


def ask(*command: str, ignored: Sequence[signal.Signals] = ()) -> str:
    """The output of a command of SLURM. Raises UserError with SLURM's message in one line.

    Args:
        ignored: signals that do not end the command.
    """
    def ignore() -> None:
        for signum in ignored:
            signal.signal(signum, signal.SIG_IGN)

    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS,
                              preexec_fn=ignore if ignored else None)
    except FileNotFoundError as error:
        raise UserError(f"hydra/launcher: slurm needs the commands of SLURM, and {command[0]} is not on this machine; "
                        f"{_ELSEWHERE}") from error
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{command[0]}: SLURM has not answered for {_SECONDS} seconds; try again") from error
    if done.returncode and _NO_CLUSTER in done.stderr:
        raise UserError(f"hydra/launcher: slurm needs a cluster, and {command[0]} finds no slurm.conf on this machine "
                        f"(SLURM_CONF, or the folder of SLURM's configuration); {_ELSEWHERE}")
    if done.returncode:
        raise UserError(f"{command[0]}: {one_line(done.stderr) or f'exit code {done.returncode}'}")
    return done.stdout


def one_line(complaint: str) -> str:
    """SLURM's message about a mistake, without its prefixes."""
    lines = [re.sub(r"^(sbatch|srun|scontrol|squeue|sinfo|scancel|sacct): (error: )?", "", line.strip())
             for line in complaint.splitlines()]
    return "; ".join(dict.fromkeys(line for line in lines if line))


def check(partition: str | None) -> None:
    """Raises UserError if jobs cannot be submitted from this machine or to this partition."""
    if shutil.which("sbatch") is None:
        ask("sbatch", "--version")
    partitions = sorted(set(ask("sinfo", "--all", "--noheader", "--format=%R").split()))
    for name in (partition or "").split(",") if partition else []:
        if name not in partitions:
            raise ConfigError("hydra.launcher.partition", name,
                              f"null, or {', '.join(partitions)}{did_you_mean(name, partitions)}")


def largest_array() -> int:
    """Largest number of jobs in an array."""
    match = re.search(r"MaxArraySize\s*=\s*(\d+)", ask("scontrol", "show", "config"))
    return max(1, int(match[1]) - 1) if match else _MOST_ARRAY


def live(ids: Collection[str]) -> dict[str, str]:
    """States of the jobs that are waiting or running, by id. Raises UserError."""
    if not ids:
        return {}
    try:
        listed = ask("squeue", "--noheader", "--array", "--jobs", ",".join(_whole(ids)), "--format=%i|%T")
    except UserError as error:
        if "Invalid job id" in str(error):  # SLURM has forgotten all of them
            return {}
        raise
    states = dict(line.strip().split("|") for line in listed.splitlines() if "|" in line)
    return {id: state for id, state in states.items() if id in ids and state not in _OVER}


def ended(ids: Collection[str]) -> dict[str, tuple[str, str]]:
    """(state and exit code, node) of jobs from SLURM's accounting, by id; empty if the cluster has no accounting."""
    if not ids:
        return {}
    try:
        listed = ask("sacct", "--noheader", "--parsable2", "--allocations", "--jobs", ",".join(_whole(ids)),
                     "--format=JobID,State,ExitCode,NodeList")
    except UserError:
        return {}
    ends = {}
    for id, state, code, nodes in (line.split("|") for line in listed.splitlines() if line.count("|") == 3):
        if id in ids:
            ends[id] = (f"{state.split()[0]} {code}", nodes)
    return ends


def state(id: str) -> str:
    """State of one job. Raises UserError."""
    match = re.search(r"JobState=(\S+)", ask("scontrol", "show", "job", id))
    return match[1] if match else "UNKNOWN"


def requeue(id: str) -> None:
    """Puts a running job back into the queue, which ends the job. Raises UserError."""
    # This command runs in the job. A signal to all processes of the job therefore reaches it, too.
    ask("scontrol", "requeue", id, ignored=[signal.SIGTERM])


def cancel(ids: Iterable[str]) -> None:
    """Cancels jobs. Raises UserError."""
    ids = list(ids)
    for first in range(0, len(ids), 500):
        ask("scancel", *ids[first : first + 500])


def _whole(ids: Iterable[str]) -> Sequence[str]:
    """The ids without their array indices. For such an id SLURM reports all jobs of the array."""
    return sorted({id.partition("_")[0] for id in ids})
