"""The shapes of forwards.

On a CPU in float32 the numbers of a row must not depend on the rest of the batch. Multiples of 8 rows and 64 keys ensure this
(notebook: Bits). Any number of rows ensures it where `step_bits.py` says so. On a GPU each shape is a captured graph. There
the shapes grow by factors of two, so that they are few.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

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
