"""Probes: measurements that explain why a method works. A run with a probe measures units and draws no samples."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from dflash_mcmc.component import Component

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dflash_mcmc.config.schema import Config
    from dflash_mcmc.run.probing import Summary, Unit, Work


class Probe(Component):
    """Base class of probes. A leaf says what its units are, measures pending units and summarises their records.

    The run folder, resuming, the processes of a launch, progress and the tracker are the run's business.
    """

    __slots__ = ()

    group = "probe"
    uses: ClassVar[tuple[str, ...]]
    """Groups that the records depend on, `grader` too where the probe grades. Only these are checked, loaded and part of the
    identity; a value given on the command line for another group is refused."""
    unit: ClassVar[str]
    """Name of a unit."""

    def sources(self) -> tuple[str, ...]:
        """Groups that the outputs of a run with this probe depend on."""
        return ("probe", *self.uses)

    @abstractmethod
    def units(self, config: Config) -> list[Unit]:
        """All units that are asked for, in the order of the reports. Loads no model."""

    @abstractmethod
    def measure(self, config: Config, work: Work) -> Iterator[tuple[Unit, dict]]:
        """Yields the record of each unit that `work` gives, in any order: JSON values, without problem and chain.

        A record but for its times is a function of identity and unit alone: its random numbers have keys of their own.
        A UserError is raised before the first record.
        """

    @abstractmethod
    def summarise(self, config: Config, records: list[dict]) -> Summary:
        """The summary, from records alone. They come in the order of `units`; there is at least one."""

    @abstractmethod
    def figures(self, config: Config, records: list[dict], summary: Summary) -> dict[str, Figure]:
        """Figures by name: each becomes a PNG and an SVG. Made with matplotlib's Figure, since pyplot's state is global."""
