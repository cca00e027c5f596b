"""What vLLM's workers do: they follow its persistent batch, draw the next token of each row, and keep what they have drawn.

A ticket says what a request asks. It travels in the request's sampling parameters, so it holds plain values. The ledger keeps
the tokens that a worker has drawn until the session takes them. Each request has a row of tables, so that the tokens of a step
are written together. A request that vLLM preempts is computed again from its tokens. A token is addressed by its number in the
request, so that the same token is written again to the same place, and a row of an incomplete prompt is overwritten by the
first token.

vLLM tells which rows of the batch were removed, added and moved, in this order. The list of a request's output tokens belongs
to vLLM and grows with each token that is drawn: its length is the number of the next token. vLLM removes a request that it
preempts, and adds it again with the tokens that it had. Tokens are drawn with the laws of the engine of slots.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from dflash_mcmc.engine.batching import logits_processor as laws
from dflash_mcmc.engine.batching.rows import Limit, columns_of_tokens, num_columns
from dflash_mcmc.engine.batching.stop_strings import FOUND
from dflash_mcmc.ops import Operation, SamplingParams, Score
from dflash_mcmc.rng import Key
from dflash_mcmc.types import Trajectory

CONFIG = "dflash_mcmc"
"""The name of this package's part of vLLM's additional configuration."""
BLENDED = {name: f"DflashMcmc{name}" for name in ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")}
"""Names of the model classes with a blend (`plugin.py`), by the names of vLLM's classes."""
FIELD = "dflash_mcmc"
"""The name of the ticket among a request's extra arguments."""


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
    def of(number: int, operation: Operation, base: Trajectory, stop_ids: Collection[int], matched: int = 0) -> "Ticket":
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
            if stop_ids and operation.floor is not None:
                limit = Limit.of(operation, base)
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
    def from_values(values: dict[str, Any]) -> "Ticket":
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


StopTable: TypeAlias = tuple[np.ndarray, np.ndarray]
"""The classes and the table of `StopStrings`."""


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
        self._searched[row], self._matched[row, 0] = not ticket.forced and self._stops is not None, ticket.matched
        self._limited[row] = ticket.limit is not None
        (self._alpha[row], self._weights[row, 0], self._threshold[row],
         self._log_length[row]) = ticket.limit or Limit()
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
        classes, table = self._stops
        states = table[self._matched[rows, numbers], classes[tokens]]
        self._matched[rows, numbers + 1] = states
        return self._searched[rows] & (states == FOUND)

    def _below(self, rows: np.ndarray, numbers: np.ndarray, scores: np.ndarray) -> np.ndarray:
        """Whether draws have crossed their floor with tokens of these scores, bool (n,)."""
        if not self._limited[rows].any():
            return np.zeros(len(rows), bool)
        with np.errstate(invalid="ignore"):  # scores that are not numbers, which are not written
            weights = self._weights[rows, numbers] + (self._alpha[rows] * scores[:, 0] - scores[:, 1])
            length = self._log_length[rows] - np.log(self._first[rows] + numbers + 1)
            bound = weights + np.where(np.isneginf(length), 0.0, length)
        self._weights[rows, numbers + 1] = weights
        return self._limited[rows] & ~(bound > self._threshold[rows])

    def take(self, numbers: Iterable[int]) -> dict[int, Drawn]:
        """The tokens of requests, which are then forgotten. Requests without a row here are left out."""
        taken = dict[int, Drawn]()
        for number in numbers:
            if (row := self._row_of.pop(number, None)) is not None:
                self._free.append(row)
                count = int(self._count[row])
                taken[number] = Drawn(self._tokens[row, :count].copy(), self._scores[row, :count, : self._widths[row]].copy(),
                                      int(self._forwards[row]), bool(self._failed[row]))
        return taken

    def __len__(self) -> int:
        return len(self._row_of)

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


PIECE = 2**18
"""Logits that are drawn from together on a CPU, so that all they become stays in its cache."""


class LawGroup(NamedTuple):
    """Rows of the batch that have the same laws, and are drawn together.

    Attributes:
        ticket: that of the first row.
        places: the rows, int64 (n,).
        forced: which of them are scores, bool (n,).
    """

    ticket: Ticket
    places: np.ndarray
    forced: np.ndarray


def groups_of(tickets: Sequence[Ticket], most: int) -> list[LawGroup]:
    """The rows by their laws, at most so many in a group."""
    members: dict[tuple, list[int]] = {}
    for row, ticket in enumerate(tickets):
        members.setdefault((ticket.params, ticket.laws, ticket.entropy, ticket.kept), []).append(row)
    pieces = (rows[first : first + most] for rows in members.values() for first in range(0, len(rows), most))
    return [LawGroup(tickets[rows[0]], np.array(rows), np.array([bool(tickets[row].forced) for row in rows]))
            for rows in pieces]


def draw(logits: torch.Tensor, groups: Sequence[LawGroup], uniforms: np.ndarray, forced: np.ndarray,
         sequence: Callable[[int], tuple[Sequence[int], int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draws a token for each row, or takes the token that a score forces.

    Args:
        logits: float32 (rows, vocabulary); minus infinity for ids that can never be drawn.
        groups: all rows.
        uniforms: float64 (rows,).
        forced: int64 (rows,), the tokens of scores; other rows have arbitrary values.
        sequence: gives the tokens before a row's next one, and how many of them are the generation's prompt. Only rows with
            a penalty are asked.

    Returns:
        On the host the tokens, int64 (rows,); their scores, float64 (rows, 4 + k) as in `Drawn` with the largest k of a row;
        and bool (rows,), False where logits or processed logits are not finite. Such a row's other values are arbitrary.
    """
    finite = torch.isfinite(logits.amax(dim=-1))
    if logits.is_cuda or not finite.all():  # a GPU is not waited for
        logits = torch.where(finite[:, None], logits, 0.0)
    drawn = [(group.places, _of_group(logits, group, uniforms[group.places], forced[group.places], sequence))
             for group in groups]
    width = max(scores.shape[1] for _, scores in drawn)
    values = torch.zeros(len(logits), 1 + width, dtype=torch.float64, device=logits.device)
    values[:, 0] = finite
    for places, scores in drawn:
        values[places, 1 : 1 + scores.shape[1]] = scores
    values[:, 0] *= ~values.isnan().any(dim=1)  # processed logits are not finite
    host = values.cpu().numpy()  # one copy from the device for all rows
    return host[:, 1].astype(np.int64), host[:, 2:], host[:, 0] > 0


def _of_group(logits: torch.Tensor, group: LawGroup, uniforms: np.ndarray, forced: np.ndarray,
              sequence: Callable[[int], tuple[Sequence[int], int]]) -> torch.Tensor:
    """Token and scores of rows with the same laws, float64 (rows, 5 + k). Arguments are those of `draw`, for these rows."""
    places, device = group.places, logits.device
    whole = len(places) == len(logits)
    if not whole:  # places that follow one another need no copy
        adjacent = int(places[-1]) - int(places[0]) + 1 == len(places)
        logits = logits[places[0] : places[-1] + 1] if adjacent else logits[torch.from_numpy(places)]
    ticket, history = group.ticket, laws.NO_HISTORY
    every = (ticket.params, *ticket.laws)
    if any(params.has_penalty for params in every):
        history = laws.history_of(every, [sequence(row) for row in places.tolist()], logits)
    target = laws.weigh(logits)
    weights = target if ticket.params == SamplingParams() else laws.weigh(laws.process(logits, ticket.params, history))
    tokens, interval = laws.draw(weights, torch.from_numpy(uniforms).to(device))
    if group.forced.any():
        tokens = torch.where(torch.from_numpy(group.forced).to(device), torch.from_numpy(forced).to(device), tokens)
        interval = laws.intervals(weights, tokens)
    columns = [tokens[:, None].double(), target.log_probability(tokens)[:, None], weights.log_probability(tokens)[:, None],
               interval]
    if num_columns(ticket):
        columns.append(columns_of_tokens(tokens, logits, target, ticket, history))
    return torch.cat(columns, dim=1)


class _BatchRequest(NamedTuple):
    ticket: Ticket
    row: int
    """Row of the ledger."""
    prompt: Sequence[int]
    output: Sequence[int]

    def sequence(self) -> tuple[Sequence[int], int]:
        """The tokens before the next one, and how many of them are the generation's prompt."""
        return [*self.prompt, *self.output], self.ticket.prompt_length


class _Layout(NamedTuple):
    """What stays the same between two changes of the batch.

    Attributes:
        requests: the batch's rows that this processor draws for, in order.
        whole: whether these are all rows.
        places: int64 (rows,), where they are in the batch.
        rows: int64 (rows,), their rows of the ledger.
        groups: the rows by their laws.
        ends: int64 (rows,), the token by which vLLM ends a request.
    """

    requests: Sequence[_BatchRequest]
    whole: bool
    places: torch.Tensor
    rows: np.ndarray
    groups: Sequence[LawGroup]
    ends: np.ndarray


class RequestRows:
    """The requests of the batch, by row.

    Args:
        ledger: receives the tokens.
        forbidden: ids that can never be drawn.
        device: device of the logits.
    """

    def __init__(self, ledger: Ledger, forbidden: Sequence[int], device: torch.device | str):
        self._ledger, self._requests = ledger, dict[int, _BatchRequest]()
        self._forbidden = torch.tensor(forbidden, dtype=torch.int64, device=device)
        self._layout: tuple[int, _Layout] | None = None

    def update(self, removed: Sequence[int], added: Sequence[tuple[int, Any, Sequence[int] | None, Sequence[int]]],
               moved: Sequence[tuple[int, int, Any]]) -> None:
        """Follows a change of the batch. The arguments are those of vLLM's `BatchUpdate`."""
        self._layout = None
        for row in removed:
            self._requests.pop(row, None)
        for row, params, prompt, output in added:
            self._requests.pop(row, None)
            values = (params.extra_args or {}).get(FIELD)
            if values is not None:
                ticket = Ticket.from_values(values)
                self._requests[row] = _BatchRequest(ticket, self._ledger.open(ticket), prompt or (), output)
        for source, target, direction in moved:
            here, there = self._requests.pop(source, None), self._requests.pop(target, None)
            if here is not None:
                self._requests[target] = here
            if direction.name == "SWAP" and there is not None:
                self._requests[source] = there

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Draws the token of every row, and leaves its logit alone finite. Returns the logits, which are changed in place.

        A draw that has crossed its floor, or whose logits are not numbers, ends: its row is left with a stop id.

        Args:
            logits: float32 (rows, vocabulary).
        """
        # The layout of the batch, which is computed again only if the batch has changed
        if self._layout is None or self._layout[0] != len(logits):
            rows = [row for row in sorted(self._requests) if row < len(logits)]
            requests = [self._requests[row] for row in rows]
            most = len(logits) if logits.is_cuda else max(1, PIECE // logits.shape[1])
            ends = np.array([(*request.ticket.stop_ids, 0)[0] for request in requests], np.int64)
            self._layout = len(logits), _Layout(
                requests, len(rows) == len(logits), torch.tensor(rows, dtype=torch.int64, device=logits.device),
                np.array([request.row for request in requests], np.int64),
                groups_of([request.ticket for request in requests], most), ends)
        layout = self._layout[1]
        if not layout.requests:
            return logits
        chosen = logits if layout.whole else logits[layout.places]  # a copy only where other rows must stay
        if len(self._forbidden):
            chosen.index_fill_(1, self._forbidden, -torch.inf)
        told = torch.from_numpy(self._note(layout, chosen)).to(logits.device)
        chosen.fill_(-torch.inf).scatter_(1, told[:, None], 0.0)
        if not layout.whole:
            logits[layout.places] = chosen
        return logits

    def _note(self, layout: _Layout, logits: torch.Tensor) -> np.ndarray:
        """Writes the tokens of requests to the ledger. Returns the tokens that vLLM is told, int64 (rows,)."""
        requests, rows = layout.requests, layout.rows
        numbers = np.fromiter((len(request.output) for request in requests), np.int64, len(requests))
        tokens, scores, finite = draw(logits, layout.groups, self._ledger.uniforms(rows, numbers),
                                      self._ledger.forced(rows, numbers), lambda place: requests[place].sequence())
        ends = self._ledger.write(rows, numbers, tokens, scores, finite)
        return np.where(ends, layout.ends, tokens)


LEDGER = Ledger()
"""The ledger of this process. vLLM makes the logits processor and the worker extension, which share nothing else."""
