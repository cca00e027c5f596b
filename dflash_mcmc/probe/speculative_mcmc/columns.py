"""What the tables of the speculative MCMC probe are computed from: its records by token and block, and speeds of proposals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from dflash_mcmc.probe.columns import ABSENT
from dflash_mcmc.probe.speculative_mcmc.weighing import chance_of_moves
from dflash_mcmc.statistics.intervals import Clusters, IntervalEstimate


class Proposal(NamedTuple):
    """A proposal and its kind of weights, which identify the rows of the tables."""

    name: str
    """A temperature of the draft, or `target`."""
    weights: str

    @property
    def is_target(self) -> bool:
        """Whether the target proposes, token by token."""
        return self.name == "target"


class Columns:
    """The measured records as columns over tokens and over blocks, with the problem of each token and block."""

    def __init__(self, records: list[dict]):
        self.records = [record for record in records if "skipped" not in record]
        sizes = [(record["problem"], record["blocks"], record["block_size"] - 1) for record in self.records]
        self.blocks = Clusters([problem for problem, count, _ in sizes for _ in range(count)])
        self.record = np.repeat(np.arange(len(sizes)), [count for _, count, _ in sizes])
        """The index of each block's record."""
        self.tokens = Clusters([problem for problem, count, n in sizes for _ in range(count * n)])
        self.drafted = self.records[0]["block_size"] - 1 if self.records else 0
        """Proposed tokens per block: all but the anchor."""
        self.number = np.array([number for _, count, _ in sizes for number in range(count)])
        self.temperatures = [name for name in self._names() if name != "target"]
        self.proposals = [Proposal(name, weights) for name in self._names() for weights in ("reference", "joint")
                          if weights in self.records[0]["proposals"][name]]

    def _names(self) -> list[str]:
        return list(self.records[0]["proposals"]) if self.records else []

    def of_tokens(self, name: str, column: str) -> np.ndarray:
        """The column `kl` or `tvd` at a draft temperature. The name `p` is for the unsharpened target."""
        return self._joined(lambda record: (record["p"] if name == "p" else record["proposals"][name])[column])

    def of_blocks(self, proposal: Proposal, column: str) -> np.ndarray:
        """A column of the simulated chains, one value per block."""
        return self._joined(lambda record: record["proposals"][proposal.name][proposal.weights][column])

    def _joined(self, values: Callable[[dict], list[float]]) -> np.ndarray:
        return np.array([value for record in self.records for value in values(record)])

    def products(self, name: str) -> np.ndarray:
        """The product of the tokens' acceptances 1 - TVD, for each block."""
        parts = [np.prod(1.0 - np.array(record["proposals"][name]["tvd"]).reshape(record["blocks"], -1), axis=1)
                 for record in self.records]
        return np.concatenate(parts) if parts else np.empty(0)


class Speed:
    """Proposals per second, and accepted proposals per second. Intervals come from one joint bootstrap over problems.

    A timed problem counts once, whatever its length. Acceptance is the mean over all blocks, timed or not.

    Args:
        rows: number of chains that proposed at once; timings of other batch sizes are left out.
    """

    def __init__(self, columns: Columns, rows: int):
        timed = [record if rows and record.get("timed_rows") == rows else {} for record in columns.records]
        self._problems, self._record = Clusters([record["problem"] for record in columns.records]), columns.record
        self._timed = np.array([bool(record) for record in timed], float)
        self._seconds = {kind: np.array([record.get(f"seconds_{kind}", 0.0) for record in timed])
                         for kind in ("target", "draft")}
        self.rows, self.num_timed = rows, int(self._timed.sum())

    def proposals(self, proposal: Proposal) -> IntervalEstimate:
        """Proposals per second."""
        return self._with_ends(self._problems.ratio(self._timed, self._of(proposal)))

    def against_target(self, proposal: Proposal) -> IntervalEstimate:
        """Speed relative to the target's proposals."""
        return self._with_ends(self._problems.ratio(self._seconds["target"], self._of(proposal)))

    def bought(self, proposal: Proposal, values: np.ndarray, here: np.ndarray | None = None) -> IntervalEstimate:
        """Mean of `values`, float64 (blocks,), over the blocks that `here` selects, times the proposals per second."""
        here = np.ones(len(values), bool) if here is None else here
        sums, counts = (np.bincount(self._record, part, len(self._timed)) for part in (values * here, here))

        def of(weights: np.ndarray) -> np.ndarray:
            with np.errstate(divide="ignore", invalid="ignore"):  # a resample may have no timed problems or no selected blocks
                return (weights @ sums) / (weights @ counts) * (weights @ self._timed) / (weights @ self._of(proposal))

        return self._with_ends(self._problems.statistic(of))

    def _with_ends(self, speed: IntervalEstimate) -> IntervalEstimate:
        """The estimate, without an interval if only one problem was timed: its seconds would be the same in all resamples."""
        return speed if self.num_timed > 1 else speed._replace(low=None, high=None)

    def _of(self, proposal: Proposal) -> np.ndarray:
        return self._seconds["target" if proposal.name == "target" else "draft"]


class Blocks:
    """The blocks of a proposal, or those that `here` selects.

    Args:
        label: what the row is named by, besides the proposal.
    """

    def __init__(self, columns: Columns, proposal: Proposal, label: Any = "", here: np.ndarray | None = None):
        self.columns, self.proposal, self.label = columns, proposal, label
        self.here = np.ones(columns.blocks.size, bool) if here is None else here
        self.clusters = columns.blocks if here is None else columns.blocks.among(here)

    @property
    def n(self) -> int:
        """Number of the blocks."""
        return int(self.here.sum())

    @property
    def num_tokens(self) -> object:
        """Number of tokens with distances. The target has no distance to itself."""
        return ABSENT if self.proposal.is_target else self.n * self.columns.drafted

    def values(self, column: str) -> np.ndarray:
        """A value of each block."""
        return self.columns.of_blocks(self.proposal, column)[self.here]

    def mean(self, column: str) -> IntervalEstimate:
        """Mean over the blocks."""
        return self.clusters.mean(self.values(column))

    def quantiles(self, percents: Sequence[float]) -> dict[str, IntervalEstimate]:
        """Percentiles of the simulated acceptance. Like all quantiles here they are observations."""
        estimates = self.clusters.quantiles(self.values("acceptance"), [percent / 100 for percent in percents])
        return {f"{percent}": estimate for percent, estimate in zip(percents, estimates, strict=True)}

    @cached_property
    def median(self) -> IntervalEstimate:
        """Median of the simulated acceptance."""
        return self.clusters.quantiles(self.values("acceptance"), [0.5])[0]

    def of_tokens(self, column: str) -> np.ndarray:
        """`kl` or `tvd` of each token."""
        return self.columns.of_tokens(self.proposal.name, column)

    def token_mean(self, column: str, of: Any = lambda values: values) -> object:
        """Mean over all tokens; absent for the target."""
        return ABSENT if self.proposal.is_target else self.columns.tokens.mean(of(self.of_tokens(column)))

    @property
    def kl(self) -> object:
        """Mean KL of a token of these blocks; absent for the target."""
        if self.proposal.is_target:
            return ABSENT
        return self.clusters.mean(self.of_tokens("kl").reshape(self.columns.blocks.size, -1)[self.here].mean(axis=1))

    def moves_at_median(self, steps: int, least: int) -> IntervalEstimate:
        """The document's probability of moves, from the median acceptance.

        The probability increases with the rate, so it maps the ends of the rate's interval to the ends of its own.
        """
        return self.median.mapped(partial(chance_of_moves, steps=steps, least=least))

    def moves_of_blocks(self, steps: int, least: int) -> IntervalEstimate:
        """The mean of the blocks' probabilities. Blocks differ, and not every accepted proposal is a move."""
        return self.clusters.mean(np.array([chance_of_moves(rate, steps, least) for rate in self.values("moved")]))
