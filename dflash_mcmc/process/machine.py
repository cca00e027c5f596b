"""The machine: its processor, as Linux describes it, its name, and the same bits in every batch.

On Intel processors MKL sums a product in an order that depends on the number of rows, so the last bits of a sample would
depend on the other samples in its batch. MKL's strict mode ("Conditional Numerical Reproducibility", oneMKL developer guide)
removes this dependence at no measured cost (notebook, "Bits"). Fixed shapes are needed as well (`batching/cache.py`). Other
processors do not need the mode.
"""

import os
import platform
import re
import socket
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

CPUINFO = Path("/proc/cpuinfo")
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
VARIABLE = "MKL_CBWR"
VENDOR = "DFLASH_MCMC_VENDOR"
"""A switch for tests: the vendor of the processor (`GenuineIntel`, `AuthenticAMD`) instead of the one in /proc/cpuinfo."""


def cpu_model() -> str | None:
    """The model name of the processor, such as `AMD EPYC 7763`; None if the machine does not report it."""
    match = re.search(r"^model name\s*:\s*(.+)$", _described(CPUINFO), flags=re.MULTILINE)
    return " ".join(match[1].split()) if match else None


def cpu_name() -> str:
    """The architecture and, if known, the model. Reports use it to see that seconds come from different machines."""
    return " ".join(filter(None, [f"{platform.machine()} CPU", cpu_model()]))


def node() -> str:
    """Name of this machine in a cluster of SLURM, and elsewhere in the network."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _described(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # not Linux
        return ""


def free_memory(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Free bytes of the machine, or fewer where this process's control group (version 2), or one around it, leaves fewer.

    Cached files in a group count as free.
    """
    import psutil

    group = root / (named[1] if (named := re.search(r"^0::/(.*)$", _described(own), flags=re.MULTILINE)) else "")
    free = [psutil.virtual_memory().available]
    for folder in (each for each in (group, *group.parents) if each.is_relative_to(root)):
        limit, used = (_described(folder / f"memory.{name}").strip() for name in ("max", "current"))
        cached = sum(map(int, re.findall(r"^(?:in)?active_file (\d+)$", _described(folder / "memory.stat"), re.MULTILINE)))
        if limit.isdecimal() and used.isdecimal():
            free.append(max(0, int(limit) - max(0, int(used) - cached)))
    return min(free)


def keep_bits(environment: MutableMapping[str, str] = os.environ, cpuinfo: Path = CPUINFO) -> None:
    """Turns the strict mode on for this process and its children where the processor needs it.

    Call it before the first product. A mode that is already set stays.
    """
    vendor = environment.get(VENDOR)
    if vendor == "GenuineIntel" if vendor else "GenuineIntel" in _described(cpuinfo):
        environment.setdefault(VARIABLE, "AUTO,STRICT")


def spin_briefly(environment: MutableMapping[str, str] = os.environ) -> None:
    """Lets the threads of PyTorch's OpenMP (libgomp) sleep soon when they wait for one another. A mode that is set stays.

    Beside other programs a run otherwise stands still, and on quiet cores it gains nothing (notebook, "Threads that spin
    beside other work"). Call it before PyTorch is imported.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", "3000")


def keep_memory() -> None:
    """Lets the C library (glibc) keep freed memory for the next tensors, up to 1 GiB each. What the user has set stays.

    A logit of each token for each chain takes tens of megabytes. The library otherwise returns them at once, and asking the
    system for them again costs as much as the arithmetic on them (notebook, "Memory that is asked for again").
    """
    if not any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        library = _c_library()
        if hasattr(library, "mallopt"):  # musl and macOS have none
            library.mallopt(_MMAP_THRESHOLD, 2**30)
            library.mallopt(_TRIM_THRESHOLD, 2**31 - 1)


def return_memory() -> None:
    """Gives the system what `keep_memory` keeps. A cache that grows leaves holes too small for the next one (notebook)."""
    library = _c_library()
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def _c_library() -> Any:
    import ctypes  # not where the package is imported: Windows has another

    return ctypes.CDLL(None)
