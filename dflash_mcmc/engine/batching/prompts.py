"""Reads prompts before their chains start.

Reading each prompt alone would take an extra forward every few decode steps. The prompts of the next chains are instead read
together into a small cache. A chain that starts copies the keys and values of its prompt into its slot. Chains with the same
prompt share one reading.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dflash_mcmc.engine.batching.cache import UNLIMITED, SlotCache
from dflash_mcmc.engine.batching.model_runner import ModelRunner, Span


class PromptReader:
    """Keys and values of a few prompts.

    Args:
        runner: reads the prompts.
        cache: a cache with a row for each prompt.
    """

    def __init__(self, runner: ModelRunner, cache: SlotCache):
        self._runner, self._cache = runner, cache
        self._rows: dict[bytes, int] = {}
        self._free = list(range(cache.num_rows))

    @property
    def num_rows(self) -> int:
        """The number of prompts that fit."""
        return self._cache.num_rows

    def read(self, prompts: Sequence[np.ndarray]) -> tuple[int, int]:
        """Reads the missing prompts, and drops all others. Returns the number of tokens and forwards."""
        wanted = {prompt.tobytes(): prompt for prompt in prompts}
        for name in [name for name in self._rows if name not in wanted]:
            row = self._rows.pop(name)
            self._cache.keep(row, 0, 0)
            self._free.append(row)
        spans = []
        for name, prompt in wanted.items():
            if name not in self._rows:
                self._rows[name] = self._free.pop()
                self._cache.clear(self._rows[name])  # an earlier prompt may have left numbers that are not finite
                spans.append(Span(self._rows[name], prompt, 0, len(prompt) - 1))
                self._cache.open(self._rows[name], 0, len(prompt) - 1)
        forwards = self._runner.read(self._cache, spans)
        for span in spans:
            self._cache.close(span.row)
        return sum(span.stop for span in spans), forwards

    def copy(self, prompt: np.ndarray, cache: SlotCache, row: int) -> int:
        """Copies a prompt without its last token into a row of another cache. Returns the number of tokens copied."""
        length = len(prompt) - 1
        cache.copy(self._cache, self._rows[prompt.tobytes()], row, 0, length)
        return length

    def clear(self) -> None:
        """Forgets all prompts, which may hold NaN."""
        self._rows.clear()
        self._free = list(range(self.num_rows))
        self._cache.clear()

    def restart(self) -> None:
        """Forgets all prompts of an earlier run, where they take memory from the rows."""
        if self._cache.num_free_pages < UNLIMITED:
            self._rows.clear()
            self._free = list(range(self.num_rows))
            self._cache.restart()
