"""Timed runs of the engine over a subject's prompts."""

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from dflash_mcmc.decoder import Decoder
from dflash_mcmc.draft import Draft
from dflash_mcmc.engine.batching.batched import BatchedEngine
from dflash_mcmc.engine.batching.interface import Counters, Finished, Options
from dflash_mcmc.ops import Chain
from dflash_mcmc.rng import Key
from dflash_mcmc.sampler import Sampler
from dflash_mcmc.sampler.power_mh import PowerMH
from dflash_mcmc.sampler.temperature import Temperature
from dflash_mcmc.types import ChainResult
from tests.bench.subject import Subject

TURNS = 2
"""Number of turns of each case, where several cases take turns."""


class Sizes(NamedTuple):
    """Sizes of the measurements."""

    slots: int
    waves: int
    """Number of chains per slot. With several chains per slot, the half-empty last wave has little weight."""
    decoder_slots: Sequence[int] = ()
    """Numbers of slots in the parts on decoders."""
    decoder_chains: int = 1
    """Number of chains in measurements with one slot, for which `waves` would give too few."""


class Measurement(NamedTuple):
    """The result of one or several runs of the engine. Means are over chains, rates over proposals."""

    seconds: float
    done: list[Finished[int]]
    counters: Counters
    """Counters of the last run."""
    processor: float
    """Seconds of processor time."""

    @property
    def num_chains(self) -> int:
        return len(self.done)

    @property
    def mean_drawn(self) -> float:
        """Mean number of tokens that the model drew for a chain."""
        return self.mean_cost("tokens_drawn")

    @property
    def mean_steps(self) -> float:
        """Mean number of Metropolis-Hastings steps of a chain."""
        return sum(result_of(chain).proposals for chain in self.done) / self.num_chains

    @property
    def acceptance(self) -> float:
        return self._rate("accepted")

    @property
    def moved(self) -> float:
        return self._rate("moved")

    @property
    def accepted_length(self) -> float | None:
        """tau: mean tokens that a block gives; None if nothing was drafted."""
        tokens, blocks = ("tokens_verified", "blocks_verified") if self.mean_cost("blocks_verified") else (
            "tokens_drawn", "blocks_drafted")
        return self.mean_cost(tokens) / self.mean_cost(blocks) if self.mean_cost("tokens_drafted") else None

    @property
    def per_hour(self) -> float:
        """Chains per hour."""
        return 3600 * self.num_chains / self.seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second that the model drew."""
        return self.mean_drawn * self.num_chains / self.seconds

    def mean_cost(self, name: str) -> float:
        """Mean of a field of `Cost` over the chains."""
        return sum(getattr(chain.cost, name) for chain in self.done) / self.num_chains

    def _rate(self, name: str) -> float:
        results = [result_of(chain) for chain in self.done]
        return sum(getattr(result, name) for result in results) / (sum(result.proposals for result in results) or 1)


class Decoding(NamedTuple):
    """A decoder and a draft, as components. The draft may also be used by a sampler for its proposals."""

    name: str
    decoder: Decoder | None = None
    """The decoder; None to decode token by token."""
    draft: Draft | None = None


PLAIN = Decoding("plain")


def result_of(chain: Finished[int]) -> ChainResult:
    """The result of a chain. Raises RuntimeError if the chain could not be drawn, because its cost would be misleading."""
    if chain.result is None:
        raise RuntimeError(f"chain {chain.tag}: {chain.failure}")
    return chain.result


def power_mh(**changes) -> PowerMH:
    """The sampler with the published setting, 16 blocks of 2 steps, and `changes`."""
    values = dict(alpha=4.0, proposal_temperature=None, num_blocks=16, num_steps=2, schedule="published", cut="current",
                  proposal="base", rule="exact", early_reject="exact", top_k=0, top_p=1.0)
    return PowerMH(**{**values, **changes})


def temperature(value: float) -> Temperature:
    """Plain sampling at this temperature."""
    return Temperature(alpha=1.0, temperature=value, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0,
                       frequency_penalty=0.0, presence_penalty=0.0)


def run(subject: Subject, sampler: Sampler, slots: int, num_chains: int, options: Options | None = None,
        horizon: int | None = None, chains_per_prompt: int = 1, label: str = "",
        decoding: Decoding = PLAIN, first: int = 0) -> Measurement:
    """Measures a run of a sampler's chains. The engine is built and warmed up before the clock starts.

    Args:
        first: number of the first chain. A chain's number determines its prompt and its key.
    """
    horizon, longest = horizon or subject.horizon, max(map(len, subject.prompts))
    drafter = decoding.draft.load(subject.model) if decoding.draft else None
    speculation = decoding.decoder.speculation(drafter) if decoding.decoder else None
    asked = drafter if sampler.needs_draft else None
    engine = BatchedEngine(subject.model, None, slots, longest + horizon, options or Options(), longest, speculation, asked)

    def chains() -> Iterator[tuple[int, Chain]]:
        for number in range(first, first + num_chains):
            prompt = subject.prompts[number // chains_per_prompt % len(subject.prompts)]
            yield number, sampler.chain(prompt, horizon, Key(0).fold_in("bench", number))

    list(engine.run((number, temperature(1.0).chain(subject.prompts[0], 2, Key(number))) for number in range(min(slots, 8))))
    engine.reset_counters()
    started, processor = time.perf_counter(), time.process_time()
    done = list(tqdm(engine.run(chains()), total=num_chains, desc=f"{subject.name} {label}", unit="chain", mininterval=1.0,
                     leave=False))
    return Measurement(time.perf_counter() - started, done, engine.counters, time.process_time() - processor)


def gain(got: Measurement, unit: Measurement) -> tuple[float, float]:
    """Mean gain in log p of a run's answers on those of another run of the same prompts, and its standard error."""
    log_p, others = ({chain.tag: float(result_of(chain).trajectory.log_p.sum()) for chain in each.done}
                     for each in (got, unit))
    differences = np.array([log_p[tag] - others[tag] for tag in log_p])
    return float(differences.mean()), float(differences.std(ddof=1) / len(differences) ** 0.5)


def joined(runs: Sequence[Measurement]) -> Measurement:
    """Several runs as one measurement."""
    return Measurement(sum(run.seconds for run in runs), [chain for run in runs for chain in run.done], runs[-1].counters,
                       sum(run.processor for run in runs))
