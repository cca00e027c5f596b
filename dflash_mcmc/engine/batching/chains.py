"""The chains of an engine: their requests, turns and costs, and the slots of their operations with keys and values."""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, NamedTuple

import numpy as np

from dflash_mcmc.engine.batching.cache import CachedPrefix, KVCache, Ladder, assign, chunks
from dflash_mcmc.engine.batching.interface import DROPPED, Finished, Meter, Options
from dflash_mcmc.engine.batching.model_runner import ModelRunner, PromptReader, Span
from dflash_mcmc.ops import Chain, Draw, Operation, Request, Score, Together, Wait
from dflash_mcmc.types import ChainResult, Cost, Trajectory, common_prefix

TURN_SECONDS = 0.05
"""Time without a forward after which a chain pauses."""


class Next(NamedTuple):
    """A waiting chain with its first request."""

    tag: Hashable
    generator: Chain
    request: Request

    @property
    def prompt(self) -> np.ndarray | None:
        """The prompt of the request's first operation; None without an operation."""
        if isinstance(self.request, Wait):
            return None
        operations = self.request.operations if isinstance(self.request, Together) else (self.request,)
        return operations[0].trajectory.prompt if operations else None


class LiveChain:
    """A chain that has begun.

    A chain keeps a slot for each operation of its largest request so far. A slot may have a row of the batch or none. The
    tokens that are read and their cost therefore depend neither on the number of rows nor on other chains.

    Attributes:
        operations: the operations of the current request.
        slots: the slots of the chain.
        cost: the cost of earlier requests.
        seconds: the chain's share of the engine's time, in seconds.
        prefill_seconds: the part of it in which prompts and prefixes were read; None where it is not measured.
        walk: a trace entry for each drafted block, if a trace is kept.
        ended: whether the chain has ended.
    """

    def __init__(self, tag: Hashable, generator: Chain, num_beside: int = 0):
        self.tag, self.generator, self._num_beside = tag, generator, num_beside
        self.started, self.seconds, self.cost = time.perf_counter(), 0.0, Cost()
        self.walk: list[dict[str, object]] = []
        self.slots: list[Slot] = []
        self.operations: Sequence[Operation] = ()
        self.ended = self._together = False
        self.prefill_seconds: float | None = None
        self._answers: list[Trajectory | None] = []
        self._costs: list[Cost] = []
        self._walks: list[list[dict[str, object]]] = []
        self._shared_from: dict[int, Trajectory] = {}
        self._forwards_of_reading = 0
        self.work: Future | None = None

    def ask(self, request: Request) -> None:
        """Takes the next request."""
        self._together = isinstance(request, Together)
        self.work = request.work if isinstance(request, Wait) else None
        several = request.operations if isinstance(request, Together) else ()
        self.operations = (request,) if isinstance(request, Draw | Score) else several
        count = len(self.operations)
        self._answers = [None] * count
        self._costs, self._walks = [Cost()] * count, [list[dict[str, object]]() for _ in range(count)]
        self._shared_from, self._forwards_of_reading = {}, 0

    @property
    def complete(self) -> bool:
        """Whether all operations of the request have their answers, or the work that it waits for is done."""
        return None not in self._answers and not self.waits

    @property
    def waits(self) -> bool:
        """Whether the chain waits for work outside of the engine."""
        return self.work is not None and not self.work.done()

    def note(self, number: int, answer: Trajectory, walk: Sequence[dict[str, object]] = ()) -> None:
        """Notes the answer to an operation of the request."""
        self._answers[number], self._walks[number] = answer, list(walk)

    def answer(self) -> Any:
        """The answer to the complete request. Adds up its cost."""
        if self.work is not None:
            return self.work.result()
        self.settle()
        return tuple(self._answers) if self._together else self._answers[0]

    def slots_for(self, bases: dict[int, Trajectory], first_alike: dict[int, int]) -> dict[int, Slot]:
        """A slot for each operation, in the order in which they are placed.

        The operations that are the first to extend their tokens come first. They get the slots that hold the most of these
        tokens.
        """
        first = list(dict.fromkeys(first_alike.values()))
        again = [number for number in bases if number not in first]
        self.slots += [Slot(self) for _ in range(len(bases) - len(self.slots))]
        pairs = assign([slot.contents for slot in self.slots], [bases[number].sequence for number in first])
        slots = {first[mine]: self.slots[theirs] for mine, theirs in pairs}
        rest = [slot for slot in self.slots if slot not in slots.values()]
        return slots | dict(zip(again, rest, strict=False))

    def settle(self) -> None:
        """Adds up the cost of the request. Its depth is that of its longest reading plus that of its longest operation."""
        if self._costs:
            cost = Cost(*map(sum, zip(*self._costs, strict=True)))
            shared = self._repeated()
            depth = self._forwards_of_reading + max(each.target_forwards for each in self._costs)
            cost = cost._replace(target_forwards=depth, token_forwards=cost.token_forwards - shared, tokens_shared=shared,
                                 companion_forwards=cost.companion_forwards - self._num_beside * shared)
            self.cost = Cost(*map(sum, zip(self.cost, cost, strict=True)))
        self.walk += [entry for walk in self._walks for entry in walk]

    def charge(self, number: int, **amounts: int) -> None:
        """Adds to the cost of an operation, by the names of `Cost`. A model beside the target reads what it reads."""
        if self._num_beside:
            amounts = {**amounts, "companion_forwards": self._num_beside * amounts.get("token_forwards", 0)}
        cost = self._costs[number]
        self._costs[number] = cost._replace(**{name: getattr(cost, name) + amount for name, amount in amounts.items()})

    def charge_reading(self, number: int, start: int, stop: int, chunk: int) -> None:
        """Charges an operation for positions `start` to `stop - 1`, which are read in pieces of at most `chunk` tokens."""
        self._forwards_of_reading = max(self._forwards_of_reading, len(list(chunks(start, stop, chunk))))
        self.charge(number, token_forwards=stop - start)

    def share(self, bases: dict[int, Trajectory]) -> None:
        """Notes the draws that share forwards while their tokens are equal, and the trajectories that they extend."""
        self._shared_from = bases if self._together else {}

    def _repeated(self) -> int:
        """Forwards that draws of the request would repeat if they did not share them.

        A draw of n tokens has n forwards: one before its first token, and one after each token but the last. In sorted order
        a draw repeats the forwards that it shares with the draw before it.
        """
        groups: dict[bytes, list[np.ndarray]] = {}
        for number, base in self._shared_from.items():
            answer = self._answers[number]
            if answer is not None:
                groups.setdefault(base.sequence.tobytes(), []).append(answer.tokens[base.length :])
        ordered = [sorted(drawn, key=lambda tokens: tokens.tolist()) for drawn in groups.values()]
        return sum(min(common_prefix(a, b) + 1, len(a), len(b)) for drawn in ordered for a, b in itertools.pairwise(drawn))


def prepare(chain: LiveChain, number: int, skip_identical: bool) -> Trajectory | None:
    """The trajectory from which forwards continue an operation; None if the operation has its answer without one.

    With `skip_identical`, the tokens that a draw shares with `Draw.along` are taken without a forward.
    """
    operation = chain.operations[number]
    if isinstance(operation, Score):
        if not len(operation.tokens):
            chain.note(number, operation.trajectory)
            return None
        return operation.trajectory
    base, along = operation.trajectory, operation.along
    if skip_identical and along is not None and not base.complete(operation.horizon):
        along = along.prefix(operation.horizon)
        shared = min(along.drawn_again(base.length, operation.uniforms()[: along.length - base.length]),
                     operation.until_abandoned(along))
        chain.charge(number, tokens_skipped=shared)
        base = along.prefix(base.length + shared)
    if base.complete(operation.horizon) or operation.is_abandoned(base):
        chain.note(number, base)
        return None
    return base


class Slot:
    """Keys and values of a chain, and the operation that uses them.

    A slot that works has a row of the batch. A slot that rests or waits may have a row, memory of its own or neither.

    Attributes:
        chain: the chain that the slot belongs to.
        row: the number of its row; None without one.
        offloaded: its keys and values while it has no row; None if it has a row or holds nothing.
        contents: the tokens whose keys and values it holds.
        number: the number of its operation in the chain's request.
        operation: the operation that it works or waits for; None if there is none.
        base: the trajectory that the operation extends.
        leader: the slot that makes this draw's forwards, since both have had the same tokens; None if the draw makes its own.
        clock: the engine's clock at the start of the operation.
        reading_clock: the part of it in which the engine has read prompts and prefixes.
        walk: a trace entry for each block drafted for the operation, if a trace is kept.
    """

    def __init__(self, chain: LiveChain):
        self.chain, self.contents = chain, CachedPrefix()
        self.row: int | None = None
        self.offloaded: SlotPlace | None = None
        self.operation: Operation | None = None
        self.base: Trajectory | None = None
        self.leader: Slot | None = None
        self.number, self.clock, self.reading_clock = 0, 0.0, 0.0
        self.walk: list[dict[str, object]] = []

    @property
    def place(self) -> int:
        """The number of its row. Raises ValueError without one."""
        if self.row is None:
            raise ValueError("this slot has no row")
        return self.row

    @property
    def in_progress(self) -> Trajectory:
        """The trajectory that the operation extends. Raises ValueError without an operation."""
        if self.base is None:
            raise ValueError("this slot has no operation")
        return self.base

    def work_for(self, number: int, base: Trajectory) -> None:
        """Takes operation `number` of the chain's request, which extends `base`."""
        self.number, self.base, self.leader, self.walk = number, base, None, []
        self.operation = self.chain.operations[number]

    def begin(self, meter: Meter) -> None:
        """Notes the clocks at the start of the operation."""
        self.clock, self.reading_clock = meter.clock, meter.reading_clock

    def charge(self, meter: Meter) -> None:
        """Adds the time since the start of the operation to the chain."""
        self.chain.seconds += meter.clock - self.clock
        self.chain.prefill_seconds = (self.chain.prefill_seconds or 0.0) + meter.reading_clock - self.reading_clock

    def rest(self) -> None:
        """Ends the operation. The keys and values stay."""
        self.operation = self.leader = self.base = None


class SlotPlace(NamedTuple):
    """Where a slot's keys and values are: a row of a cache, and the same row of the cache of spare rows."""

    cache: KVCache
    spare: KVCache
    row: int = 0


class SlotMemory:
    """A row of keys and values for each slot, and a spare row that keeps the current sequence while a draw overwrites it.

    Args:
        runner: reads the missing tokens of a row.
        cache, spare: the caches of all slots.
        prompts: the reader of prompts ahead of their chains.
        options: the engine's options.
        ladder: shapes of the keys.
        padding: number of positions for padding after a sequence.
        longest: maximal number of positions of a row.
    """

    def __init__(self, runner: ModelRunner, cache: KVCache, spare: KVCache, prompts: PromptReader,
                 options: Options, ladder: Ladder, padding: int, longest: int):
        self.runner, self.cache, self.spare, self.prompts = runner, cache, spare, prompts
        self._options, self._ladder, self._padding, self._longest = options, ladder, padding, longest
        self._unread: list[Slot] = []
        self.reset()

    def reset(self) -> None:
        """Forgets the pending reads of an earlier run."""
        self._unread = []

    def reserve(self, length: int) -> None:
        """Makes the rows long enough for a sequence of `length` tokens and its padding."""
        self.cache.reserve(self._key_length(length + self._padding))

    def reserve_step(self, tops: np.ndarray, reach: int) -> int:
        """Makes the rows long enough for a step. Returns the length of its keys.

        Args:
            tops: int64 (rows,), bounds on the positions of the first rows.
            reach: number of positions, from a row's position on, that the step may touch.
        """
        keys = self._key_length(int(tops.max()) + reach)
        self.cache.reserve(keys)
        return keys

    def admit(self, slot: Slot, prompt: np.ndarray) -> None:
        """Copies a prompt that has been read ahead into a slot's row.

        Each chain is charged for its prompt, even if it shares the prompt, because its cost must not depend on other chains.
        `prompt_forwards` says how much of its cost that is (`Cost.together`).
        """
        self.reserve(len(prompt))
        length = self.prompts.copy(prompt, self.cache, slot.place)
        slot.contents.hold(prompt[:length])
        slot.chain.charge_reading(0, 0, length, self._options.prefill_chunk)
        slot.chain.charge(0, prompt_forwards=length)

    def place(self, slot: Slot, sequence: np.ndarray, along: Trajectory | None, like: Slot | None = None) -> int:
        """Copies the tokens of a sequence that the chain holds into a slot. The other tokens, except the last, are read later.

        Args:
            along: the current sequence, which the spare row then keeps.
            like: a slot of the chain that has been placed for the same sequence.

        Returns:
            The position of the first missing token. `fill` requests the missing tokens.
        """
        others = [other for other in slot.chain.slots if other is not slot]
        done = slot.contents.place(sequence, along, [other.contents for other in others],
                                   None if like is None else others.index(like))
        home = self._place_of(slot, len(sequence) if along is None else max(len(sequence), along.sequence_length))
        if done.kept < done.restored:
            home.cache.copy(home.spare, home.row, home.row, done.kept, done.restored)
        if done.source is not None:
            source = self._place_of(others[done.source])
            home.cache.copy(source.cache, source.row, home.row, done.restored, done.forked)
        if done.saved[0] < done.saved[1]:
            home.spare.reserve(home.cache.length)  # spare rows grow only when one is written: plain draws never need them
            home.spare.copy(home.cache, home.row, home.row, *done.saved)
        return done.forked

    def fill(self, slot: Slot) -> None:
        """Requests the missing tokens of a slot from the next `read`."""
        contents = slot.contents
        if contents.filled < len(contents.held) or self.cache.recurrent:
            self._unread.append(slot)

    def follow(self, leader: Slot, slot: Slot, length: int) -> None:
        """Copies the positions up to `length` that a slot lacks from its leader's row."""
        start = slot.contents.filled
        if start < length:
            self.cache.fork(leader.place, slot.place, start, length)

    def move_out(self, slot: Slot) -> None:
        """Moves a slot's keys and values out of its row, to the host's memory. The slot then has no row."""
        held, home, slot.row = slot.contents, self._place_of(slot), None
        if held.filled or held.saved_from < len(held.saved):
            _move(held, home, self._place_of(slot, max(held.filled, len(held.saved))))

    def move_in(self, slot: Slot, row: int) -> None:
        """Gives a slot a row, and copies its keys and values there."""
        held, home, slot.row, slot.offloaded = slot.contents, slot.offloaded, row, None
        if home is not None:
            self.reserve(max(len(held.held), len(held.saved)))
            _move(held, home, self._place_of(slot))

    def read(self) -> tuple[int, int]:
        """Reads the missing tokens of all rows. Returns the number of tokens and of forwards."""
        slots, self._unread = self._unread, []
        working = [slot for slot in slots if slot.row is not None and slot.operation is not None]
        self.runner.replay(self.cache, [slot.place for slot in working], [slot.contents.filled for slot in working])
        missing = [slot for slot in working if slot.contents.filled < len(slot.contents.held)]
        spans = [Span(slot.place, slot.in_progress.sequence, slot.contents.filled, len(slot.contents.held),
                      slot.in_progress.prompt) for slot in missing]
        for slot in slots:
            slot.contents.filled = len(slot.contents.held)
        return sum(span.stop - span.start for span in spans), self.runner.read(self.cache, spans) if spans else 0

    def swap(self, a: int, b: int, slots: Sequence[Slot | None], lengths: Sequence[int]) -> None:
        """Exchanges two rows.

        Args:
            slots: the slots of these rows.
            lengths: positions of each that hold keys and values.
        """
        self.cache.swap(a, b, *lengths)
        saved = [0 if slot is None else len(slot.contents.saved) for slot in slots]
        if any(saved):
            self.spare.reserve(self.cache.length)
            self.spare.swap(a, b, *saved)
        for part in (self.runner.grid, self.runner.second):
            if part:
                part.swap(a, b)

    def clear(self, slot: Slot) -> None:
        """Removes numbers that are not finite from a slot and from the prompts that are read ahead."""
        home = self._place_of(slot)
        home.cache.clear(home.row)
        home.spare.clear(home.row)
        self.prompts.clear()

    def _key_length(self, length: int) -> int:
        return min(self._ladder.keys(length), self._longest)

    def _place_of(self, slot: Slot, length: int = 0) -> SlotPlace:
        """Where a slot's keys and values are. One with neither row nor memory gets memory for `length` positions."""
        if slot.row is not None:
            return SlotPlace(self.cache, self.spare, slot.row)
        if slot.offloaded is None:
            slot.offloaded = SlotPlace(self.cache.on_host(length), self.spare.on_host(length))
        slot.offloaded.cache.reserve(length)
        return slot.offloaded


def _move(held: CachedPrefix, home: SlotPlace, goal: SlotPlace) -> None:
    """Copies what a slot holds from one place to another."""
    goal.cache.copy(home.cache, home.row, goal.row, 0, held.filled)
    if held.saved_from < len(held.saved):
        goal.spare.reserve(goal.cache.length)
        goal.spare.copy(home.spare, home.row, goal.row, held.saved_from, len(held.saved))


class ChainPool(ABC):
    """The chains of a run that are in progress. A chain whose requests stay complete pauses, and others go on.

    A step costs no forward where the stored intervals or a floor answer its operation. A chain of such steps would otherwise
    go on to its end between two decode steps of the others. Draws are keyed, so that a pause changes no result and no cost.

    A chain that waits for work outside of the engine pauses too.

    Args:
        source: (tag, generator) pairs, or None where no chain waits now and others may follow.
        meter: counts the work and measures time.

    Attributes:
        chains: the chains, in the order of their admission.
        paused: those that wait for their next turn, the longest wait first.
        more: whether `source` may have another chain.
    """

    def __init__(self, source: Iterable[tuple[Hashable, Chain] | None], meter: Meter):
        self.chains, self.paused, self.more = dict[LiveChain, None](), deque[LiveChain](), True
        self._source, self._meter, self._finished = iter(source), meter, list[Finished]()

    @abstractmethod
    def _begin(self, chain: LiveChain) -> None:
        """Begins the operations of a chain's new request."""

    @abstractmethod
    def _release(self, chain: LiveChain) -> None:
        """Frees what a chain that ends has held."""

    def _next(self) -> Next | None:
        """Takes the next chain; None if none waits now. One that ends without a request is finished at once."""
        for entry in self._source:
            if entry is None:
                return None
            tag, generator = entry
            try:
                return Next(tag, generator, next(generator))
            except StopIteration as stop:
                self._finished.append(Finished(tag, stop.value, Cost(), 0.0, 0.0))
        self.more = False
        return None

    def advance(self, chain: LiveChain) -> None:
        """Gives a chain its answers until a request is not complete, the chain ends or its turn is over."""
        over = self._meter.now() + TURN_SECONDS
        while chain.complete and not chain.ended:
            try:
                request: Request = chain.generator.send(chain.answer())
            except StopIteration as stop:
                self._end(chain, stop.value)
                return
            chain.ask(request)
            self._begin(chain)
            if self._meter.now() >= over:
                break
        if not chain.ended and (chain.complete or chain.waits):
            self.paused.append(chain)

    def resume(self) -> None:
        """Gives chains that have paused a turn, one after another until a turn's time has passed."""
        over = self._meter.now() + TURN_SECONDS
        for _ in range(len(self.paused)):
            self.advance(self.paused.popleft())
            if self._meter.now() >= over:
                return

    def rest(self) -> None:
        """Waits for the work of a chain, a turn's time at most, if all chains wait for some."""
        if self.paused and all(chain.waits for chain in self.paused):
            wait([chain.work for chain in self.paused if chain.work is not None], TURN_SECONDS, FIRST_COMPLETED)

    def end_dropped(self, tags: Collection[Hashable]) -> None:
        """Ends the chains of these tags before their end."""
        for chain in [chain for chain in self.chains if chain.tag in tags]:
            self._give_up(chain, DROPPED)

    def take_finished(self) -> list[Finished]:
        """The chains that have ended since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def _give_up(self, chain: LiveChain, reason: str) -> None:
        """Ends a chain in the middle of its request."""
        chain.generator.close()
        chain.settle()
        self._end(chain, None, reason)

    def _end(self, chain: LiveChain, result: ChainResult | None, failure: str = "") -> None:
        self._release(chain)
        self.chains.pop(chain)
        if chain in self.paused:
            self.paused.remove(chain)
        chain.ended, seconds = True, time.perf_counter() - chain.started
        self._finished.append(Finished(chain.tag, result, chain.cost, seconds, chain.seconds, failure, tuple(chain.walk),
                                       chain.prefill_seconds))
