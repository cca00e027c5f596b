"""What ends a draw: stop ids, stop strings, and the last position."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import torch

from dflash_mcmc.engine.batching.rows import Rows
from dflash_mcmc.engine.batching.stop_strings import StopStrings
from dflash_mcmc.engine.batching.stop_tables import FOUND, StopTables
from dflash_mcmc.ops import Operation


class Endings:
    """Finds the tokens at which draws end.

    Args:
        stop_ids: tokens that end a draw.
        strings: strings that end the draws of operations without strings of their own; None for none.
        compiled: the tables of the strings of an operation.
    """

    def __init__(self, stop_ids: Collection[int], strings: StopStrings | None, device: torch.device,
                 compiled: Callable[[tuple[str, ...]], StopStrings] | None = None):
        self.ids = torch.tensor(list(stop_ids), dtype=torch.int64, device=device)
        self._stop_ids, self._strings, self._compiled = frozenset(stop_ids), strings, compiled
        self._tables = StopTables(device)

    @property
    def version(self) -> int:
        """A number that is another one after the tensors that `states` reads have become others."""
        return self._tables.version

    def begin(self, operation: Operation, tokens: np.ndarray) -> int:
        """The state of the stop strings of a draw that continues generated tokens, int64 (n,)."""
        return self._tables.state(self._strings_of(operation), tokens)

    def ended(self, operation: Operation, tokens: np.ndarray) -> bool:
        """Whether generated tokens, int64 (n,), end with a stop id or with the token that completes a stop string."""
        strings = self._strings_of(operation)
        return int(tokens[-1]) in self._stop_ids or (strings is not None and strings.ends(tokens))

    def states(self, rows: Rows, tokens: torch.Tensor, offered: torch.Tensor) -> torch.Tensor | None:
        """The state of the stop strings after each slot of the first rows, int64 (rows, slots); None if no row has strings.

        Args:
            tokens: int64 (rows, slots), consecutive tokens.
            offered: bool (rows, slots); other slots change no state.
        """
        if not self._tables.version:
            return None
        state, found = rows.matched[: len(tokens)], list[torch.Tensor]()
        for slot in range(tokens.shape[1]):
            state = torch.where(offered[:, slot], self._tables.after(state, tokens[:, slot]), state)
            found.append(state)
        return torch.stack(found, dim=1)

    def ends(self, rows: Rows, tokens: torch.Tensor, at: torch.Tensor, states: torch.Tensor | None) -> torch.Tensor:
        """Whether a draw ends with the token of a slot, bool (rows, slots).

        Args:
            tokens, at: int64 (rows, slots), tokens and their positions.
            states: the result of `states`.
        """
        ended = (tokens[..., None] == self.ids).any(dim=-1) | (at >= rows.last[: len(tokens), None])
        return ended if states is None else ended | (states == FOUND)

    def _strings_of(self, operation: Operation) -> StopStrings | None:
        if operation.stop is None:
            return self._strings
        if not operation.stop:
            return None
        if self._compiled is None:
            raise ValueError("this engine has no tables for the stop strings of an operation")
        return self._compiled(operation.stop)
