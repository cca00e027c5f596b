"""Sequential Monte Carlo for the power distribution p^alpha, and two exact Markov kernels made from it.

Power-SMC: arXiv 2602.10273. Particle-independent Metropolis-Hastings and conditional SMC: Andrieu, Doucet & Holenstein 2010,
"Particle Markov chain Monte Carlo methods". Proposals from a draft: arXiv 2604.15672.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from dflash_mcmc import kernel
from dflash_mcmc.components import Need, Settings, identity, register
from dflash_mcmc.draft import check_source
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.ops import UNENDED, Chain, Draw, Steps, Together
from dflash_mcmc.rng import Key
from dflash_mcmc.sampler import AtTemperature, Truncated
from dflash_mcmc.types import ExpectedCost, Trajectory


class Cloud(NamedTuple):
    """The particles of one run: complete paths with final log-weights, float64 (N,), in nats."""

    paths: list[Trajectory]
    log_weights: np.ndarray
    log_z: float
    """Log of the estimate of the sum of p^alpha over all sequences. The estimate is unbiased."""
    num_resampled: int
    least_size: float
    """The smallest effective sample size before a resampling or at the end, as a share of N."""
    num_ancestors: int
    """Number of different particles of the first block from which the final particles descend."""

    def number(self, key: Key) -> int:
        """The number of a particle, drawn in proportion to its weight."""
        return key.categorical(kernel.shares(self.log_weights))

    def chosen(self, key: Key) -> Trajectory:
        """The particle with that number."""
        return self.paths[self.number(key)]


@register("sampler", "power_smc")
@dataclass(slots=True, kw_only=True)
class PowerSMC(Truncated, AtTemperature):
    """Particles that are drawn block by block, weighed by p^alpha / q, and resampled when their weights are too unequal.

    With `wrapper=none` the result is a particle drawn in proportion to its final weight. Its law is not p^alpha for finite N,
    but tends to it as N grows. The mean of Z * 1(result = x) is p(x)^alpha for every sequence x and any N, where log Z is
    `log_z` of the record. A finished particle keeps its weight and takes part in resampling.

    With `wrapper=pimh` a chain keeps (result, Z) and replaces it by those of a new run with probability min(1, Z' / Z). With
    `wrapper=csmc` each step runs SMC from a cut on, with the present state as particle 0, which always survives. The step
    takes one of the particles by its final weight times 1 / |y|, since the cut is chosen among the places of the state. Both
    leave p^alpha invariant for any number of particles.

    The parents are systematic (one uniform number for all), and multinomial (independent) in the steps of csmc, whose form of
    systematic resampling has another law.

    p is the (blended) target; p^alpha is restricted to the support of the proposals.
    """

    num_particles: int = identity(16, "particles of a run", ge=1, le=65_536)
    block_size: int = identity(16, "tokens between two checks of the weights", ge=1)
    ess_threshold: float = identity(0.5, "resample when the effective sample size is below this share of the particles; 1 "
                                    "resamples at all unequal weights", gt=0, le=1)
    proposal: Literal["target", "draft"] = identity(
        "target", "target = tokens from the target; draft = blocks from the draft, the first token of a block from the target")
    wrapper: Literal["none", "pimh", "csmc"] = identity(
        "none", "none = one run; pimh = particle-independent Metropolis-Hastings; csmc = conditional SMC")
    num_steps: int = identity(4, "steps of the wrapper after the first run", ge=0)

    takes_draft = True
    needs = (Need("decoder.is_null", given="proposal=draft", why=", whose draws are the draft's"),)
    takes_potential = True

    def check(self, config: Settings) -> None:
        if self.wrapper == "csmc" and self.num_particles < 2:
            raise ConfigError("sampler.num_particles", self.num_particles, "at least 2 with sampler.wrapper=csmc, where "
                              "particle 0 is the present state")
        if self.wrapper != "none" and not self.num_steps:
            raise ConfigError("sampler.num_steps", self.num_steps, f"at least 1 with sampler.wrapper={self.wrapper}")
        if self.proposal == "draft":
            if config.draft.is_null:
                raise ConfigError("sampler.proposal", "draft", "target without a draft; draft=dflash or draft=tiny give one")
            check_source(config, "sampler.proposal=draft", "sampler.proposal=target")

    def canonical(self, config: Settings) -> dict[str, object]:
        values = super().canonical(config)
        if self.wrapper == "none":
            values["num_steps"] = None
        if self.num_particles == 1:
            values.update(block_size=None, ess_threshold=None)
        return values

    def source(self) -> str:
        return "draft" if self.proposal == "draft" else "blended"

    def width(self) -> int:
        """All particles are drawn at once."""
        return self.num_particles

    def power(self) -> float | None:
        return self.alpha if self.wrapper != "none" and not self.law().truncates else None

    def expected_cost(self, length: float, horizon: int) -> ExpectedCost:
        """Mean cost of a chain whose answers have `length` tokens. Forwards that particles share are not subtracted."""
        runs = 1 + (self.num_steps if self.wrapper != "none" else 0)
        rounds = math.ceil(length / self.block_size) * self.num_particles
        if self.wrapper != "csmc":
            tokens = runs * self.num_particles * length
            return ExpectedCost(tokens, num_draws=runs * rounds, drafts=runs * rounds if self.proposal == "draft" else 0.0)
        others = (self.num_particles - 1) * self.num_steps
        share = (length + 1) / (2.0 * length)
        drawn = others * length * share
        draws = rounds * (1 + share * self.num_steps)
        drafts = draws if self.proposal == "draft" else 0.0
        return ExpectedCost(self.num_particles * length, drawn, num_draws=draws, drafts=drafts)

    def chain(self, prompt: np.ndarray, horizon: int, key: Key) -> Chain:
        """One run, and the steps of the wrapper; `horizon` is the full length in tokens."""
        cloud = yield from self.cloud(Trajectory.start(prompt), horizon, key.fold_in("run", 0))
        path, log_z = cloud.chosen(key.fold_in("choose", 0)), cloud.log_z
        steps, trace, clouds = list[kernel.MetropolisStep](), list[dict](), [cloud]
        for step_number in range(1, self.num_steps + 1 if self.wrapper != "none" else 1):
            length, step_key = path.length, key.fold_in("step", step_number)
            if self.wrapper == "pimh":
                step, cloud = yield from self.independent_step(path, log_z, horizon, step_key)
                log_z = cloud.log_z if step.accepted else log_z
            else:
                step = yield from self.step(path, horizon, step_key)
            path = step.trajectory
            steps.append(step)
            trace.append(kernel.trace_entry(step, 1, step_number, length))
            clouds.append(cloud)
        outcome = kernel.result(path, steps, trace)
        return outcome._replace(measures=self._measures(clouds if self.wrapper == "pimh" else clouds[:1], log_z))

    def independent_step(self, path: Trajectory, log_z: float, horizon: int,
                         key: Key) -> Steps[tuple[kernel.MetropolisStep, Cloud]]:
        """A step of particle-independent Metropolis-Hastings from the state (path, log_z), and the new run's cloud."""
        log_uniform = key.fold_in("accept").log_uniform()
        cloud = yield from self.cloud(Trajectory.start(path.prompt), horizon, key.fold_in("run"))
        proposal = cloud.chosen(key.fold_in("choose"))
        return kernel.decide(path, proposal, 0, cloud.log_z - log_z, log_uniform), cloud

    def step(self, path: Trajectory, horizon: int, key: Key) -> Steps[kernel.MetropolisStep]:
        """A step of conditional SMC from a complete state of horizon `horizon`."""
        cut = key.fold_in("cut").integer(path.length)
        cloud = yield from self.cloud(path.prefix(cut), horizon, key.fold_in("run"), path)
        lengths = np.array([other.length for other in cloud.paths])  # the cut had probability 1 / |y| under each state y
        cloud = cloud._replace(log_weights=cloud.log_weights - np.log(lengths))
        number = cloud.number(key.fold_in("choose"))
        chosen = cloud.paths[number]
        decision = "identical" if np.array_equal(chosen.tokens, path.tokens) else "accept"
        return kernel.MetropolisStep(chosen, cut, chosen.length, 0.0, decision if number else "reject")

    def cloud(self, start: Trajectory, horizon: int, key: Key, forced: Trajectory | None = None) -> Steps[Cloud]:
        """Runs the particles from `start` to the end.

        Args:
            forced: the path of particle 0, which always survives; None if all particles are drawn.
        """
        count, cut = self.num_particles, start.length
        paths, roots = [start] * count, list(range(count))
        log_weights, log_z, num_resampled, least, law = np.zeros(count), 0.0, 0, 1.0, self.law()
        # Numbers of generated tokens at which the weights are checked, the horizon included
        size = self.block_size if self.num_particles > 1 else horizon
        for stop in [*range(cut + size, horizon, size), horizon]:
            before = [path.weight(self.alpha, cut) for path in paths]
            mine = [particle for particle, path in enumerate(paths)
                    if not path.complete(stop) and not (forced is not None and particle == 0)]
            drawn = yield Together(tuple(
                Draw(paths[particle], stop, law, key.fold_in("particle", stop, particle), self.source())
                for particle in mine))
            for particle, path in zip(mine, drawn, strict=True):
                paths[particle] = path
            if forced is not None:
                paths[0] = forced.prefix(stop)
            log_weights = log_weights + [path.weight(self.alpha, cut) - old for path, old in zip(paths, before, strict=True)]
            if all(path.complete(horizon) for path in paths):
                break
            least = min(least, kernel.effective_size(log_weights) / count)
            if kernel.is_low(log_weights, self.ess_threshold):
                log_z += kernel.log_mean(log_weights)
                parents = self._parents(log_weights, key.fold_in("resample", stop), forced is not None)
                paths, roots = [paths[parent] for parent in parents], [roots[parent] for parent in parents]
                num_resampled += 1
                log_weights = np.zeros(count)
        least = min(least, kernel.effective_size(log_weights) / count)
        return Cloud(paths, log_weights, log_z + kernel.log_mean(log_weights), num_resampled, least, len(set(roots)))

    def _parents(self, log_weights: np.ndarray, key: Key, forced: bool) -> list[int]:
        """The parent of each particle: the number of the particle that it continues. Finished ones take part."""
        if forced:
            return [0, *kernel.multinomial(log_weights, self.num_particles - 1, key)]
        return kernel.systematic(log_weights, key)

    def _measures(self, clouds: Sequence[Cloud], log_z: float) -> dict[str, float]:
        """Diagnostics of the chain: `log_z` of the state, and means over the runs without a forced particle.

        Where answers must end (`dataset.must_end`) and no particle has, the estimate is 0 and there is no log_z.
        """
        def mean(of: Callable[[Cloud], float]) -> float:
            return float(np.mean([of(cloud) for cloud in clouds]))

        ended = {"log_z": log_z} if log_z > -UNENDED / 2 * self.alpha else {}
        return {**ended, "least_ess": mean(lambda cloud: cloud.least_size),
                "resamplings": mean(lambda cloud: cloud.num_resampled), "ancestors": mean(lambda cloud: cloud.num_ancestors)}
