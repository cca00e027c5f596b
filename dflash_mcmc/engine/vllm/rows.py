"""Follows vLLM's persistent batch, and draws the next token of each of its rows.

vLLM tells which rows were removed, added and moved, in this order. The list of a request's output tokens belongs to vLLM and
grows with each token that is drawn: its length is the number of the next token. vLLM removes a request that it preempts, and
adds it again with the tokens that it had.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from dflash_mcmc.engine.vllm.drawing import LawGroup, NextTokens, draw, groups_of
from dflash_mcmc.engine.vllm.ledger import Ledger
from dflash_mcmc.engine.vllm.ticket import FIELD, Ticket


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


class BatchRows:
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
        layout = self._layout_of(logits)
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

    def _layout_of(self, logits: torch.Tensor) -> _Layout:
        """The layout of the batch, which is computed again only if the batch has changed."""
        if self._layout is None or self._layout[0] != len(logits):
            places = [place for place in sorted(self._requests) if place < len(logits)]
            requests = [self._requests[place] for place in places]
            ends = np.array([(*request.ticket.stop_ids, 0)[0] for request in requests], np.int64)
            self._layout = len(logits), _Layout(
                requests, len(places) == len(logits), torch.tensor(places, dtype=torch.int64, device=logits.device),
                np.array([request.row for request in requests], np.int64),
                groups_of([request.ticket for request in requests]), ends)
        return self._layout[1]

    def _note(self, layout: _Layout, logits: torch.Tensor) -> np.ndarray:
        """Writes the tokens of requests to the ledger. Returns the tokens that vLLM is told, int64 (rows,)."""
        requests, rows = layout.requests, layout.rows
        numbers = np.fromiter((len(request.output) for request in requests), np.int64, len(requests))
        asked = NextTokens(self._ledger.uniforms(rows, numbers), self._ledger.forced(rows, numbers),
                      lambda place: requests[place].sequence())
        tokens, scores, finite = draw(logits, layout.groups, asked)
        ends = self._ledger.write(rows, numbers, tokens, scores, finite)
        return np.where(ends, layout.ends, tokens)
