"""A product of few rows and a matrix, with the sums of a product of many rows.

MKL's kernels for many rows add the terms of a sum one after the other in pieces of the inner dimension, and then add the
pieces. For one row it has another kernel with another order, so that the last bits differ. `torch.embedding_bag` adds weighted
rows of a table one after the other, by fused multiply-adds. Here the table is the transposed weight, the weights are the row,
and each bag is a piece. The result has the bits of the kernels for many rows, and takes the time of reading the matrix once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

_NARROWEST = 64
"""Smallest number of columns of a bag."""
_BAGS_A_THREAD = 4
_SHARED_BYTES = 2**19
"""Largest part of a table that several rows read one after the other. It stays in the cache of a core."""
_SMALL = 2**17
"""A matrix with fewer elements is not divided among threads."""
_PIECES = (192, 384, 256, 320, 336, 128, 448, 512, 224, 288, 160, 96, 64)
"""Lengths of pieces that kernels may have, for inner dimensions that have several pieces."""
_NUM_SEEDS = 3
ROWS = 8
"""Rows of the product whose bits are found again: the smallest batch of `ladder.py`."""


class PiecewiseProduct:
    """Products x W^T of 1 to 7 rows x.

    Args:
        weight: float32 (outputs, inputs). A transposed copy is kept.
        piece: number of terms that are added one after the other.
        most: largest usual number of rows. It changes the time alone.
    """

    def __init__(self, weight: torch.Tensor, piece: int, most: int = 1):
        self.outputs, inputs = weight.shape
        self.piece, self._pieces = piece, -(-inputs // piece)
        self._parts = _num_parts(self._pieces, self.outputs, weight.numel(), 4 * piece * self.outputs if most > 1 else 0)
        self._table = weight.t().contiguous().view(inputs * self._parts, self.outputs // self._parts)
        self._inputs = inputs
        self._layouts: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of the copy."""
        return self._table.numel() * self._table.element_size()

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x W^T + bias, float32 (..., outputs), for x float32 (..., inputs)."""
        count = x.numel() // self._inputs
        if count not in self._layouts:
            self._layouts[count] = self._layout(count)
        indices, offsets, order = self._layouts[count]
        flat = x.reshape(-1)
        sums = torch._embedding_bag_forward_only(
            self._table, indices, offsets, False, 0, False, flat if order is None else flat[order])[0]
        if bias is None and self._pieces == 1 and (count == 1 or self._parts == 1):
            return sums.view(*x.shape[:-1], self.outputs)
        total = sums.view(self._pieces, -1)
        if bias is not None:
            first = total[0].view(self._parts, count, -1) + bias.view(self._parts, 1, -1)
            result = first.view(-1)
        else:
            result = total[0]
        for piece in range(1, self._pieces):
            result = result + total[piece]
        if count > 1 and self._parts > 1:
            result = result.view(self._parts, count, -1).transpose(0, 1)
        return result.reshape(*x.shape[:-1], self.outputs)

    def _layout(self, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(indices, offsets, order) of the bags of `count` rows, in the order of piece, part, row.

        `order` are the places of the weights in the flat rows; None if they are in order.
        """
        indices, order, lengths = [], [], []
        for start in range(0, self._inputs, self.piece):
            inner = torch.arange(start, min(start + self.piece, self._inputs))
            for part in range(self._parts):
                for row in range(count):
                    indices.append(inner * self._parts + part)
                    order.append(row * self._inputs + inner)
                    lengths.append(len(inner))
        offsets = torch.tensor([0, *lengths[:-1]]).cumsum(0)
        together = torch.cat(order)
        in_order = torch.equal(together, torch.arange(len(together)))
        return torch.cat(indices).int(), offsets.int(), None if in_order else together


def find(weight: torch.Tensor, bias: torch.Tensor | None, most: int) -> PiecewiseProduct | None:
    """The product with the bits of a linear layer of eight rows; None if no order of the sums is found.

    Random rows of several seeds are compared bit by bit, in all batches of up to `most` rows.

    Args:
        weight: float32 (outputs, inputs).
        bias: float32 (outputs,), or None.
    """
    tried = {_candidate(piece, weight.shape[1]) for piece in (*_PIECES, *_equal_pieces(weight.shape[1]))}
    row = _random_rows(weight, 0)
    for piece in sorted(tried, key=lambda piece: (-(-weight.shape[1] // piece), piece)):
        probe = PiecewiseProduct(weight[: 2 * _NARROWEST].contiguous(), piece)
        short = torch.nn.functional.linear(row, weight, None)[:1, : 2 * _NARROWEST]
        if torch.equal(probe(row[:1]), short):
            product = PiecewiseProduct(weight, piece, most)
            return product if agrees(product, weight, bias, most, range(_NUM_SEEDS)) else None
    return None


def agrees(product: PiecewiseProduct, weight: torch.Tensor, bias: torch.Tensor | None, most: int, seeds: range) -> bool:
    """Whether a product has the bits of the linear layer of eight rows, in all batches of up to `most` rows."""
    for seed in seeds:
        rows = _random_rows(weight, seed)
        expected = torch.nn.functional.linear(rows, weight, bias)
        for count in range(1, most + 1):
            first = (seed * 3) % (ROWS - count + 1)
            if not torch.equal(product(rows[first : first + count], bias), expected[first : first + count]):
                return False
    return True


def _candidate(piece: int, inputs: int) -> int:
    return min(piece, inputs)


def _equal_pieces(inputs: int) -> Iterator[int]:
    """The whole length, and lengths of two to four pieces that are about equal."""
    yield inputs
    for number in (2, 3, 4):
        for step in (1, 4, 8, 16, 32):
            yield -(-inputs // (number * step)) * step


def _num_parts(pieces: int, outputs: int, size: int, shared: int) -> int:
    """Number of parts into which the outputs are divided, so that rows find parts in the cache, and all threads have bags.

    Args:
        size: elements of the matrix.
        shared: bytes of a piece that several rows read; 0 for one row.
    """
    parts, threads = 1, torch.get_num_threads()
    busy = _BAGS_A_THREAD * threads if size >= _SMALL and threads > 1 else 0
    while ((pieces * parts < busy or shared > _SHARED_BYTES * parts) and outputs % (4 * parts) == 0
           and outputs // (2 * parts) >= _NARROWEST):
        parts *= 2
    return parts


def _random_rows(weight: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, weight.shape[1], generator=generator)
