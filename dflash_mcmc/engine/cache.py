"""The keys and values of all slots: preallocated, one row a slot, each row at its own position.

It is a `transformers` cache, so that unmodified models run on it: what a layer writes is scattered to each row's own
positions, and the mask that goes with a forward lets a query see the keys up to its own position. Rolling back is only
a smaller position; what lies above it is never read before it is overwritten.
"""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class SlotLayer(CacheLayerMixin):
    """Keys and values of one decoder layer: each (num_rows, num_kv_heads, length, head_dim)."""

    is_sliding = False
    is_croppable = True

    def __init__(self, num_rows: int, length: int):
        super().__init__()
        self.num_rows, self.length = num_rows, length
        self.rows: slice | torch.Tensor = slice(0, 0)
        self.row_ids = torch.empty(0)
        self.positions = torch.empty(0)
        self.key_length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        shapes = [(self.num_rows, s.shape[1], self.length, s.shape[3]) for s in (key_states, value_states)]
        self.keys, self.values = (torch.zeros(shape, dtype=self.dtype, device=self.device) for shape in shapes)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scatters (rows, heads, queries, head_dim) to the rows' positions; returns all keys up to `key_length`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        # Advanced indices around a slice put the indexed axes first: (rows, queries, heads, head_dim).
        self.keys[self.row_ids[:, None], :, self.positions] = key_states.transpose(1, 2)
        self.values[self.row_ids[:, None], :, self.positions] = value_states.transpose(1, 2)
        # Consecutive rows are a view; others are gathered.
        return self.keys[self.rows, :, : self.key_length], self.values[self.rows, :, : self.key_length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.key_length, 0

    def get_seq_length(self) -> int:
        return self.key_length

    def get_max_length(self) -> int:
        return self.length


class SlotCache(Cache):
    """A SlotLayer for each decoder layer, aimed at the same rows and positions before each forward."""

    def __init__(self, num_layers: int, num_rows: int, length: int):
        super().__init__(layers=[SlotLayer(num_rows, length) for _ in range(num_layers)])

    def aim(self, rows: slice | torch.Tensor, positions: torch.Tensor, key_length: int) -> None:
        """The next forward writes `rows` (the first ones, or int64 indices) at `positions`, int64 (rows, queries)."""
        row_ids = torch.arange(rows.stop, device=positions.device) if isinstance(rows, slice) else rows
        for layer in self.layers:
            layer.rows, layer.row_ids, layer.positions, layer.key_length = rows, row_ids, positions, key_length

    def move_row(self, source: int, destination: int, length: int) -> None:
        """Copies the first `length` positions of a row over those of another."""
        for layer in self.layers:
            layer.keys[destination, :, :length] = layer.keys[source, :, :length]
            layer.values[destination, :, :length] = layer.values[source, :, :length]
