"""Several tries of a suffix in each step, for the power distribution p^alpha.

Multiple-try Metropolis: Liu, Liang & Wong 2000, "The multiple-try method and local optimization in Metropolis sampling".
Iterated sampling importance resampling (i-SIR): Tjelmeland 2004; Andrieu, Lee & Vihola 2018, "Uniform ergodicity of the
iterated conditional SMC and geometric ergodicity of particle Gibbs samplers".
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dflash_mcmc import kernel
from dflash_mcmc.components import identity, register
from dflash_mcmc.ops import Chain, Draw, Floor, Steps, Together
from dflash_mcmc.rng import Contest, Key
from dflash_mcmc.sampler import ProposesAt, Redraws, Truncated
from dflash_mcmc.types import ExpectedCost, Trajectory


@register("sampler", "multiple_try")
@dataclass(slots=True, kw_only=True)
class MultipleTry(Redraws, Truncated, ProposesAt):
    """Markov chain on p^alpha that draws several suffixes from each cut, all at once, and takes one of them or stays.

    Target and stages are those of power_mh. A step chooses a cut and draws K suffixes y_1, ..., y_K from q after it. w(y) is
    exp(W(y)) / |y|, where W sums alpha * log p - log q over the suffix. Both forms leave the target invariant for every K.

    `form=multiple_try` picks y_j in proportion to w and accepts it with probability
    min(1, sum_k w(y_k) / (w(x) + sum_{k != j} w(y_k))). It needs no reference draws: given the cut, the tries do not depend
    on the old suffix. With K = 1 it is power_mh. `form=isir` takes one of x, y_1, ..., y_K in proportion to w. With K = 1
    this is Barker's rule, which moves less than Metropolis-Hastings.

    With `form=isir` the choice is the largest log w plus Gumbel noise. The noise is drawn first, so that a try is abandoned
    as soon as it cannot exceed x.
    """

    form: Literal["multiple_try", "isir"] = identity(
        "isir", "multiple_try = pick a try by weight, then accept or reject it; isir = take one of the state and the tries by "
        "weight")
    num_tries: int = identity(4, "suffixes that a step draws", ge=1, le=65_536)

    def move(self) -> kernel.Move:
        return kernel.Move(self.alpha, kernel.UniformCuts())

    def width(self) -> int:
        """All tries of a step are drawn at once."""
        return self.num_tries

    def power(self) -> float | None:
        return None if self.law().truncates else self.alpha

    def expected_cost(self, length: float, horizon: int) -> ExpectedCost:
        """Mean cost of a chain whose answers have `length` tokens. Each try is drawn from its cut to its end."""
        none, one = (kernel.mh_cost(length, horizon, self.num_blocks, steps) for steps in (0, self.num_steps))
        return ExpectedCost(*(first + self.num_tries * (both - first) for first, both in zip(none, one, strict=True)))

    def chain(self, prompt: np.ndarray, horizon: int, key: Key) -> Chain:
        outcome, steps = yield from self.staged(prompt, horizon, key, range(1, self.num_blocks + 1))
        lost = [step.lost / self.num_tries for step in steps]
        return outcome._replace(measures={"abandoned_tries": float(np.mean(lost))} if lost and self.rejects_early() else {})

    def step(self, path: Trajectory, horizon: int, key: Key) -> Steps[kernel.MetropolisStep]:
        cut = self.move().cuts.draw(path, key.fold_in("cut"))
        contest = key.fold_in("choose").contest(self.num_tries + 1) if self.form == "isir" else None
        drawn: Sequence[Trajectory] = yield Together(tuple(
            Draw(path.prefix(cut), horizon, self.law(), key.fold_in("try", index), along=path,
                 floor=self._floor(path, horizon, cut, contest, index)) for index in range(1, self.num_tries + 1)))
        if contest is None:
            # Multiple-try Metropolis
            log_weights = np.array([self.log_weight(each, cut) for each in drawn])
            picked = key.fold_in("pick").categorical(kernel.shares(log_weights))
            reference = log_weights.copy()
            reference[picked] = self.log_weight(path, cut)
            log_ratio = float(np.logaddexp.reduce(log_weights) - np.logaddexp.reduce(reference))
            return kernel.decide(path, drawn[picked], cut, log_ratio, key.fold_in("accept").log_uniform())
        # Only an upper bound on the weight of an abandoned try is known. Such a try cannot win.
        bounds = np.array([self.log_weight(each, cut) for each in (path, *drawn)])
        complete = np.array([each.complete(horizon) for each in (path, *drawn)])
        taken = contest.winner(np.where(complete, bounds, -np.inf))
        step = self._taken(path, drawn, cut, taken, bounds - bounds[0], bool(complete[1:].any()))
        return step._replace(lost=int((~complete).sum()))

    def _taken(self, path: Trajectory, drawn: Sequence[Trajectory], cut: int, taken: int, log_ratios: np.ndarray,
               any_complete: bool) -> kernel.MetropolisStep:
        """The step of i-SIR that takes number `taken` of the state and the tries.

        Args:
            log_ratios: log of w(y) / w(x) for the state and the tries, or an upper bound for an abandoned try.
        """
        if not taken:
            best = int(np.argmax(log_ratios[1:]))
            return kernel.MetropolisStep(path, cut, drawn[best].length, float(log_ratios[1 + best]),
                                         "reject" if any_complete else "abandon")
        chosen = drawn[taken - 1]
        decision = "identical" if np.array_equal(chosen.tokens, path.tokens) else "accept"
        return kernel.MetropolisStep(chosen, cut, chosen.length, float(log_ratios[taken]), decision)

    def log_weight(self, path: Trajectory, cut: int) -> float:
        """log w of a state whose suffix starts at `cut`, in float64; an upper bound for an abandoned try."""
        return path.weight(self.alpha, cut) - math.log(path.length)

    def _floor(self, path: Trajectory, horizon: int, cut: int, contest: Contest | None, index: int) -> Floor | None:
        """The threshold below which try `index` cannot exceed the state; None without early rejection."""
        if contest is None or not self.rejects_early():
            return None
        return self.move().floor(path, horizon, cut, contest.lead(0, index))

    def why_not_early(self, unblended: bool) -> str:
        if self.form != "isir":
            return "sampler.form=multiple_try needs the weight of every try"
        return super().why_not_early(unblended)
