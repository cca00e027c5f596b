"""Computes the draft's hidden states for every token, on a grid of blocks that depends only on the sequence.

`ops.grid_slot` defines the grid. The hidden states of a block are computed once, when its anchor is fed, and kept for the row
until the block ends. A draw that starts inside a block computes the states of its block again.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from dflash_mcmc.engine.batching.cache import SlotCache
from dflash_mcmc.engine.batching.ladder import round_up
from dflash_mcmc.engine.batching.rows import Rows, Status
from dflash_mcmc.engine.speculative.drafter import Anchors, DFlashDrafter
from dflash_mcmc.ops import grid_slot

_NONE = -1


class Said(NamedTuple):
    """The draft's hidden states (rows, width) for the next token; valid where `inside`, bool (rows,)."""

    hidden: torch.Tensor
    inside: torch.Tensor


class BlockGrid:
    """The current blocks of all rows.

    Args:
        drafter: gives the block size of the grid.
        num_rows: rows of the engine's cache.
        row_step: the draft runs on a multiple of this number of rows, on which its numbers then do not depend (`ladder.py`).
    """

    def __init__(self, drafter: DFlashDrafter, num_rows: int, row_step: int, device: torch.device):
        self.drafter, self.block_size, self._row_step = drafter, drafter.num_drafted + 1, row_step
        width = drafter.network.shape.hidden_size
        self._hidden = torch.zeros(num_rows, drafter.num_drafted, width, dtype=drafter.dtype, device=device)
        self._anchor = torch.full((num_rows,), _NONE, device=device)

    def forget(self, row: int) -> None:
        """Forgets the row's block, because the row has a new sequence."""
        self._anchor[row] = _NONE

    def swap(self, a: int, b: int) -> None:
        """Exchanges the blocks of two rows."""
        self._hidden[[a, b]], self._anchor[[a, b]] = self._hidden[[b, a]], self._anchor[[b, a]]

    def at_step(self, cache: SlotCache, state: Rows, batch: int, key_length: int) -> Said:
        """States for the next tokens of the first `batch` rows, before the rows are fed. Waits for the device."""
        position = state.position[:batch]
        slot = torch.remainder(position + 1 - state.grid_origin[:batch], self.block_size)
        anchor, inside = position + 1 - slot, slot > 0
        due = inside & (anchor != self._anchor[:batch]) & (state.status[:batch] == Status.LIVE)
        rows = due.nonzero()[:, 0]
        if len(rows):
            padded = torch.cat([rows, rows[:1].expand(round_up(len(rows), self._row_step) - len(rows))])
            hidden = self.drafter.hidden_aside(Anchors(padded, cache, state.tokens, anchor[padded], key_length))
            self._hidden[rows], self._anchor[rows] = hidden[: len(rows)], anchor[rows]
            state.blocks[:batch] += due
        chosen = self._hidden[state.ids[:batch], (slot - 1).clamp(min=0)]
        return Said(chosen, inside)

    def num_blocks(self, origin: int, first: int, stop: int) -> int:
        """Number of blocks that `along` drafts for the tokens at positions `first` to `stop - 1`."""
        return len({position - slot for position in range(first, stop)
                    if (slot := grid_slot(position - origin, self.block_size))})

    def along(self, cache: SlotCache, row: int, sequence: np.ndarray, origin: int, first: int, count: int) -> Said:
        """States for the `count` tokens after position `first` of a sequence that the row holds.

        `origin` is the position at which the first block starts.
        """
        device = self._anchor.device
        slots = [grid_slot(first + 1 + index - origin, self.block_size) for index in range(count)]
        tokens, rows = torch.from_numpy(sequence).to(device)[None], torch.tensor([row], device=device)
        blocks: dict[int, torch.Tensor] = {}
        hidden = torch.zeros(count, self._hidden.shape[2], dtype=self._hidden.dtype, device=device)
        for index, slot in enumerate(slots):
            anchor = first + 1 + index - slot
            if slot and anchor not in blocks:
                # The tokens are taken from the sequence, not from the engine's rows.
                at = Anchors(rows, cache, tokens.expand(row + 1, -1), torch.tensor([anchor], device=device), cache.length)
                blocks[anchor] = self.drafter.hidden_aside(at)[0]
            if slot:
                hidden[index] = blocks[anchor][slot - 1]
        return Said(hidden, torch.tensor(slots, device=device) > 0)
