"""Probes measure why a method works. A run with a probe consists of the probe's units instead of samples.

A probe lists its units, measures the pending ones, and derives numbers, tables and figures from the records. Run folder,
resuming, the processes of a launch, progress and tracker are handled by `dflash_mcmc.runner`.
"""

from __future__ import annotations

import importlib
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from dflash_mcmc.chains import cost
from dflash_mcmc.components import Component
from dflash_mcmc.draft import check_features, load_feature_drafter
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.fields import identity
from dflash_mcmc.forcing.answers import answers, check_source
from dflash_mcmc.registry import name_of
from dflash_mcmc.types import Summary, Unit, Work

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dflash_mcmc.draft import Draft
    from dflash_mcmc.engine.batching.language_model import LanguageModel
    from dflash_mcmc.engine.batching.plan import TargetShape
    from dflash_mcmc.engine.speculative.drafter import DFlashDrafter
    from dflash_mcmc.forcing.answers import Answer
    from dflash_mcmc.probe.columns import Table
    from dflash_mcmc.settings import Settings
    from dflash_mcmc.types import UnitCost


class Probe(Component):
    """Base class of probes. A subclass lists its units, measures pending units and summarises their records."""

    __slots__ = ()

    group = "probe"
    uses: ClassVar[tuple[str, ...]]
    """Groups that the records depend on, including `grader` if the probe grades. Only these groups are checked, loaded and
    part of the identity. A command line that sets a value of another group is refused."""
    reads_blend: ClassVar[bool] = False
    """Whether the records depend on `blend` too, if one is chosen. What it mixes in is read along given answers."""
    unit: ClassVar[str]
    """The word for one unit in the progress bar and messages."""
    record_type: ClassVar[type | None] = None
    """A TypedDict of typing_extensions with the fields of a record, without problem and chain, which are checked when records
    are written and read (`store/schema.py`). A record with `skipped` may lack them. None checks that numbers are finite."""
    tables_in: ClassVar[str] = ""
    """The module that has the probe's tables as `ALL`: its own, `__name__`, or one that is imported only for them."""

    @classmethod
    def columns(cls) -> Sequence[Table]:
        """The tables that the probe writes, and as `values` the values of its summary; see `probe/columns.py`."""
        return importlib.import_module(cls.tables_in).ALL if cls.tables_in else ()

    def sources(self) -> tuple[str, ...]:
        """Groups that the outputs of a run with this probe depend on."""
        return ("probe", *self.uses)

    def with_draft(self, draft: Draft) -> Self:
        """The probe with the values that follow from the chosen draft. They may decide which groups the probe uses."""
        return self

    @abstractmethod
    def units(self, config: Settings) -> list[Unit]:
        """All requested units, in the order of the reports. This method loads no model."""

    def num_units(self, config: Settings) -> int:
        """Number of requested units, which a dry run asks for. An override need not read the dataset."""
        return len(self.units(config))

    def draws_answers(self) -> bool:
        """Whether the target draws the answers, each of up to `dataset.max_new_tokens` tokens.

        If not, the probe reads the solutions of the dataset.
        """
        return True

    def check_target(self, target: TargetShape) -> None:
        """Checks that the probe can measure this target, before its weights are loaded. Raises UserError."""

    def expected_cost(self, config: Settings) -> UnitCost | None:
        """Mean cost of a unit, for the lengths in `config.assumed`; None without an estimate. Loads no weights."""
        return None

    @abstractmethod
    def measure(self, config: Settings, work: Work) -> Iterator[tuple[Unit, dict]]:
        """Measures each unit that `work` gives and yields its record when it is done, in any order.

        A record holds JSON values, without problem and chain; the fields `failure` and `checksum` are reserved. Except for its
        times, a record depends only on the identity and the unit: its random numbers have their own keys. The method may be
        called several times. A UserError that refuses the configuration is raised before the first record.
        """

    @abstractmethod
    def summarise(self, config: Settings, records: list[dict]) -> Summary:
        """Summarises the records, which are in the order of `units`. There is at least one record."""

    def figures(self, config: Settings, records: list[dict], summary: Summary) -> dict[str, Figure]:
        """Figures by name. Each is written as PNG and SVG. Use matplotlib's Figure, not pyplot, whose state is global."""
        return {}


class ProblemProbe(Probe):
    """Base class of probes that measure every problem, once or once for each chain."""

    __slots__ = ()

    measures_chains: ClassVar[bool] = False
    """Whether a problem has `num_chains` units."""

    def units(self, config: Settings) -> list[Unit]:
        """The units of a problem are adjacent, so that its prompt is read once."""
        return [Unit(problem.id, chain) for problem in config.dataset.problems() for chain in range(self._each(config))]

    def num_units(self, config: Settings) -> int:
        """The number of problems is known for a published dataset, which is not read."""
        return config.dataset.num_chosen() * self._each(config)

    def _each(self, config: Settings) -> int:
        return config.num_chains if self.measures_chains else 1


class ForcedProbe(ProblemProbe):
    """Base class of probes that teacher-force an answer to every problem, in the target and in a draft.

    A subclass defines `recorder`. An answer that cannot be measured has its reason as record. The answers are the target's
    own greedy ones, unless the subclass has another `source`.
    """

    __slots__ = ()

    uses = ("model", "draft", "dataset")
    unit = "problem"
    is_timed: ClassVar[bool] = True
    """Whether a record has the seconds since the record before it: of its drawing and its measurement."""

    def source(self) -> str:
        """The answers to teacher-force: `greedy`, or `gold` for the dataset's solutions."""
        return "greedy"

    def draws_answers(self) -> bool:
        """Whether the answers are the target's own."""
        return self.source() == "greedy"

    def check(self, config: Settings) -> None:
        """Checks that the dataset has the answers, and that the draft reads features if there is one. Raises ConfigError."""
        if not config.draft.is_null:
            check_features(config, f"probe={name_of(self)}")
        check_source(config, self.source())

    def expected_cost(self, config: Settings) -> UnitCost:
        """The cost of drawing the answer and reading it once. A draft adds a second reading and the drafting of each block.

        A sequence whose states of all layers exceed the memory that `forcing.layers` allows is read more than once.
        """
        return cost.read_along(config)

    @abstractmethod
    def recorder(self, config: Settings, model: LanguageModel, draft: DFlashDrafter | None,
                 work: Work) -> Callable[[Unit, Answer], dict]:
        """The function that measures an answer, of a block at least if the probe needs a draft. It may raise NotNumbers."""

    def measure(self, config: Settings, work: Work) -> Iterator[tuple[Unit, dict]]:
        """The record of each answer. Raises UserError for an answer that does not fit into the model's positions."""
        from dflash_mcmc.forcing.sequences import NotNumbers

        model = config.model.load(work.device)
        draft = None if config.draft.is_null else load_feature_drafter(config, model)
        record, begun = self.recorder(config, model, draft, work), time.perf_counter()
        for unit, answer in answers(config, model, work, self.source()):
            try:
                reason = answer.skipped(draft.num_drafted + 1 if draft and self.needs_draft else 1)
                found = {"skipped": reason} if reason else record(unit, answer)
            except NotNumbers as none:
                found = {"skipped": str(none)}
            ended = time.perf_counter()
            yield unit, {**found, "seconds": round(ended - begun, 6)} if self.is_timed else found
            begun = ended


@dataclass(kw_only=True)
class AnswerProbe(ForcedProbe):
    """Base class of such probes that choose between the dataset's solutions and greedy answers."""

    __slots__ = ()  # the field is a slot of the leaf

    answers: Literal["gold", "greedy"] = identity(
        "gold", "answers to teacher-force: gold = the dataset's solutions; greedy = the target's own greedy answers")

    def source(self) -> str:
        """See `ForcedProbe.source`."""
        return self.answers


def check_block(config: Settings, block_size: int) -> None:
    """Checks that an answer may have the tokens of a block. Raises ConfigError."""
    if config.dataset.max_new_tokens < block_size:
        raise ConfigError("dataset.max_new_tokens", config.dataset.max_new_tokens, f"at least {block_size}, a block")
