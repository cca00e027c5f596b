"""What a request asks of the logits processor, and the tokens that a worker has drawn, until the session takes them.

A ticket travels in the request's sampling parameters, so it holds plain values. Each request has a row of tables, so that the
tokens of a step are written together. A request that vLLM preempts is computed again from its tokens. A token is addressed by
its number in the request, so that the same token is written again to the same place, and a row of an incomplete prompt is
overwritten by the first token.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dflash_mcmc.engine.batching.rows import num_columns
from dflash_mcmc.engine.batching.stop_strings import StopStrings
from dflash_mcmc.ops import Operation, SamplingParams, Score
from dflash_mcmc.rng import Key
from dflash_mcmc.types import Trajectory

CONFIG = "dflash_mcmc"
"""The name of this package's part of vLLM's additional configuration."""
BLENDED = {name: f"DflashMcmc{name}" for name in ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")}
"""Names of the model classes with a blend (`plugin.py`), by the names of vLLM's classes."""
FIELD = "dflash_mcmc"
"""The name of the ticket among a request's extra arguments."""


class Limit(NamedTuple):
    """The floor of a draw, as `Floor`, for a request that starts after `weight` is summed."""

    alpha: float
    weight: float
    """Sum of alpha log p - log q over the draw's tokens before the request, in nats."""
    threshold: float
    """The draw has crossed its floor if weight plus the length term is not above this."""
    log_length: float | None
    """Log of `Floor.length`; None without one."""


class Ticket(NamedTuple):
    """A draw or a score after a base. The base's tokens are the request's prompt."""

    number: int
    """The request, in the ledger."""
    prompt_length: int
    """Tokens of the request's prompt that are not generated."""
    first: int
    """Number of the request's first token, counted from the start of the generation."""
    params: SamplingParams
    laws: tuple[SamplingParams, ...]
    entropy: bool
    kept: bool
    key: bytes
    """The digest of the draw's key; empty where no uniform is needed."""
    length: int
    """Most tokens of the request."""
    stop_ids: tuple[int, ...]
    forced: tuple[int, ...] = ()
    """The tokens of a score."""
    limit: Limit | None = None
    matched: int = 0
    """The state of the stop strings after the tokens before the request (`stop_strings.py`)."""

    @staticmethod
    def of(number: int, operation: Operation, base: Trajectory, stop_ids: Collection[int], matched: int = 0) -> Ticket:
        """The ticket of an operation that goes on after `base`.

        A floor is left out where there is no stop id by which the request could be ended. It changes no answer.
        """
        key, forced, limit = b"", tuple[int, ...](), None
        if isinstance(operation, Score):
            forced = tuple(int(token) for token in operation.tokens)
            length = len(forced)
        else:
            key = b"" if operation.params.temperature == 0.0 else operation.key.digest
            length = operation.horizon - base.length
            if stop_ids and (floor := operation.floor) is not None:
                limit = Limit(floor.alpha, floor.weight(base, operation.trajectory.length), floor.threshold,
                              None if floor.length is None else float(np.log(floor.length)))
        return Ticket(number, len(base.prompt), base.length, operation.params, operation.laws, operation.entropy,
                      operation.kept, key, length, tuple(stop_ids), forced, limit, matched)

    def uniforms(self) -> np.ndarray:
        """Uniforms of the request's tokens, float64 (length,), as a draw of the engine of slots has them."""
        if not self.key:
            return np.full(self.length, 0.5)
        return Key(self.key).uniforms(self.first, self.first + self.length)

    def to_values(self) -> dict[str, Any]:
        """The ticket as lists, numbers and texts."""
        return {**self._asdict(), "params": list(self.params), "laws": [list(law) for law in self.laws],
                "key": self.key.hex(), "stop_ids": list(self.stop_ids), "forced": list(self.forced),
                "limit": None if self.limit is None else list(self.limit)}

    @staticmethod
    def from_values(values: dict[str, Any]) -> Ticket:
        """The ticket that `to_values` has turned into values."""
        limit: Sequence[Any] | None = values["limit"]
        return Ticket(**{**values, "params": SamplingParams(*values["params"]), "key": bytes.fromhex(values["key"]),
                         "laws": tuple(SamplingParams(*law) for law in values["laws"]),
                         "stop_ids": tuple(values["stop_ids"]), "forced": tuple(values["forced"]),
                         "limit": None if limit is None else Limit(*limit)})


SCORES = 4
"""log p, log q and the two ends of the interval."""
_ROWS, _LENGTH = 16, 64
"""Rows and tokens of the first tables."""


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


class StopTable(NamedTuple):
    """The stop strings of draws, as in `StopStrings`.

    Attributes:
        classes: int32 (vocabulary,).
        table: int32 (states, classes).
    """

    classes: np.ndarray
    table: np.ndarray

    @staticmethod
    def of(strings: StopStrings | None) -> StopTable | None:
        """The table of stop strings; None for none."""
        return None if strings is None else StopTable(strings.classes, strings.table)


class Ledger:
    """The requests of a worker. `rows` in its methods are rows of its tables, int64 (n,), without repetition.

    A table is allocated as zeros, which take no memory before they are written.
    """

    def __init__(self) -> None:
        self._row_of, self._free = dict[int, int](), list(range(_ROWS - 1, -1, -1))
        self._widths = [0] * _ROWS
        self._tokens, self._given = np.zeros((_ROWS, _LENGTH), np.int64), np.zeros((_ROWS, _LENGTH), np.int64)
        self._uniforms, self._weights = np.zeros((_ROWS, _LENGTH)), np.zeros((_ROWS, _LENGTH + 1))
        self._scores = np.zeros((_ROWS, _LENGTH, SCORES))
        self._count, self._forwards, self._first = (np.zeros(_ROWS, np.int64) for _ in range(3))
        self._failed, self._limited, self._searched = (np.zeros(_ROWS, bool) for _ in range(3))
        self._alpha, self._threshold, self._log_length = (np.zeros(_ROWS) for _ in range(3))
        self._stops: StopTable | None = None
        self._matched = np.zeros((_ROWS, _LENGTH + 1), np.int32)

    def stop_at(self, stops: StopTable | None) -> None:
        """Sets the stop strings of draws that begin from now on."""
        self._stops = stops

    def open(self, ticket: Ticket) -> int:
        """The row of a request, which is new or was preempted."""
        existing = self._row_of.get(ticket.number)
        if existing is not None:
            return existing
        width = SCORES + num_columns(ticket)
        self._grow(ticket.length, width)
        row = self._row_of[ticket.number] = self._free.pop()
        self._widths[row] = width
        self._uniforms[row, : ticket.length] = ticket.uniforms()
        if ticket.forced:
            self._given[row, : ticket.length] = ticket.forced
        self._count[row], self._forwards[row], self._failed[row], self._first[row] = 0, 0, False, ticket.first
        limit = ticket.limit
        self._limited[row], self._weights[row, 0] = limit is not None, 0.0 if limit is None else limit.weight
        self._searched[row], self._matched[row, 0] = not ticket.forced and self._stops is not None, ticket.matched
        if limit is not None:
            self._alpha[row], self._threshold[row] = limit.alpha, limit.threshold
            self._log_length[row] = np.nan if limit.log_length is None else limit.log_length
        return row

    def uniforms(self, rows: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Uniforms of tokens of requests, float64 (n,). `numbers` are those of the tokens in the requests, from 0."""
        return self._uniforms[rows, numbers]

    def forced(self, rows: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Tokens that scores force, int64 (n,). Other requests have arbitrary values."""
        return self._given[rows, numbers]

    def write(self, rows: np.ndarray, numbers: np.ndarray, tokens: np.ndarray, scores: np.ndarray,
              finite: np.ndarray) -> np.ndarray:
        """Writes a token of each request. Later tokens of the requests are forgotten.

        Args:
            numbers: int64 (n,), numbers of the tokens in the requests, from 0.
            tokens: int64 (n,).
            scores: float64 (n, 4 + k), with the largest k of a request.
            finite: bool (n,), False where logits are not numbers. The token is then not written.

        Returns:
            bool (n,), whether the request must end: its draw has crossed its floor or completed a stop string, or its logits
            are not numbers.
        """
        self._forwards[rows] += 1
        self._tokens[rows, numbers], self._scores[rows, numbers, : scores.shape[1]] = tokens, scores
        self._count[rows], self._failed[rows] = numbers + finite, ~finite
        return ~finite | self._found(rows, numbers, tokens) | self._below(rows, numbers, scores)

    def _found(self, rows: np.ndarray, numbers: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Whether draws have completed a stop string with these tokens, bool (n,)."""
        if self._stops is None:
            return np.zeros(len(rows), bool)
        states = self._stops.table[self._matched[rows, numbers], self._stops.classes[tokens]]
        self._matched[rows, numbers + 1] = states
        return self._searched[rows] & (states == StopStrings.found)

    def _below(self, rows: np.ndarray, numbers: np.ndarray, scores: np.ndarray) -> np.ndarray:
        """Whether draws have crossed their floor with tokens of these scores, bool (n,)."""
        if not self._limited[rows].any():
            return np.zeros(len(rows), bool)
        with np.errstate(invalid="ignore"):  # scores that are not numbers, which are not written
            weights = self._weights[rows, numbers] + (self._alpha[rows] * scores[:, 0] - scores[:, 1])
            length = self._log_length[rows] - np.log(self._first[rows] + numbers + 1)
            bound = weights + np.where(np.isnan(length), 0.0, length)
        self._weights[rows, numbers + 1] = weights
        return self._limited[rows] & ~(bound > self._threshold[rows])

    def take(self, numbers: Iterable[int]) -> dict[int, Drawn]:
        """The tokens of requests, which are then forgotten. Requests without a row here are left out."""
        return {number: self._take(self._row_of.pop(number)) for number in numbers if number in self._row_of}

    def __len__(self) -> int:
        return len(self._row_of)

    def _take(self, row: int) -> Drawn:
        count = int(self._count[row])
        self._free.append(row)
        return Drawn(self._tokens[row, :count].copy(), self._scores[row, :count, : self._widths[row]].copy(),
                     int(self._forwards[row]), bool(self._failed[row]))

    def _grow(self, length: int, width: int) -> None:
        """Makes room for a request. Sizes double, so that it is rare."""
        rows, longest = self._tokens.shape
        more_rows = 0 if self._free else rows
        more_length = max(0, max(length, 2 * longest) - longest) if length > longest else 0
        more_width = max(0, width - self._scores.shape[2])
        if not (more_rows or more_length or more_width):
            return
        self._free = [*range(rows + more_rows - 1, rows - 1, -1), *self._free]
        self._widths += [0] * more_rows
        for name in ("_count", "_forwards", "_first", "_failed", "_limited", "_searched", "_alpha", "_threshold",
                     "_log_length"):
            setattr(self, name, _larger(getattr(self, name), more_rows))
        for name in ("_tokens", "_given", "_uniforms", "_weights", "_matched"):
            setattr(self, name, _larger(getattr(self, name), more_rows, more_length))
        self._scores = _larger(self._scores, more_rows, more_length, more_width)


def _larger(table: np.ndarray, *more: int) -> np.ndarray:
    """The table with further zeros at the end of its axes."""
    larger = np.zeros([size + add for size, add in zip(table.shape, more, strict=True)], table.dtype)
    larger[tuple(slice(size) for size in table.shape)] = table
    return larger


LEDGER = Ledger()
"""The ledger of this process. vLLM makes the logits processor and the worker extension, which share nothing else."""
