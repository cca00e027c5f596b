"""The KV cache of all slots: one preallocated row for each slot. Each row has its own position.

It is a `transformers` cache, so unmodified models run on it. The keys and values of a layer are scattered to each row's own
positions. The mask of a forward lets a query see the keys up to its own position. A rollback only lowers the position,
because larger positions are overwritten before they are read again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class CacheShape(NamedTuple):
    """Shape of the keys and values of one token of one sequence."""

    num_layers: int
    num_heads: int
    """Heads of keys and values."""
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    def token_bytes(self) -> int:
        """Bytes of one token in all layers."""
        return self.num_layers * self.num_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


class SlotLayer(CacheLayerMixin):
    """Keys and values of one decoder layer: each (num_rows, num_heads, length, dim)."""

    is_sliding = False
    is_croppable = True
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, keys: torch.Tensor, values: torch.Tensor):
        super().__init__()
        self.keys, self.values = keys, values
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self.rows: slice | torch.Tensor = slice(0, 0)
        self.row_ids = torch.empty(0)
        self.positions = torch.empty(0)
        self.key_length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Does nothing, because a slot cache is allocated as a whole."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scatters keys and values, each (rows, heads, queries, dim), to the rows' positions.

        Returns the keys and values of the rows up to `key_length`.
        """
        # Advanced indices around a slice put the indexed axes first: (rows, queries, heads, dim).
        self.keys[self.row_ids, :, self.positions] = key_states.transpose(1, 2)
        self.values[self.row_ids, :, self.positions] = value_states.transpose(1, 2)
        # Consecutive rows are a view; others are gathered.
        return self.keys[self.rows, :, : self.key_length], self.values[self.rows, :, : self.key_length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.key_length, 0

    def get_seq_length(self) -> int:
        return self.key_length

    def get_max_length(self) -> int:
        return self.keys.shape[2]


class SlotCache(Cache):
    """A SlotLayer for each decoder layer. `aim` sets rows and positions before each forward.

    Attributes:
        keys, values: (num_layers, num_rows, num_heads, length, dim), the memory of all layers. One copy moves a span of a
            row in all layers.
        companion: a draft's cache for the same tokens; None without a draft. It grows and is copied together with this one.
    """

    def __init__(self, shape: CacheShape, num_rows: int, length: int, device: torch.device | str = "cpu",
                 companion: CacheShape | None = None):
        self._shape = shape
        self.keys, self.values = (
            # Uninitialised memory may hold NaN. A masked position has weight zero, but zero times NaN is NaN.
            torch.zeros(shape.num_layers, num_rows, shape.num_heads, length, dim, dtype=shape.dtype, device=device)
            for dim in (shape.key_dim, shape.value_dim)
        )
        self.slot_layers = [SlotLayer(*layer) for layer in zip(self.keys, self.values, strict=True)]
        super().__init__(layers=[*self.slot_layers])
        self._row_ids = torch.arange(num_rows, device=device)[:, None]
        self.companion = None if companion is None else SlotCache(companion, num_rows, length, device)

    def of_one_row(self, length: int) -> SlotCache:
        """A cache of the same shape on the host, with one row of `length` positions."""
        return SlotCache(self._shape, 1, length, "cpu", self.companion._shape if self.companion else None)

    @property
    def length(self) -> int:
        """Positions of a row."""
        return self.values.shape[3]

    @property
    def drafts(self) -> SlotCache:
        """The companion of a cache that has one."""
        if self.companion is None:
            raise ValueError("this cache has no companion cache for a draft")
        return self.companion

    def reserve(self, length: int) -> None:
        """Makes rows at least `length` long.

        On a CPU the cache grows on demand. A cache that is no longer than its longest sequence is read as one piece of
        memory, which makes a decode step of many rows a fifth faster (LOG.md).
        """
        if length <= self.length:
            return
        more = (0, 0, 0, length - self.length)
        for name in ("keys", "values"):  # one after the other, to limit the memory for copies
            setattr(self, name, torch.nn.functional.pad(getattr(self, name), more))
            for layer, memory in zip(self.slot_layers, getattr(self, name), strict=True):
                setattr(layer, name, memory)
        if self.companion is not None:
            self.companion.reserve(length)

    def aim(self, rows: slice | torch.Tensor, positions: torch.Tensor, key_length: int) -> None:
        """Sets where the next forward writes.

        Args:
            rows: the first rows as a slice, or int64 indices.
            positions: int64 (rows, queries).
        """
        row_ids = self._row_ids[rows]
        for layer in self.slot_layers:
            layer.rows, layer.row_ids, layer.positions, layer.key_length = rows, row_ids, positions, key_length

    def write(self, rows: slice | torch.Tensor, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes keys and values, each (layers, rows, heads, queries, dim), to positions of rows, int64 (rows, queries)."""
        row_ids = self._row_ids[rows]
        # Advanced indices with a slice between them come first: (rows, queries, layers, heads, dim).
        self.keys[:, row_ids, :, positions] = keys.permute(1, 3, 0, 2, 4)
        self.values[:, row_ids, :, positions] = values.permute(1, 3, 0, 2, 4)

    def at(self, rows: slice | torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values at these positions, in the shapes of `write`."""
        row_ids = self._row_ids[rows]
        keys, values = (memory[:, row_ids, :, positions].permute(2, 0, 3, 1, 4) for memory in (self.keys, self.values))
        return keys, values

    def copy(self, source: SlotCache, source_row: int, row: int, start: int, stop: int) -> None:
        """Copies positions `start` to `stop - 1` of a row of a cache (this one or another) into a row of this one."""
        self.keys[:, row, :, start:stop] = source.keys[:, source_row, :, start:stop]
        self.values[:, row, :, start:stop] = source.values[:, source_row, :, start:stop]
        if self.companion is not None:
            self.companion.copy(source.drafts, source_row, row, start, stop)

    def swap(self, a: int, b: int, length_a: int, length_b: int) -> None:
        """Exchanges two rows, of which the first `length_a` and `length_b` positions matter."""
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
        """Sets a row, or all rows, to zero. This removes NaN: a masked position has weight zero, but zero times NaN is NaN."""
        self.keys[:, row] = 0
        self.values[:, row] = 0
        if self.companion is not None:
            self.companion.clear(row)
