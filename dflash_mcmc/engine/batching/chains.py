"""The chains of an engine: their live requests, the slots of their operations, their turns, and what they cost."""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dflash_mcmc.engine.batching.cache import chunks
from dflash_mcmc.engine.batching.interface import Counters, Finished, Tag
from dflash_mcmc.engine.batching.rows import RowCounts
from dflash_mcmc.ops import Chain, Operation, Request, Together
from dflash_mcmc.types import ChainResult, Cost, Trajectory, common_prefix

if TYPE_CHECKING:
    from dflash_mcmc.draft.adaptation.learning import Adapter
    from dflash_mcmc.engine.batching.slot_memory import SlotPlace


_NOTHING = np.empty(0, np.int64)
TURN_SECONDS = 0.05
"""Time without a forward after which a chain pauses."""


class Placement(NamedTuple):
    """How a row comes to hold the first tokens of a sequence. All numbers are positions.

    The row keeps positions up to `kept`. Positions up to `restored` come from its spare row, those up to `forked` from the row
    of the contents `source`, and the later ones are read. Then the positions in `saved`, if any, are copied to the spare row.
    """

    kept: int
    restored: int
    forked: int
    source: int | None
    saved: tuple[int, int]


class CachedPrefix:
    """The tokens that a row and its spare row hold.

    Attributes:
        held: tokens from position 0 on whose keys and values the row holds, or will hold after the next reading.
        filled: number of these tokens that the row holds already.
        saved: tokens of the current sequence; the spare row holds their positions from `saved_from` on.
    """

    __slots__ = ("filled", "held", "saved", "saved_from")

    def __init__(self) -> None:
        self.held = self.saved = _NOTHING
        self.filled = self.saved_from = 0

    def clear(self) -> None:
        """Forgets everything."""
        self.held = self.saved = _NOTHING
        self.filled = self.saved_from = 0

    def hold(self, tokens: np.ndarray) -> None:
        """Sets the tokens that the row holds."""
        self.held, self.filled = tokens, len(tokens)

    def in_row(self, sequence: np.ndarray) -> int:
        """Number of first tokens of `sequence` that the row holds."""
        return min(common_prefix(self.held, sequence), self.filled)

    def reach(self, sequence: np.ndarray) -> int:
        """Number of first tokens of `sequence` that the row and its spare row hold."""
        return self.restorable(sequence, self.in_row(sequence))

    def restorable(self, sequence: np.ndarray, start: int) -> int:
        """The position up to which the spare row holds `sequence` from `start` on; `start` if it holds nothing of it."""
        if not self.saved_from <= start < len(self.saved):
            return start
        return max(start, common_prefix(self.saved, sequence))

    def save(self, current: np.ndarray, start: int) -> tuple[int, int]:
        """The span to copy to the spare row, which then holds `current` from position `start` on.

        `current` is the sequence that the chain returns to after a rejection; the draw overwrites the row from `start` on.
        """
        in_row = self.in_row(current)
        if self.saved_from <= in_row < common_prefix(self.saved, current):
            span = (start, self.saved_from)
            self.saved_from = min(start, self.saved_from)
        else:
            span = (start, in_row)
            self.saved, self.saved_from = current[:in_row], start
        return span

    def place(self, sequence: np.ndarray, along: Trajectory | None, others: Sequence[CachedPrefix],
              like: int | None = None) -> Placement:
        """Notes that the row will hold `sequence` without its last token, and returns how.

        Args:
            along: the current sequence, which the spare row then keeps; None without one.
            others: contents of other rows of the chain, from which a prefix may be copied.
            like: the number in `others` of contents that have been placed for the same sequence; None without such contents.
                Everything is then copied from them, because keys and values of the same tokens can differ in their last bits
                between two computations.
        """
        end, source = len(sequence) - 1, like
        if like is not None:
            self.clear()
        kept = min(self.in_row(sequence), end)
        restored = forked = min(self.restorable(sequence, kept), end)
        if like is not None:
            forked = min(others[like].in_row(sequence), end)
        elif restored < end:
            for index, other in enumerate(others):
                if (reach := min(other.in_row(sequence), end)) > forked:
                    source, forked = index, reach
        self.hold(np.concatenate([self.held[:kept], sequence[kept:forked]]) if forked > kept else self.held)
        saved = (0, 0)
        if along is not None:
            saved = self.save(np.concatenate([along.prompt, along.tokens])[:-1], end)
        self.held, self.filled = sequence[:-1], forked
        return Placement(kept, restored, forked, source, saved)

    def read(self) -> None:
        """Notes that the missing tokens have been read."""
        self.filled = len(self.held)


def assign(contents: Sequence[CachedPrefix], sequences: Sequence[np.ndarray]) -> list[tuple[int, int]]:
    """(sequence, contents) pairs, the longest reach first. Each sequence and each of the contents is in at most one pair."""
    if len(contents) == 1 and len(sequences) == 1:
        return [(0, 0)]
    reaches = sorted((-held.reach(sequence), mine, theirs) for mine, sequence in enumerate(sequences)
                     for theirs, held in enumerate(contents))
    pairs: dict[int, int] = {}
    taken = set[int]()
    for _, mine, theirs in reaches:
        if mine not in pairs and theirs not in taken:
            pairs[mine] = theirs
            taken.add(theirs)
    return list(pairs.items())


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
        counts: counts of the latest draw that has ended.
        walk: a trace entry for each block drafted for the operation, if a trace is kept.
        adapter: what the draft has learned in the slot's operations; None for nothing.
    """

    __slots__ = (
        "adapter",
        "base",
        "chain",
        "clock",
        "contents",
        "counts",
        "leader",
        "number",
        "offloaded",
        "operation",
        "reading_clock",
        "row",
        "walk",
    )

    def __init__(self, chain: LiveChain):
        self.chain, self.contents, self.counts = chain, CachedPrefix(), RowCounts()
        self.row: int | None = None
        self.offloaded: SlotPlace | None = None
        self.operation: Operation | None = None
        self.base: Trajectory | None = None
        self.adapter: Adapter | None = None
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

    def rest(self) -> None:
        """Ends the operation. The keys and values stay."""
        self.operation = self.leader = self.base = None


def rests(slot: Slot | None) -> bool:
    """Whether the row of this slot, or of none, is free for an operation."""
    return slot is None or slot.operation is None


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
        adapted: whether the chain has been charged for what the draft has learned from its prompt.
        adapt_seconds: seconds of the steps of a draft that learns.
    """

    def __init__(self, tag: Hashable, generator: Chain, num_beside: int = 0):
        self.tag, self.generator, self._num_beside = tag, generator, num_beside
        self.started, self.seconds, self.cost = time.perf_counter(), 0.0, Cost()
        self.walk: list[dict[str, object]] = []
        self.slots: list[Slot] = []
        self.operations: Sequence[Operation] = ()
        self.ended = self._together = self.adapted = False
        self.adapt_seconds = 0.0
        self.prefill_seconds: float | None = None
        self._answers: list[Trajectory | None] = []
        self._costs: list[Cost] = []
        self._walks: list[list[dict[str, object]]] = []
        self._shared_from: dict[int, Trajectory] = {}
        self._forwards_of_reading = 0

    def ask(self, request: Request) -> None:
        """Takes the next request."""
        self._together = isinstance(request, Together)
        self.operations = request.operations if isinstance(request, Together) else (request,)
        count = len(self.operations)
        self._answers = [None] * count
        self._costs, self._walks = [Cost()] * count, [list[dict[str, object]]() for _ in range(count)]
        self._shared_from, self._forwards_of_reading = {}, 0

    @property
    def complete(self) -> bool:
        """Whether all operations of the request have their answers."""
        return None not in self._answers

    def has_answer(self, number: int) -> bool:
        """Whether an operation of the request has its answer."""
        return self._answers[number] is not None

    def note(self, number: int, answer: Trajectory, walk: Sequence[dict[str, object]] = ()) -> None:
        """Notes the answer to an operation of the request."""
        self._answers[number], self._walks[number] = answer, list(walk)

    def answer(self) -> Trajectory | tuple[Trajectory | None, ...] | None:
        """The answer to the complete request. Adds up its cost."""
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

    def finished(self, result: ChainResult | None, failure: str = "") -> Finished:
        """Ends the chain. Returns what the engine yields of it."""
        self.ended = True
        seconds = time.perf_counter() - self.started
        return Finished(self.tag, result, self.cost, seconds, self.seconds, failure, tuple(self.walk),
                        self.adapt_seconds, self.prefill_seconds)

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
        """Forwards that draws of the request would repeat if they did not share them."""
        groups: dict[bytes, list[np.ndarray]] = {}
        for number, base in self._shared_from.items():
            answer = self._answers[number]
            if answer is not None:
                groups.setdefault(base.sequence.tobytes(), []).append(answer.tokens[base.length :])
        return sum(map(_repeated, groups.values()))


def _repeated(drawn: Sequence[np.ndarray]) -> int:
    """Number of forwards that draws from one sequence repeat.

    A draw of n tokens has n forwards: one before its first token, and one after each token but the last. In sorted order a
    draw repeats the forwards that it shares with the draw before it.

    Args:
        drawn: the tokens of each draw, int64 (n,) with n > 0.
    """
    ordered = sorted(drawn, key=lambda tokens: tokens.tolist())
    return sum(min(common_prefix(a, b) + 1, len(a), len(b)) for a, b in itertools.pairwise(ordered))


class Turns:
    """Gives chains the answers to complete requests. A chain whose requests stay complete pauses, and others go on.

    A step costs no forward where the stored intervals or a floor answer its operation. A chain of such steps would otherwise
    go on to its end between two decode steps of the others. Draws are keyed, so that a pause changes no result and no cost.

    Args:
        begin: begins the operations of a new request.
        end: takes the result of a chain that has ended.
        now: a clock, in seconds.

    Attributes:
        paused: the chains that wait for their next turn, the longest wait first. Their requests are complete.
    """

    def __init__(self, begin: Callable[[LiveChain], None], end: Callable[[LiveChain, ChainResult], None],
                 now: Callable[[], float]):
        self.paused: deque[LiveChain] = deque()
        self._begin, self._end, self._now = begin, end, now

    def advance(self, chain: LiveChain) -> None:
        """Gives a chain its answers until a request is not complete, the chain ends or its turn is over."""
        if not chain.complete or chain.ended:
            return
        over = self._now() + TURN_SECONDS
        while self._step(chain):
            if self._now() >= over:
                self.paused.append(chain)
                return

    def resume(self) -> None:
        """Gives chains that have paused a turn, one after another until a turn's time has passed."""
        over = self._now() + TURN_SECONDS
        for _ in range(len(self.paused)):
            self.advance(self.paused.popleft())
            if self._now() >= over:
                return

    def leave(self, chain: LiveChain) -> None:
        """Takes out a chain that has ended."""
        if chain in self.paused:
            self.paused.remove(chain)

    def _step(self, chain: LiveChain) -> bool:
        """Gives a chain the answer to its complete request. Returns whether its next request is complete at once."""
        try:
            request: Request = chain.generator.send(chain.answer())
        except StopIteration as stop:
            self._end(chain, stop.value)
            return False
        chain.ask(request)
        self._begin(chain)
        return chain.complete and not chain.ended


class Meter:
    """The counters and the clock of an engine.

    Args:
        now: the clock that measures the turns of chains, in seconds.

    Attributes:
        clock: seconds per chain since the start of the run. The time of each step is divided among the chains in it.
        reading_clock: the part of `clock` in which prompts and prefixes were read.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self.counters, self.now = Counters(), now
        self.clock = self.reading_clock = self._reading = 0.0

    def reset_clock(self) -> None:
        """Resets the clocks at the start of a run. The counters are kept."""
        self.clock = self.reading_clock = self._reading = 0.0

    def share(self, started: float, chains: int) -> None:
        """Divides the time since `started` among chains."""
        self.clock += (time.perf_counter() - started) / max(1, chains)
        self.reading_clock += self._reading / max(1, chains)
        self._reading = 0.0

    def begin(self, slot: Slot) -> None:
        """Notes the clocks at the start of a slot's operation."""
        slot.clock, slot.reading_clock = self.clock, self.reading_clock

    def charge(self, slot: Slot) -> None:
        """Adds the time since the start of a slot's operation to its chain."""
        chain = slot.chain
        chain.seconds += self.clock - slot.clock
        chain.prefill_seconds = (chain.prefill_seconds or 0.0) + self.reading_clock - slot.reading_clock

    def count_reading(self, tokens: int, forwards: int, started: float, ahead: bool = False) -> None:
        """Counts tokens that were read since `started`.

        Args:
            ahead: whether they were read for chains that have not begun, and take no part in the next step.
        """
        counters, seconds = self.counters, time.perf_counter() - started
        self._reading += 0.0 if ahead else seconds
        self.counters = counters._replace(
            read_tokens=counters.read_tokens + tokens, read_forwards=counters.read_forwards + forwards,
            read_seconds=counters.read_seconds + seconds)

    def count_steps(self, steps: int, row_steps: int, busy_slots: int, started: float) -> None:
        """Counts decode steps since `started`.

        Args:
            row_steps: rows that drew a token, summed over steps.
            busy_slots: number of slots of the engine if chains wait, else 0.
        """
        counters = self.counters
        self.counters = counters._replace(
            steps=counters.steps + steps, row_steps=counters.row_steps + row_steps,
            busy_row_steps=counters.busy_row_steps + (row_steps if busy_slots else 0),
            busy_slot_steps=counters.busy_slot_steps + steps * busy_slots,
            step_seconds=counters.step_seconds + time.perf_counter() - started)


class MeteredEngine(ABC):
    """An engine with a meter. `steps` ends the chains of the tags in `_dropped`."""

    def __init__(self) -> None:
        self._meter, self._dropped = Meter(), set[Hashable]()

    @property
    def counters(self) -> Counters:
        """The engine's work so far."""
        return self._meter.counters

    def drop(self, tags: Collection[Hashable]) -> None:
        """Ends chains of `steps` before its next step; see `ChainRunner.drop`."""
        self._dropped.update(tags)

    def run(self, chains: Iterable[tuple[Tag, Chain] | None]) -> Iterator[Finished[Tag]]:
        """Yields chains as they end; see `ChainRunner.run`. A few chains may be taken before there is room for them."""
        return (done for done in self.steps(chains) if done is not None)

    @abstractmethod
    def steps(self, chains: Iterable[tuple[Tag, Chain] | None]) -> Generator[Finished[Tag] | None, None, None]:
        """See `ChainRunner.steps`."""
