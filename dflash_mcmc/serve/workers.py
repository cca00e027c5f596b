"""Orders that wait, and the thread that draws them in one continuous batch.

Chains of any sampler share the batch. An engine has a number of sets of stop strings that its chains may have: many, or with
`engine=vllm` and `engine=api` one. An order with a further set waits until the chains before it have ended, and then the
engine is started again.
"""

import copy
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from starlette.exceptions import HTTPException

from dflash_mcmc.api.choices import turn_of
from dflash_mcmc.config.schema import Config, checked
from dflash_mcmc.engine.batching.interface import ChainRunner, ChainTarget, Finished
from dflash_mcmc.errors import ConfigError, UserError
from dflash_mcmc.grading.extraction import cut
from dflash_mcmc.ops import Chain, stopping
from dflash_mcmc.serve.options import ServeOptions
from dflash_mcmc.store import records
from dflash_mcmc.types import ChainResult, Cost

MOST_SETS = 64
"""Sets of stop strings in an engine whose chains can have strings of their own."""
_PROMPT = 1024
_MOST_SLOTS = 256
"""Slots of an engine that chooses their number itself, at most."""


class DrawnAnswer(NamedTuple):
    """A drawn answer."""

    result: ChainResult
    cost: Cost
    text: str
    """The text without special tokens, up to a stop string."""
    finish_reason: str
    """One of `records.REASONS`."""


class Order(NamedTuple):
    """An answer to draw."""

    chain: Callable[[], Chain]
    stop: tuple[str, ...]
    future: Future[DrawnAnswer]
    """Gets the answer, UserError for what the client can change, or HTTPException. Who cancels it gives up the order."""


class Workers:
    """The thread that draws, and the orders that wait for it.

    Args:
        start: starts the engine for stop strings.
        mixes: whether chains of that engine can have stop strings of their own.
        resource: what one run at a time can use.
        max_waiting: orders that may wait or be drawn.
    """

    def __init__(self, start: Callable[[tuple[str, ...]], ChainRunner], mixes: bool, resource: object, max_waiting: int):
        self._start, self._mixes, self._resource, self._max_waiting = start, mixes, resource, max_waiting
        self._news = threading.Condition()
        self._waiting: deque[Order] = deque()
        self._live: set[Order] = set()
        self._sets: set[tuple[str, ...]] = set()
        self._engine: ChainRunner | None = None
        self._closing = self.failing = False
        self._thread = threading.Thread(target=self._work, name="dflash_mcmc draws", daemon=True)

    def begin(self, stop: tuple[str, ...]) -> None:
        """Starts the engine for stop strings, and then the thread. Raises UserError if the memory does not suffice."""
        self._engine_for(stop)
        self._thread.start()

    @property
    def counts(self) -> tuple[int, int]:
        """The number of orders that wait, and that the engine has."""
        with self._news:
            return sum(not order.future.cancelled() for order in self._waiting), len(self._live)

    def order(self, orders: Sequence[Order]) -> None:
        """Takes all orders or none. Raises HTTPException, also after `close`."""
        with self._news:
            if self._closing:
                raise HTTPException(503, "the server is shutting down")
            if (pending := sum(self.counts)) + len(orders) > self._max_waiting:
                raise HTTPException(429, f"{pending} answers wait or are drawn; allowed: {self._max_waiting} with those of "
                                    "this request (serve.max_waiting); try again later", {"Retry-After": "1"})
            self._waiting.extend(orders)
            self._news.notify()

    def close(self, seconds: float | None = None) -> None:
        """Ends the thread after the orders that it has. The thread is waited for at most so many seconds."""
        with self._news:
            self._closing = True
            self._news.notify()
        self._thread.join(seconds)

    def _work(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    break
                stop = self._waiting[0].stop
            try:
                with turn_of(self._resource).taken(nests=False):
                    self._draw(self._engine_for(stop))
            except Exception as error:  # whatever fails in the engine, its orders get an error and the thread stays alive
                self._give_up(error)
        self._release()

    def _draw(self, runner: ChainRunner) -> None:
        """Draws orders until none is there that may join."""
        for done in runner.steps(self._arrivals(runner.model)):
            if done is None:
                runner.drop([order for order in self._live if order.future.cancelled()])
                continue
            self.failing, order = False, done.tag
            # The order stays live until its answer is there: if decoding fails, `_give_up` answers it too.
            answer = done.result and _drawn(done, order.stop, runner.model)
            with self._news:
                self._live.remove(order)
            if not order.future.done():  # else its chain has failed, or it was given up
                _settle(order, answer or HTTPException(500, done.failure))

    def _give_up(self, error: Exception) -> None:
        self.failing = True
        with self._news:
            lost = list(self._live)
            if not lost and self._waiting:  # the engine did not start: the order for which it was started would wait for ever
                lost.append(self._waiting.popleft())
            self._live.clear()
        for order in lost:
            if not order.future.done():
                _settle(order, HTTPException(500, _reason(error, "engine")))
        try:
            self._release()
        except Exception:  # what has failed may fail to close, and the thread goes on with a new engine
            traceback.print_exc()

    def _engine_for(self, stop: tuple[str, ...]) -> ChainRunner:
        if self._engine is None or not self._has_room(stop):
            self._release()
            self._engine = self._start(() if self._mixes else stop)
            self._sets.add(stop)
        return self._engine

    def _has_room(self, stop: tuple[str, ...]) -> bool:
        """Whether a chain with these stop strings can join the engine's batch."""
        return stop in self._sets or len(self._sets) < (MOST_SETS if self._mixes else 1)

    def _release(self) -> None:
        engine, self._engine = self._engine, None
        self._sets.clear()
        if engine is not None:
            engine.close()

    def _arrivals(self, model: Any) -> Iterator[tuple[Order, Chain] | None]:
        """The chains of orders in their order; None while none is there that may join."""
        while True:
            with self._news:
                while self._waiting and self._waiting[0].future.cancelled():
                    self._waiting.popleft()
                arrived = self._waiting.popleft() if self._waiting and self._has_room(self._waiting[0].stop) else None
                if arrived is not None:
                    self._live.add(arrived)
                    self._sets.add(arrived.stop)
            yield arrived and (arrived, self._guarded(arrived, model))

    def _guarded(self, order: Order, model: Any) -> Generator[Any, Any, Any]:
        """The chain of an order. If it raises, it ends without a result, and the other chains of the batch go on."""
        try:
            if not (self._mixes and order.stop):
                return (yield from order.chain())
            model.strings(order.stop)  # raises UserError where the tokenizer has no tables
            return (yield from stopping(order.chain(), order.stop))
        except Exception as error:  # a sampler may be a plugin
            _settle(order, error if isinstance(error, UserError) else HTTPException(500, _reason(error, "sampler")))
            return None


def _settle(order: Order, answer: DrawnAnswer | Exception) -> None:
    """Gives an order its answer, unless it was given up."""
    if order.future.set_running_or_notify_cancel():
        if isinstance(answer, Exception):
            order.future.set_exception(answer)
        else:
            order.future.set_result(answer)


def _drawn(done: Finished[Order], stop: tuple[str, ...], model: Any) -> DrawnAnswer:
    assert done.result is not None
    path = done.result.trajectory
    return DrawnAnswer(done.result, done.cost, cut(model.decode(path.tokens), stop), records.finish_of(path, model.stop_ids))


def _reason(error: Exception, what: str) -> str:
    """What a client is told of an error. The log has the other errors."""
    if isinstance(error, UserError):
        return str(error)
    traceback.print_exception(error)
    return f"the {what} failed; the log says why"


def started(config: Config, options: ServeOptions) -> tuple[ChainTarget, Workers, int]:
    """Loads the model of a configuration as it was composed, and starts the thread.

    The engine of the configured stop strings is started here, so that a lack of memory is found before any order.

    Returns:
        The loaded model, what draws from it, and the most tokens of a prompt.

    Raises:
        UserError: for an engine that cannot be started.
    """
    whole = checked(copy.deepcopy(config))
    target = whole.engine.load(whole, whole.hardware.resolve())
    room, longest_prompt = whole.dataset.max_new_tokens, options.max_prompt_tokens or _PROMPT
    if target.max_positions is not None:
        if options.max_prompt_tokens is None:
            longest_prompt = max(1, min(_PROMPT, target.max_positions - room))
        if longest_prompt + room > target.max_positions:
            raise ConfigError("serve.max_prompt_tokens", longest_prompt, f"with dataset.max_new_tokens, {room}, at most the "
                              f"model's {target.max_positions} positions")

    def start(stop: tuple[str, ...]) -> ChainRunner:
        mine = copy.copy(whole)
        mine.dataset = copy.copy(whole.dataset)
        mine.dataset.stop = list(stop)
        return whole.engine.start(mine, target, longest_prompt, whole.hardware.num_slots or _MOST_SLOTS)

    workers = Workers(start, whole.engine.mixes_stops, whole.engine.resource(target), options.max_waiting)
    workers.begin(tuple(whole.dataset.stop))
    return target, workers, longest_prompt
