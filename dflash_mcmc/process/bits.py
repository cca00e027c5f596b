"""The same bits in every batch: the setting that float32 on a CPU needs besides shapes that are kept to (`engine/ladder.py`).

On Intel's processors MKL adds up a product in an order that depends on the number of its rows. The last bits of a sample would
then depend on the samples drawn with it. MKL's strict mode ("Conditional Numerical Reproducibility", oneMKL developer guide)
keeps one order; it costs no time here (LOG.md, "Bits"). On other processors MKL has no such mode; those measured need none.
"""

from __future__ import annotations

import os
from pathlib import Path

from dflash_mcmc.process import machine

VARIABLE = "MKL_CBWR"


def keep(cpuinfo: Path = machine.CPUINFO) -> None:
    """Sets MKL's strict mode for this process and those that it starts, on Intel's processors.

    It has to be called before the first product. A mode that is set already stays.
    """
    if machine.is_intel(cpuinfo):
        os.environ.setdefault(VARIABLE, "AUTO,STRICT")
