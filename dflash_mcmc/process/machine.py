"""The machine: its processor, as Linux describes it, and the names of its devices."""

from __future__ import annotations

import os
import platform
import re
import socket
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
_GPUS = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "CUDA_VISIBLE_DEVICES")
"""Environment variables with the numbers or names of the visible GPUs; the first one that is set counts."""


def cpu_model(cpuinfo: Path = CPUINFO) -> str | None:
    """The model name of the processor, such as `AMD EPYC 7763`; None if the machine does not report it."""
    found = re.search(r"^model name\s*:\s*(.+)$", _described(cpuinfo), flags=re.MULTILINE)
    return " ".join(found[1].split()) if found else None


def cpu_name() -> str:
    """The architecture and, if known, the model. Reports use it to see that seconds come from different machines."""
    return " ".join(filter(None, [f"{platform.machine()} CPU", cpu_model()]))


def node() -> str:
    """Name of this machine in a cluster of SLURM, and elsewhere in the network."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def place_of(device: str) -> str:
    """A name of a device among all machines that share a run: `n1/cpu`, `n1/gpu 3`. Asks the environment, not the device.

    A job of SLURM sees its GPUs as 0, 1, ... where the cluster hides the others. Its environment has their numbers.
    """
    if not device.startswith("cuda"):
        return f"{node()}/{device}"
    index = int(device.partition(":")[2] or 0)
    given = next(filter(None, map(os.environ.get, _GPUS)), "").split(",")
    return f"{node()}/gpu {given[index] if index < len(given) and given[index] else index}"


def is_intel(cpuinfo: Path = CPUINFO) -> bool:
    """Whether the processor is Intel's; False where that is not known."""
    return "GenuineIntel" in _described(cpuinfo)


def _described(cpuinfo: Path) -> str:
    try:
        return cpuinfo.read_text()
    except OSError:  # not Linux
        return ""
