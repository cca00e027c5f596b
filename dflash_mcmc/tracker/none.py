"""No tracking."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dflash_mcmc.registry import register
from dflash_mcmc.tracker import RunInfo, Tracker


@register("tracker", "none")
@dataclass(slots=True, kw_only=True)
class NoTracker(Tracker):
    """Tracks nothing: the run folder has everything."""

    is_null = True

    def start(self, info: RunInfo) -> NoTracker:
        return self

    def log(self, metrics: dict, step: int) -> None:
        """Does nothing."""

    def summary(self, metrics: dict, records: list[dict]) -> None:
        """Does nothing."""

    def publish(self, folder: Path, tables: dict[str, list[dict]], figures: list[Path]) -> None:
        """Does nothing."""

    def preempt(self) -> None:
        """Does nothing."""

    def finish(self, exit_code: int) -> None:
        """Does nothing."""
