"""The machine's processor, as Linux describes it."""

from __future__ import annotations

import platform
import re
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def cpu_model(cpuinfo: Path = CPUINFO) -> str | None:
    """The model name of the processor, such as `AMD EPYC 7763`; None if the machine does not report it."""
    found = re.search(r"^model name\s*:\s*(.+)$", _described(cpuinfo), flags=re.MULTILINE)
    return " ".join(found[1].split()) if found else None


def cpu_name() -> str:
    """The architecture and, if known, the model. Reports use it to see that seconds come from different machines."""
    return " ".join(filter(None, [f"{platform.machine()} CPU", cpu_model()]))


def is_intel(cpuinfo: Path = CPUINFO) -> bool:
    """Whether the processor is Intel's; False where that is not known."""
    return "GenuineIntel" in _described(cpuinfo)


def _described(cpuinfo: Path) -> str:
    try:
        return cpuinfo.read_text()
    except OSError:  # not Linux
        return ""
