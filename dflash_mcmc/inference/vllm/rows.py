"""Follows vLLM's persistent batch, and draws the next token of each of its rows.

vLLM tells which rows were removed, added and moved, in this order. A list of a request's output tokens is vLLM's own, and
grows as tokens are drawn: its length is the number of the next token. A request that was preempted is removed and added again
with the tokens that it had.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from dflash_mcmc.inference.vllm.drawing import Row, draw
from dflash_mcmc.inference.vllm.ledger import Ledger, LedgerEntry
from dflash_mcmc.inference.vllm.ticket import FIELD, Ticket


class _BatchRequest(NamedTuple):
    entry: LedgerEntry
    prompt: Sequence[int]
    output: Sequence[int]

    def row(self) -> Row:
        number, entry = len(self.output), self.entry
        return Row(entry.ticket, number, float(entry.uniforms[number]), [*self.prompt, *self.output]
                   if any(params.has_penalty for params in (entry.ticket.params, *entry.ticket.laws)) else ())


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

    def update(self, removed: Sequence[int], added: Sequence[tuple[int, Any, Sequence[int] | None, Sequence[int]]],
               moved: Sequence[tuple[int, int, Any]]) -> None:
        """Follows a change of the batch. The arguments are those of vLLM's `BatchUpdate`."""
        for row in removed:
            self._requests.pop(row, None)
        for row, params, prompt, output in added:
            self._requests.pop(row, None)
            values = (params.extra_args or {}).get(FIELD)
            if values is not None:
                self._requests[row] = _BatchRequest(self._ledger.open(Ticket.from_values(values)), prompt or (), output)
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
        places = [place for place in sorted(self._requests) if place < len(logits)]
        if not places:
            return logits
        requests = [self._requests[place] for place in places]
        whole = len(places) == len(logits)
        index = torch.tensor(places, device=logits.device)
        chosen = logits if whole else logits[index]  # a copy only where other rows must stay
        if len(self._forbidden):
            chosen.index_fill_(1, self._forbidden, -torch.inf)
        told = torch.tensor(self._note(requests, chosen), device=logits.device)
        chosen.fill_(-torch.inf).scatter_(1, told[:, None], 0.0)
        if not whole:
            logits[index] = chosen
        return logits

    def _note(self, requests: Sequence[_BatchRequest], logits: torch.Tensor) -> list[int]:
        """Writes the tokens of requests to the ledger. Returns the tokens that vLLM is told."""
        rows, told = [request.row() for request in requests], []
        tokens, scores, finite = draw(logits, rows)
        for place, (request, row) in enumerate(zip(requests, rows, strict=True)):
            entry, token = request.entry, int(tokens[place])
            entry.forwards += 1
            if finite[place]:
                entry.write(row.number, token, scores[place][: entry.width])
            else:
                entry.fail(row.number)
            ends = not finite[place] or entry.crossed
            told.append((*row.ticket.stop_ids, 0)[0] if ends else token)
        return told
