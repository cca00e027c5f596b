"""Measures the speed of the two proposals on the engine: a block of the draft, and as many tokens of the target."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from dflash_mcmc.engine.batching.batched import BatchedEngine
from dflash_mcmc.engine.batching.interface import Options
from dflash_mcmc.forcing.sequences import NotNumbers
from dflash_mcmc.ops import Chain, Draw, SamplingParams
from dflash_mcmc.rng import Key
from dflash_mcmc.types import ChainResult, Trajectory

if TYPE_CHECKING:
    from dflash_mcmc.engine.batching.language_model import LanguageModel
    from dflash_mcmc.engine.speculative.drafter import DFlashDrafter
    from dflash_mcmc.forcing.answers import Answer


class Timing:
    """Times proposals at the middle anchor of an answer. The time includes drawing and the target's scoring, as in a chain.

    Args:
        options: options of the engine.
        rows: number of chains that propose at once.
        temperature: temperature of both proposals.
        num_proposals: proposals of each chain. The first one is not counted: it also reads prompt and answer.
    """

    def __init__(self, options: Options, model: LanguageModel, drafter: DFlashDrafter, rows: int, temperature: float,
                 num_proposals: int):
        self._options, self._model, self._drafter, self._rows = options, model, drafter, rows
        self._law, self._num_proposals = SamplingParams(temperature=temperature), num_proposals

    def of(self, answer: Answer) -> dict[str, float | int]:
        """Seconds per proposal, `seconds_target` and `seconds_draft`. They are the batch's seconds divided by `timed_rows`.

        Raises NotNumbers.
        """
        return {"seconds_target": self._seconds(answer, "blended", None),
                "seconds_draft": self._seconds(answer, "draft", self._drafter), "timed_rows": self._rows}

    def _seconds(self, answer: Answer, source: str, drafter: DFlashDrafter | None) -> float:
        n = self._drafter.num_drafted
        anchor = len(answer.tokens) // (n + 1) // 2 * (n + 1)
        times: list[list[float]] = []

        def chain(row: int) -> Chain:
            path = Trajectory.start(answer.prompt)
            scored = answer.tokens[: anchor + 1]
            path = path.extended(scored, np.zeros(len(scored)), np.zeros(len(scored)), np.zeros((len(scored), 2)), False)
            own: list[float] = []
            for repeat in range(self._num_proposals):
                drawn = yield Draw(path, anchor + 1 + n, self._law, Key(row).fold_in(repeat), source)
                own.append(time.perf_counter())
            times.append(own)
            return ChainResult(drawn)

        engine = BatchedEngine(self._model, None, self._rows, len(answer.prompt) + anchor + 1 + n, self._options,
                               drafter=drafter)
        ended = list(engine.run((row, chain(row)) for row in range(self._rows)))
        if any(done.result is None for done in ended):
            raise NotNumbers  # the only reason for which the engine gives up a draw
        return (max(own[-1] for own in times) - max(own[0] for own in times)) / ((self._num_proposals - 1) * self._rows)
