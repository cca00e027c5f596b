"""A contiguous cache for a model in which some layers are recurrent (`recurrent_state.py`)."""

from __future__ import annotations

import numpy as np
import torch

from dflash_mcmc.engine.batching.cache import CacheShape, SlotCache
from dflash_mcmc.engine.batching.contiguous_cache import ContiguousCache
from dflash_mcmc.engine.batching.recurrent_state import HybridCache, RecurrentStates, StatePlace, hybrid


class HybridRows(HybridCache, ContiguousCache):
    """A contiguous cache with inputs and snapshots of recurrent layers in each row.

    Args:
        every: positions between two snapshots.
        num_recent: number of recent states of a row.

    Attributes:
        inputs: (layers, num_rows, length, width), the inputs of the recurrent layers.
    """

    def __init__(self, shape: CacheShape, num_rows: int, length: int, device: torch.device | str = "cpu",
                 companion: CacheShape | None = None, every: int = 1, num_recent: int = 2):
        ContiguousCache.__init__(self, shape, num_rows, length, device, companion)
        if shape.recurrent is None:
            raise ValueError("this model has no recurrent layers")
        recurrent = shape.recurrent
        sizes = len(recurrent.layers), num_rows, length, recurrent.width
        self.inputs = torch.zeros(sizes, dtype=recurrent.dtype, device=device)
        self.snapshots = RecurrentStates(recurrent, num_rows, length // every + 1, device)
        self._kept = np.ones((num_rows, length // every + 1), bool)
        self._add_states(recurrent, every, num_recent, device)

    def on_host(self, length: int) -> HybridRows:
        return HybridRows(self._shape, 1, length, "cpu", self.companion._shape if self.companion else None, self.every,
                          self.num_recent)

    def reserve(self, length: int) -> None:
        if length > self.length:
            self.inputs = torch.nn.functional.pad(self.inputs, (0, 0, 0, length - self.length))
            self.snapshots.extend(length // self.every + 1)
            more = length // self.every + 1 - self._kept.shape[1]
            self._kept = np.pad(self._kept, ((0, 0), (0, more)), constant_values=True)
        super().reserve(length)

    def write_inputs(self, number: int, inputs: torch.Tensor) -> None:
        self.inputs[number][self.row_ids[:, None], self.positions] = inputs

    def inputs_at(self, number: int, rows: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        device = self.inputs.device
        return self.inputs[number][torch.from_numpy(rows[:, None]).to(device), torch.from_numpy(positions).to(device)]

    def input_span(self, row: int, start: int, stop: int) -> torch.Tensor:
        return self.inputs[:, row, start:stop]

    def snapshot(self, row: int, number: int) -> StatePlace | None:
        return StatePlace(row, number) if self._kept[row, number] else None

    def place_snapshot(self, row: int, number: int) -> StatePlace:
        self._kept[row, number] = True
        return StatePlace(row, number)

    def _forget_snapshot(self, row: int, number: int) -> None:
        self._kept[row, number] = False

    def copy(self, source: SlotCache, source_row: int, row: int, start: int, stop: int) -> None:
        """See `SlotCache`. States at positions `start + 1` to `stop` are copied too, as far as the source has them."""
        super().copy(source, source_row, row, start, stop)
        theirs = hybrid(source)
        self.inputs[:, row, start:stop] = theirs.input_span(source_row, start, stop)
        if isinstance(theirs, HybridRows):
            taken = slice(start // self.every + 1, stop // self.every + 1)
            self.snapshots.copy(row, taken, theirs.snapshots, source_row, taken)
            self._kept[row, taken] = theirs._kept[source_row, taken]
        else:
            self._copy_snapshots(theirs, source_row, row, start, stop)
        self._copy_recent(theirs, source_row, row, stop)

    def swap(self, a: int, b: int, length_a: int, length_b: int) -> None:
        length, known = max(length_a, length_b), self.known[[b, a]]
        super().swap(a, b, length_a, length_b)
        if length_a and length_b:  # else one row has been copied over the other
            kept = self.inputs[:, a, :length].clone()
            self.inputs[:, a, :length] = self.inputs[:, b, :length]
            self.inputs[:, b, :length] = kept
            self.snapshots.swap(a, b, length // self.every + 1)
            self._kept[[a, b]] = self._kept[[b, a]]
        self._swap_recent(a, b, known)

    def clear(self, row: int | slice = slice(None)) -> None:
        super().clear(row)
        self.inputs[:, row] = 0
        self.snapshots.clear(row)
        self._kept[row] = True
        self._clear_recent(row)
