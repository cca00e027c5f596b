"""Compares plain decoding of chains of equal length with `transformers.generate`: one chain, and batches."""

import copy
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from dflash_mcmc.engine.batching.batched import BatchedEngine
from dflash_mcmc.engine.batching.interface import Options
from dflash_mcmc.rng import Key
from tests.bench.measure import Sizes, temperature
from tests.bench.subject import Subject

_TURNS = 3
"""Each case has so many turns, of which the fastest counts: other programs only make a turn slower."""
_PROMPT, _MOST_TOKENS = 48, 64


def against_generate(subject: Subject, sizes: Sizes) -> list[dict]:
    """(o) 1, 8 and 32 chains of equal length compared with `generate`, in turns, without stop ids."""
    horizon = min(subject.horizon, _MOST_TOKENS)
    endless = subject._replace(model=subject.model.without_stops())
    # Prompts differ, because the engine reads equal prompts once.
    prompts = [np.resize(prompt, _PROMPT) for prompt in subject.prompts]
    return [row for chains in (1, 8, 32) for row in compared(
        endless, [prompts[number % len(prompts)] for number in range(chains)], horizon, _TURNS)]


def compared(subject: Subject, prompts: list[np.ndarray], horizon: int, turns: int, **settings: Any) -> list[dict]:
    """Rows for `generate`, with these settings, and for the engine. Prompts have the same length."""
    found = _fastest({"generate": _generate(subject.causal_lm, prompts, horizon, settings),
                      "engine": _engine(subject, prompts, horizon, Options())}, turns)
    return [{"chains": len(prompts), "by": name, "ms a token": 1e3 * seconds / (len(prompts) * horizon),
             "rate / generate": found["generate"][0] / seconds, "rate / generate, CPU time": found["generate"][1] / processor}
            for name, (seconds, processor) in found.items()]


def _fastest(cases: dict[str, Callable[[], None]], turns: int) -> dict[str, tuple[float, float]]:
    """The smallest seconds by the clock and of the processor for each case, over turns after one that is not counted."""
    found = {name: (np.inf, np.inf) for name in cases}
    for turn in range(turns + 1):
        for name, case in cases.items():
            clock, processor = time.perf_counter(), time.process_time()
            case()
            spent = (time.perf_counter() - clock, time.process_time() - processor)
            if turn:
                found[name] = (min(found[name][0], spent[0]), min(found[name][1], spent[1]))
    return found


def _generate(causal_lm: Any, prompts: list[np.ndarray], horizon: int, more: dict[str, Any]) -> Callable[[], None]:
    settings = GenerationConfig(max_new_tokens=horizon, do_sample=True, temperature=1.0, top_k=0, pad_token_id=0, **more)
    given = torch.from_numpy(np.stack(prompts)).to(causal_lm.device)
    endless = copy.copy(causal_lm)  # `generate` takes missing settings from the model's own
    endless.generation_config = settings

    def case() -> None:
        drawn = endless.generate(given, attention_mask=torch.ones_like(given), generation_config=settings)
        if drawn.shape[1] != given.shape[1] + horizon:
            raise RuntimeError(f"generate ended after {drawn.shape[1] - given.shape[1]} of {horizon} tokens")

    return case


def _engine(subject: Subject, prompts: list[np.ndarray], horizon: int, options: Options) -> Callable[[], None]:
    engine = BatchedEngine(subject.model, None, len(prompts), len(prompts[0]) + horizon, options, len(prompts[0]))

    def case() -> None:
        sampler = temperature(1.0)
        for done in engine.run((number, sampler.chain(prompt, horizon, Key(number))) for number, prompt in enumerate(prompts)):
            if done.result is None or done.result.trajectory.length != horizon:
                raise RuntimeError(f"chain {done.tag} did not draw {horizon} tokens: {done.failure}")

    return case
