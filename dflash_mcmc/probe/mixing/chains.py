"""Metropolis-Hastings chains as arrays: how a record stores the steps of a chain, and how they are read back.

A cell is one setting of the grid: the chains of all problems with the same power, proposal temperature and early rejection.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple, NotRequired, final

import numpy as np
from numpy.typing import DTypeLike
from typing_extensions import TypedDict

from dflash_mcmc.store.bounds import Anew, Count, Instead, Letters, Long
from dflash_mcmc.types import ChainResult, Cost

_WHOLE = ("block", "step", "cut", "length", "proposal_length")
_REAL = ("log_ratio", "log_p")
COSTS = ("tokens_drawn", "tokens_skipped", "token_forwards", "target_forwards")
DECISIONS = {"accept": "a", "identical": "i", "reject": "r", "abandon": "x"}
"""Letters for the decision of a step in a record."""


@final
class StepColumns(TypedDict):
    """The steps of a chain by column, in their order; see `kernel.trace_entry`."""

    block: Annotated[list[Count], Long("steps")]
    step: Annotated[list[Count], Long("steps")]
    cut: Annotated[list[Count], Long("steps")]
    length: Annotated[list[Count], Long("steps")]
    """Tokens of the state before the step."""
    proposal_length: Annotated[list[Count], Long("steps")]
    log_ratio: Annotated[list[float], Long("steps")]
    """Log acceptance ratio in nats."""
    log_p: Annotated[list[float], Long("steps")]
    """Log p of the state after the step, in nats."""
    decision: Annotated[str, Letters("".join(DECISIONS.values())), Long("steps")]
    """A letter of `DECISIONS` for each step."""


@final
class CellRecord(TypedDict):
    """The chain in one setting of the grid."""

    alpha: float
    temperature: float
    """Temperature of the proposal."""
    early_reject: str
    num_tokens: Count
    """Tokens of the answer."""
    log_p: float
    """Log p of the answer, in nats."""
    proposals: Count
    accepted: Count
    moved: Count
    abandoned: Count
    tokens_drawn: Count
    tokens_skipped: Count
    token_forwards: Count
    target_forwards: Count
    trace: Annotated[StepColumns, Anew("steps")]
    failure: NotRequired[Annotated[str, Instead(("num_tokens", "log_p", "proposals", "accepted", "moved", "abandoned",
                                                 "trace"))]]
    """Why the chain could not be drawn in this setting."""


@final
class MixingRecord(TypedDict):
    """A chain in all settings, and its totals over them."""

    cells: list[CellRecord]
    """In the order of `Mixing.measured`."""
    proposals: Count
    accepted: Count
    moved: Count


def compact(trace: Sequence[dict]) -> dict[str, list | str]:
    """A chain's trace (see `kernel.trace_entry`) by column: numbers to six digits, decisions as a string of letters."""
    columns: dict[str, list | str] = {name: [entry[name] for entry in trace] for name in _WHOLE}
    columns.update({name: [float(f"{entry[name]:.6g}") for entry in trace] for name in _REAL})
    return {**columns, "decision": "".join(DECISIONS[entry["decision"]] for entry in trace)}


def cell_record(setting: tuple[float, float, str], result: ChainResult | None, cost: Cost, failure: str) -> dict:
    """The record of a chain in one cell. If it could not be drawn (`result` None), the record has the reason and the cost.

    Args:
        setting: alpha, proposal temperature and early rejection of the cell.
    """
    columns = dict(zip(("alpha", "temperature", "early_reject"), setting, strict=True))
    costs = {name: getattr(cost, name) for name in COSTS}
    if result is None:
        return {**columns, "failure": failure, **costs}
    return {**columns, "num_tokens": result.trajectory.length, "log_p": float(f"{result.trajectory.log_p.sum():.6g}"),
            "proposals": result.proposals, "accepted": result.accepted, "moved": result.moved, "abandoned": result.abandoned,
            **costs, "trace": compact(result.trace)}


class StepChain(NamedTuple):
    """A chain. Its steps are arrays of shape (steps,): whole numbers int64, log ratios and log p float64 in nats."""

    problem: str
    number: int
    block: np.ndarray
    step: np.ndarray
    cut: np.ndarray
    length: np.ndarray
    """Tokens of the state before the step."""
    proposal_length: np.ndarray
    log_ratio: np.ndarray
    """Log acceptance ratio of the proposal. For an abandoned proposal it is an upper bound."""
    log_p: np.ndarray
    """Log p of the state after the step.

    It changes only if the chain moves, or between stages as the state grows. If the proposal repeats the state, the previous
    value is kept, because a recomputed one would differ by rounding.
    """
    decision: np.ndarray
    """Letters of `DECISIONS`."""
    last_log_p: float
    """Log p of the state that the chain returns."""
    cost: dict[str, int]

    @property
    def num_steps(self) -> int:
        return len(self.cut)

    @property
    def moved(self) -> np.ndarray:
        """Whether the step changed the state, bool (steps,)."""
        return self.decision == DECISIONS["accept"]

    @property
    def accepted(self) -> np.ndarray:
        """Whether the proposal was accepted, including proposals equal to the state, bool (steps,)."""
        return self.moved | (self.decision == DECISIONS["identical"])


class Steps(NamedTuple):
    """The steps of all chains of a cell, concatenated."""

    problem: list[str]
    cut: np.ndarray
    length: np.ndarray
    proposal_length: np.ndarray
    log_ratio: np.ndarray
    accepted: np.ndarray
    moved: np.ndarray
    identical: np.ndarray
    abandoned: np.ndarray

    @property
    def real(self) -> np.ndarray:
        """Whether the step has a proposal. With `cut=horizon`, a cut after the end of the sequence proposes nothing."""
        return self.cut < self.length


class Cell(NamedTuple):
    """The chains of one setting that could be drawn."""

    alpha: float
    temperature: float
    """Effective temperature of the proposal: 1/alpha if the setting is null."""
    early_reject: str
    chains: list[StepChain]
    num_failed: int

    @property
    def problems(self) -> dict[str, list[StepChain]]:
        """The chains of each problem."""
        by_problem: dict[str, list[StepChain]] = {}
        for chain in self.chains:
            by_problem.setdefault(chain.problem, []).append(chain)
        return by_problem

    def steps(self) -> Steps:
        """All steps, in the order of the chains."""
        def joined(name: str, kind: DTypeLike) -> np.ndarray:
            return np.concatenate([np.empty(0, kind), *(getattr(chain, name) for chain in self.chains)])

        decision = joined("decision", "<U1")
        return Steps([chain.problem for chain in self.chains for _ in range(chain.num_steps)],
                     joined("cut", np.int64), joined("length", np.int64), joined("proposal_length", np.int64),
                     joined("log_ratio", float), joined("accepted", bool), joined("moved", bool),
                     decision == DECISIONS["identical"], decision == DECISIONS["abandon"])


def cells_of(records: Sequence[dict]) -> list[Cell]:
    """The cells of the chains' records, in the order of the records. All records have the same cells."""
    cells = []
    for number, first in enumerate(records[0]["cells"]):
        parts = [(record, record["cells"][number]) for record in records]
        chains = [_chain(record, part) for record, part in parts if "trace" in part]
        cells.append(Cell(first["alpha"], first["temperature"], first["early_reject"], chains, len(parts) - len(chains)))
    return cells


def _chain(record: dict, part: dict) -> StepChain:
    trace = part["trace"]
    columns = {**{name: np.array(trace[name], np.int64) for name in _WHOLE},
               **{name: np.array(trace[name], float) for name in _REAL}, "decision": np.array(list(trace["decision"]), "<U1")}
    chain = StepChain(record["problem"], record["chain"], **columns, last_log_p=part["log_p"],
                      cost={name: part[name] for name in COSTS})
    after = np.where(chain.moved, chain.proposal_length, chain.length)
    same = np.concatenate([[False], ~chain.moved[1:] & (chain.length[1:] == after[:-1])])
    return chain._replace(log_p=chain.log_p[np.maximum.accumulate(np.where(same, 0, np.arange(chain.num_steps)))])
