"""The speed of the two proposals, measured on the engine: a block of the draft, and as many tokens of the target."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from dflash_mcmc.blend.none import NoBlend
from dflash_mcmc.engine.batched import BatchedEngine
from dflash_mcmc.engine.interface import Options
from dflash_mcmc.forcing.sequences import NotNumbers
from dflash_mcmc.ops import Chain, Draw, SamplingParams
from dflash_mcmc.rng import Key
from dflash_mcmc.types import ChainResult, Trajectory

if TYPE_CHECKING:
    from dflash_mcmc.engine.language_model import LanguageModel
    from dflash_mcmc.engine.speculative.drafter import DFlashDrafter
    from dflash_mcmc.forcing.answers import Answer

_REPEATS = 3


class Timing:
    """Times a proposal behind the middle anchor of an answer: drawn, and scored by the target, as a chain needs it.

    Args:
        options: of the engine.
        rows: chains that propose at once.
        temperature: of both proposals.
    """

    def __init__(self, options: Options, model: LanguageModel, drafter: DFlashDrafter, rows: int, temperature: float):
        self._options, self._model, self._drafter, self._rows = options, model, drafter, rows
        self._law = SamplingParams(temperature=temperature)

    def of(self, answer: Answer) -> dict[str, float | int]:
        """`seconds_target` and `seconds_draft` that a proposal takes, all rows' divided by their number, `timed_rows`.

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
            path = path.extended(scored, *(np.zeros(len(scored)) for _ in range(2)), np.zeros((len(scored), 2)), False)
            own: list[float] = []
            for repeat in range(1 + _REPEATS):  # the first reads prompt and answer too
                drawn = yield Draw(path, anchor + 1 + n, self._law, Key(row).fold_in(repeat), source)
                own.append(time.perf_counter())
            times.append(own)
            return ChainResult(drawn)

        engine = BatchedEngine(self._model, NoBlend(), self._rows, len(answer.prompt) + anchor + 1 + n, self._options,
                               drafter=drafter)
        ended = list(engine.run((row, chain(row)) for row in range(self._rows)))
        if any(done.result is None for done in ended):
            raise NotNumbers  # the engine has no other reason to give up a draw
        return (max(own[-1] for own in times) - max(own[0] for own in times)) / (_REPEATS * self._rows)
