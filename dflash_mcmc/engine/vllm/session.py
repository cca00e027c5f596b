"""Runs chains on vLLM: operations become requests as chains ask for them, and requests that end become answers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from dflash_mcmc.engine.batching.chains import LiveChain, prepare
from dflash_mcmc.engine.batching.interface import DROPPED, NOT_NUMBERS, Finished, Meter, MeteredEngine, Tag
from dflash_mcmc.engine.batching.rows import split_columns
from dflash_mcmc.engine.batching.scheduler import Turns
from dflash_mcmc.engine.vllm.core import EndedRequest, VllmCore
from dflash_mcmc.engine.vllm.ledger import Drawn, StopTable, Ticket
from dflash_mcmc.engine.vllm.starting import VllmTarget
from dflash_mcmc.ops import Chain, Draw
from dflash_mcmc.process import bars
from dflash_mcmc.types import ChainResult, Cost, Trajectory

_SCORES = 4


class _Asked(NamedTuple):
    """A request in progress: the operation of a chain, and the trajectory that the request goes on from."""

    chain: LiveChain
    number: int
    base: Trajectory


class VllmEngine(MeteredEngine):
    """Runs chains of operations on vLLM.

    Args:
        model: the target.
        core: vLLM's engine.
        num_chains: chains in progress at once. Requests that do not fit into vLLM's batch wait there.
        skip_identical: whether the tokens that a draw shares with `Draw.along` are taken without a forward.
    """

    def __init__(self, model: VllmTarget, core: VllmCore, num_chains: int, skip_identical: bool = True):
        super().__init__()
        self.model, self._core, self._num_chains, self._skip_identical = model, core, num_chains, skip_identical
        self._numbers = itertools.count()
        self._asked: dict[int, _Asked] = {}
        core.stop_at(StopTable.of(model.stop_strings))

    def close(self) -> None:
        """Ends the requests in progress. vLLM stays loaded for the next job of this process."""
        if self._asked:
            self._core.abort(list(self._asked))
            self._asked.clear()

    def steps(self, chains: Iterable[tuple[Tag, Chain] | None]) -> Generator[Finished[Tag] | None, None, None]:
        """Like `run`, but also yields None after every step, to let the caller do something else in between."""
        self._meter.reset_clock()
        self._dropped.clear()
        run = _LiveChains(iter(chains), self._num_chains, self._begin, self._meter)
        try:
            yield from run.fill()
            while run.live:
                for asked, answer in self._step(run) if self._asked else []:  # else all chains wait for a turn
                    run.end(asked, answer)
                run.drop(self._dropped)
                self._dropped.clear()
                self._drop([number for number, asked in self._asked.items() if asked.chain.ended])
                yield from run.fill()
                yield None
        finally:
            self.close()

    def _step(self, run: _LiveChains) -> list[tuple[_Asked, Trajectory | None]]:
        """Steps vLLM. Returns the requests that have ended, and their answers."""
        started, live = time.perf_counter(), len(run.live)
        ended = self._core.step()
        bars.drew(len(self._asked))
        self._meter.count_steps(1, len(self._asked), self._num_chains if run.more else 0, started)
        answers = self._answers(ended)
        self._meter.share(started, live)
        return answers

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
                self._asked[ticket.number] = _Asked(chain, number, base)
                self._core.add(ticket, base.sequence.tolist())

    def _answers(self, ended: list[EndedRequest]) -> list[tuple[_Asked, Trajectory | None]]:
        """The answers of requests that have ended; None where logits are not numbers."""
        if not ended:
            return []
        drawn = self._core.take([request.number for request in ended])
        return [self._answer(self._asked.pop(request.number), request, drawn[request.number]) for request in ended]

    def _answer(self, asked: _Asked, request: EndedRequest, drawn: Drawn) -> tuple[_Asked, Trajectory | None]:
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

    def _drop(self, numbers: list[int]) -> None:
        """Ends requests whose chain has failed."""
        if numbers:
            self._core.abort(numbers)
            for number in numbers:
                del self._asked[number]


class _LiveChains:
    """The chains of one run.

    Attributes:
        live: chains in progress.
        more: whether another chain may wait.
    """

    def __init__(self, chains: Iterator[tuple[Hashable, Chain] | None], num_chains: int, begin: Callable[[LiveChain], None],
                 meter: Meter):
        self.live, self.more = set[LiveChain](), True
        self._chains, self._num_chains, self._begin, self._meter = chains, num_chains, begin, meter
        self._turns = Turns(begin, self._end, meter.now)
        self._finished: list[Finished] = []
        self._clocks: dict[LiveChain, float] = {}

    def fill(self) -> list[Finished]:
        """Goes on with chains that have paused, and begins chains while there is room. Returns the chains that have ended."""
        self._turns.resume()
        while self.more and len(self.live) < self._num_chains:
            try:
                entry = next(self._chains)
            except StopIteration:
                self.more = False
                break
            if entry is None:  # no chain waits now
                break
            self._admit(*entry)
        finished, self._finished = self._finished, []
        return finished

    def end(self, asked: _Asked, answer: Trajectory | None) -> None:
        """Gives a chain an answer; None ends it, since its logits are not numbers."""
        chain = asked.chain
        if chain.ended:
            return
        if answer is None:
            self._give_up(chain, NOT_NUMBERS)
            return
        chain.note(asked.number, answer)
        self._turns.advance(chain)

    def drop(self, tags: Collection[Hashable]) -> None:
        """Ends chains before their end."""
        for chain in [chain for chain in self.live if chain.tag in tags]:
            self._give_up(chain, DROPPED)

    def _give_up(self, chain: LiveChain, reason: str) -> None:
        chain.generator.close()
        chain.settle()
        self._end(chain, None, reason)

    def _admit(self, tag: Hashable, generator: Chain) -> None:
        try:
            request = next(generator)
        except StopIteration as stop:
            self._finished.append(Finished(tag, stop.value, Cost(), 0.0, 0.0))
            return
        chain = LiveChain(tag, generator)
        self.live.add(chain)
        self._clocks[chain] = self._meter.clock
        chain.ask(request)
        self._begin(chain)
        self._turns.advance(chain)

    def _end(self, chain: LiveChain, result: ChainResult | None, failure: str = "") -> None:
        self.live.remove(chain)
        self._turns.leave(chain)
        chain.seconds = self._meter.clock - self._clocks.pop(chain)
        self._finished.append(chain.finished(result, failure))
