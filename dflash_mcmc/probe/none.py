"""No probe: samples are drawn."""

from collections.abc import Iterator
from dataclasses import dataclass

from dflash_mcmc.components import Settings, register
from dflash_mcmc.probe import Probe, Summary, Unit, Work


@register("probe", "none")
@dataclass(slots=True, kw_only=True)
class NoProbe(Probe):
    """No probe: samples are drawn."""

    uses = ("model", "draft", "blend", "sampler", "decoder", "dataset", "grader")
    unit = "sample"
    is_null = True

    def sources(self) -> tuple[str, ...]:
        """The groups that samples depend on. The probe itself is not part of the identity."""
        return self.uses

    def units(self, config: Settings) -> list[Unit]:
        return []

    def measure(self, config: Settings, work: Work) -> Iterator[tuple[Unit, dict]]:
        return iter(())

    def summarise(self, config: Settings, records: list[dict]) -> Summary:
        return Summary({}, {}, {})
