"""The rate of a run, in the unit in which dry runs ask for it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from dflash_mcmc.errors import note
from dflash_mcmc.process import ranks


class Rate:
    """The token-forwards per second of this process, since the object was made. Loading the model is not in it.

    It is the number of `hardware.tokens_per_second`.
    """

    def __init__(self):
        self._begun, self._forwards = time.monotonic(), 0.0

    def add(self, record: Mapping[str, object]) -> None:
        """Counts a record that this process has made. Units of probes have no token-forwards."""
        forwards = record.get("token_forwards")
        self._forwards += forwards if isinstance(forwards, (int, float)) else 0.0

    def text(self) -> str:
        """The rate in words; empty if no record had token-forwards."""
        if not self._forwards:
            return ""
        rate = self._forwards / (time.monotonic() - self._begun)
        of = " of this process" if ranks.world_size() > 1 else ""
        return f"{rate:,.0f} token-forwards per second{of}; hardware.tokens_per_second={rate:.0f} gives a dry run its hours"

    def tell(self, folder: Path) -> None:
        """Prints the rate of a run to standard error, beside its bar, if it is known."""
        if shown := self.text():
            note(f"{folder}: {shown}")
