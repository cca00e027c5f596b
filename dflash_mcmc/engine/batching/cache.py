"""The KV cache of all slots: a row for each slot, each with its own position.

It is a `transformers` cache, so unmodified models run on it. The keys and values of a layer are written to each row's own
positions. The mask of a forward lets a query see the keys up to its own position. A rollback only lowers the position, because
larger positions are overwritten before they are read again.

    contiguous_cache.py   a row is one piece of memory, as long as the longest
    paged_cache.py        a row is a list of pages, as long as its text
    recurrent_state.py    either of them with the states of recurrent layers
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from dflash_mcmc.engine.batching.recurrent_shape import RecurrentShape

UNLIMITED = 2**62
"""A number of pages that always suffices."""


class CacheShape(NamedTuple):
    """Shape of the keys and values of one token of one sequence."""

    num_layers: int
    """Layers with keys and values."""
    num_heads: int
    """Heads of keys and values."""
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    recurrent: RecurrentShape | None = None
    """Shape of the recurrent layers; None without such layers."""

    def token_bytes(self) -> int:
        """Bytes of one token in all layers, without the inputs of recurrent layers."""
        return self.layer_bytes() * self.num_layers

    def layer_bytes(self) -> int:
        """Bytes of the keys and values of one token in one layer."""
        return self.num_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


class SlotLayer(CacheLayerMixin):
    """Keys and values of one decoder layer.

    Args:
        length: positions of a row.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, dtype: torch.dtype, device: torch.device, length: int):
        super().__init__()
        self.dtype, self.device, self.is_initialized = dtype, device, True
        self.length, self.key_length = length, 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Does nothing, because a slot cache is allocated as a whole."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.key_length, 0

    def get_seq_length(self) -> int:
        return self.key_length

    def get_max_length(self) -> int:
        return self.length


class SlotCache(Cache, ABC):
    """The keys and values of some rows. `aim` sets rows and positions before each forward.

    A row can be written only where it is open. A forward calls `update` of each layer with keys and values (rows, heads,
    queries, dim). It returns the keys and values of the aimed rows, (rows, heads, key_length, dim).

    Attributes:
        slot_layers: a layer for each decoder layer.
        num_rows: number of rows.
        companion: a draft's cache for the same tokens; None without a draft. It is opened, copied and freed with this one.
        recurrent: whether it has states of recurrent layers (`recurrent_state.py`).
    """

    recurrent = False
    companion: SlotCache | None

    def __init__(self, layers: Sequence[SlotLayer], num_rows: int, companion: SlotCache | None):
        super().__init__(layers=[*layers])
        self.slot_layers, self.num_rows, self.companion = layers, num_rows, companion

    @property
    def drafts(self) -> SlotCache:
        """The companion of a cache that has one."""
        if self.companion is None:
            raise ValueError("this cache has no companion cache for a draft")
        return self.companion

    @property
    @abstractmethod
    def length(self) -> int:
        """Positions of a row."""

    @abstractmethod
    def of_one_row(self, length: int) -> SlotCache:
        """A cache of the same shape with one row of at least `length` positions, for a slot without a row of the batch."""

    @abstractmethod
    def on_host(self, length: int) -> SlotCache:
        """Like `of_one_row`, in the host's memory and without pages."""

    @abstractmethod
    def span(self, row: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values at positions `start` to `stop - 1` of a row, each (layers, heads, positions, dim)."""

    @abstractmethod
    def reserve(self, length: int) -> None:
        """Makes rows at least `length` long."""

    @abstractmethod
    def open(self, row: int, start: int, stop: int) -> None:
        """Lets forwards write positions `start` to `stop - 1` of a row, beside those that are open. Raises OutOfPages."""

    @abstractmethod
    def close(self, row: int) -> None:
        """Ends the writing to a row: what a forward gives for it is lost."""

    @abstractmethod
    def keep(self, row: int, start: int, stop: int) -> None:
        """Frees the memory of a row outside positions `start` to `stop - 1`. The row is closed."""

    @abstractmethod
    def extend(self, stops: np.ndarray) -> None:
        """Opens the first rows, except closed ones, up to these positions, int64 (rows,). Raises OutOfPages."""

    @abstractmethod
    def restart(self) -> None:
        """Empties all rows of this cache, and frees the memory of all caches of one row made from it."""

    @property
    @abstractmethod
    def num_pages(self) -> int:
        """Number of pages, free or not; UNLIMITED where rows have memory of their own."""

    @property
    @abstractmethod
    def num_free_pages(self) -> int:
        """Number of free pages; UNLIMITED where rows have memory of their own."""

    @abstractmethod
    def has_pages(self, row: int) -> bool:
        """Whether a row has pages that it could free."""

    @abstractmethod
    def pages_of(self, length: int) -> int:
        """Number of pages of `length` positions; 0 where rows have memory of their own."""

    @abstractmethod
    def pages_to_extend(self, stops: np.ndarray) -> int:
        """Number of pages that `extend` takes."""

    @abstractmethod
    def aim(self, rows: slice | torch.Tensor, positions: torch.Tensor, key_length: int) -> None:
        """Sets where the next forward writes, and how many positions of the rows it reads.

        Args:
            rows: the first rows as a slice, or int64 indices.
            positions: int64 (rows, queries).
        """

    def reading(self, spans: np.ndarray) -> AbstractContextManager[None]:
        """A context for a forward that reads spans: (row, start, stop) for each row, int64 (rows, 3)."""
        return nullcontext()

    def passed(self, before: np.ndarray, after: np.ndarray) -> None:
        """Notes that decode steps have brought the first rows from positions `before` to positions `after`, int64 (rows,)."""

    @abstractmethod
    def write(self, rows: slice | torch.Tensor, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes keys and values, each (layers, rows, heads, queries, dim), to positions of rows, int64 (rows, queries)."""

    @abstractmethod
    def at(self, rows: slice | torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values at these positions, in the shapes of `write`. The positions are open."""

    @abstractmethod
    def copy(self, source: SlotCache, source_row: int, row: int, start: int, stop: int) -> None:
        """Copies positions `start` to `stop - 1` of a row of a cache (this one or another) into a row of this one."""

    def follow(self, leader: int, row: int, start: int, stop: int) -> None:
        """Copies positions of an open row, which is no longer written before `stop`, into another row."""
        self.copy(self, leader, row, start, stop)

    @abstractmethod
    def swap(self, a: int, b: int, length_a: int, length_b: int) -> None:
        """Exchanges two rows, of which the first `length_a` and `length_b` positions matter."""

    @abstractmethod
    def clear(self, row: int | slice = slice(None)) -> None:
        """Empties a row, or all rows. What they held is set to zero before it is read again.

        This removes NaN: a masked position has weight zero, but zero times NaN is NaN.
        """
