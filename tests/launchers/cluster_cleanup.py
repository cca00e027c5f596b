"""Removes a cluster: ends its processes by SIGKILL, then deletes its folder.

As a program (`python cluster_cleanup.py FOLDER`) it waits for a line or the end of its standard input, and then removes the
cluster. A cluster starts this program first. The cluster is therefore also removed if its test process is killed, or if its
start fails.
"""

import contextlib
import shutil
import sys
import time
from pathlib import Path

import psutil


def processes(folder: Path, node: str | None = None) -> list[psutil.Process]:
    """The processes of a cluster, or of one of its nodes.

    Daemons, jobs and clients have SLURM_CONF in their environment. Two helpers of the daemons overwrite their environment, but
    they keep the daemon's log open: slurmstepd, one per step of a job, and slurmscriptd.
    """
    return [process for process in psutil.process_iter() if _belongs(process, folder, node)]


def _belongs(process: psutil.Process, folder: Path, node: str | None) -> bool:
    # The process may have ended, or belong to another user.
    with contextlib.suppress(psutil.Error, OSError):
        environment = process.environ()
        if environment.get("SLURM_CONF") == str(folder / "slurm.conf"):
            return node is None or environment.get("SLURMD_NODENAME") == node
        if process.name().startswith(("slurmstepd", "slurmscriptd")):
            logs = f"{folder}/{f'slurmd.{node}' if node else '*'}.log"
            return any(Path(file.path).match(logs) for file in process.open_files())
    return False


def kill(folder: Path, node: str | None = None, seconds: float = 600) -> None:
    """Kills repeatedly until no process is left, because a process may start another in between. Raises TimeoutError."""
    end = time.monotonic() + seconds
    while left := processes(folder, node):
        if time.monotonic() > end:
            raise TimeoutError(f"these processes of the cluster in {folder} cannot be killed: {left}")
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=0.2)


def remove(folder: Path) -> None:
    """Kills all processes of a cluster and deletes its folder."""
    kill(folder)
    shutil.rmtree(folder)


if __name__ == "__main__":
    sys.stdin.readline()
    remove(Path(sys.argv[1]))
