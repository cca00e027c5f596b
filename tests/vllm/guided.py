"""The reference engine with fewer forwards: another engine's answers are guesses, and one forward checks all tokens of one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from dflash_mcmc.ops import Operation, Steps
from dflash_mcmc.types import Trajectory
from tests.reference import ReferenceEngine


def recorded(chain: Steps, answers: list[Trajectory]) -> Steps:
    """The chain, whose answers are appended to a list."""
    answer = None
    while True:
        try:
            operation = chain.send(answer) if answers else next(chain)
        except StopIteration as end:
            return end.value
        answer = yield operation
        answers.append(answer)


class GuidedReference(ReferenceEngine):
    """Draws every token by its own rule from logits of the model without a cache.

    The logits after a prefix of the guess come from a forward of the whole guess; after any other sequence from a forward of
    its own. A wrong guess therefore costs forwards and changes no token. For models without blend and soft-cap.
    """

    def __init__(self, model: Any, parts: Any, answers: list[Trajectory]):
        super().__init__(model, parts, None)
        assert parts.softcap is None
        self._answers: Iterator[Trajectory] = iter(answers)
        self._guess, self._rows, self.forwards = np.empty(0, np.int64), torch.empty(0), 0

    @torch.inference_mode()
    def answer(self, operation: Operation) -> Trajectory:
        """See `ReferenceEngine.answer`."""
        guess = next(self._answers, None)
        self._guess = np.empty(0, np.int64) if guess is None else guess.sequence
        if len(self._guess):
            self._rows = self.model(input_ids=torch.from_numpy(self._guess)[None], use_cache=False).logits[0]
        return super().answer(operation)

    def _sources(self, trajectory: Trajectory) -> dict[str, np.ndarray]:
        length = len(trajectory.sequence)
        if length > len(self._guess) or not np.array_equal(self._guess[:length], trajectory.sequence):
            self.forwards += 1
            return super()._sources(trajectory)
        row = self._rows[length - 1].double().masked_fill(self.parts.forbidden, -torch.inf).numpy()
        return {"blended": row, "base": row}
