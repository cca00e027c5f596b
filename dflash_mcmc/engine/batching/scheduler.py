"""Continuous batching: a row of the batch that becomes free takes the next waiting operation or chain before the next step.

Rows are in this order: rows that are fed, rows that share the forwards of one of them, other rows. The other rows are free, or
belong to slots that rest. A slot that rests gives up its row when another operation needs it, and moves out.
"""

from __future__ import annotations

import functools
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait

import numpy as np

from dflash_mcmc.engine.batching.cache import chunks
from dflash_mcmc.engine.batching.chains import LiveChain, Next, Slot, SlotMemory, prepare, prompt_of, rests
from dflash_mcmc.engine.batching.decode_loop import DecodeLoop, Diverged, Stop, start_of
from dflash_mcmc.engine.batching.interface import DROPPED, NOT_NUMBERS, Finished, Meter, Options
from dflash_mcmc.engine.batching.model_runner import PromptReader, ScoreRequest, scores
from dflash_mcmc.engine.batching.rows import DrawnTokens, Status, num_columns, split_columns
from dflash_mcmc.engine.speculative.drafter import Drafter
from dflash_mcmc.engine.speculative.speculation import Noise, Speculation
from dflash_mcmc.ops import Chain, Draw, Operation, Request, Score, counted_from
from dflash_mcmc.types import ChainResult, Cost, Trajectory

TURN_SECONDS = 0.05
"""Time without a forward after which a chain pauses."""


class AdmissionQueue:
    """Gives out chains in their order.

    Args:
        chains: (tag, generator) pairs, or None where no chain waits now and others may follow.
        prompts: reads the prompts of the next chains.
        was_read: called after each reading with the number of tokens, the number of forwards and the start time.

    Attributes:
        seconds_each: the latest reading's seconds, divided among the chains that it was for.
    """

    def __init__(self, chains: Iterable[tuple[Hashable, Chain] | None], prompts: PromptReader,
                 was_read: Callable[[int, int, float], None]):
        self._chains, self._prompts, self._was_read = iter(chains), prompts, was_read
        self._ahead: deque[Next] = deque()
        self._drained = self._paused = False
        self.seconds_each = 0.0

    @property
    def more(self) -> bool:
        """Whether another chain may follow."""
        return bool(self._ahead) or not self._drained

    @property
    def arrived(self) -> bool:
        """Whether a chain waits now, after `chains` had none for a while."""
        if self._paused and not self._ahead:
            self._look_ahead()
        return bool(self._ahead)

    def drop(self, tags: Collection[Hashable]) -> list[Finished]:
        """Ends waiting chains before they begin."""
        out = [entry for entry in self._ahead if entry.tag in tags]
        self._ahead = deque(entry for entry in self._ahead if entry.tag not in tags)
        for entry in out:
            entry.chain.close()
        return [Finished(entry.tag, None, Cost(), 0.0, 0.0, DROPPED) for entry in out]

    def next(self) -> Next | None:
        """The next chain; None after the last."""
        if not self._ahead and not self._drained:
            self._look_ahead()
        return self._ahead.popleft() if self._ahead else None

    def read(self) -> None:
        """Reads the prompts of the waiting chains, except those already read."""
        started = time.perf_counter()
        prompts = [prompt for entry in self._ahead if (prompt := prompt_of(entry.request)) is not None]
        self._was_read(*self._prompts.read(prompts), started)
        self.seconds_each = (time.perf_counter() - started) / max(1, len(self._ahead))

    def _look_ahead(self) -> None:
        self._paused = False
        for arrival in self._chains:
            if arrival is None:
                self._paused = True
                break
            tag, chain = arrival
            try:
                self._ahead.append(Next(tag, chain, next(chain), None))
            except StopIteration as stop:
                self._ahead.append(Next(tag, chain, None, stop.value))
            if len(self._ahead) == self._prompts.num_rows:
                break
        else:
            self._drained = True
        if self._ahead or not self._paused:
            self.read()


class BatchRows:
    """Which slot has which row of the batch. No other object changes this.

    Args:
        memory, loop: hold the state of the rows.
    """

    def __init__(self, num_rows: int, memory: SlotMemory, loop: DecodeLoop):
        self._slots: list[Slot | None] = [None] * num_rows
        self._memory, self._loop = memory, loop

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def num_free(self) -> int:
        """Rows that are free for an operation: those without a slot, and those of slots that rest."""
        return sum(map(rests, self._slots))

    def give(self, slot: Slot) -> bool:
        """Gives a slot a row, if necessary the row of a resting slot. Returns False if all rows are in use."""
        if slot.row is not None:
            return True
        idle = [row for row, other in enumerate(self._slots) if rests(other)]
        if not idle:
            return False
        row = min(idle, key=lambda row: self._slots[row] is not None)
        other = self._slots[row]
        if other is not None:
            self._memory.move_out(other)
            other.row = None
        self._slots[row], slot.row = slot, row
        self._memory.move_in(slot)
        return True

    def release(self, slot: Slot) -> None:
        """Frees the row of a slot that holds nothing any more."""
        if slot.row is not None:
            self._loop.drop(slot.row, 0)
            self._slots[slot.row] = None
            slot.row = None

    def arrange(self) -> list[Slot]:
        """Brings the rows into their order. Returns the slots that work, by row."""
        working = [slot for slot in self._slots if slot is not None and slot.operation is not None]
        fed = [slot for slot in working if slot.leader is None]
        sharing = [slot for slot in working if slot.leader is not None]
        self._bring(fed, 0)
        self._bring(sharing, len(fed))
        for row in range(len(working), len(self._slots)):
            slot = self._slots[row]
            self._loop.drop(row, 0 if slot is None else slot.contents.filled)
        live = sorted([*fed, *sharing], key=lambda slot: slot.place)
        self._loop.arrange(live, len(fed))
        return live

    def _bring(self, wanted: Sequence[Slot], start: int) -> None:
        """Brings slots to the rows from `start` on."""
        stop = start + len(wanted)
        outside = [slot.place for slot in wanted if not start <= slot.place < stop]
        gaps = [row for row in range(start, stop) if self._slots[row] not in wanted]
        for row, gap in zip(reversed(outside), gaps, strict=True):
            slots = self._slots[row], self._slots[gap]
            self._memory.swap(row, gap, slots, [self._held(slot) for slot in slots])
            self._loop.swap(row, gap)
            self._slots[gap], self._slots[row] = slots
            for slot, new_row in zip(slots, (gap, row), strict=True):
                if slot is not None:
                    slot.row = new_row

    def _held(self, slot: Slot | None) -> int:
        """Positions of a slot's row that hold keys and values."""
        if slot is None:
            return 0
        works = slot.operation is not None and slot.leader is None
        return self._loop.positions_held(slot.place) if works else slot.contents.filled


class Operations:
    """Carries out draws and scores.

    Args:
        memory: keys and values of the slots.
        loop: takes the draws that need decode steps.
        speculation: the rule for drawing block by block; None to draw token by token.
        options: the engine's options.
        sharing: whether draws share forwards while their tokens are equal.
    """

    def __init__(self, memory: SlotMemory, loop: DecodeLoop, speculation: Speculation[Drafter] | None, options: Options,
                 sharing: bool):
        self._memory, self._loop, self._speculation = memory, loop, speculation
        self.options, self.sharing = options, sharing
        self._most_rows = options.read_ahead  # of a forward that scores; the plan of the memory has room for them
        self._runner, self._grid = memory.runner, memory.runner.grid

    def shares(self, operation: Operation) -> bool:
        """Whether an operation can share forwards with another: a draw token by token, by the target alone."""
        return self.sharing and isinstance(operation, Draw)

    def place(self, slot: Slot, like: Slot | None) -> None:
        """Prepares a slot's keys and values for its operation. The slot may have a row or none.

        Args:
            like: a slot that has been placed and whose operation extends the same tokens; None for the first such slot.
        """
        sequence, along = slot.in_progress.sequence, None
        if isinstance(slot.operation, Draw):
            along = slot.operation.along
            self._memory.reserve(len(sequence) if along is None else along.sequence_length)
        start = self._memory.place(slot, sequence, along, like)
        if like is None or not self.sharing:
            slot.chain.charge_reading(slot.number, start, len(sequence) - 1, self.options.prefill_chunk)

    def begin(self, slot: Slot) -> bool:
        """Begins the operation of a slot that has a row and its keys and values. A score is carried out at once.

        Returns False for a score whose logits are not numbers.
        """
        if self._runner.second:
            self._runner.second.begin(slot.place, slot.in_progress.prompt)
        if isinstance(slot.operation, Draw):
            self._draw(slot, slot.operation)
            return True
        return self.score([slot])[0]

    def collect(self, slot: Slot, drawn: DrawnTokens) -> Trajectory:
        """The answer to a draw whose decode steps have ended. Notes it in the chain."""
        base = slot.in_progress
        asked = slot.chain.operations[slot.number]
        ended = self._runner.endings.ended(asked, np.concatenate([base.tokens, drawn.tokens]))
        answer = base.extended(drawn.tokens, drawn.log_p, drawn.log_q, drawn.interval, ended,
                               *split_columns(slot.operation, drawn.columns))
        if slot.leader is not None:
            self._memory.follow(slot.leader, slot, answer.sequence_length - 1)
        # The last token has not been fed, and a model that drafts may lack the one before; see `ModelDrafter`.
        slot.contents.hold(answer.sequence[: -2 if self._runner.drafting else -1])
        slot.chain.charge(slot.number, **self._loop.cost(asked, len(drawn.tokens), slot.counts))
        return answer

    def _draw(self, slot: Slot, draw: Draw) -> None:
        """Prepares the row. Missing tokens are read before the next step, which feeds the last token of the draw's base."""
        base, row = slot.in_progress, slot.place
        sequence = base.sequence
        self._memory.reserve(len(sequence))
        if slot.leader is None:
            self._memory.fill(slot)
        uniforms = draw.uniforms()[base.length - draw.trajectory.length :]
        start = start_of(draw, base, row, uniforms)
        start = start._replace(matched=self._runner.endings.begin(draw, base.tokens))
        if self._speculation is not None and self._loop.rows.noise.shape[2]:
            noise = Noise.of(draw.key, base.length, draw.horizon, self._speculation.num_drafted)
            start = start._replace(noise=np.concatenate(noise, axis=1))
        self._loop.rows.reserve_columns(num_columns(draw))
        self._write_history(row, draw, sequence)
        self._loop.begin(start, draw)

    def _write_history(self, row: int, draw: Draw, sequence: np.ndarray) -> None:
        """Writes the tokens that drafters and laws read."""
        every = (draw.params, *draw.laws)
        calls = any(params.function for params in every)
        if self._grid or calls or (self._speculation and self._speculation.drafter.reads_tokens):
            self._loop.rows.set_tokens(row, sequence)
        if calls:
            self._loop.rows.reads_tokens = True
        if self._grid:
            self._grid.forget(row)
        if any(params.repetition_penalty != 1.0 for params in every):
            self._loop.rows.mark_seen(row, sequence)
        if any(params.counts_tokens for params in every):
            self._loop.rows.set_counts(row, sequence[counted_from(every, len(draw.trajectory.prompt)) :])

    def score(self, slots: Sequence[Slot]) -> list[bool]:
        """Teacher-forces tokens after the trajectories of slots that have rows. Returns which scores are numbers."""
        asked = [_asked(slot) for slot in slots]
        for slot, (_, _, sequence) in zip(slots, asked, strict=True):
            self._memory.reserve(len(sequence))
            self._memory.fill(slot)
        self._memory.read()
        for slot, each in zip(slots, asked, strict=True):
            span = each.span()
            pieces = list(chunks(span.start, span.stop, self.options.prefill_chunk))
            slot.chain.charge(slot.number, target_forwards=len(pieces))
        scored = scores(self._runner, self._memory.cache, asked, self._most_rows)
        for slot, each, result in zip(slots, asked, scored, strict=True):
            if result is not None:
                _, score, sequence = each
                origin, start, blocks = len(score.trajectory.prompt), len(sequence) - len(score.tokens), 0
                slot.contents.hold(sequence[:-1])
                if self._grid and self._runner.drafts({score.source}):
                    blocks = self._grid.num_blocks(origin, start, len(sequence))
                slot.chain.charge(slot.number, token_forwards=len(score.tokens), blocks_drafted=blocks)
                log_p, log_q, interval, columns = result
                ended = self._runner.endings.ended(score, sequence[origin:])
                slot.chain.note(slot.number, score.trajectory.extended(
                    sequence[start:], log_p, log_q, interval, ended, *split_columns(score, columns)))
        return [result is not None for result in scored]


def _asked(slot: Slot) -> ScoreRequest:
    """The score of a slot that has a row. Raises TypeError for a draw."""
    if not isinstance(slot.operation, Score):
        raise TypeError(f"{slot.operation} is no score")
    tokens = np.asarray(slot.operation.tokens, dtype=np.int64)
    return ScoreRequest(slot.place, slot.operation, np.concatenate([slot.operation.trajectory.sequence, tokens]))


class ChainPool(ABC):
    """The chains of a run that are in progress. A chain whose requests stay complete pauses, and others go on.

    A step costs no forward where the stored intervals or a floor answer its operation. A chain of such steps would otherwise
    go on to its end between two decode steps of the others. Draws are keyed, so that a pause changes no result and no cost.

    A chain that waits for work outside of the engine pauses too.

    Attributes:
        chains: the chains, in the order of their admission.
        paused: those that wait for their next turn, the longest wait first.
    """

    def __init__(self, meter: Meter):
        self.chains, self.paused = dict[LiveChain, None](), deque[LiveChain]()
        self._meter, self._finished = meter, list[Finished]()

    @abstractmethod
    def _begin(self, chain: LiveChain) -> None:
        """Begins the operations of a chain's new request."""

    @abstractmethod
    def _release(self, chain: LiveChain) -> None:
        """Frees what a chain that ends has held."""

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
        self._finished.append(chain.finished(result, failure))


class Scheduler(ChainPool):
    """Admits chains, gives their operations rows and their generators the answers, and takes them out when they end.

    Operations of live chains come before new chains. A request may have more operations than there are rows.

    Args:
        chains: (tag, generator) pairs, or None where no chain waits now.
        num_rows: operations in the batch at once.
        operations: carries out the operations of chains.
        memory, loop: hold the state of the rows.
        meter: counts the work and measures time.
    """

    def __init__(self, chains: Iterable[tuple[Hashable, Chain] | None], num_rows: int, operations: Operations,
                 memory: SlotMemory, loop: DecodeLoop, meter: Meter):
        super().__init__(meter)
        self.running: list[Slot] = []
        self._rows = BatchRows(num_rows, memory, loop)
        self._operations, self._memory, self._loop = operations, memory, loop
        self._queue = AdmissionQueue(chains, memory.prompts, functools.partial(meter.count_reading, ahead=True))
        self._waiting, self._scores = deque[Slot](), list[Slot]()  # scores wait for those of other chains

    @property
    def waits(self) -> bool:
        """Whether there is work: rows that draw, or chains that wait for a turn."""
        return bool(self.running or self.paused)

    @property
    def busy_slots(self) -> int:
        """The number of rows while chains may wait; 0 afterwards."""
        return len(self._rows) if self._queue.more else 0

    def fill(self) -> list[Finished]:
        """Gives all rows work, as far as there is work. Returns the chains that have ended.

        A chain that has paused has no row, and counts as one that has: else ever more chains would be live.
        """
        if not self.running:
            self.rest()
        self.resume()
        while ((self._rows.num_free > (0 if self._waiting else len(self.paused))
                and (self._begin_waiting() if self._waiting else self._admit())) or self._carry_out_scores()):
            pass
        self.running = self._rows.arrange()
        return self.take_finished()

    def _carry_out_scores(self) -> bool:
        """Carries out the scores that wait, together. Returns whether there were any."""
        slots, self._scores = [slot for slot in self._scores if slot.operation is not None], []  # else the chain has failed
        for slot, scored in zip(slots, self._operations.score(slots) if slots else [], strict=True):
            if scored:
                slot.rest()
            elif not slot.chain.ended:
                self._fail(slot.chain, NOT_NUMBERS)
        for chain in dict.fromkeys(slot.chain for slot in slots):
            self.advance(chain)
        return bool(slots)

    def end_steps(self, stop: Stop) -> list[Finished]:
        """Gives chains the answers to draws that have ended, and fills the rows. Returns the chains that have ended."""
        if not (stop.ended or stop.parted):
            return self.fill() if self.paused or (self._rows.num_free and self._queue.arrived) else []
        self._part(stop.parted)  # first, because it copies keys and values of rows whose draws may have ended
        for slot, ended in [(self.running[ended.row], ended) for ended in reversed(stop.ended)]:
            chain = slot.chain
            if slot.operation is None:  # another operation of the chain has failed
                continue
            if ended.status == Status.FAILED:
                self._fail(chain, f"{NOT_NUMBERS} (after {slot.in_progress.length + len(ended.drawn.tokens)} tokens)")
                continue
            chain.note(slot.number, self._operations.collect(slot, ended.drawn), slot.walk)
            slot.charge(self._meter)
            slot.rest()
            self.advance(chain)
        return self.fill()

    def drop(self, tags: Collection[Hashable]) -> list[Finished]:
        """Ends live and waiting chains before their end, and fills the rows. Returns the chains that have ended."""
        self.end_dropped(tags)
        self._finished += self._queue.drop(tags)
        return self.fill()

    def _part(self, parted: Sequence[Diverged]) -> None:
        """Continues draws that have parted from their leaders. Draws that still agree share forwards again."""
        groups: dict[tuple[Slot | None, int, int], list[Slot]] = {}
        for row, position, token in parted:
            groups.setdefault((self.running[row].leader, position, token), []).append(self.running[row])
        for (leader, position, _), (first, *others) in groups.items():
            if leader is not None:
                self._memory.follow(leader, first, position)
            first.leader = None
            for other in others:
                other.leader = first
        self._loop.rows.go_on([entry.row for entry in parted])

    def _admit(self) -> bool:
        """Begins the next chain that waits. Returns whether there was one."""
        if (entry := self._queue.next()) is None:
            return False
        if entry.request is None:
            self._finished.append(Finished(entry.tag, entry.result, Cost(), 0.0, 0.0))
            return True
        chain, prompt = LiveChain(entry.tag, entry.chain, len(self._memory.runner.beside)), prompt_of(entry.request)
        self.chains[chain] = None
        chain.seconds = chain.prefill_seconds = self._queue.seconds_each
        chain.ask(entry.request)
        if prompt is not None:
            chain.slots.append(Slot(chain))
            self._rows.give(chain.slots[0])
            self._memory.admit(chain.slots[0], prompt)
        self._begin(chain)
        self.advance(chain)
        return True

    def _begin(self, chain: LiveChain) -> None:
        """Begins the operations of a new request. Those that get no row wait for one."""
        skips = self._operations.options.skip_identical
        bases = {number: base for number in range(len(chain.operations))
                 if (base := prepare(chain, number, skips)) is not None}
        chain.share({number: base for number, base in bases.items() if self._operations.shares(chain.operations[number])})
        same: dict[bytes, int] = {}  # the first operation that extends the same tokens; this can be the operation itself
        first = {number: same.setdefault(base.sequence.tobytes(), number) for number, base in bases.items()}
        slots = chain.slots_for(bases, first)
        for number, slot in slots.items():
            slot.work_for(number, bases[number])
        working = [slot for slot in slots.values() if self._rows.give(slot)]
        for number, slot in slots.items():
            self._operations.place(slot, None if first[number] == number else slots[first[number]])
        self._waiting.extend(slot for slot in slots.values() if slot.row is None)
        self._work(working)

    def _begin_waiting(self) -> bool:
        """Begins the operations that have waited longest, as far as there are rows. Returns whether any began."""
        slots = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._rows.num_free))]
        for slot in slots:
            self._rows.give(slot)
        self._work(slots)
        for chain in dict.fromkeys(slot.chain for slot in slots):
            self.advance(chain)
        return bool(slots)

    def _work(self, slots: Sequence[Slot]) -> None:
        """Begins the operations of slots that have rows. Draws of a chain that extend the same tokens share forwards."""
        first: dict[tuple[LiveChain, bytes], Slot] = {}
        for slot in slots:
            if slot.operation is None:  # another operation of the chain has failed
                continue
            if self._operations.shares(slot.operation):
                name = slot.chain, slot.in_progress.sequence.tobytes()
                leader = first.setdefault(name, slot)
                slot.leader = None if leader is slot else leader
            slot.begin(self._meter)
            scores = isinstance(slot.operation, Score)
            if scores and not self._memory.cache.recurrent:  # whose states are prepared for one row
                self._scores.append(slot)
            elif not self._operations.begin(slot):
                self._fail(slot.chain, NOT_NUMBERS)
            elif scores:
                slot.rest()

    def _fail(self, chain: LiveChain, reason: str) -> None:
        """Ends a chain whose logits are not numbers, and clears its keys and values."""
        for slot in chain.slots:
            self._memory.clear(slot)
        self._queue.read()  # prompts that are read ahead are cleared too
        self._give_up(chain, reason)

    def _release(self, chain: LiveChain) -> None:
        for slot in [slot for slot in self._waiting if slot.chain is chain]:
            self._waiting.remove(slot)
        for slot in chain.slots:
            slot.rest()
            slot.offloaded = None
            self._rows.release(slot)
