"""What ends a draw on the device: stop ids, stop strings, and the last position."""

from __future__ import annotations

from collections.abc import Collection

import torch

from dflash_mcmc.inference.rows import Rows
from dflash_mcmc.inference.stop_strings import StopStrings


class Endings:
    """Finds the tokens at which draws end.

    Args:
        stop_ids: tokens that end a draw.
        strings: strings that end a draw; None for none, which costs nothing.
    """

    def __init__(self, stop_ids: Collection[int], strings: StopStrings | None, device: torch.device):
        self.ids = torch.tensor(list(stop_ids), dtype=torch.int64, device=device)
        self._found = None if strings is None else strings.found
        if strings is not None:
            self._classes = torch.from_numpy(strings.classes).to(device)
            self._table = torch.from_numpy(strings.table).to(device)

    def states(self, rows: Rows, tokens: torch.Tensor, offered: torch.Tensor) -> torch.Tensor | None:
        """The state of the stop strings after each slot of the first rows, int64 (rows, slots); None without stop strings.

        Args:
            tokens: int64 (rows, slots), consecutive tokens.
            offered: bool (rows, slots); other slots change no state.
        """
        if self._found is None:
            return None
        state, found = rows.matched[: len(tokens)], list[torch.Tensor]()
        classes = self._classes[tokens]
        for slot in range(tokens.shape[1]):
            state = torch.where(offered[:, slot], self._table[state, classes[:, slot]].long(), state)
            found.append(state)
        return torch.stack(found, dim=1)

    def ends(self, rows: Rows, tokens: torch.Tensor, at: torch.Tensor, states: torch.Tensor | None) -> torch.Tensor:
        """Whether a draw ends with the token of a slot, bool (rows, slots).

        Args:
            tokens, at: int64 (rows, slots), tokens and their positions.
            states: the result of `states`.
        """
        ended = (tokens[..., None] == self.ids).any(dim=-1) | (at >= rows.last[: len(tokens), None])
        return ended if states is None else ended | (states == self._found)
