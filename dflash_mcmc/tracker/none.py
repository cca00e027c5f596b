"""No tracking."""

from dataclasses import dataclass

from dflash_mcmc.components import register
from dflash_mcmc.tracker import RunInfo, TrackedRun, Tracker


@register("tracker", "none")
@dataclass(slots=True, kw_only=True)
class NoTracker(Tracker):
    """Tracks nothing: the run folder has everything."""

    is_null = True

    def start(self, info: RunInfo) -> TrackedRun:
        return TrackedRun()
