"""The states of recurrent layers, by position, and the inputs that lead from one state to the next.

Keys and values of a token stay valid when later tokens are dropped. A recurrent state does not: it has to be known at the
position to which a row is rolled back. A row therefore keeps

    inputs      the input of each recurrent layer at every position, where an attention layer keeps keys and values
    snapshots   the states at positions 0, `every`, 2 `every`, ...
    recent      the states at the latest positions, at `position % num_recent`: those that the next steps can start from

The state at a position is the state before its token is fed. A state that is neither a snapshot nor recent is replayed: the
recurrence runs from the last snapshot over the kept inputs (`delta_net.replay`), token by token in every forward, so that its
bits do not depend on how a text was split, nor on which snapshot it starts from.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from dflash_mcmc.engine.batching.cache import CacheLayer, CacheShape, KVCache, RecurrentShape, RecurrentStates

_UNKNOWN = -1


class RecurrentLayer(CacheLayer):
    """One recurrent layer of a `HybridCache`. `delta_net.mix` reads and writes its states in each forward."""

    def __init__(self, cache: HybridCache, number: int, shape: RecurrentShape, device: torch.device):
        super().__init__(shape.dtype, device, cache.length)
        self._cache, self._number = cache, number

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Raises TypeError: the layer has no keys and values."""
        raise TypeError("a recurrent layer has no keys and values")

    def begin(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores inputs (rows, queries, width). Returns windows and matrices of the rows before the first query."""
        cache = self._cache
        cache.inputs[self._number][cache.row_ids[:, None], cache.positions] = inputs
        return cache.recent.get(self._number, cache.row_ids, cache.positions[:, 0] % cache.num_recent)

    def keep(self, query: int, windows: torch.Tensor, matrices: torch.Tensor) -> None:
        """Keeps the states after a query: windows (rows, window, channels), matrices (rows, heads, key_dim, value_dim)."""
        cache, number = self._cache, self._number
        if cache.spans is None:
            cache.recent.put(number, cache.row_ids, (cache.positions[:, query] + 1) % cache.num_recent, windows, matrices)
            return
        # After its last token a row reads padding, whose states are not kept.
        (rows, stop), reached = cache.spans[:, [0, 2]].T, cache.spans[:, 1] + query + 1
        for index in np.flatnonzero((reached <= stop) & (reached % cache.every == 0)).tolist():
            row, at = int(rows[index]), int(reached[index]) // cache.every
            cache.snapshots.put(number, row, at, windows[index], matrices[index])
        for index in np.flatnonzero(reached == stop).tolist():
            row, at = int(rows[index]), int(stop[index]) % cache.num_recent
            cache.recent.put(number, row, at, windows[index], matrices[index])


class HybridCache(KVCache):
    """A cache for a model in which some layers are recurrent.

    Args:
        every: positions between two snapshots.
        num_recent: number of recent states of a row.

    Attributes:
        inputs: (layers, num_rows, length, width), the inputs of the recurrent layers.
        snapshots: the states of each row at multiples of `every`.
        recent: the latest states of each row.
        known: int64 (num_rows,) on the host, the position whose state is recent in each row beside those that the next steps
            write; -1 without such a position.
        spans: int64 (rows, 3): rows, and the positions that the next forward reads in them, without padding; None for a
            decode step.
        row_ids, positions: int64 (rows,) and (rows, queries), the next forward's.
    """

    recurrent = True

    def __init__(self, shape: CacheShape, num_rows: int, length: int, device: torch.device | str = "cpu",
                 companions: tuple[CacheShape, ...] = (), every: int = 1, num_recent: int = 2):
        super().__init__(shape, num_rows, length, device, companions)
        if shape.recurrent is None:
            raise ValueError("this model has no recurrent layers")
        recurrent = shape.recurrent
        sizes = len(recurrent.layers), num_rows, length, recurrent.width
        self.inputs = torch.zeros(sizes, dtype=recurrent.dtype, device=device)
        self.every, self.num_recent = every, num_recent
        self.snapshots = RecurrentStates(recurrent, num_rows, length // every + 1, device)
        self.recent = RecurrentStates(recurrent, num_rows, num_recent, device)
        self.known = np.zeros(num_rows, np.int64)
        self.spans: np.ndarray | None = None
        self.row_ids = self.positions = torch.empty(0)
        layers: list[CacheLayer] = list(self.kv_layers)
        for index, layer in enumerate(recurrent.layers):  # in ascending order, so that each lands at its place
            layers.insert(layer, RecurrentLayer(self, index, recurrent, torch.device(device)))
        self.layers = [*layers]

    def on_host(self, length: int) -> HybridCache:
        return HybridCache(self._shape, 1, length, "cpu", self._companions, self.every, self.num_recent)

    def reserve(self, length: int) -> None:
        if length > self.length:
            self.inputs = torch.nn.functional.pad(self.inputs, (0, 0, 0, length - self.length))
            self.snapshots.extend(length // self.every + 1)
        super().reserve(length)

    def aim(self, rows: slice | torch.Tensor, positions: torch.Tensor, key_length: int) -> None:
        super().aim(rows, positions, key_length)
        self.row_ids, self.positions = self._row_ids[rows][:, 0], positions

    @contextmanager
    def reading(self, spans: np.ndarray) -> Iterator[None]:
        self.spans = spans
        yield
        self.spans = None
        self.known[spans[:, 0]] = spans[:, 2]

    def passed(self, before: np.ndarray, after: np.ndarray) -> None:
        for row in np.flatnonzero(after // self.every > before // self.every).tolist():
            for number in range(int(before[row]) // self.every + 1, int(after[row]) // self.every + 1):
                self.snapshots.copy(row, number, self.recent, row, number * self.every % self.num_recent)
        self.known[: len(after)] = after

    def copy(self, source: KVCache, source_row: int, row: int, start: int, stop: int) -> None:
        """See `KVCache`. States at positions `start + 1` to `stop` are copied too, as far as the source has them."""
        super().copy(source, source_row, row, start, stop)
        if not isinstance(source, HybridCache):
            raise TypeError(f"{type(source).__name__} has no recurrent states")
        self.inputs[:, row, start:stop] = source.inputs[:, source_row, start:stop]
        taken = slice(start // self.every + 1, stop // self.every + 1)
        self.snapshots.copy(row, taken, source.snapshots, source_row, taken)
        if source.known[source_row] == stop:
            self._copy_recent(source, source_row, row, stop)
        else:
            self.known[row] = _UNKNOWN

    def fork(self, leader: int, row: int, start: int, stop: int) -> None:
        """See `KVCache`. The state at `stop` is recent in the leader's row."""
        super().fork(leader, row, start, stop)
        self._copy_recent(self, leader, row, stop)

    def _copy_recent(self, source: HybridCache, source_row: int, row: int, stop: int) -> None:
        at = stop % self.num_recent
        self.recent.copy(row, at, source.recent, source_row, at)
        self.known[row] = stop

    def swap(self, a: int, b: int, length_a: int, length_b: int) -> None:
        length, known = max(length_a, length_b), self.known[[b, a]]
        super().swap(a, b, length_a, length_b)
        if length_a and length_b:  # else one row has been copied over the other
            kept = self.inputs[:, a, :length].clone()
            self.inputs[:, a, :length] = self.inputs[:, b, :length]
            self.inputs[:, b, :length] = kept
            self.snapshots.swap(a, b, length // self.every + 1)
        self.recent.swap(a, b, self.num_recent)
        self.known[[a, b]] = known

    def clear(self, row: int | slice = slice(None)) -> None:
        super().clear(row)
        self.inputs[:, row] = 0
        self.snapshots.clear(row)
        self.recent.clear(row)
        self.known[row] = 0
