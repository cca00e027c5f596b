"""A KV cache whose rows are all as long as the longest. Each layer has one piece of memory.

Decode steps read rows without copying them. The memory is the number of rows times the length of the longest sequence.
"""

from __future__ import annotations

import numpy as np
import torch

from dflash_mcmc.engine.batching.cache import UNLIMITED, CacheShape, SlotCache, SlotLayer

_FIRST = slice(0, 1)


class ContiguousLayer(SlotLayer):
    """Keys and values of one decoder layer: each (num_rows, num_heads, length, dim)."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, keys: torch.Tensor, values: torch.Tensor):
        super().__init__(keys.dtype, keys.device, keys.shape[2])
        self.keys, self.values = keys, values
        self.rows: slice | torch.Tensor = slice(0, 0)
        self.row_ids = torch.empty(0)
        self.positions = torch.empty(0)
        self.only: int | None = None
        self._read: tuple[torch.Tensor, torch.Tensor] | None = None

    def aim(self, rows: slice | torch.Tensor, row_ids: torch.Tensor, positions: torch.Tensor, key_length: int,
            only: int | None) -> None:
        """See `SlotCache.aim`. `only` is the position of a forward that feeds one token of the first row, else None."""
        if not isinstance(rows, slice) or self.rows != rows or self.key_length != key_length:
            self._read = None
        self.rows, self.row_ids, self.positions, self.key_length, self.only = rows, row_ids, positions, key_length, only

    def resize(self, length: int, **memory: torch.Tensor) -> None:
        """Takes other memory for keys or values."""
        self.length, self._read = length, None
        for name, tensor in memory.items():
            setattr(self, name, tensor)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scatters keys and values, each (rows, heads, queries, dim), to the rows' positions.

        Returns the keys and values of the rows up to `key_length`.
        """
        if self.only is not None:  # indexing by tensors takes longer
            self.keys[0, :, self.only] = key_states[0, :, 0]
            self.values[0, :, self.only] = value_states[0, :, 0]
        else:  # advanced indices around a slice put the indexed axes first: (rows, queries, heads, dim)
            self.keys[self.row_ids, :, self.positions] = key_states.transpose(1, 2)
            self.values[self.row_ids, :, self.positions] = value_states.transpose(1, 2)
        # Consecutive rows are a view, which stays the same for many steps; others are gathered.
        if self._read is not None:
            return self._read
        found = self.keys[self.rows, :, : self.key_length], self.values[self.rows, :, : self.key_length]
        self._read = found if isinstance(self.rows, slice) else None
        return found


class ContiguousCache(SlotCache):
    """A layer for each decoder layer. Every row is open.

    Attributes:
        keys, values: (num_layers, num_rows, num_heads, length, dim), the memory of all layers. One copy moves a span of a
            row in all layers.
    """

    companion: ContiguousCache | None

    def __init__(self, shape: CacheShape, num_rows: int, length: int, device: torch.device | str = "cpu",
                 companion: CacheShape | None = None):
        self._shape = shape
        self.keys, self.values = (
            # Uninitialised memory may hold NaN. A masked position has weight zero, but zero times NaN is NaN.
            torch.zeros(shape.num_layers, num_rows, shape.num_heads, length, dim, dtype=shape.dtype, device=device)
            for dim in (shape.key_dim, shape.value_dim)
        )
        drafts = None if companion is None else ContiguousCache(companion, num_rows, length, device)
        self._layers = [ContiguousLayer(*layer) for layer in zip(self.keys, self.values, strict=True)]
        super().__init__(self._layers, num_rows, drafts)
        self._row_ids = torch.arange(num_rows, device=device)[:, None]

    def of_one_row(self, length: int) -> ContiguousCache:
        """See `SlotCache`. The memory is the host's."""
        return self.on_host(length)

    def on_host(self, length: int) -> ContiguousCache:
        return ContiguousCache(self._shape, 1, length, "cpu", self.companion._shape if self.companion else None)

    @property
    def length(self) -> int:
        return self.values.shape[3]

    def reserve(self, length: int) -> None:
        """See `SlotCache`.

        On a CPU the cache grows on demand. A cache that is no longer than its longest sequence is read as one piece of
        memory, which makes a decode step of many rows a fifth faster (notebook, "The engine").
        """
        if length <= self.length:
            return
        more = (0, 0, 0, length - self.length)
        for name in ("keys", "values"):  # one after the other, to limit the memory for copies
            setattr(self, name, torch.nn.functional.pad(getattr(self, name), more))
            for layer, memory in zip(self._layers, getattr(self, name), strict=True):
                layer.resize(length, **{name: memory})
        if self.companion is not None:
            self.companion.reserve(length)

    def open(self, row: int, start: int, stop: int) -> None:
        """Does nothing: all rows are open."""

    def close(self, row: int) -> None:
        """Does nothing: a step writes to a closed row only where the row holds nothing."""

    def keep(self, row: int, start: int, stop: int) -> None:
        """Does nothing: the memory of a row is its own."""

    def extend(self, stops: np.ndarray) -> None:
        """Does nothing: `reserve` makes all rows long enough."""

    def restart(self) -> None:
        """Does nothing: later tokens overwrite what rows hold."""

    @property
    def num_pages(self) -> int:
        return UNLIMITED

    @property
    def num_free_pages(self) -> int:
        return UNLIMITED

    def has_pages(self, row: int) -> bool:
        return False

    def pages_of(self, length: int) -> int:
        return 0

    def pages_to_extend(self, stops: np.ndarray) -> int:
        return 0

    def aim(self, rows: slice | torch.Tensor, positions: torch.Tensor, key_length: int) -> None:
        row_ids = self._row_ids[rows]
        one = isinstance(rows, slice) and rows == _FIRST and positions.numel() == 1 and positions.device.type == "cpu"
        only = int(positions) if one else None
        for layer in self._layers:
            layer.aim(rows, row_ids, positions, key_length, only)

    def write(self, rows: slice | torch.Tensor, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        row_ids = self._row_ids[rows]
        # Advanced indices with a slice between them come first: (rows, queries, layers, heads, dim).
        self.keys[:, row_ids, :, positions] = keys.permute(1, 3, 0, 2, 4)
        self.values[:, row_ids, :, positions] = values.permute(1, 3, 0, 2, 4)

    def at(self, rows: slice | torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        row_ids = self._row_ids[rows]
        keys, values = (memory[:, row_ids, :, positions].permute(2, 0, 3, 1, 4) for memory in (self.keys, self.values))
        return keys, values

    def copy(self, source: SlotCache, source_row: int, row: int, start: int, stop: int) -> None:
        self.keys[:, row, :, start:stop], self.values[:, row, :, start:stop] = source.span(source_row, start, stop)
        if self.companion is not None:
            self.companion.copy(source.drafts, source_row, row, start, stop)

    def span(self, row: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys[:, row, :, start:stop], self.values[:, row, :, start:stop]

    def swap(self, a: int, b: int, length_a: int, length_b: int) -> None:
        if not length_a or not length_b:
            source, row = (a, b) if length_a else (b, a)
            self.copy(self, source, row, 0, max(length_a, length_b))
            return
        length = max(length_a, length_b)
        for memory in (self.keys, self.values):
            kept = memory[:, a, :, :length].clone()
            memory[:, a, :, :length] = memory[:, b, :, :length]
            memory[:, b, :, :length] = kept
        if self.companion is not None:
            self.companion.swap(a, b, length_a, length_b)

    def clear(self, row: int | slice = slice(None)) -> None:
        self.keys[:, row] = 0
        self.values[:, row] = 0
        if self.companion is not None:
            self.companion.clear(row)
