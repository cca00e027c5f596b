"""Runs chains on vLLM: operations become requests as chains ask for them, and requests that end become answers."""

from __future__ import annotations

import itertools
import time

import numpy as np

from dflash_mcmc.engine.batching.chains import LiveChain, prepare
from dflash_mcmc.engine.batching.elsewhere import Asked, DelegatingEngine, LiveChains, UnloadedTarget
from dflash_mcmc.engine.batching.rows import split_columns
from dflash_mcmc.engine.vllm.core import EndedRequest, VllmCore
from dflash_mcmc.engine.vllm.ledger import Drawn, StopTable, Ticket
from dflash_mcmc.ops import Draw
from dflash_mcmc.process import bars
from dflash_mcmc.types import Trajectory

_SCORES = 4


class VllmEngine(DelegatingEngine):
    """Runs chains of operations on vLLM.

    Args:
        model: the target.
        core: vLLM's engine.
        num_chains: chains in progress at once. Requests that do not fit into vLLM's batch wait there.
        skip_identical: whether the tokens that a draw shares with `Draw.along` are taken without a forward.
    """

    def __init__(self, model: UnloadedTarget, core: VllmCore, num_chains: int, skip_identical: bool = True):
        super().__init__(num_chains)
        self.model, self._core, self._skip_identical = model, core, skip_identical
        self._numbers = itertools.count()
        core.stop_at(StopTable.of(model.stop_strings))

    def close(self) -> None:
        """Ends the requests in progress. vLLM stays loaded for the next job of this process."""
        self._abort(list(self._asked))

    def _step(self, run: LiveChains) -> None:
        """Steps vLLM, unless all chains wait for a turn."""
        if not self._asked:
            return
        started, live = time.perf_counter(), len(run.live)
        ended = self._core.step()
        bars.drew(len(self._asked))
        self._meter.count_steps(1, len(self._asked), self._num_chains if run.more else 0, started)
        answers = self._answers(ended)
        self._meter.share(started, live)
        for asked, answer in answers:
            run.end(asked.chain, asked.number, answer)

    def _begin(self, chain: LiveChain) -> None:
        """Asks vLLM for the operations of a chain's new request, but for those that are answered without it."""
        for number, operation in enumerate(chain.operations):
            if operation.stop is not None:
                raise ValueError("engine=vllm has no operations with stop strings of their own")
            base = prepare(chain, number, self._skip_identical)
            if base is not None:
                strings = self.model.stop_strings
                matched = 0 if strings is None else strings.state(base.tokens)
                ticket = Ticket.of(next(self._numbers), operation, base, self.model.stop_ids, matched)
                self._asked[ticket.number] = Asked(chain, number, base)
                self._core.add(ticket, base.sequence.tolist())

    def _answers(self, ended: list[EndedRequest]) -> list[tuple[Asked, Trajectory | None]]:
        """The answers of requests that have ended; None where logits are not numbers."""
        if not ended:
            return []
        drawn = self._core.take([request.number for request in ended])
        return [self._answer(self._asked.pop(request.number), request, drawn[request.number]) for request in ended]

    def _answer(self, asked: Asked, request: EndedRequest, drawn: Drawn) -> tuple[Asked, Trajectory | None]:
        chain, number, base = asked
        operation, count = chain.operations[number], len(drawn.tokens)
        read = base.sequence_length - request.cached
        chain.charge(number, tokens_drawn=count if isinstance(operation, Draw) else 0, target_forwards=drawn.forwards,
                     token_forwards=read + max(count - 1, 0))
        self._meter.count_reading(read, 0, time.perf_counter())
        if drawn.failed:
            return asked, None
        scores, stopped = drawn.scores, self.model.ends(np.concatenate([base.tokens, drawn.tokens]))
        answer = base.extended(drawn.tokens, scores[:, 0], scores[:, 1], scores[:, 2:_SCORES], stopped,
                               *split_columns(operation, scores[:, _SCORES:]))
        if isinstance(operation, Draw) and not (answer.complete(operation.horizon) or operation.is_abandoned(answer)):
            raise RuntimeError(f"vLLM ended a request after {count} tokens, without a stop id, stop string, horizon or floor")
        return asked, answer

    def _abort(self, requests: list[int]) -> None:
        """Ends requests of vLLM."""
        if requests:
            self._core.abort(requests)
            for number in requests:
                del self._asked[number]
