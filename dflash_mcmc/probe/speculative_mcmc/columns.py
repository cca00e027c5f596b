"""The records of the speculative MCMC probe as columns over tokens and blocks, and the speeds of the two proposals."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dflash_mcmc.statistics.intervals import Clusters, IntervalEstimate


class Proposal(NamedTuple):
    """A proposal and its kind of weights, which identify the rows of the tables."""

    name: str
    """A temperature of the draft, or `target`."""
    weights: str

    def columns(self) -> dict[str, object]:
        """The first columns of its rows."""
        target = self.name == "target"
        return {"proposal": "target" if target else "draft", "temperature": None if target else float(self.name),
                "weights": self.weights}


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
        return np.array([value for record in self.records
                         for value in (record["p"] if name == "p" else record["proposals"][name])[column]])

    def of_blocks(self, proposal: Proposal, column: str) -> np.ndarray:
        """A column of the simulated chains, one value per block."""
        return np.array([value for record in self.records
                         for value in record["proposals"][proposal.name][proposal.weights][column]])

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
        self._rows, self.num_timed = rows, int(self._timed.sum())

    def counts(self) -> dict[str, int]:
        """The numbers of timed problems and rows."""
        return {"timed_problems": self.num_timed, "timed_rows": self._rows}

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

    def _with_ends(self, found: IntervalEstimate) -> IntervalEstimate:
        """The estimate, without an interval if only one problem was timed: its seconds would be the same in all resamples."""
        return found if self.num_timed > 1 else found._replace(low=None, high=None)

    def _of(self, proposal: Proposal) -> np.ndarray:
        return self._seconds["target" if proposal.name == "target" else "draft"]
