"""The KV cache of all slots: a row for each slot, each with its own position.

It is a `transformers` cache, so unmodified models run on it. The keys and values of a layer are written to each row's own
positions. The mask of a forward lets a query see the keys up to its own position. A rollback only lowers the position, because
larger positions are overwritten before they are read again.

A hybrid model mixes attention with layers of the gated delta rule (arXiv 2412.06464). Such a layer has no keys and values: its
state after a token is a short convolution's last inputs, and a matrix for each head (`recurrent_state.py`).

Forwards have few shapes (`Ladder`). On a CPU in float32 the numbers of a row must not depend on the rest of the batch.
Multiples of 8 rows and 64 keys ensure this (notebook: Bits), or any number of rows where `batched.free_rows` says so. On a
GPU each shape is a captured graph. There the shapes grow by factors of two, so that they are few.

Rows are changed from one sequence to the next with as little reading as possible (`CachedPrefix`): a row keeps the tokens that
the next one begins with, a spare row gives back what a rejected draw has overwritten, and other rows of the chain give what
they hold.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from dflash_mcmc.process.machine import return_memory
from dflash_mcmc.types import Trajectory, common_prefix


def cache_argument(module: torch.nn.Module) -> str:
    """`cache`, or `past_key_values` for a module of an earlier version. The remote code of a checkpoint may be older."""
    return "cache" if "cache" in signature(module.forward).parameters else "past_key_values"


LINEAR = "linear_attention"
"""The name of a recurrent layer in `layer_types`."""
FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Values of `model_type` whose recurrent layers `recurrent_state.py` computes."""
PIECE = 64
"""Most tokens of a piece of a replay, which limits its memory."""
_WORK_COPIES = 6
"""Number of float32 arrays, as large as the matrices or the channels of all tokens, that a layer holds at the same time."""


class RecurrentShape(NamedTuple):
    """Shape of the recurrent layers of a model, and of the state of one sequence in each of them."""

    layers: tuple[int, ...]
    """Numbers of the recurrent layers, from 0."""
    width: int
    """Hidden size, the size of a layer's input."""
    window: int
    """Earlier inputs that the convolution reads."""
    channels: int
    """Channels of the convolution."""
    num_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    """Precision of inputs and windows. The matrices are in float32."""

    @property
    def state_bytes(self) -> int:
        """Bytes of the state after one token, in all layers."""
        matrix = self.num_heads * self.key_dim * self.value_dim * torch.float32.itemsize
        return len(self.layers) * (self.window * self.channels * self.dtype.itemsize + matrix)

    def work_bytes(self, queries: int) -> int:
        """Bytes that a layer takes to compute the states after so many tokens of one sequence."""
        matrix = self.num_heads * self.key_dim * self.value_dim
        return _WORK_COPIES * (matrix + queries * self.channels) * torch.float32.itemsize

    @property
    def input_bytes(self) -> int:
        """Bytes of the inputs of one token, in all layers."""
        return len(self.layers) * self.width * self.dtype.itemsize


def exchange(one: torch.Tensor, other: torch.Tensor) -> None:
    """Exchanges the values of two views of a tensor."""
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)


class RecurrentStates:
    """States of all recurrent layers: `count` of them for each row. They begin as zero, the state at position 0.

    Attributes:
        windows: (layers, num_rows, count, window, channels), the convolution's last inputs.
        matrices: float32 (layers, num_rows, count, heads, key_dim, value_dim).
    """

    def __init__(self, shape: RecurrentShape, num_rows: int, count: int, device: torch.device | str):
        sizes, layers = (num_rows, count), len(shape.layers)
        self.windows = torch.zeros(layers, *sizes, shape.window, shape.channels, dtype=shape.dtype, device=device)
        self.matrices = torch.zeros(layers, *sizes, shape.num_heads, shape.key_dim, shape.value_dim, device=device)

    def get(self, layer: int, rows: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(windows, matrices) of rows in a layer, each row's at its own number."""
        return self.windows[layer][rows, at], self.matrices[layer][rows, at]

    def put(self, layer: int, rows: int | torch.Tensor, at: int | torch.Tensor, windows: torch.Tensor,
            matrices: torch.Tensor) -> None:
        """Writes states of a row, or of rows each at its own number, in a layer."""
        self.windows[layer][rows, at], self.matrices[layer][rows, at] = windows, matrices

    def copy(self, row: int, at: int | slice, source: "RecurrentStates", source_row: int, source_at: int | slice) -> None:
        """Copies states of a row of `source` into a row."""
        self.windows[:, row, at] = source.windows[:, source_row, source_at]
        self.matrices[:, row, at] = source.matrices[:, source_row, source_at]

    def swap(self, a: int, b: int, count: int) -> None:
        """Exchanges the first `count` states of two rows."""
        for memory in (self.windows, self.matrices):
            exchange(memory[:, a, :count], memory[:, b, :count])

    def extend(self, count: int) -> None:
        """Makes room for `count` states in each row."""
        for name in ("windows", "matrices"):
            memory = getattr(self, name)
            more = torch.zeros(*memory.shape[:2], count - memory.shape[2], *memory.shape[3:], dtype=memory.dtype,
                               device=memory.device)
            setattr(self, name, torch.cat([memory, more], dim=2))

    def clear(self, row: int | slice) -> None:
        """Sets all states of a row to zero."""
        self.windows[:, row] = 0
        self.matrices[:, row] = 0


def recurrent_shape(config: Any, dtype: torch.dtype) -> RecurrentShape | None:
    """The shape of a model's recurrent layers; None if it has none, or layers of another kind than `FAMILIES`."""
    kinds = getattr(config, "layer_types", None) or ()
    if LINEAR not in kinds or config.model_type not in FAMILIES:
        return None
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    return RecurrentShape(
        tuple(index for index, kind in enumerate(kinds) if kind == LINEAR), config.hidden_size,
        config.linear_conv_kernel_dim - 1, 2 * keys + values, config.linear_num_value_heads, config.linear_key_head_dim,
        config.linear_value_head_dim, dtype)


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


class CacheLayer(CacheLayerMixin):
    """What the cache holds of one decoder layer.

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
        """Does nothing, because the cache is allocated as a whole."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.key_length, 0

    def get_seq_length(self) -> int:
        return self.key_length

    def get_max_length(self) -> int:
        return self.length


class KVLayer(CacheLayer):
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
        """See `KVCache.aim`. `only` is the position of a forward that feeds one token of the first row, else None."""
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
        read = self.keys[self.rows, :, : self.key_length], self.values[self.rows, :, : self.key_length]
        self._read = read if isinstance(self.rows, slice) else None
        return read


class KVCache(Cache):
    """The keys and values of some rows. `aim` sets rows and positions before each forward.

    A forward calls `update` of each layer with keys and values (rows, heads, queries, dim). It returns the keys and values of
    the aimed rows, (rows, heads, key_length, dim).

    Args:
        companions: shapes of the caches that follow this one.

    Attributes:
        keys, values: (num_layers, num_rows, num_heads, length, dim), the memory of all layers. One copy moves a span of a
            row in all layers.
        kv_layers: a layer for each decoder layer with keys and values.
        num_rows: number of rows.
        companion: a cache of a draft or of another model for the same tokens, which may have a companion itself; None without
            one. It is copied and cleared with this one.
        recurrent: whether it has states of recurrent layers (`recurrent_state.py`).
    """

    recurrent = False

    def __init__(self, shape: CacheShape, num_rows: int, length: int, device: torch.device | str = "cpu",
                 companions: tuple[CacheShape, ...] = ()):
        self._shape, self._companions, self.num_rows = shape, companions, num_rows
        self.keys, self.values = (
            # Uninitialised memory may hold NaN. A masked position has weight zero, but zero times NaN is NaN.
            torch.zeros(shape.num_layers, num_rows, shape.num_heads, length, dim, dtype=shape.dtype, device=device)
            for dim in (shape.key_dim, shape.value_dim)
        )
        self.companion = KVCache(companions[0], num_rows, length, device, companions[1:]) if companions else None
        self.kv_layers = [KVLayer(*layer) for layer in zip(self.keys, self.values, strict=True)]
        super().__init__(layers=[*self.kv_layers])
        self._row_ids = torch.arange(num_rows, device=device)[:, None]

    @property
    def drafts(self) -> "KVCache":
        """The companion of a cache that has one: that of a draft, if there is a draft with a cache."""
        if self.companion is None:
            raise ValueError("this cache has no companion cache")
        return self.companion

    def chain(self) -> "list[KVCache]":
        """This cache, its companion, that one's companion, and so on."""
        return [self, *(self.companion.chain() if self.companion is not None else ())]

    @property
    def length(self) -> int:
        """Positions of a row."""
        return self.values.shape[3]

    def on_host(self, length: int) -> "KVCache":
        """A cache of the same shape with one row of `length` positions in the host's memory, for a slot without a row."""
        return KVCache(self._shape, 1, length, "cpu", self._companions)

    def reserve(self, length: int) -> None:
        """Makes rows at least `length` long.

        On a CPU the cache grows on demand. A cache that is no longer than its longest sequence is read as one piece of
        memory, which makes a decode step of many rows a fifth faster (notebook, "The engine").
        """
        if length <= self.length:
            return
        more = (0, 0, 0, length - self.length)
        for name in ("keys", "values"):  # one after the other, to limit the memory for copies
            setattr(self, name, torch.nn.functional.pad(getattr(self, name), more))
            for layer, memory in zip(self.kv_layers, getattr(self, name), strict=True):
                layer.resize(length, **{name: memory})
            return_memory()
        if self.companion is not None:
            self.companion.reserve(length)

    def aim(self, rows: slice | torch.Tensor, positions: torch.Tensor, key_length: int) -> None:
        """Sets where the next forward writes, and how many positions of the rows it reads.

        Args:
            rows: the first rows as a slice, or int64 indices.
            positions: int64 (rows, queries).
        """
        row_ids = self._row_ids[rows]
        one = isinstance(rows, slice) and rows == slice(0, 1) and positions.numel() == 1 and positions.device.type == "cpu"
        only = int(positions) if one else None
        for layer in self.kv_layers:
            layer.aim(rows, row_ids, positions, key_length, only)

    def reading(self, spans: np.ndarray) -> AbstractContextManager[None]:
        """A context for a forward that reads spans: (row, start, stop) for each row, int64 (rows, 3)."""
        return nullcontext()

    def passed(self, before: np.ndarray, after: np.ndarray) -> None:
        """Notes that decode steps have brought the first rows from positions `before` to positions `after`, int64 (rows,)."""

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

    def copy(self, source: "KVCache", source_row: int, row: int, start: int, stop: int) -> None:
        """Copies positions `start` to `stop - 1` of a row of a cache (this one or another) into a row of this one."""
        for own, other in ((self.keys, source.keys), (self.values, source.values)):
            own[:, row, :, start:stop] = other[:, source_row, :, start:stop]
        if self.companion is not None:
            self.companion.copy(source.drafts, source_row, row, start, stop)

    def fork(self, leader: int, row: int, start: int, stop: int) -> None:
        """Copies positions of a row, which is no longer written before `stop`, into another row that goes on from `stop`."""
        self.copy(self, leader, row, start, stop)

    def swap(self, a: int, b: int, length_a: int, length_b: int) -> None:
        """Exchanges two rows, of which the first `length_a` and `length_b` positions matter."""
        if not length_a or not length_b:  # one row holds nothing that matters: a copy takes half of the work
            source, row = (a, b) if length_a else (b, a)
            self.copy(self, source, row, 0, max(length_a, length_b))
            return
        length = max(length_a, length_b)
        for memory in (self.keys, self.values):
            exchange(memory[:, a, :, :length], memory[:, b, :, :length])
        if self.companion is not None:
            self.companion.swap(a, b, length_a, length_b)

    def clear(self, row: int | slice = slice(None)) -> None:
        """Sets a row, or all rows, to zero.

        This removes NaN: a masked position has weight zero, but zero times NaN is NaN.
        """
        self.keys[:, row] = 0
        self.values[:, row] = 0
        if self.companion is not None:
            self.companion.clear(row)


_NOTHING = np.empty(0, np.int64)


class Placement(NamedTuple):
    """How a row comes to hold the first tokens of a sequence. All numbers are positions.

    The row keeps positions up to `kept`. Positions up to `restored` come from its spare row, those up to `forked` from the row
    of the contents `source`, and the later ones are read. Then the positions in `saved`, if any, are copied to the spare row.
    """

    kept: int
    restored: int
    forked: int
    source: int | None
    saved: tuple[int, int]


class CachedPrefix:
    """The tokens that a row and its spare row hold.

    Attributes:
        held: tokens from position 0 on whose keys and values the row holds, or will hold after the next reading.
        filled: number of these tokens that the row holds already.
        saved: tokens of the current sequence; the spare row holds their positions from `saved_from` on.
    """

    def __init__(self) -> None:
        self.held = self.saved = _NOTHING
        self.filled = self.saved_from = 0

    def hold(self, tokens: np.ndarray) -> None:
        """Sets the tokens that the row holds."""
        self.held, self.filled = tokens, len(tokens)

    def in_row(self, sequence: np.ndarray) -> int:
        """Number of first tokens of `sequence` that the row holds."""
        return min(common_prefix(self.held, sequence), self.filled)

    def restorable(self, sequence: np.ndarray, start: int) -> int:
        """The position up to which the spare row holds `sequence` from `start` on; `start` if it holds nothing of it."""
        if not self.saved_from <= start < len(self.saved):
            return start
        return max(start, common_prefix(self.saved, sequence))

    def save(self, current: np.ndarray, start: int) -> tuple[int, int]:
        """The span to copy to the spare row, which then holds `current` from position `start` on.

        `current` is the sequence that the chain returns to after a rejection; the draw overwrites the row from `start` on.
        """
        in_row = self.in_row(current)
        if self.saved_from <= in_row < common_prefix(self.saved, current):
            span = (start, self.saved_from)
            self.saved_from = min(start, self.saved_from)
        else:
            span = (start, in_row)
            self.saved, self.saved_from = current[:in_row], start
        return span

    def place(self, sequence: np.ndarray, along: Trajectory | None, others: "Sequence[CachedPrefix]",
              like: int | None = None) -> Placement:
        """Notes that the row will hold `sequence` without its last token, and returns how.

        Args:
            along: the current sequence, which the spare row then keeps; None without one.
            others: contents of other rows of the chain, from which a prefix may be copied.
            like: the number in `others` of contents that have been placed for the same sequence; None without such contents.
                Everything is then copied from them, because keys and values of the same tokens can differ in their last bits
                between two computations.
        """
        end, source = len(sequence) - 1, like
        if like is not None:
            self.held = self.saved = _NOTHING
            self.filled = self.saved_from = 0
        kept = min(self.in_row(sequence), end)
        restored = forked = min(self.restorable(sequence, kept), end)
        if like is not None:
            forked = min(others[like].in_row(sequence), end)
        elif restored < end:
            for index, other in enumerate(others):
                if (reach := min(other.in_row(sequence), end)) > forked:
                    source, forked = index, reach
        self.hold(np.concatenate([self.held[:kept], sequence[kept:forked]]) if forked > kept else self.held)
        saved = (0, 0)
        if along is not None:
            saved = self.save(np.concatenate([along.prompt, along.tokens])[:-1], end)
        self.held, self.filled = sequence[:-1], forked
        return Placement(kept, restored, forked, source, saved)


def assign(contents: Sequence[CachedPrefix], sequences: Sequence[np.ndarray]) -> list[tuple[int, int]]:
    """(sequence, contents) pairs, the longest reach first. Each sequence and each of the contents is in at most one pair."""
    if len(contents) == 1 and len(sequences) == 1:
        return [(0, 0)]
    reaches = sorted((-held.restorable(sequence, held.in_row(sequence)), mine, theirs)
                     for mine, sequence in enumerate(sequences) for theirs, held in enumerate(contents))
    pairs: dict[int, int] = {}
    for _, mine, theirs in reaches:
        if mine not in pairs and theirs not in pairs.values():
            pairs[mine] = theirs
    return list(pairs.items())


_SMALLEST_CHUNK = 8


class Ladder(NamedTuple):
    """The allowed batch sizes and key lengths. `batch` and `keys` return the smallest allowed value that is large enough."""

    row_step: int
    key_step: int
    doubling: bool

    def batch(self, rows: int) -> int:
        """Rows of a decode step."""
        return self._fit(rows, self.row_step)

    def keys(self, length: int) -> int:
        """Length of the keys of a decode step."""
        return self._fit(length, self.key_step)

    def _fit(self, value: int, step: int) -> int:
        if not self.doubling:
            return round_up(value, step)
        while step < value:
            step *= 2
        return step


def ladder_of(device: torch.device) -> Ladder:
    """The ladder of a device."""
    return Ladder(8, 64, False) if device.type == "cpu" else Ladder(8, 256, True)


def cache_size(device: torch.device, num_rows: int, max_length: int, padding: int) -> tuple[int, int]:
    """(rows, length) of a cache for sequences of `max_length`, with positions after them for padding."""
    ladder = ladder_of(device)
    return ladder.batch(num_rows), round_up(max_length + padding, ladder.key_step)


def chunks(start: int, stop: int, largest: int) -> Iterator[tuple[int, int]]:
    """(first position, size) of chunks that cover `start` to `stop - 1`. The last chunk may reach beyond.

    There are few sizes (8, 16, 24, 32, 48, 64, 96, ...), which lets chunks of several rows share a forward. Less than half of
    a chunk is padding.
    """
    while start < stop:
        needed, size = min(stop - start, largest), _SMALLEST_CHUNK
        while size < needed:
            size *= 2
        between = 3 * size // 4
        if between >= needed and between % _SMALLEST_CHUNK == 0:
            size = between
        yield start, size
        start += size


def round_up(value: int, step: int) -> int:
    """The smallest multiple of `step` that is at least `value`."""
    return -(-value // step) * step
