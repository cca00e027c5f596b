"""The chains of an engine: their requests, turns and costs, and the slots of their operations with keys and values."""

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
from dflash_mcmc.engine.batching.rows import Start
from dflash_mcmc.ops import Chain, Operation, Request, Score, Together, Wait
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


class RequestPart:
    """An operation of a chain's request, until it is answered.

    Attributes:
        chain, operation: the chain, and what it asks for.
        base: the trajectory that is extended: the operation's, or a longer one whose tokens were taken without a forward.
        answer: None until it is known.
        cost: what the operation has cost so far.
        walk: a trace entry for each block drafted for it, if a trace is kept.
        shares: whether it shares forwards with other parts while their tokens are equal.
    """

    def __init__(self, chain: "LiveChain", operation: Operation):
        self.chain, self.operation, self.base, self.cost = chain, operation, operation.trajectory, Cost()
        self.answer: Trajectory | None = None
        self.walk: list[dict[str, object]] = []
        self.shares, self.forwards_of_reading = False, 0

    def prepare(self, skip_identical: bool) -> bool:
        """Finds the base. Returns whether the answer needs forwards; otherwise it is known now.

        Args:
            skip_identical: whether the tokens that a draw shares with `Draw.along` are taken without a forward.
        """
        asked, start = self.operation, self.base.length
        if isinstance(asked, Score):
            known = not len(asked.tokens)
        else:
            if skip_identical and asked.along is not None and not self.base.complete(asked.horizon):
                along = asked.along.prefix(asked.horizon)
                shared = min(along.drawn_again(start, asked.uniforms()[: along.length - start]), asked.until_abandoned(along))
                self.charge(tokens_skipped=shared)
                self.base = along.prefix(start + shared)
            known = self.base.complete(asked.horizon) or asked.is_abandoned(self.base)
        if known:
            self.answer = self.base
        return not known

    def charge(self, **amounts: int) -> None:
        """Adds to the cost, by the names of `Cost`. A model beside the target reads what it reads."""
        if beside := self.chain.num_beside:
            amounts = {**amounts, "companion_forwards": beside * amounts.get("token_forwards", 0)}
        self.cost = self.cost._replace(**{name: getattr(self.cost, name) + amount for name, amount in amounts.items()})

    def charge_reading(self, start: int, stop: int, chunk: int) -> None:
        """Charges for positions `start` to `stop - 1`, which are read in pieces of at most `chunk` tokens."""
        self.forwards_of_reading = max(self.forwards_of_reading, len(list(chunks(start, stop, chunk))))
        self.charge(token_forwards=stop - start)


class LiveChain:
    """A chain that has begun.

    A chain keeps a slot for each operation of its largest request so far. A slot may have a row of the batch or none. The
    tokens that are read and their cost therefore depend neither on the number of rows nor on other chains.

    Attributes:
        parts: the operations of the current request.
        slots: the slots of the chain.
        work: what it waits for outside of the engine; None without such work.
        cost: the cost of earlier requests.
        seconds: the chain's share of the engine's time, in seconds.
        prefill_seconds: the part of it in which prompts and prefixes were read; None where it is not measured.
        walk: a trace entry for each drafted block, if a trace is kept.
        ended: whether the chain has ended.
        num_beside: models that read what the target reads.
    """

    def __init__(self, tag: Hashable, generator: Chain, num_beside: int = 0):
        self.tag, self.generator, self.num_beside = tag, generator, num_beside
        self.started, self.seconds, self.cost = time.perf_counter(), 0.0, Cost()
        self.walk: list[dict[str, object]] = []
        self.slots: list[Slot] = []
        self.parts: list[RequestPart] = []
        self.work: Future | None = None
        self.ended = self._together = False
        self.prefill_seconds: float | None = None

    def ask(self, request: Request) -> None:
        """Takes the next request."""
        self._together = isinstance(request, Together)
        self.work = request.work if isinstance(request, Wait) else None
        operations = request.operations if isinstance(request, Together) else () if isinstance(request, Wait) else (request,)
        self.parts = [RequestPart(self, operation) for operation in operations]

    @property
    def complete(self) -> bool:
        """Whether all operations of the request have their answers, or the work that it waits for is done."""
        return not self.waits and all(part.answer is not None for part in self.parts)

    @property
    def waits(self) -> bool:
        """Whether the chain waits for work outside of the engine."""
        return self.work is not None and not self.work.done()

    def answer(self) -> Any:
        """The answer to the complete request. Adds up its cost."""
        if self.work is not None:
            return self.work.result()
        self.settle()
        answers = tuple(part.answer for part in self.parts)
        return answers if self._together else answers[0]

    def slots_for(self, first: Sequence[RequestPart], again: Sequence[RequestPart]) -> "list[Slot]":
        """A slot for each part, in the order in which they are placed.

        Args:
            first: the first parts to extend their tokens. They get the slots that hold the most of these tokens.
            again: the other parts.
        """
        self.slots += [Slot(self) for _ in range(len(first) + len(again) - len(self.slots))]
        pairs = assign([slot.contents for slot in self.slots], [part.base.sequence for part in first])
        chosen = [self.slots[theirs] for _, theirs in pairs]
        chosen += [slot for slot in self.slots if slot not in chosen][: len(again)]
        for slot, part in zip(chosen, [*(first[mine] for mine, _ in pairs), *again], strict=True):
            slot.part, slot.leader = part, None
        return chosen

    def settle(self) -> None:
        """Adds up the cost of the request. Its depth is that of its longest reading plus that of its longest operation."""
        if self.parts:
            cost = Cost(*map(sum, zip(*(part.cost for part in self.parts), strict=True)))
            shared = self._repeated()
            depth = max(part.forwards_of_reading for part in self.parts) + max(
                part.cost.target_forwards for part in self.parts)
            cost = cost._replace(target_forwards=depth, token_forwards=cost.token_forwards - shared, tokens_shared=shared,
                                 companion_forwards=cost.companion_forwards - self.num_beside * shared)
            self.cost = Cost(*map(sum, zip(self.cost, cost, strict=True)))
        self.walk += [entry for part in self.parts if part.answer is not None for entry in part.walk]

    def _repeated(self) -> int:
        """Forwards that draws of the request would repeat if they did not share them.

        A draw of n tokens has n forwards: one before its first token, and one after each token but the last. In sorted order
        a draw repeats the forwards that it shares with the draw before it.
        """
        groups: dict[bytes, list[np.ndarray]] = {}
        for part in self.parts:
            if part.shares and part.answer is not None:
                groups.setdefault(part.base.sequence.tobytes(), []).append(part.answer.tokens[part.base.length :])
        ordered = [sorted(drawn, key=lambda tokens: tokens.tolist()) for drawn in groups.values()]
        return sum(min(common_prefix(a, b) + 1, len(a), len(b)) for drawn in ordered for a, b in itertools.pairwise(drawn))


class Slot:
    """Keys and values of a chain, and the operation that uses them.

    A slot that works has a row of the batch. A slot that rests or waits may have a row, memory of its own or neither.

    Attributes:
        chain: the chain that the slot belongs to.
        row: the number of its row; None without one.
        offloaded: its keys and values while it has no row; None if it has a row or holds nothing.
        contents: the tokens whose keys and values it holds.
        part: the operation that it works or waits for; None if there is none.
        leader: the slot that makes this draw's forwards, since both have had the same tokens; None if the draw makes its own.
        start: the draw that begins with the next decode step; None if it has begun.
        top: an upper bound on the position of its draw.
        rounds: steps of its draw at the last check.
        clock: the engine's clock at the start of the operation.
        reading_clock: the part of it in which the engine has read prompts and prefixes.
    """

    def __init__(self, chain: LiveChain):
        self.chain, self.contents = chain, CachedPrefix()
        self.row: int | None = None
        self.offloaded: SlotPlace | None = None
        self.part: RequestPart | None = None
        self.leader: Slot | None = None
        self.start: Start | None = None
        self.top = self.rounds = 0
        self.clock = self.reading_clock = 0.0

    @property
    def row_number(self) -> int:
        """The number of its row. Raises ValueError without one."""
        if self.row is None:
            raise ValueError("this slot has no row")
        return self.row

    @property
    def work(self) -> RequestPart:
        """The operation that it works for. Raises ValueError without one."""
        if self.part is None:
            raise ValueError("this slot has no operation")
        return self.part

    @property
    def positions_held(self) -> int:
        """Positions of its row that hold keys and values."""
        draws = self.part is not None and self.leader is None
        return self.top + 1 if draws else self.contents.filled

    def begin(self, meter: Meter) -> None:
        """Notes the clocks at the start of the operation."""
        self.clock, self.reading_clock = meter.clock, meter.reading_clock

    def charge(self, meter: Meter) -> None:
        """Adds the time since the start of the operation to the chain."""
        self.chain.seconds += meter.clock - self.clock
        self.chain.prefill_seconds = (self.chain.prefill_seconds or 0.0) + meter.reading_clock - self.reading_clock

    def rest(self) -> None:
        """Ends the operation. The keys and values stay."""
        self.part = self.leader = self.start = None


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

    def reset(self) -> None:
        """Forgets the pending reads of an earlier run."""
        self._unread = []

    def reserve(self, length: int) -> None:
        """Makes the rows long enough for a sequence of `length` tokens and its padding."""
        self.cache.reserve(self._key_length(length + self._padding))

    def reserve_step(self, stop: int) -> int:
        """Makes the rows long enough for a step that touches positions before `stop`. Returns the length of its keys."""
        keys = self._key_length(stop)
        self.cache.reserve(keys)
        return keys

    def admit(self, slot: Slot, prompt: np.ndarray) -> None:
        """Copies a prompt that has been read ahead into a slot's row.

        Each chain is charged for its prompt, even if it shares the prompt, because its cost must not depend on other chains.
        `prompt_forwards` says how much of its cost that is (`Cost.together`).
        """
        self.reserve(len(prompt))
        length = self.prompts.copy(prompt, self.cache, slot.row_number)
        slot.contents.hold(prompt[:length])
        part = slot.chain.parts[0]
        part.charge_reading(0, length, self._options.prefill_chunk)
        part.charge(prompt_forwards=length)

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
            self.cache.fork(leader.row_number, slot.row_number, start, length)

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
        working = [slot for slot in slots if slot.row is not None and slot.part is not None]
        self.runner.replay(self.cache, [slot.row_number for slot in working], [slot.contents.filled for slot in working])
        spans = [Span(slot.row_number, slot.part.base.sequence, slot.contents.filled, len(slot.contents.held),
                      slot.part.base.prompt) for slot in working
                 if slot.part is not None and slot.contents.filled < len(slot.contents.held)]
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

    def wait_outside(self) -> None:
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
