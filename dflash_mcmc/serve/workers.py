"""Chains that wait, and the thread that draws them in one continuous batch.

Chains of any sampler share the batch. An engine has a number of sets of stop strings that its chains may have: many, or with
`engine=vllm` and `engine=api` one. Chains with further sets are drawn in another round, by an engine that is started again. In
a round, a chain overtakes one with a further set only if it had arrived before the round began.
"""

from __future__ import annotations

import copy
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from dflash_mcmc.api.choices import turn_of
from dflash_mcmc.config.checks import checked
from dflash_mcmc.config.schema import Config
from dflash_mcmc.engine.batching.interface import ChainRunner, ChainTarget
from dflash_mcmc.errors import ConfigError, UserError
from dflash_mcmc.grading.extraction import cut
from dflash_mcmc.ops import Chain, stopping
from dflash_mcmc.serve.answers import DrawnAnswer, Refused
from dflash_mcmc.serve.options import ServeOptions
from dflash_mcmc.store import records
from dflash_mcmc.types import ChainResult, Cost

Start = Callable[[tuple[str, ...]], ChainRunner]
MOST_SETS = 64
"""Sets of stop strings in an engine whose chains can have strings of their own."""
_PROMPT = 1024
_MOST_SLOTS = 256
"""Slots of an engine that chooses their number itself, at most."""


class Order(NamedTuple):
    """An answer to draw."""

    chain: Callable[[], Chain]
    stop: tuple[str, ...]
    future: Future[DrawnAnswer]
    """Gets the answer, or Refused: with status 400 for what the client can change, else 500."""


class Workers:
    """The thread that draws, and the orders that wait for it.

    Args:
        start: starts the engine for stop strings.
        mixes: whether chains of that engine can have stop strings of their own.
        resource: what one run at a time can use.
        max_waiting: orders that may wait or be drawn.
        failed: called after a failure of the engine.
    """

    def __init__(self, start: Start, mixes: bool, resource: object, max_waiting: int, failed: Callable[[], None]):
        self._start, self._resource, self._max_waiting, self._failed = start, resource, max_waiting, failed
        self._mixes, self._most_sets = mixes, MOST_SETS if mixes else 1
        self._news = threading.Condition()
        self._waiting: deque[tuple[int, Order]] = deque()
        self._live: dict[int, Order] = {}
        self._dropped: set[int] = set()
        self._failures: dict[int, Refused] = {}
        self._number, self._closing = 0, False
        self._engine: ChainRunner | None = None
        self._sets: set[tuple[str, ...]] = set()
        self.failing, self.stepped = False, time.monotonic()
        self._thread = threading.Thread(target=self._work, name="dflash_mcmc draws", daemon=True)

    def begin(self, stop: tuple[str, ...]) -> None:
        """Starts the engine for stop strings, and then the thread. Raises UserError if the memory does not suffice."""
        self._engine_for(stop)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread draws, or waits for orders."""
        return self._thread.is_alive()

    @property
    def counts(self) -> tuple[int, int]:
        """The number of orders that wait, and that the engine has."""
        with self._news:
            return len(self._waiting), len(self._live)

    def order(self, orders: Sequence[Order]) -> list[int]:
        """Takes all orders or none, and returns their numbers. Raises Refused, also after `close`."""
        with self._news:
            if self._closing:
                raise Refused(503, "the server is shutting down")
            pending = len(self._waiting) + len(self._live)
            if pending + len(orders) > self._max_waiting:
                raise Refused(429, f"{pending} answers wait or are drawn; allowed: at most {self._max_waiting} with those of "
                              "this request; try again later", code="queue_full")
            if not pending:
                self.stepped = time.monotonic()  # nothing has waited for a step until now
            numbers = list(range(self._number, self._number + len(orders)))
            self._number += len(orders)
            self._waiting.extend(zip(numbers, orders, strict=True))
            self._news.notify()
        return numbers

    def drop(self, numbers: Collection[int]) -> int:
        """Gives up orders that are not finished. Returns how many."""
        with self._news:
            waiting = [number for number, _ in self._waiting if number in numbers]
            self._waiting = deque(each for each in self._waiting if each[0] not in numbers)
            live = [number for number in self._live if number in numbers]
            self._dropped.update(live)
        return len(waiting) + len(live)

    def close(self, seconds: float | None = None) -> None:
        """Ends the thread after the orders that it has. The thread is waited for at most so many seconds."""
        with self._news:
            self._closing = True
            self._news.notify()
        self._thread.join(seconds)

    def _work(self) -> None:
        while True:
            with self._news:
                while not self._waiting and not self._closing:
                    self._news.wait()
                if not self._waiting:
                    break
                stop, begun = self._waiting[0][1].stop, self._number
            self._round(stop, begun)
        self._release()

    def _round(self, stop: tuple[str, ...], begun: int) -> None:
        """Draws orders until none may join; the first has these stop strings. An engine that fails is started again."""
        try:
            with turn_of(self._resource).taken(nests=False):
                runner = self._engine_for(stop)
                for done in runner.steps(self._arrivals(begun, runner)):
                    self.stepped = time.monotonic()
                    if done is None:
                        with self._news:
                            dropped, self._dropped = self._dropped, set()
                        if dropped:
                            runner.drop(dropped)
                    else:
                        self.failing = False
                        failure = self._failures.pop(done.tag, None) or Refused(500, done.failure)
                        # The order stays live until its answer is there: if decoding fails, `_give_up` answers it too.
                        order = self._live[done.tag]
                        answer = done.result and _drawn(done.result, done.cost, order.stop, runner.model)
                        with self._news:
                            del self._live[done.tag]
                            self._dropped.discard(done.tag)
                        if answer is None:
                            order.future.set_exception(failure)
                        else:
                            order.future.set_result(answer)
        except Exception as error:  # whatever fails in the engine, its orders get an error and the thread stays alive
            if not isinstance(error, UserError):
                traceback.print_exc(file=sys.stderr)
            self._give_up(stop, error)

    def _give_up(self, stop: tuple[str, ...], error: Exception) -> None:
        self.failing = True
        self._failed()
        with self._news:
            lost = list(self._live.values())
            if not lost:  # the engine did not start: those that wait for it would wait for ever
                lost = [order for _, order in self._waiting if order.stop == stop]
                self._waiting = deque(each for each in self._waiting if each[1].stop != stop)
            self._live.clear()
            self._dropped.clear()
            self._failures.clear()
        for order in lost:
            order.future.set_exception(Refused(500, _reason(error, "engine")))
        try:
            self._release()
        except Exception:  # what has failed may fail to close, and the thread goes on with a new engine
            traceback.print_exc(file=sys.stderr)

    def _engine_for(self, stop: tuple[str, ...]) -> ChainRunner:
        if self._engine is None or not self._has_room(stop):
            self._release()
            self._engine = self._start(() if self._mixes else stop)
        self._sets.add(stop)
        return self._engine

    def _has_room(self, stop: tuple[str, ...]) -> bool:
        """Whether a chain with these stop strings can join the engine's batch."""
        return stop in self._sets or len(self._sets) < self._most_sets

    def _release(self) -> None:
        engine, self._engine = self._engine, None
        self._sets.clear()
        if engine is not None:
            engine.close()

    def _arrivals(self, begun: int, runner: ChainRunner) -> Iterator[tuple[int, Chain] | None]:
        while True:
            arrived = self._next(begun)
            yield None if arrived is None else (arrived[0], self._guarded(*arrived, runner.model))

    def _guarded(self, number: int, order: Order, model: Any) -> Generator[Any, Any, Any]:
        """The chain of an order. If it raises, it ends without a result, and the other chains of the batch go on."""
        try:
            if not self._mixes:
                return (yield from order.chain())
            if order.stop:
                model.strings(order.stop)  # raises UserError where the tokenizer has no tables
            return (yield from stopping(order.chain(), order.stop))
        except Exception as error:  # a sampler may be a plugin
            if not isinstance(error, UserError):
                traceback.print_exc(file=sys.stderr)
            self._failures[number] = Refused(400 if isinstance(error, UserError) else 500, _reason(error, "sampler"))
            return None

    def _next(self, begun: int) -> tuple[int, Order] | None:
        """The next order of a round; None if there is none now."""
        with self._news:
            overtakes = False
            for index, (number, order) in enumerate(self._waiting):
                joins = self._has_room(order.stop)
                if joins and not (overtakes and number >= begun):
                    del self._waiting[index]
                    self._live[number] = order
                    self._sets.add(order.stop)
                    return number, order
                overtakes = overtakes or not joins
        return None


def _drawn(result: ChainResult, cost: Cost, stop: tuple[str, ...], model: Any) -> DrawnAnswer:
    path = result.trajectory
    return DrawnAnswer(result, cost, cut(model.decode(path.tokens), stop), records.finish_of(path, model.stop_ids))


def _reason(error: Exception, what: str) -> str:
    return str(error) if isinstance(error, UserError) else f"the {what} failed; the log says why"


def started(config: Config, options: ServeOptions, failed: Callable[[], None]) -> tuple[ChainTarget, Workers, int]:
    """Loads the model of a configuration as it was composed, and starts the thread.

    The engine of the configured stop strings is started here, so that a lack of memory is found before any order.

    Args:
        options: the longest prompt, and the orders that may wait or be drawn.
        failed: called after a failure of the engine.

    Returns:
        The loaded model, what draws from it, and the most tokens of a prompt.

    Raises:
        UserError: for an engine that cannot be started.
    """
    whole = checked(copy.deepcopy(config))
    target = whole.engine.load(whole, whole.hardware.resolve())
    longest_prompt = _prompt_tokens(options.max_prompt_tokens, whole, target.max_positions)

    def start(stop: tuple[str, ...]) -> ChainRunner:
        mine = copy.copy(whole)
        mine.dataset = copy.copy(whole.dataset)
        mine.dataset.stop = list(stop)
        return whole.engine.start(mine, target, longest_prompt, whole.hardware.num_slots or _MOST_SLOTS)

    workers = Workers(start, whole.engine.mixes_stops, whole.engine.resource(target), options.max_waiting, failed)
    workers.begin(tuple(whole.dataset.stop))
    return target, workers, longest_prompt


def _prompt_tokens(longest: int | None, config: Config, positions: int | None) -> int:
    """The longest prompt. Raises ConfigError."""
    room = config.dataset.max_new_tokens
    if positions is None:
        return longest or _PROMPT
    if room >= positions:
        raise ConfigError("dataset.max_new_tokens", room, f"at most {positions - 1} (the model has {positions} positions)")
    if longest is not None and longest + room > positions:
        raise ConfigError("serve.max_prompt_tokens", longest, f"at most {positions - room} (the model has {positions} "
                          f"positions, and dataset.max_new_tokens takes {room})")
    return longest or min(_PROMPT, positions - room)
