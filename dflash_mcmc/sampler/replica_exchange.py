"""Replica exchange between chains on several powers of p, also called parallel power tempering.

Swendsen & Wang 1986; Geyer 1991; for language models Theodoropoulos et al. 2026 (arXiv 2609.38104).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dflash_mcmc.components import Settings, identity, register
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.kernel import MetropolisStep, Move, UniformCuts, mh_cost, result, stage_horizon, trace_entry, why_weights_rise
from dflash_mcmc.ops import LARGEST, SMALLEST, Chain, Draw, SamplingParams, Steps, Together
from dflash_mcmc.rng import Key
from dflash_mcmc.sampler import RejectsEarly
from dflash_mcmc.types import ExpectedCost, Trajectory


class Rungs(NamedTuple):
    """The states of the ladder's rungs, and the rungs at which they were drawn."""

    paths: tuple[Trajectory, ...]
    """The state of each rung. `laws` of a state has log q and interval under the proposal laws of all rungs."""
    born: tuple[int, ...]
    """The rung whose local step made each state."""


@register("sampler", "replica_exchange")
@dataclass(slots=True, kw_only=True)
class ReplicaExchange(RejectsEarly):
    """Metropolis-Hastings chains on p^alpha_1, ..., p^alpha_K, which exchange their states.

    Law: the product of p^alpha_k over the rungs, at the horizon of the stage. Each round leaves it invariant. The result is
    the state of the rung `output`, which is fixed beforehand. A round has a Metropolis-Hastings step on every
    rung: it chooses a cut, draws the suffix again from p^(1/temperature_k), and accepts it as `power_mh` does. Then the
    pairs (1, 2), (2, 3), ... exchange their states, in this order, with probability
    min(1, exp((alpha_{k+1} - alpha_k) (log p(x_k) - log p(x_{k+1})))). A swap needs no forward: each token has log q under
    the proposal laws of all rungs. p is the (blended) target.
    """

    alphas: list[float] = identity([1.0, 2.0, 4.0], "powers of the rungs, rising", ge=SMALLEST, le=LARGEST)
    temperatures: list[float] | None = identity(None, "proposal temperatures of the rungs; null takes 1/alpha of each",
                                                ge=SMALLEST, le=LARGEST, inverse_of="alphas")
    output: int = identity(-1, "rung of the result, from 1; -1 is the last")
    num_blocks: int = 4
    num_steps: int = identity(4, "rounds of each stage", ge=0)

    def check(self, config: Settings) -> None:
        if len(self.alphas) < 2 or any(a >= b for a, b in zip(self.alphas, self.alphas[1:], strict=False)):
            raise ConfigError("sampler.alphas", self.alphas, "at least two powers, each larger than the one before it")
        if self.temperatures is not None and len(self.temperatures) != len(self.alphas):
            raise ConfigError("sampler.temperatures", self.temperatures, f"null or {len(self.alphas)} numbers, one for each "
                              "of sampler.alphas")
        if not (self.output == -1 or 1 <= self.output <= len(self.alphas)):
            raise ConfigError("sampler.output", self.output, f"1 to {len(self.alphas)}, or -1 for the last")
        super().check(config)

    def canonical(self, config: Settings) -> dict[str, object]:
        return {"temperatures": [law.temperature for law in self.laws()], "output": self.output_rung + 1}

    @property
    def output_rung(self) -> int:
        """The number of the output rung, from 0."""
        return len(self.alphas) - 1 if self.output == -1 else self.output - 1

    def reads_rows(self) -> bool:
        """Each token has log q under the laws of all rungs."""
        return True

    def laws(self) -> tuple[SamplingParams, ...]:
        """The proposal law of each rung."""
        return tuple(SamplingParams(value) for value in self.temperatures or [1.0 / alpha for alpha in self.alphas])

    def moves(self) -> tuple[Move, ...]:
        """The moves of each rung: its power, and where a suffix may start."""
        return tuple(Move(alpha, UniformCuts()) for alpha in self.alphas)

    def law(self) -> SamplingParams:
        """The proposal law of the output rung."""
        return self.laws()[self.output_rung]

    def width(self) -> int:
        """All rungs draw at once."""
        return len(self.alphas)

    def power(self) -> float:
        return self.alphas[self.output_rung]

    def expected_cost(self, length: float, horizon: int) -> ExpectedCost:
        """Mean cost of a chain whose answers have `length` tokens on every rung."""
        one = mh_cost(length, horizon, self.num_blocks, self.num_steps)
        return ExpectedCost(*(value * len(self.alphas) for value in one))

    def chain(self, prompt: np.ndarray, horizon: int, key: Key) -> Chain:
        """One ladder through all stages; `horizon` is the full length in tokens."""
        count = len(self.alphas)
        ladder = Rungs((Trajectory.start(prompt),) * count, tuple(range(count)))
        steps, trace, swaps, replicas = list[MetropolisStep](), list[dict](), list[tuple[bool, ...]](), _Replicas(count)
        for block in range(1, self.num_blocks + 1):
            block_key, stage = key.fold_in("block", block), stage_horizon(block, self.num_blocks, horizon)
            ladder = yield from self._extend(ladder, stage, block_key)
            for sweep in range(1, self.num_steps + 1):
                before = ladder
                ladder, rung_steps = yield from self.local_step(ladder, stage, block_key.fold_in("local", sweep, 0))
                steps += rung_steps
                trace += [{**trace_entry(step, block, sweep, old.length), "rung": rung + 1}
                          for rung, (step, old) in enumerate(zip(rung_steps, before.paths, strict=True))]
                ladder, swapped = self.swap(ladder, block_key.fold_in("swap", sweep))
                swaps.append(swapped)
                replicas.swap(swapped)
        outcome = result(ladder.paths[self.output_rung].under(self.output_rung), steps, trace)
        rates = np.mean(swaps, axis=0) if swaps else np.zeros(count - 1)
        measures = {f"swaps_{rung}_{rung + 1}": float(rate) for rung, rate in enumerate(rates, start=1)}
        return outcome._replace(measures={**measures, "round_trips": float(replicas.round_trips),
                                        "born": float(ladder.born[self.output_rung] + 1)})

    def round(self, ladder: Rungs, horizon: int, key: Key) -> Steps[Rungs]:
        """A round from complete states of horizon `horizon`: a local step of every rung, and the swaps."""
        ladder, _ = yield from self.local_step(ladder, horizon, key.fold_in("local", 0))
        return self.swap(ladder, key.fold_in("swap"))[0]

    def _extend(self, ladder: Rungs, horizon: int, key: Key) -> Steps[Rungs]:
        """Extends the states that have not ended to the horizon of a stage, each by the law of its rung."""
        laws, mine = self.laws(), [rung for rung, path in enumerate(ladder.paths) if not path.complete(horizon)]
        drawn = yield Together(tuple(Draw(ladder.paths[rung].under(rung) if ladder.paths[rung].length else ladder.paths[rung],
                                          horizon, laws[rung], key.fold_in("extend", rung), laws=laws) for rung in mine))
        paths, born = list(ladder.paths), list(ladder.born)
        for rung, path in zip(mine, drawn, strict=True):
            paths[rung], born[rung] = path, rung
        return Rungs(tuple(paths), tuple(born))

    def local_step(self, ladder: Rungs, horizon: int, key: Key) -> Steps[tuple[Rungs, list[MetropolisStep]]]:
        """A Metropolis-Hastings step of every rung, at once."""
        laws, states = self.laws(), [path.under(rung) for rung, path in enumerate(ladder.paths)]
        moves, early = self.moves(), self.rejects_early()
        cuts = [move.cuts.draw(state, key.fold_in("cut", rung))
                for rung, (move, state) in enumerate(zip(moves, states, strict=True))]
        uniforms = [key.fold_in("accept", rung).log_uniform() for rung in range(len(states))]
        floors = [move.floor(state, horizon, cut, uniform) if early else None
                  for move, state, cut, uniform in zip(moves, states, cuts, uniforms, strict=True)]
        drawn = yield Together(tuple(
            Draw(state.prefix(cuts[rung]), horizon, laws[rung], key.fold_in("token", rung), along=state,
                 floor=floors[rung], laws=laws) for rung, state in enumerate(states)))
        steps = [move.decide(state, proposal, horizon, cut, uniform, floor) for move, state, proposal, cut, uniform, floor
                 in zip(moves, states, drawn, cuts, uniforms, floors, strict=True)]
        born = tuple(rung if step.moved else old for rung, (step, old) in enumerate(zip(steps, ladder.born, strict=True)))
        return Rungs(tuple(step.trajectory for step in steps), born), steps

    def swap(self, ladder: Rungs, key: Key) -> tuple[Rungs, tuple[bool, ...]]:
        """The ladder after the swaps of adjacent rungs, from the first pair to the last, and which were accepted."""
        paths, born, accepted = list(ladder.paths), list(ladder.born), list[bool]()
        for low, (alpha, higher) in enumerate(zip(self.alphas, self.alphas[1:], strict=False)):
            log_ratio = (higher - alpha) * float(paths[low].log_p.sum() - paths[low + 1].log_p.sum())
            accepted.append(key.fold_in(low).log_uniform() < log_ratio)
            if accepted[-1]:  # each state has log q under the laws of all rungs, so that it keeps its numbers as it moves
                paths[low], paths[low + 1] = paths[low + 1], paths[low]
                born[low], born[low + 1] = born[low + 1], born[low]
        return Rungs(tuple(paths), tuple(born)), tuple(accepted)

    def why_not_early(self, unblended: bool) -> str:
        """See `RejectsEarly`, for every rung."""
        reasons = (why_weights_rise(alpha, law) for alpha, law in zip(self.alphas, self.laws(), strict=True))
        return next(filter(None, reasons), "")


class _Replicas:
    """Counts round trips: a replica goes from the first rung to the last and back."""

    def __init__(self, count: int):
        self._at, self._seen = list(range(count)), [0] * count
        self._seen[0] = 1
        self.round_trips = 0

    def swap(self, accepted: Sequence[bool]) -> None:
        """Moves the replicas of the rungs that have exchanged their states."""
        for low, swapped in enumerate(accepted):
            if swapped:
                self._at[low], self._at[low + 1] = self._at[low + 1], self._at[low]
        first, last = self._at[0], self._at[-1]
        if self._seen[first] == 2:
            self.round_trips += 1
        self._seen[first] = 1
        self._seen[last] = 2 if self._seen[last] else 0
