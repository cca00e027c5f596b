"""Probes measure why a method works. A run with a probe consists of the probe's units instead of samples.

A probe lists its units, measures the pending ones, and derives numbers, tables and figures from the records. Run folder,
resuming, the processes of a launch, progress and tracker are handled by `dflash_mcmc.runner`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, Self

from dflash_mcmc.components import Component
from dflash_mcmc.types import Summary, Unit, Work

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dflash_mcmc.config.schema import Config
    from dflash_mcmc.draft import Draft
    from dflash_mcmc.engine.batching.plan import TargetShape
    from dflash_mcmc.probe.columns import Table
    from dflash_mcmc.types import UnitCost


class Probe(Component):
    """Base class of probes. A subclass lists its units, measures pending units and summarises their records."""

    __slots__ = ()

    group = "probe"
    uses: ClassVar[tuple[str, ...]]
    """Groups that the records depend on, including `grader` if the probe grades. Only these groups are checked, loaded and
    part of the identity. A command line that sets a value of another group is refused."""
    runs_chains_alone: ClassVar[bool] = False
    """Whether the probe reads the target only through the chains that it runs, so that every engine can run it."""
    draws_with_stops: ClassVar[bool] = False
    """Whether all answers are drawn by chains of the configured engine, so that `dataset.stop` ends them."""
    unit: ClassVar[str]
    """The word for one unit in the progress bar and messages."""
    record_type: ClassVar[type | None] = None
    """A TypedDict of typing_extensions with the fields of a record, without problem and chain. Records are checked against it
    when they are written and read (`store/schema.py`; `store/schema.py` has bounds). A record with `skipped` may lack the
    fields. None checks only that numbers are finite."""

    @classmethod
    def columns(cls) -> Sequence[Table]:
        """The tables that the probe writes, and as `values` the values of its summary.

        Each column has its name, meaning and computation (`probe/columns.py`). The reference of the documentation shows the
        meanings.
        """
        return ()

    def sources(self) -> tuple[str, ...]:
        """Groups that the outputs of a run with this probe depend on."""
        return ("probe", *self.uses)

    def with_draft(self, draft: Draft) -> Self:
        """The probe with the values that follow from the chosen draft. They may decide which groups the probe uses."""
        return self

    @abstractmethod
    def units(self, config: Config) -> list[Unit]:
        """All requested units, in the order of the reports. This method loads no model."""

    def num_units(self, config: Config) -> int:
        """Number of requested units, which a dry run asks for. An override need not read the dataset."""
        return len(self.units(config))

    def draws_answers(self) -> bool:
        """Whether the target draws the answers, each of up to `dataset.max_new_tokens` tokens.

        If not, the probe reads the solutions of the dataset.
        """
        return True

    def check_target(self, target: TargetShape) -> None:
        """Checks that the probe can measure this target, before its weights are loaded. Raises UserError."""

    def expected_cost(self, config: Config) -> UnitCost | None:
        """Mean cost of a unit, for the lengths in `config.assumed`; None without an estimate. Loads no weights."""
        return None

    @abstractmethod
    def measure(self, config: Config, work: Work) -> Iterator[tuple[Unit, dict]]:
        """Measures each unit that `work` gives and yields its record when it is done, in any order.

        A record holds JSON values. Problem and chain are not in it, and the fields `failure` and `checksum` are reserved.
        Except for its times, a record depends only on the identity and the unit. It does not depend on other units, and its
        random numbers have their own keys. The method may be called several times, for example for a unit that must be
        measured alone. A UserError that refuses the configuration is raised before the first record.
        """

    @abstractmethod
    def summarise(self, config: Config, records: list[dict]) -> Summary:
        """Summarises the records, which are in the order of `units`. There is at least one record."""

    @abstractmethod
    def figures(self, config: Config, records: list[dict], summary: Summary) -> dict[str, Figure]:
        """Figures by name. Each is written as PNG and SVG. Use matplotlib's Figure, not pyplot, whose state is global."""


class ProblemProbe(Probe):
    """Base class of probes that measure every problem, once or once for each chain."""

    __slots__ = ()

    measures_chains: ClassVar[bool] = False
    """Whether a problem has `num_chains` units."""

    def units(self, config: Config) -> list[Unit]:
        """The units of a problem are adjacent, so that its prompt is read once."""
        return [Unit(problem.id, chain) for problem in config.dataset.problems() for chain in range(self._each(config))]

    def num_units(self, config: Config) -> int:
        """The number of problems is known for a published dataset, which is not read."""
        return config.dataset.num_chosen() * self._each(config)

    def _each(self, config: Config) -> int:
        return config.num_chains if self.measures_chains else 1
