"""Probes measure why a method works. A run with a probe consists of the probe's units instead of samples.

A probe lists its units, measures the pending ones, and derives numbers, tables and figures from the records. Run folder,
resuming, the processes of a launch, progress and tracker are handled by `dflash_mcmc.runner`.

A column of a table has its name, its meaning and its computation in one place. A row is computed from one case, mostly
`Observations`: values of tokens, blocks or answers, and what the row is called by. The documentation takes the meanings, and a
probe takes the rows, so that no column is without a meaning and no meaning without a column.
"""

import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from dflash_mcmc.chains import cost
from dflash_mcmc.components import Component, Settings, identity, name_of
from dflash_mcmc.draft import check_features, load_feature_drafter
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.forcing.answers import Answer, answers, check_source
from dflash_mcmc.statistics.estimates import Clusters, IntervalEstimate
from dflash_mcmc.types import Summary, Unit, UnitCost, Work

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure

    from dflash_mcmc.engine.batching import language_model, plan
    from dflash_mcmc.engine.speculative.drafter import DFlashDrafter

ABSENT = object()
"""The value of a column that a row does not have."""

Column = tuple[str, str] | tuple[str, str, Callable[..., object]]
"""A column: its name, its meaning with the unit, and its value: case -> a JSON value, an `IntervalEstimate` (columns `name`,
`name_low`, `name_high`), or `ABSENT`. Without a computation the value is `case[name]`."""


class Each(NamedTuple):
    """Columns that a row has once for each of several keys. Their values are functions of the case and of the key.

    Attributes:
        keys: case -> the texts that replace the part of the names in braces, which are the keys, or map to them.
        columns: the columns for one key.
    """

    keys: Callable[[Any], Mapping[str, Any] | Iterable[str]]
    columns: Sequence[Column]


class Observations:
    """The observations that a row is about, in clusters of problems, and what the row is called by.

    Args:
        columns: values of the observations by name; the column `problem` has their clusters. Intervals resample all of them.
            With a column `n` each observation has sums over so many.
        among: bool (observations,), those of the row; None for all.
        names: the names and other values of the row.

    Attributes:
        values: the columns as arrays.
    """

    def __init__(self, columns: Mapping[str, ArrayLike], among: np.ndarray | None = None, clusters: Clusters | None = None,
                 **names: Any):
        self.values, self.names = {name: np.asarray(values) for name, values in columns.items()}, names
        self.clusters = clusters or Clusters(self.values["problem"].tolist())
        self.among = np.ones(self.clusters.size, bool) if among is None else among

    def __getitem__(self, name: str) -> Any:
        """A name of the row, or else the mean of a column."""
        return self.names[name] if name in self.names else self.mean(name)

    def row(self, among: np.ndarray | None = None, **names: Any) -> "Observations":
        """The observations of a row that are among these, and its further names."""
        both = self.among if among is None else self.among & among
        return Observations(self.values, both, self.clusters, **{**self.names, **names})

    @property
    def n(self) -> int:
        """The number of the row's observations."""
        return round(self.values["n"][self.among].sum()) if "n" in self.values else int(self.among.sum())

    def mean(self, values: str | ArrayLike) -> IntervalEstimate:
        """The mean over the row's observations of a column, or of values of all observations."""
        return self.ratio(values, "n") if "n" in self.values else self.clusters.mean(self._of(values), self.among)

    def ratio(self, above: str | ArrayLike, below: str | ArrayLike) -> IntervalEstimate:
        """The sum of one column or value over the row's observations, divided by that of another."""
        return self.clusters.ratio(*(np.where(self.among, self._of(part), 0.0) for part in (above, below)))

    def quantiles(self, column: str, levels: Sequence[float]) -> list[IntervalEstimate]:
        """Quantiles of a column over all observations."""
        return self.clusters.quantiles(self.values[column], levels)

    def _of(self, values: str | ArrayLike) -> ArrayLike:
        return self.values[values] if isinstance(values, str) else values


class Table:
    """A table of a probe, or with the name `values` a part of the values of its summary.

    Args:
        name: its name, which is also the name of its CSV file.
        columns: its columns in their order.
    """

    def __init__(self, name: str, columns: Sequence[Column | Each]):
        self.name, self.columns = name, columns

    def row(self, case: Any) -> dict[str, Any]:
        """The row of a case."""
        row: dict[str, Any] = {}

        def add(name: str, value: object) -> None:
            if value is not ABSENT:
                row.update(value.columns(name) if isinstance(value, IntervalEstimate) else {name: value})

        for column in self.columns:
            if not isinstance(column, Each):
                add(column[0], column[2](case) if len(column) == 3 else case[column[0]])
                continue
            keys = column.keys(case)
            for text, key in (keys if isinstance(keys, Mapping) else {key: key for key in keys}).items():
                for name, _, made in column.columns:  # type: ignore[misc]  # each has a computation
                    add(f"{name[:name.index('{')]}{text}{name[name.rindex('}') + 1:]}", made(case, key))
        return row

    def rows(self, cases: Iterable[Any]) -> list[dict[str, Any]]:
        """A row for each case."""
        return [self.row(case) for case in cases]


def meanings_of(tables: Sequence[Table]) -> dict[str, dict[str, str]]:
    """The meaning of each column by its name, by table. Parts of a table, which share its name, are joined."""
    joined: dict[str, dict[str, str]] = {}
    for table in tables:
        for column in table.columns:
            joined.setdefault(table.name, {}).update(
                (each[0], each[1]) for each in (column.columns if isinstance(column, Each) else [column]))
    return joined


def measured(records: Iterable[dict]) -> list[dict]:
    """The records of what was measured."""
    return [record for record in records if "skipped" not in record]


def rounded(values: "np.ndarray | torch.Tensor", digits: int = 6) -> list[float]:
    """The values with so many significant digits, enough for a record."""
    return [float(f"{value:.{digits}g}") for value in values.tolist()]


# Values of most summaries, for cases with all `records`.
PROBLEMS = ("num_problems", "measured answers", lambda of: len(measured(of["records"])))
SKIPPED = ("num_skipped", "answers with nothing to measure, or with logits that are not numbers",
           lambda of: len(of["records"]) - len(measured(of["records"])))


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

    @classmethod
    def columns(cls) -> Sequence[Table]:
        """The tables that the probe writes, and as `values` the values of its summary: `ALL` of its module; see `Table`."""
        return getattr(sys.modules[cls.__module__], "ALL", ())

    def sources(self) -> tuple[str, ...]:
        """Groups that the outputs of a run with this probe depend on."""
        return ("probe", *self.uses)

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

    def check_target(self, target: "plan.TargetShape") -> None:
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

    def figures(self, config: Settings, records: list[dict], summary: Summary) -> "dict[str, Figure]":
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

        A sequence whose states of all layers exceed the memory that `forcing.sequences` allows is read more than once.
        """
        return cost.read_along(config)

    @abstractmethod
    def recorder(self, config: Settings, model: "language_model.LanguageModel", draft: "DFlashDrafter | None",
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
        return self.answers


def check_block(config: Settings, block_size: int) -> None:
    """Checks that an answer may have the tokens of a block. Raises ConfigError."""
    if config.dataset.max_new_tokens < block_size:
        raise ConfigError("dataset.max_new_tokens", config.dataset.max_new_tokens, f"at least {block_size}, a block")
