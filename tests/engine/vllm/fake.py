"""A stand-in for vLLM's engine: a persistent batch whose rows are added, removed, moved, swapped and preempted.

It calls the processor's code as vLLM does, with logits from forwards of whole sequences.
"""

import json
from collections.abc import Sequence
from enum import Enum
from types import SimpleNamespace

import numpy as np
import torch

from dflash_mcmc.engine.vllm.core import EndedRequest
from dflash_mcmc.engine.vllm.drawing import FIELD, Drawn, Ledger, RequestRows, StopTable, Ticket


class Direction(Enum):
    UNIDIRECTIONAL = 1
    SWAP = 2


class Request:
    """A request. `waits` counts the steps before its prompt is complete, as in chunked prefill."""

    def __init__(self, ticket: Ticket, prompt: list[int], waits: int):
        values = json.loads(json.dumps(ticket.to_values()))  # it can travel to another process
        self.params = SimpleNamespace(extra_args={FIELD: values})
        self.ticket, self.prompt, self.output, self.waits = ticket, prompt, list[int](), waits


class FakeCore:
    """Args:
        model: maps ids (1, n) to logits (1, n, vocabulary); a model of transformers.
        rows: rows of the batch.
        preempt_every: steps between preemptions; 0 for none.
        chunks: steps in which a prompt is incomplete, and its row draws a token that is thrown away.
        broken: numbers of requests whose logits are not numbers.
    """

    def __init__(self, model, rows: int = 4, preempt_every: int = 0, chunks: int = 0, broken: Sequence[int] = (),
                 forbidden: Sequence[int] = ()):
        self._model, self._rows, self._preempt_every, self._chunks = model, rows, preempt_every, chunks
        self.ledger, self.broken = Ledger(), set(broken)
        self._batch = RequestRows(self.ledger, forbidden, "cpu")
        self.waiting, self.running, self.steps = list[Request](), list[Request](), 0
        self.preempted, self.aborted = 0, list[int]()
        self._logits: dict[tuple[int, ...], np.ndarray] = {}

    def add(self, ticket: Ticket, tokens: Sequence[int]) -> None:
        assert tokens
        self.waiting.append(Request(ticket, list(tokens), self._chunks))

    def step(self) -> list[EndedRequest]:
        self.steps += 1
        self._preempt()
        self._swap()
        added = []
        while self.waiting and len(self.running) < self._rows:
            request = self.waiting.pop(0)
            added.append((len(self.running), request.params, request.prompt, request.output))
            self.running.append(request)
        self._batch.update([], added, [])
        logits = self._batch.apply(torch.stack([self._of(request) for request in self.running]))
        assert (torch.isfinite(logits).sum(dim=1) == 1).all()
        for request, token in zip(self.running, logits.argmax(dim=1).tolist(), strict=True):
            if request.waits:
                request.waits -= 1
            else:
                request.output.append(token)
        ended = [request for request in self.running if self._ends(request)]
        self._remove(ended)
        return [EndedRequest(request.ticket.number, 0) for request in ended]

    def stop_at(self, stops: StopTable | None) -> None:
        self.ledger.stop_at(stops)

    def take(self, numbers: Sequence[int]) -> dict[int, Drawn]:
        return self.ledger.take(numbers)

    def abort(self, numbers: Sequence[int]) -> None:
        self.aborted += numbers
        self.waiting = [request for request in self.waiting if request.ticket.number not in numbers]
        self._remove([request for request in self.running if request.ticket.number in numbers])
        self.take(numbers)

    def _ends(self, request: Request) -> bool:
        stops = () if request.ticket.forced else request.ticket.stop_ids
        return len(request.output) == request.ticket.length or (bool(request.output) and request.output[-1] in stops)

    def _remove(self, ended: Sequence[Request]) -> None:
        """The last rows fill the gaps."""
        places = [self.running.index(request) for request in ended]
        keep, moved = [row for row in range(len(self.running)) if row not in places], []
        for gap in sorted(places):
            if keep and keep[-1] > gap:
                moved.append((keep.pop(), gap, Direction.UNIDIRECTIONAL))
                keep.insert(0, gap)
                keep.sort()
        self._batch.update(sorted(places, reverse=True), [], moved)
        order = {row: row for row in range(len(self.running)) if row not in places}
        for source, target, _ in moved:
            order[target] = order.pop(source)
        self.running = [self.running[order[row]] for row in sorted(order)]
        assert sorted(order) == list(range(len(self.running)))

    def _swap(self) -> None:
        if len(self.running) > 1:
            self.running[0], self.running[-1] = self.running[-1], self.running[0]
            self._batch.update([], [], [(0, len(self.running) - 1, Direction.SWAP)])

    def _preempt(self) -> None:
        if self._preempt_every and self.steps % self._preempt_every == 0 and self.running:
            request = self.running[-1]
            self._remove([request])
            request.waits = 1  # its prompt and tokens are read again in two pieces
            self.waiting.insert(0, request)
            self.preempted += 1

    def _of(self, request: Request) -> torch.Tensor:
        if request.ticket.number in self.broken:
            return torch.full((self._model.config.vocab_size,), torch.nan)
        tokens = (*request.prompt, *request.output)
        if request.waits:
            tokens = tokens[: max(1, len(tokens) // 2)]
        if tokens not in self._logits:
            with torch.inference_mode():
                self._logits[tokens] = self._model(torch.tensor([tokens])).logits[0, -1].numpy()
        return torch.from_numpy(self._logits[tokens].copy())
