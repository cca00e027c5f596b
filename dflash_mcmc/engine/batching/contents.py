"""Which tokens' keys and values the rows of a chain hold, and how a row is prepared for a sequence with little reading."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dflash_mcmc.engine.batching.interface import Options
from dflash_mcmc.types import Trajectory, common_prefix

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


class Contents:
    """The tokens that a row and its spare row hold.

    Attributes:
        held: tokens from position 0 on whose keys and values the row holds, or will hold after the next reading.
        filled: number of these tokens that the row holds already.
        saved: tokens of the current sequence; the spare row holds their positions from `saved_from` on.
    """

    __slots__ = ("filled", "held", "saved", "saved_from")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forgets everything."""
        self.held = self.saved = _NOTHING
        self.filled = self.saved_from = 0

    def hold(self, tokens: np.ndarray) -> None:
        """Sets the tokens that the row holds."""
        self.held, self.filled = tokens, len(tokens)

    def in_row(self, sequence: np.ndarray) -> int:
        """Number of first tokens of `sequence` that the row holds."""
        return min(common_prefix(self.held, sequence), self.filled)

    def reach(self, sequence: np.ndarray) -> int:
        """Number of first tokens of `sequence` that the row and its spare row hold."""
        return self.restorable(sequence, self.in_row(sequence))

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

    def place(self, sequence: np.ndarray, along: Trajectory | None, others: Sequence[Contents], options: Options,
              like: int | None = None) -> Placement:
        """Notes that the row will hold `sequence` without its last token, and returns how.

        Args:
            along: the current sequence, which the spare row then keeps; None to keep none.
            others: contents of other rows of the chain, from which a prefix may be copied.
            like: the number in `others` of contents that have been placed for the same sequence; None without such contents.
                Everything is then copied from them, because keys and values of the same tokens can differ in their last bits
                between two computations.
        """
        end, source = len(sequence) - 1, like
        if like is not None:
            self.clear()
        kept = min(self.in_row(sequence), end) if options.reuse_prefix else 0
        spare = options.keep_current and options.reuse_prefix
        restored = forked = min(self.restorable(sequence, kept), end) if spare else kept
        if like is not None:
            forked = min(others[like].in_row(sequence), end)
        elif options.reuse_prefix and restored < end:
            for number, other in enumerate(others):
                if (reach := min(other.in_row(sequence), end)) > forked:
                    source, forked = number, reach
        self.hold(np.concatenate([self.held[:kept], sequence[kept:forked]]) if forked > kept else self.held)
        saved = (0, 0)
        if spare and along is not None:
            saved = self.save(np.concatenate([along.prompt, along.tokens])[:-1], end)
        self.held, self.filled = sequence[:-1], forked
        return Placement(kept, restored, forked, source, saved)

    def read(self) -> None:
        """Notes that the missing tokens have been read."""
        self.filled = len(self.held)


def assign(contents: Sequence[Contents], sequences: Sequence[np.ndarray]) -> list[tuple[int, int]]:
    """(sequence, contents) pairs, the longest reach first. Each sequence and each of the contents is in at most one pair."""
    if len(contents) == 1 and len(sequences) == 1:
        return [(0, 0)]
    reaches = sorted((-held.reach(sequence), mine, theirs) for mine, sequence in enumerate(sequences)
                     for theirs, held in enumerate(contents))
    pairs: dict[int, int] = {}
    taken = set[int]()
    for _, mine, theirs in reaches:
        if mine not in pairs and theirs not in taken:
            pairs[mine] = theirs
            taken.add(theirs)
    return list(pairs.items())
