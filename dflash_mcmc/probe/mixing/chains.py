"""Metropolis-Hastings chains as arrays: how a record stores the steps of a chain, and how they are read back.

A cell is one setting of the grid: the chains of all problems with the same power, proposal temperature and early rejection.

Convergence of parallel chains is measured with arviz: R-hat, effective sample size and autocorrelation of log p. R-hat is the
rank-normalised split R-hat, and the effective sample size (ESS) is the bulk ESS: Vehtari, Gelman, Simpson, Carpenter &
Buerkner 2021, "Rank-Normalization, Folding, and Localization: An Improved R-hat" (arXiv 1903.08008). For chains that hardly
move, arviz's numbers do not measure mixing. If all chains stay at one value, arviz's ESS equals the number of draws. If chains
stay at different values, the ESS equals twice the number of chains, and R-hat may be nan. This module therefore limits the
ESS. A chain adds at most the number of states that it visits, and a stuck chain adds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Annotated, NamedTuple, NotRequired, final

import numpy as np
from numpy.typing import DTypeLike
from typing_extensions import TypedDict

from dflash_mcmc.rng import Key
from dflash_mcmc.statistics.intervals import Clusters, IntervalEstimate
from dflash_mcmc.store.schema import Anew, Count, Instead, Letters, Long
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
    for index, first in enumerate(records[0]["cells"]):
        of_cell = [(record, record["cells"][index]) for record in records]
        chains = [_chain(record, cell) for record, cell in of_cell if "trace" in cell]
        cells.append(Cell(first["alpha"], first["temperature"], first["early_reject"], chains, len(of_cell) - len(chains)))
    return cells


def _chain(record: dict, cell: dict) -> StepChain:
    trace = cell["trace"]
    columns = {**{name: np.array(trace[name], np.int64) for name in _WHOLE},
               **{name: np.array(trace[name], float) for name in _REAL}, "decision": np.array(list(trace["decision"]), "<U1")}
    chain = StepChain(record["problem"], record["chain"], **columns, last_log_p=cell["log_p"],
                      cost={name: cell[name] for name in COSTS})
    after = np.where(chain.moved, chain.proposal_length, chain.length)
    same = np.concatenate([[False], ~chain.moved[1:] & (chain.length[1:] == after[:-1])])
    return chain._replace(log_p=chain.log_p[np.maximum.accumulate(np.where(same, 0, np.arange(chain.num_steps)))])


LEAST_STEPS, LEAST_CHAINS = 4, 2
"""Fewest steps and chains for R-hat. It splits each chain into two halves of at least two steps."""
LEAST_STEPS_OF_ESS = 20
"""Smallest number of steps for ESS.

The estimator sums autocorrelations of the half chains in pairs of lags. Below 10 steps there is no pair, and the result is a
constant above the number of draws, whatever the values of the chains. At 10 steps there is one pair: four autoregressive
chains (coefficient 0.8), whose true ESS is 0.11 of the draws, get 0.40 on average. At 20 steps they get 0.19.
"""
_ROUNDING = 1e7
"""A larger R-hat is treated as infinite, because its denominator is only rounding error.

For comparison, R-hat is 1.3e3 if a single one of 64 times 2,000 values differs from the rest of its chain.
"""
MOST_LAGS, DRAWS = 20, 200
WINDOWS = ("all", "last_half", "last_stage")
"""Windows of steps.

All steps include those in which the state still grows. The last half leaves out this warm-up. The last stage is the only
window in which the target is always the same.
"""


class Convergence(NamedTuple):
    """Convergence of the parallel chains of a problem."""

    chains: int
    steps: int
    """Steps of each chain."""
    stuck: int
    """Number of chains whose state never changes after the first step of the window."""
    rhat: float | None
    """R-hat. It is None if there are fewer than two chains or four steps, or if all half chains have the same value.

    It is infinite if half chains differ but do not vary within themselves.
    """
    ess: float | None
    """ESS of all chains together, at most the number of draws; 0 if all are stuck, None below `LEAST_STEPS_OF_ESS`."""


class Window(NamedTuple):
    """Steps of parallel chains, each array (chains, steps): log p after each step (float64), and whether it moved (bool)."""

    log_p: np.ndarray
    moved: np.ndarray

    @property
    def stuck(self) -> np.ndarray:
        """Whether a chain's state never changes after the first step of the window, bool (chains,)."""
        return self.moved[:, 1:].sum(axis=1) == 0


def window(chains: Sequence[StepChain], name: str) -> Window:
    """One of `WINDOWS`. If chains differ in length, each contributes as many of its last steps as the shortest one has."""
    kept = [chain.block == chain.block[-1] if name == "last_stage" else np.ones(chain.num_steps, bool) for chain in chains]
    length = min(int(mask.sum()) for mask in kept)
    length -= length // 2 if name == "last_half" else 0

    def rows(column: str) -> np.ndarray:
        return np.stack([(own := getattr(chain, column)[mask])[len(own) - length :]
                         for chain, mask in zip(chains, kept, strict=True)])

    return Window(rows("log_p"), rows("moved"))


def convergence(steps: Window) -> Convergence:
    """The convergence of parallel chains."""
    (chains, length), stuck = steps.log_p.shape, int(steps.stuck.sum())
    rhat = _rhat(steps.log_p) if chains >= LEAST_CHAINS and length >= LEAST_STEPS else math.nan
    return Convergence(chains, length, stuck, None if math.isnan(rhat) else rhat,
                       _ess(steps) if length >= LEAST_STEPS_OF_ESS else None)


def _rhat(log_p: np.ndarray) -> float:
    """R-hat, nan if all half chains have one value. With an odd number of steps, the middle one is in neither half."""
    import arviz

    with np.errstate(divide="ignore", invalid="ignore"):  # warnings for constant half chains
        rhat = float(arviz.rhat(log_p, method="rank"))
    return math.inf if rhat > _ROUNDING else rhat


def _ess(steps: Window) -> float:
    """arviz's ESS, limited to the number of states that the moving chains visit.

    A state counts as one draw, regardless of how many steps it is kept. The limit also keeps the ESS of antithetic chains at
    or below the number of draws. Stuck chains add nothing, because their only state is the one with which they enter the
    window. Without the limit, many chains with a single move among them would have an ESS of all their draws, because log p
    hardly varies. A cell would then look better the less its chains move.
    """
    import arviz

    moves = steps.moved[:, 1:].sum(axis=1)
    states = float((moves + 1)[moves > 0].sum())
    with np.errstate(divide="ignore", invalid="ignore"):
        return min(float(arviz.ess(steps.log_p, method="bulk")), states)


def autocorrelation(log_p: np.ndarray) -> np.ndarray:
    """Autocorrelation at lags 0, 1, ... of a chain that is not stuck, float64 (steps,), from its log p.

    The divisor is the sum of squares around the chain's own mean. For short chains the result is too small by about 1 / steps.
    """
    import arviz

    return np.asarray(arviz.autocorr(log_p), float)


def independent_autocorrelation(steps: int, lag: int) -> float:
    """The expected autocorrelation of independent draws.

    It is negative: for deviations from their own mean, the products of all ordered pairs of different draws sum to minus the
    sum of squares.
    """
    return -(steps - lag) / (steps * (steps - 1))


@cache
def independent_rhats(chains: int, steps: int) -> np.ndarray:
    """`DRAWS` values of R-hat for independent draws, float64 (DRAWS,). They show perfect mixing in equally short chains."""
    key = Key(0).fold_in("independent chains", chains, steps)
    return np.array([_rhat(draws) for draws in key.uniforms(0, DRAWS * chains * steps).reshape(DRAWS, chains, steps)])


class _CellWindow:
    """The problems of a cell whose chains have at least `least` steps in a window."""

    def __init__(self, cell: Cell, name: str, least: int):
        of_problems = {problem: convergence(window(chains, name)) for problem, chains in cell.problems.items()}
        self.cell, self.window, self.steps = cell, name, [of.steps for of in of_problems.values()]
        self.long = {problem: of for problem, of in of_problems.items() if of.steps >= least}
        self.clusters, self.too_short = Clusters(list(self.long)), len(of_problems) - len(self.long)


class CellConvergence(_CellWindow):
    """R-hat over the problems of a cell. Those with too few steps are counted separately.

    Attributes:
        rhats: R-hat of the problems for which it is defined. Chains that are all stuck at one value have none.
        defined: these problems.
        stuck: share of stuck chains.
    """

    def __init__(self, cell: Cell, name: str):
        super().__init__(cell, name, LEAST_STEPS)
        defined = {problem: of for problem, of in self.long.items() if of.rhat is not None}
        self.rhats, self.defined = np.array([of.rhat for of in defined.values()], float), Clusters(list(defined))
        self._draws = np.concatenate([np.empty(0), *(independent_rhats(of.chains, of.steps) for of in defined.values())])
        self.stuck = self.clusters.ratio([of.stuck for of in self.long.values()], [of.chains for of in self.long.values()])

    @property
    def median_rhat(self) -> IntervalEstimate:
        """The median; None if it is infinite. For an even number of problems it is the larger of the two middle values."""
        (inverse,) = self.defined.quantiles(1.0 / self.rhats, [0.5])  # infinite values would spoil an interval
        return IntervalEstimate(_inverted(inverse.value), _inverted(inverse.high), _inverted(inverse.low), self.defined.size)

    def independent_above(self, limit: float) -> float | None:
        """The share above a limit for independent draws in equally few chains and steps."""
        return float(np.mean(self._draws > limit)) if len(self._draws) else None


class CellEss(_CellWindow):
    """Effective sample size over the problems of a cell.

    A problem whose chains are all stuck adds its steps and cost but no ESS. Otherwise a cell with more stuck chains would
    look better. A problem with too few steps is left out and counted in `too_short`.
    """

    def __init__(self, cell: Cell, name: str):
        super().__init__(cell, name, LEAST_STEPS_OF_ESS)
        self._ess = np.array([of.ess for of in self.long.values()], float)

    @property
    def per_step(self) -> IntervalEstimate:
        """ESS per step."""
        return self.clusters.ratio(self._ess, [of.chains * of.steps for of in self.long.values()])

    @property
    def per_1000_token_forwards(self) -> IntervalEstimate:
        """ESS for 1,000 token-forwards of the whole chains."""
        spent = [sum(chain.cost["token_forwards"] for chain in self.cell.problems[problem]) for problem in self.long]
        return self.clusters.ratio(1000.0 * self._ess, spent)


class Lag(NamedTuple):
    """The autocorrelations of a cell's moving chains at one lag."""

    cell: Cell
    window: str
    lag: int
    clusters: Clusters
    values: list[float]
    independent: float
    """The mean value of independent draws in chains of the same n steps, -(n - lag) / (n (n - 1))."""
    stuck: int


def lags(cell: Cell, name: str) -> list[Lag]:
    """The autocorrelations at each lag up to `MOST_LAGS` that a chain has. Stuck chains have none and are counted."""
    curves, stuck = [], 0
    for problem, chains in cell.problems.items():
        steps = window(chains, name)
        if steps.log_p.shape[1] >= LEAST_STEPS:
            curves += [(problem, autocorrelation(row)) for row in steps.log_p[~steps.stuck]]
            stuck += int(steps.stuck.sum())
    reaching = {lag: [pair for pair in curves if lag < len(pair[1])] for lag in range(1, 1 + MOST_LAGS)}
    return [Lag(cell, name, lag, Clusters([problem for problem, _ in pairs]), [curve[lag] for _, curve in pairs],
                float(np.mean([independent_autocorrelation(len(curve), lag) for _, curve in pairs])), stuck)
            for lag, pairs in reaching.items() if pairs]


def _inverted(value: float | None) -> float | None:
    return 1.0 / value if value else None
