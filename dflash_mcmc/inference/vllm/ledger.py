"""The tokens that a worker has drawn, by request, until the session takes them.

A request that vLLM preempts is computed again from its tokens. Its entry is addressed by the token's number, so that the same
token is written again to the same place, and a row of an incomplete prompt is overwritten by the first token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from dflash_mcmc.inference.vllm.ticket import Ticket

_SCORES = 4
"""log p, log q and the two ends of the interval."""


class Drawn(NamedTuple):
    """The tokens of a request.

    Attributes:
        tokens: int64 (n,).
        scores: float64 (n, 4 + k): log p, log q, the interval's ends, and the further columns that the operation asks for.
        forwards: forwards that the request took part in.
        failed: whether logits were not numbers; the tokens are then those before.
    """

    tokens: np.ndarray
    scores: np.ndarray
    forwards: int
    failed: bool


class LedgerEntry:
    """The tokens of one request so far.

    Attributes:
        forwards: forwards that the request took part in.
    """

    __slots__ = ("_count", "_failed", "_scores", "_tokens", "_weights", "forwards", "ticket", "uniforms")

    def __init__(self, ticket: Ticket):
        self.ticket, self.uniforms = ticket, ticket.uniforms()
        width = _SCORES + (1 + 3 * len(ticket.laws) if ticket.laws or ticket.entropy else 0)
        self._tokens, self._scores = np.zeros(ticket.length, np.int64), np.zeros((ticket.length, width))
        self._weights = np.zeros(ticket.length + 1)
        self._weights[0] = 0.0 if ticket.limit is None else ticket.limit.weight
        self._count, self._failed, self.forwards = 0, False, 0

    def write(self, number: int, token: int, scores: np.ndarray) -> None:
        """Writes token `number` of the request, from 0. Later tokens are forgotten."""
        self._tokens[number], self._scores[number] = token, scores
        self._count, self._failed = number + 1, False
        limit = self.ticket.limit
        if limit is not None:
            self._weights[number + 1] = self._weights[number] + limit.alpha * scores[0] - scores[1]

    def fail(self, number: int) -> None:
        """Notes that the logits of token `number` are not numbers."""
        self._count, self._failed = number, True

    @property
    def width(self) -> int:
        """Scores of a token."""
        return self._scores.shape[1]

    @property
    def crossed(self) -> bool:
        """Whether the tokens so far have crossed the draw's floor."""
        limit = self.ticket.limit
        if limit is None:
            return False
        length = 0.0 if limit.log_length is None else limit.log_length - math.log(self.ticket.first + self._count)
        return not self._weights[self._count] + length > limit.threshold

    def drawn(self) -> Drawn:
        """The tokens."""
        return Drawn(self._tokens[: self._count], self._scores[: self._count], self.forwards, self._failed)


class Ledger:
    """The entries of a worker's requests."""

    def __init__(self) -> None:
        self._entries: dict[int, LedgerEntry] = {}

    def open(self, ticket: Ticket) -> LedgerEntry:
        """The entry of a request, which is new or was preempted."""
        if ticket.number not in self._entries:
            self._entries[ticket.number] = LedgerEntry(ticket)
        return self._entries[ticket.number]

    def take(self, numbers: Iterable[int]) -> dict[int, Drawn]:
        """The tokens of requests, which are then forgotten. Requests without an entry here are left out."""
        return {number: self._entries.pop(number).drawn() for number in numbers if number in self._entries}

    def __len__(self) -> int:
        return len(self._entries)


LEDGER = Ledger()
"""The ledger of this process. vLLM makes the logits processor and the worker extension, which share nothing else."""
