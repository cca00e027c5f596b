"""The same bits in every batch: what float32 on a CPU needs besides shapes that are kept to (`engine/ladder.py`).

On Intel's processors MKL adds up a product in an order that depends on the number of its rows, so that a sample would hang on
what is drawn beside it, in its last bits. MKL's strict mode ("Conditional Numerical Reproducibility", oneMKL developer guide)
does not; it costs no time here (LOG.md, "Bits"). On other processors MKL has no such mode, and where measured needs none.
"""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "MKL_CBWR"
_CPUINFO = Path("/proc/cpuinfo")


def keep(cpuinfo: Path = _CPUINFO) -> None:
    """Asks MKL for it, in this process and those it starts. Comes before the first product; what is set already stays."""
    try:
        intel = "GenuineIntel" in cpuinfo.read_text()
    except OSError:  # no Linux: nothing is known of the processor
        return
    if intel:
        os.environ.setdefault(VARIABLE, "AUTO,STRICT")
