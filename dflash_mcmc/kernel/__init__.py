"""Mathematics that samplers share: decisions, stages, cuts, early rejection, expected costs, and the weights of particles.

A suffix starts at any token (`UniformCuts`), more often where the target finds a token unlikely (`ConfidenceCuts`), or more
often where it becomes uncertain (`EntropyCuts`, arXiv 2605.30327). For the last, H_t is the entropy of p before token t, and
s_t = max(0, H_t - H_{t-1})^power with H_{-1} = 0. A state x is then cut at token m with probability s_m / S(x), where S(x)
sums s_t over its tokens. If no jump is positive, every place is equally likely. As H_{-1} = 0, the first token has a positive
jump unless the model is certain of it. So a chain can reach every sequence.

Early rejection abandons a proposal once it cannot be accepted any more (Solonen et al. 2012).

Particles: Del Moral, Doucet & Jasra 2006, "Sequential Monte Carlo samplers"; Douc & Cappe 2005, "Comparison of resampling
schemes". Log-weights are float64 (N,), in nats. A minus infinity is a weight of zero.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dflash_mcmc.ops import Floor, SamplingParams
from dflash_mcmc.rng import Key
from dflash_mcmc.types import ChainResult, ExpectedCost, Trajectory, common_prefix

_EQUAL_SHARES = 1e-9
"""Relative rounding of an effective sample size. Equal weights must not count as unequal ones."""


def log_mean(log_weights: np.ndarray) -> float:
    """The logarithm of the mean weight."""
    largest = float(log_weights.max())
    return largest + float(np.log(np.mean(np.exp(log_weights - largest))))


def shares(log_weights: np.ndarray) -> np.ndarray:
    """Normalised weights, float64 (N,)."""
    weights = np.exp(log_weights - log_weights.max())
    return weights / weights.sum()


def effective_size(log_weights: np.ndarray) -> float:
    """The effective sample size (sum w)^2 / sum w^2, from 1 to N (Kong, Liu & Wong 1994)."""
    return 1.0 / float(np.sum(shares(log_weights) ** 2))


def is_low(log_weights: np.ndarray, threshold: float) -> bool:
    """Whether the effective sample size is below this share of the number of particles."""
    return effective_size(log_weights) < threshold * len(log_weights) * (1.0 - _EQUAL_SHARES)


def multinomial(log_weights: np.ndarray, count: int, key: Key) -> list[int]:
    """`count` independent parents, each drawn in proportion to its weight."""
    probabilities = shares(log_weights)
    return [key.fold_in(index).categorical(probabilities) for index in range(count)]


def systematic(log_weights: np.ndarray, key: Key) -> list[int]:
    """N parents, by one uniform number u0 that gives the points (u0 + i) / N of the cumulative weights.

    The parents change only at finitely many values of u0. The piece between two of them is drawn, so that the law of the
    parents can be enumerated.
    """
    count = len(log_weights)
    ends = np.cumsum(shares(log_weights))[:-1] * count
    breaks = np.unique(np.concatenate([[0.0, 1.0], ends - np.floor(ends)]))
    piece = key.categorical(np.diff(breaks))
    points = (breaks[piece] + breaks[piece + 1]) / 2.0 + np.arange(count)
    return np.searchsorted(ends, points, side="right").tolist()


ROUNDING = 1e-5
"""Bound on the rounding of a float32 weight, in nats per token and unit of alpha: the margin of exact early rejection."""
_EQUAL = 1e-12
"""Rounding of a temperature that is given as 1/alpha."""


def stage_horizon(block: int, num_blocks: int, horizon: int) -> int:
    """The horizon of stage `block` of 1 to `num_blocks`: its share of the full horizon in tokens, rounded down.

    The last stage has the full horizon, whether or not `num_blocks` divides it.
    """
    return block * horizon // num_blocks


class MetropolisStep(NamedTuple):
    """Outcome of one Metropolis-Hastings step."""

    trajectory: Trajectory
    """The next state."""
    cut: int
    proposal_length: int
    log_ratio: float
    """Log of the acceptance ratio; an upper bound for an abandoned proposal."""
    decision: str
    """`accept`, `identical` (accepted, equal to the state), `reject`, or `abandon` (rejected before it was complete)."""
    lost: int = 0
    """Tries that were abandoned, in a step of several tries."""

    @property
    def accepted(self) -> bool:
        return self.decision in ("accept", "identical")

    @property
    def moved(self) -> bool:
        return self.decision == "accept"


def decide(path: Trajectory, proposal: Trajectory, cut: int, log_ratio: float, log_uniform: float) -> MetropolisStep:
    """The step that accepts a complete proposal if `log_uniform` is below `log_ratio`, and otherwise stays at `path`."""
    if not log_uniform < log_ratio:  # a ratio that is not a number rejects
        return MetropolisStep(path, cut, proposal.length, log_ratio, "reject")
    decision = "identical" if np.array_equal(proposal.tokens, path.tokens) else "accept"
    return MetropolisStep(proposal, cut, proposal.length, log_ratio, decision)


def trace_entry(step: MetropolisStep, block: int, number: int, length: int) -> dict[str, float | int | str]:
    """The trace entry of a step. `length` refers to the state before the step, and `log_p` to the state after it."""
    return {"block": block, "step": number, "cut": step.cut, "length": length, "proposal_length": step.proposal_length,
            "log_ratio": step.log_ratio, "decision": step.decision, "log_p": float(step.trajectory.log_p.sum())}


def result(trajectory: Trajectory, steps: Sequence[MetropolisStep], trace: Sequence[dict]) -> ChainResult:
    """The result of a chain after its steps."""
    return ChainResult(trajectory, len(steps), sum(step.accepted for step in steps), sum(step.moved for step in steps),
                       sum(step.decision == "abandon" for step in steps), trace=tuple(trace))


class CutBound(NamedTuple):
    """An upper bound for g, the log ratio of the cut's probabilities, over all proposals from a cut.

    Attributes:
        most: the bound in nats; with a `length`, log(length / tokens of the proposal so far) is added to it.
        length: the tokens of the state, where the bound falls as a proposal grows; None where it does not.
    """

    most: float
    length: int | None = None


class UniformCuts:
    """Every place of the state is equally likely."""

    def draw(self, path: Trajectory, key: Key) -> int:
        """A cut, in tokens of the answer."""
        return key.integer(path.length)

    def log_ratio(self, path: Trajectory, proposal: Trajectory, cut: int) -> float:
        """g: log of the probability of this cut in the proposal, minus that in the state."""
        return math.log(path.length / proposal.length)

    def bound(self, path: Trajectory, cut: int) -> CutBound:
        """The bound for early rejection: g is log(|x| / |y|), since a proposal of n tokens has n places."""
        return CutBound(0.0, path.length)


class EntropyCuts(NamedTuple):
    """A place is more likely where the entropy of p rises. Trajectories need entropies."""

    power: float

    def draw(self, path: Trajectory, key: Key) -> int:
        """A cut, in tokens of the answer."""
        return key.categorical(cut_probabilities(path, self.power))

    def log_ratio(self, path: Trajectory, proposal: Trajectory, cut: int) -> float:
        """g: log of the probability of this cut in the proposal, minus that in the state. Both have the same tokens before it.

        The jump at the cut depends only on these tokens. So g is log S(x) - log S(y) if the state has a positive jump.
        """
        there, back = (cut_probabilities(state, self.power)[cut] for state in (path, proposal))
        return math.log(back / there) if back > 0.0 else -math.inf

    def bound(self, path: Trajectory, cut: int) -> CutBound:
        """The bound for early rejection. S(y) is at least the sum of the jumps up to the cut, which state and y share.

        Without a positive jump in the state g is at most log(|x| / |y|).
        """
        jumps = entropy_jumps(path, self.power)
        if jumps.sum() > 0.0:
            return CutBound(math.log(jumps.sum() / jumps[: cut + 1].sum()))
        return CutBound(0.0, path.length)


class ConfidenceCuts(NamedTuple):
    """A place is more likely where the target finds the token unlikely."""

    floor: float
    """The weight of a place whose token has probability 1."""

    def places(self, path: Trajectory) -> np.ndarray:
        """Weights of the places of a path as cuts, float64 (length,)."""
        return self.floor - np.expm1(path.log_p)

    def draw(self, path: Trajectory, key: Key) -> int:
        """A cut, in tokens of the answer."""
        places = self.places(path)
        return key.categorical(places / places.sum())

    def log_share(self, path: Trajectory, cut: int) -> float:
        """Log of the probability of the cut `cut` in a path."""
        places = self.places(path)
        return math.log(places[cut]) - math.log(places.sum())

    def log_ratio(self, path: Trajectory, proposal: Trajectory, cut: int) -> float:
        """g: log of the probability of this cut in the proposal, minus that in the state."""
        return self.log_share(proposal, cut) - self.log_share(path, cut)

    def bound(self, path: Trajectory, cut: int) -> CutBound:
        """The bound for early rejection. A proposal of one token after the cut, of probability 0, has it."""
        most = math.log(self.floor + 1.0) - math.log(self.places(path)[:cut].sum() + self.floor + 1.0)
        return CutBound(most - self.log_share(path, cut))


class Move(NamedTuple):
    """A Metropolis-Hastings move on p^alpha that draws the tokens after a cut again."""

    alpha: float
    cuts: UniformCuts | EntropyCuts | ConfidenceCuts = UniformCuts()

    @property
    def stops(self) -> bool:
        """Whether a chain ends with the stage in which its answer ends."""
        return False

    def reach(self, path: Trajectory, block: int, num_blocks: int, horizon: int) -> int:
        """How far stage `block` extends a state, in tokens."""
        return stage_horizon(block, num_blocks, horizon)

    def longest(self, path: Trajectory, horizon: int) -> int:
        """The longest proposal from a state, in tokens."""
        return horizon

    def why_not_early(self, law: SamplingParams) -> str:
        """Why early rejection would change decisions with proposals from this law; empty where it does not."""
        return why_weights_rise(self.alpha, law)

    def log_ratio(self, path: Trajectory, proposal: Trajectory, cut: int) -> float:
        """Log of the acceptance ratio of a complete proposal that shares `cut` tokens with the state."""
        # Shared tokens have the same weight in both, except for rounding. They are left out, so no rounding error remains.
        start = cut + common_prefix(path.tokens[cut:], proposal.tokens[cut:])
        change = proposal.weight(self.alpha, start) - path.weight(self.alpha, start)
        return change + self.cuts.log_ratio(path, proposal, cut)

    def floor(self, path: Trajectory, horizon: int, cut: int, log_uniform: float) -> Floor:
        """The threshold for abandoning a proposal from `cut` on: the early rejection of Solonen et al. 2012, for sequences."""
        # y is accepted if log u < W(y) - W(x) + g. With the largest g, what is rejected early would be rejected in the end.
        bound = self.cuts.bound(path, cut)
        return Floor(log_uniform, self.alpha, path.weight(self.alpha, cut) - bound.most, bound.length,
                     ROUNDING * self.alpha * (horizon - cut))

    def decide(self, path: Trajectory, proposal: Trajectory, horizon: int, cut: int, log_uniform: float,
               floor: Floor | None) -> MetropolisStep:
        """The step with a proposal that shares `cut` tokens with the state. An incomplete one has been abandoned."""
        if floor is not None and not proposal.complete(horizon):
            bound = floor.bound(proposal.weight(self.alpha, cut), proposal.length)
            return MetropolisStep(path, cut, proposal.length, bound, "abandon")
        return decide(path, proposal, cut, self.log_ratio(path, proposal, cut), log_uniform)


class PublishedMove(Move):
    """The move of the code of arXiv 2510.14901, for comparison: it leaves no p^alpha invariant and can only shorten a state.

    A proposal is capped at the length of the state, and the ratio covers the overlap of both alone.
    """

    __slots__ = ()

    @property
    def stops(self) -> bool:
        return True

    def reach(self, path: Trajectory, block: int, num_blocks: int, horizon: int) -> int:
        """Counts from the state, which may be shorter than the horizon of the stage before."""
        return path.length + stage_horizon(block, num_blocks, horizon) - stage_horizon(block - 1, num_blocks, horizon)

    def longest(self, path: Trajectory, horizon: int) -> int:
        return path.length

    def why_not_early(self, law: SamplingParams) -> str:
        return "sampler.rule=published compares overlaps, whose bound does not fall"

    def log_ratio(self, path: Trajectory, proposal: Trajectory, cut: int) -> float:
        stop = min(path.length, proposal.length)
        return super().log_ratio(path.prefix(stop), proposal.prefix(stop), cut)


def entropy_jumps(path: Trajectory, power: float) -> np.ndarray:
    """s_t of each token, float64 (length,). Raises ValueError for a trajectory without entropies."""
    if path.entropy is None:
        raise ValueError("cuts at jumps of the entropy need trajectories with entropies")
    rises = np.maximum(np.diff(path.entropy, prepend=0.0), 0.0)
    return np.where(rises > 0.0, rises**power, 0.0)


def cut_probabilities(path: Trajectory, power: float) -> np.ndarray:
    """The probability of each cut, float64 (length,)."""
    jumps = entropy_jumps(path, power)
    total = jumps.sum()
    return jumps / total if total > 0.0 else np.full(path.length, 1.0 / path.length)


def why_weights_rise(alpha: float, law: SamplingParams) -> str:
    """Why the weight of a suffix may rise as it grows, so that early rejection is not exact; empty if it never rises.

    Exact early rejection needs alpha * log p - log q to be at most 0 for every token. This holds if q is p^(1/temperature),
    with 1/alpha <= temperature <= 1, on a support that depends on the prefix alone.
    """
    if alpha < 1.0:
        return f"weights grow with length at alpha={alpha:g} (below 1)"
    if not 1.0 / alpha - _EQUAL <= law.temperature <= 1.0:
        return f"the proposal's temperature {law.temperature:g} is not between 1/alpha={1 / alpha:g} and 1"
    return "a penalty makes the proposal another law than p^(1/temperature)" if law.has_penalty else ""


def mh_cost(length: float, horizon: int, num_blocks: int, num_steps: int, stops: bool = False) -> ExpectedCost:
    """The expected cost of a chain on answers of `length` tokens.

    At stage k of K the state has n_k = min(k * horizon / K, length) tokens, and each of its `num_steps` steps draws
    (n_k + 1) / 2 tokens again, the mean for a cut that is uniform over the state.

    Args:
        stops: whether the chain ends with the stage in which its answer ends.
    """
    block = horizon / num_blocks
    num_stages = min(num_blocks, math.ceil(length / block)) if stops else num_blocks
    states = [min(stage * block, length) for stage in range(1, num_stages + 1)]
    return _cost(length, states, min(num_stages, math.ceil(length / block)), num_steps)


def doubling(num_blocks: int) -> list[int]:
    """Horizons that double from 1 to `num_blocks`, in blocks."""
    return [2**exponent for exponent in range((num_blocks - 1).bit_length())] + [num_blocks]


def doubling_cost(length: float, horizon: int, num_blocks: int, num_steps: int) -> ExpectedCost:
    """The expected cost of a chain whose horizons double until its answer of `length` tokens ends.

    The last stage, at the full horizon, follows the extension in which the answer ends. The steps draw at most about
    1.5 * num_steps * length tokens, however many blocks there are.
    """
    passed = [reach for stage in doubling(num_blocks) if (reach := stage * horizon / num_blocks) < length]
    return _cost(length, [*passed, length], 1 + len(passed), num_steps)


def _cost(length: float, states: Sequence[float], num_extensions: int, num_steps: int) -> ExpectedCost:
    """The cost of stages, given as lengths of the state, and of the extensions between them."""
    redrawn = sum((state + 1.0) / 2 for state in states)
    return ExpectedCost(length, num_steps * redrawn, 0.0, num_extensions + num_steps * len(states))
