"""One timed run of the engine over a subject's prompts."""

from __future__ import annotations

import time
from typing import NamedTuple

from tqdm import tqdm

from dflash_mcmc.bench.subject import Subject
from dflash_mcmc.blend.none import NoBlend
from dflash_mcmc.engine.batched import BatchedEngine
from dflash_mcmc.engine.interface import Counters, Options
from dflash_mcmc.rng import Key
from dflash_mcmc.sampler.power_mh import PowerMH
from dflash_mcmc.sampler.temperature import Temperature


class Measured(NamedTuple):
    """A run of the engine. Means are over chains."""

    seconds: float
    num_chains: int
    mean_drawn: float
    """Tokens drawn by the model."""
    mean_skipped: float
    mean_token_forwards: float
    acceptance: float
    moved: float
    abandoned: float
    mean_length: float
    counters: Counters

    @property
    def per_hour(self) -> float:
        """Chains an hour."""
        return 3600 * self.num_chains / self.seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens that the model drew."""
        return self.mean_drawn * self.num_chains / self.seconds


def power_mh(**changes) -> PowerMH:
    """The sampler of the published setting, 16 blocks of 2 steps, but for `changes`."""
    values = dict(alpha=4.0, proposal_temperature=None, num_blocks=16, num_steps=2, cut="current", proposal="base",
                  rule="exact", after_eos="continue", early_reject="exact", epsilon=1e-5, top_k=0, top_p=1.0, min_p=0.0,
                  repetition_penalty=1.0)
    return PowerMH(**{**values, **changes})


def temperature(value: float) -> Temperature:
    """Plain sampling."""
    return Temperature(alpha=1.0, temperature=value, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)


def run(subject: Subject, sampler: object, slots: int, num_chains: int, options: Options | None = None,
        blend: object | None = None, horizon: int | None = None, chains_per_prompt: int = 1, label: str = "") -> Measured:
    """Runs chains of a sampler, prompt after prompt, and times it. The engine is made, and warm, before the clock starts."""
    horizon, longest = horizon or subject.horizon, max(map(len, subject.prompts))
    engine = BatchedEngine(subject.model, blend or NoBlend(), slots, longest + horizon, options or Options(), longest)

    def chains(count: int, name: str):
        for number in range(count):
            prompt = subject.prompts[number // chains_per_prompt % len(subject.prompts)]
            yield number, sampler.chain(prompt, horizon, Key(0).fold_in(name, number))

    list(engine.run((number, temperature(1.0).chain(subject.prompts[0], 2, Key(number))) for number in range(min(slots, 8))))
    engine.counters = Counters()
    started = time.perf_counter()
    done = list(tqdm(engine.run(chains(num_chains, "bench")), total=num_chains, desc=f"{subject.name} {label}", unit="chain",
                     mininterval=1.0, leave=False))
    seconds = time.perf_counter() - started
    results, costs = [d.result for d in done], [d.cost for d in done]
    proposals = sum(r.proposals for r in results) or 1

    def mean(values) -> float:
        return sum(values) / num_chains

    return Measured(
        seconds, num_chains, mean(c.tokens_drawn for c in costs), mean(c.tokens_skipped for c in costs),
        mean(c.token_forwards for c in costs), sum(r.accepted for r in results) / proposals,
        sum(r.moved for r in results) / proposals, sum(r.abandoned for r in results) / proposals,
        mean(r.path.length for r in results), engine.counters)
