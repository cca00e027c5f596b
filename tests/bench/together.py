"""Measures chains that ask for several draws at once: particles that are copied, and candidates of one prompt."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from dflash_mcmc.engine.batching.batched import BatchedEngine
from dflash_mcmc.engine.batching.chains import SlotMemory
from dflash_mcmc.engine.batching.interface import Options
from dflash_mcmc.ops import Chain, Draw, SamplingParams, Together
from dflash_mcmc.rng import Key
from dflash_mcmc.types import ChainResult, Trajectory
from tests.bench.measure import Sizes, temperature
from tests.bench.subject import Subject

_PARTICLES, _TOKENS, _BLOCK, _CANDIDATES, _REPEATS = 32, 128, 16, 8, 3


def together(subject: Subject, sizes: Sizes) -> list[dict]:
    """(m) Draws asked for together: particles beside independent chains, and candidates at once or one after another."""
    endless = copy.copy(subject.model)
    endless.stop_ids = ()
    rows = []
    for params in (SamplingParams(), SamplingParams(temperature=0.25)):
        rows += _particle_rows(subject._replace(model=endless), params)
    sequential, at_once = (_best(subject, _CANDIDATES, lambda prompt, key, ask=ask: [
        _candidates(prompt, key, subject.horizon, ask)], prompts=8)
                           for ask in (False, True))
    for label, found in (("one after another", sequential), ("at once", at_once)):
        rows.append({"what": f"{_CANDIDATES} candidates, one prompt at a time: {label}", **found,
                     "against the first": found["s"] / sequential["s"]})
    return rows


def _particle_rows(subject: Subject, params: SamplingParams) -> list[dict]:
    """Independent chains, and particles that share forwards."""
    def alone(prompt: Any, key: Key) -> list[Chain]:
        return [_independent(prompt, params, key.fold_in("chain", number)) for number in range(_PARTICLES)]

    def copied(prompt: Any, key: Key) -> list[Chain]:
        return [_particles(prompt, params, key)]

    cases = [("independent chains", alone, Options()), (f"particles, resampled every {_BLOCK} tokens", copied, Options())]
    found = [_best(subject, _PARTICLES, chains_of, options) for _, chains_of, options in cases]
    return [{"what": f"{_PARTICLES} x {_TOKENS} tokens, temperature {params.temperature}: {label}", **run,
             "against the first": run["s"] / found[0]["s"]} for (label, _, _), run in zip(cases, found, strict=True)]


def _best(subject: Subject, slots: int, chains_of: Any, options: Options | None = None, prompts: int = 1) -> dict[str, float]:
    """The fastest of three runs: seconds, the share of copies in them, and forwards of the rows that draw."""
    longest = max(map(len, subject.prompts))
    engine = BatchedEngine(subject.model, None, slots, longest + max(_TOKENS, subject.horizon), options or Options(), longest)
    runs = []
    for repeat in range(_REPEATS + 1):
        engine.reset_counters()
        with _timed(SlotMemory, "place", "follow", "move_out", "move_in", "swap") as copies:
            started = time.perf_counter()
            for number in range(prompts):
                chains = chains_of(subject.prompts[number], Key(repeat).fold_in("bench", number))
                done = list(engine.run(enumerate(chains)))
            seconds = time.perf_counter() - started
        runs.append({"s": seconds, "copies, %": 100 * copies[0] / seconds, "shared": sum(d.cost.tokens_shared for d in done)})
    return min(runs[1:], key=lambda run: run["s"])  # the first run warms up


def _independent(prompt: Any, params: SamplingParams, key: Key) -> Chain:
    return ChainResult((yield Draw(Trajectory.start(prompt), _TOKENS, params, key)))


def _particles(prompt: Any, params: SamplingParams, key: Key) -> Chain:
    """Particles that are resampled uniformly after each block: a third of them is lost each time."""
    paths = [Trajectory.start(prompt)] * _PARTICLES
    for stop in range(_BLOCK, _TOKENS + 1, _BLOCK):
        paths = yield Together(tuple(Draw(path, stop, params, key.fold_in("particle", stop, number))
                                     for number, path in enumerate(paths)))
        if stop < _TOKENS:
            paths = [paths[key.fold_in("parent", stop, number).integer(_PARTICLES)] for number in range(_PARTICLES)]
    return ChainResult(paths[0])


def _candidates(prompt: Any, key: Key, horizon: int, at_once: bool) -> Chain:
    draws = tuple(Draw(Trajectory.start(prompt), horizon, temperature(1.0).law(), key.fold_in("candidate", number))
                  for number in range(_CANDIDATES))
    if at_once:
        return ChainResult((yield Together(draws))[0])
    paths = []
    for draw in draws:
        paths.append((yield draw))
    return ChainResult(paths[0])


@contextmanager
def _timed(owner: type, *names: str) -> Iterator[list[float]]:
    """Adds up the seconds in these methods while the context lasts."""
    total = [0.0]

    def timing(method: Any) -> Any:
        def timed(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return method(*arguments, **named)
            finally:
                total[0] += time.perf_counter() - started
        return timed

    with ExitStack() as stack:
        for name in names:
            method = getattr(owner, name)
            stack.callback(setattr, owner, name, method)
            setattr(owner, name, timing(method))
        yield total
