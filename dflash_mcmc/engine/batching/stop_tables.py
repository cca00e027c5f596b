"""The tables of several sets of stop strings as one table, so that each row of a batch can have a set of its own.

A state belongs to a set, and says how much of its strings a text ends with (`stop_strings.py`). Two states belong to all sets:
state 0 of rows without strings, and state 1 after a string was found. A row's set is therefore known by its state alone.
"""

from __future__ import annotations

import numpy as np
import torch

from dflash_mcmc.engine.batching.stop_strings import StopStrings

_NONE, FOUND = 0, 1


class StopTables:
    """The joined tables on a device. Sets are added when they are first needed.

    Attributes:
        version: number of sets. The tensors are others after a set was added.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._offsets: dict[tuple[str, ...], int] = {}

    @property
    def version(self) -> int:
        """The number of sets."""
        return len(self._offsets)

    def state(self, strings: StopStrings | None, tokens: np.ndarray) -> int:
        """The state of a row after generated tokens, int64 (n,). Adds the set of its strings if it is new."""
        if strings is None:
            return _NONE
        if strings.strings not in self._offsets:
            self._add(strings)
        found = strings.state(tokens)
        return FOUND if found == strings.found else self._offsets[strings.strings] + found

    def after(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The states, int64 (rows,), after a token each, int64 (rows,). There must be a set."""
        classes = self._classes[self._vocabulary[states] + tokens]
        return self._steps[self._row[states] + classes].long()

    def _add(self, strings: StopStrings) -> None:
        """Appends the classes of all tokens, and the rows of the set's table. Both are flat, since sets differ in size."""
        if not self._offsets:
            self._classes, self._steps = (torch.zeros(size, dtype=torch.int32, device=self._device)
                                          for size in (len(strings.classes), 2))
            self._steps[FOUND] = FOUND
            self._vocabulary, self._row = (torch.tensor(values, device=self._device) for values in ([0, 0], [_NONE, FOUND]))
        states, width = strings.table.shape
        offset = self._offsets[strings.strings] = len(self._row)
        table = np.where(strings.table == strings.found, FOUND, strings.table + offset).astype(np.int32)
        rows = len(self._steps) + width * torch.arange(states, device=self._device)
        self._vocabulary = torch.cat([self._vocabulary, torch.full_like(rows, len(self._classes))])
        self._row = torch.cat([self._row, rows])
        self._classes, self._steps = (torch.cat([known, torch.from_numpy(more).to(self._device)]) for known, more in (
            (self._classes, strings.classes), (self._steps, table.ravel())))
