"""The same bits in every batch: the setting that float32 on a CPU needs in addition to fixed shapes (`batching/ladder.py`).

On Intel processors MKL sums a product in an order that depends on the number of rows, so the last bits of a sample would
depend on the other samples in its batch. MKL's strict mode ("Conditional Numerical Reproducibility", oneMKL developer guide)
removes this dependence at no measured cost (notebook, "Bits"). Other processors do not need the mode.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

from dflash_mcmc.process import machine

VARIABLE = "MKL_CBWR"
VENDOR = "DFLASH_MCMC_VENDOR"
"""A switch for tests: the vendor of the processor (`GenuineIntel`, `AuthenticAMD`) instead of the one in /proc/cpuinfo."""


def keep(environment: MutableMapping[str, str] = os.environ, cpuinfo: Path = machine.CPUINFO) -> None:
    """Turns the strict mode on for this process and its children where the processor needs it.

    Call it before the first product. A mode that is already set stays.
    """
    vendor = environment.get(VENDOR)
    if vendor == "GenuineIntel" if vendor else machine.is_intel(cpuinfo):
        environment.setdefault(VARIABLE, "AUTO,STRICT")
