"""Follows vLLM's persistent batch, and draws the next token of each of its rows with the laws of the engine of slots.

vLLM tells which rows were removed, added and moved, in this order. The list of a request's output tokens belongs to vLLM and
grows with each token that is drawn: its length is the number of the next token. vLLM removes a request that it preempts, and
adds it again with the tokens that it had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from dflash_mcmc.engine.batching import logits_processor as laws
from dflash_mcmc.engine.batching.rows import columns_of_tokens, num_columns
from dflash_mcmc.engine.vllm.ledger import FIELD, Ledger, Ticket
from dflash_mcmc.ops import SamplingParams

_PLAIN = SamplingParams()

PIECE = 2**18
"""Logits that are drawn from together on a CPU, so that all they become stays in its cache."""


class LawGroup(NamedTuple):
    """Rows of the batch that have the same laws.

    Attributes:
        ticket: that of the first row.
        places: the rows, int64 (n,).
        forced: which of them are scores, bool (n,).
    """

    ticket: Ticket
    places: np.ndarray
    forced: np.ndarray


class NextTokens(NamedTuple):
    """What a batch asks for: the next token of each row.

    Attributes:
        uniforms: float64 (rows,).
        forced: int64 (rows,), the tokens of scores; other rows have arbitrary values.
        sequence: gives the tokens before a row's next one, and how many of them are the generation's prompt. Only rows with
            a penalty are asked.
    """

    uniforms: np.ndarray
    forced: np.ndarray
    sequence: Callable[[int], tuple[Sequence[int], int]]


class DrawnBatch(NamedTuple):
    """The tokens of the rows, on the host.

    Attributes:
        tokens: int64 (rows,).
        scores: float64 (rows, 4 + k) as in `ledger.Drawn`, with the largest k of a row.
        finite: bool (rows,), False where logits or processed logits are not finite. The row's other values are then arbitrary.
    """

    tokens: np.ndarray
    scores: np.ndarray
    finite: np.ndarray


def groups_of(tickets: Sequence[Ticket]) -> list[LawGroup]:
    """The rows by their laws."""
    members: dict[tuple, list[int]] = {}
    for row, ticket in enumerate(tickets):
        members.setdefault((ticket.params, ticket.laws, ticket.entropy, ticket.kept), []).append(row)
    return [LawGroup(tickets[rows[0]], np.array(rows), np.array([bool(tickets[row].forced) for row in rows]))
            for rows in members.values()]


def draw(logits: torch.Tensor, groups: Sequence[LawGroup], asked: NextTokens) -> DrawnBatch:
    """Draws a token for each row, or takes the token that a score forces.

    Args:
        logits: float32 (rows, vocabulary); minus infinity for ids that can never be drawn.
        groups: all rows.
    """
    finite = torch.isfinite(logits.amax(dim=-1))
    if logits.is_cuda or not finite.all():  # a GPU is not waited for
        logits = torch.where(finite[:, None], logits, 0.0)
    drawn = [(piece.places, _of_piece(logits, piece, asked)) for group in groups for piece in _pieces(group, logits)]
    width = max(scores.shape[1] for _, scores in drawn)
    values = torch.zeros(len(logits), 1 + width, dtype=torch.float64, device=logits.device)
    values[:, 0] = finite
    for places, scores in drawn:
        values[places, 1 : 1 + scores.shape[1]] = scores
    values[:, 0] *= ~values.isnan().any(dim=1)  # processed logits are not finite
    host = values.cpu().numpy()  # one copy from the device for all rows
    return DrawnBatch(host[:, 1].astype(np.int64), host[:, 2:], host[:, 0] > 0)


def _pieces(group: LawGroup, logits: torch.Tensor) -> Iterator[LawGroup]:
    """The group, in pieces on a CPU."""
    count = len(group.places) if logits.device.type != "cpu" else max(1, PIECE // logits.shape[1])
    for first in range(0, len(group.places), count):
        mine = slice(first, first + count)
        yield LawGroup(group.ticket, group.places[mine], group.forced[mine])


def _of_piece(logits: torch.Tensor, piece: LawGroup, asked: NextTokens) -> torch.Tensor:
    """Token and scores of rows with the same laws, float64 (rows, 5 + k)."""
    places, device = piece.places, logits.device
    whole = len(places) == len(logits)
    if not whole:  # places that follow one another need no copy
        adjacent = int(places[-1]) - int(places[0]) + 1 == len(places)
        logits = logits[places[0] : places[-1] + 1] if adjacent else logits[torch.from_numpy(places)]
    ticket, history = piece.ticket, laws.NO_HISTORY
    every = (ticket.params, *ticket.laws)
    if any(params.has_penalty for params in every):
        history = laws.history_of(every, [asked.sequence(row) for row in places.tolist()], logits)
    target = laws.weigh(logits)
    weights = target if ticket.params == _PLAIN else laws.weigh(laws.process(logits, ticket.params, history))
    tokens, interval = laws.draw(weights, torch.from_numpy(asked.uniforms[places]).to(device))
    if piece.forced.any():
        forced = torch.from_numpy(asked.forced[places]).to(device)
        tokens = torch.where(torch.from_numpy(piece.forced).to(device), forced, tokens)
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
        """See `NextTokens.sequence`."""
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
            ends = np.array([(*request.ticket.stop_ids, 0)[0] for request in requests], np.int64)
            self._layout = len(logits), _Layout(
                requests, len(rows) == len(logits), torch.tensor(rows, dtype=torch.int64, device=logits.device),
                np.array([request.row for request in requests], np.int64),
                groups_of([request.ticket for request in requests]), ends)
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
        asked = NextTokens(self._ledger.uniforms(rows, numbers), self._ledger.forced(rows, numbers),
                      lambda place: requests[place].sequence())
        tokens, scores, finite = draw(logits, layout.groups, asked)
        ends = self._ledger.write(rows, numbers, tokens, scores, finite)
        return np.where(ends, layout.ends, tokens)
