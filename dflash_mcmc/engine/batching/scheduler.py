"""Continuous batching: a row of the batch that becomes free takes the next waiting operation or chain before the next step.

Rows are in this order: rows that are fed, rows that share the forwards of one of them, other rows. The other rows are free, or
belong to slots that rest. A slot that rests gives up its row when another operation needs it, and moves out.
"""

import time
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Sequence

import numpy as np
import torch

from dflash_mcmc.engine.batching import rows as row_state
from dflash_mcmc.engine.batching.cache import Ladder, chunks
from dflash_mcmc.engine.batching.chains import ChainPool, LiveChain, Next, RequestPart, Slot, SlotMemory
from dflash_mcmc.engine.batching.interface import DROPPED, NOT_NUMBERS, Finished, Meter, Options
from dflash_mcmc.engine.batching.model_runner import Span, scores
from dflash_mcmc.engine.batching.rows import Group, Rows, Start, Status, Stepper
from dflash_mcmc.engine.speculative.drafter import Drafter
from dflash_mcmc.engine.speculative.rules import Noise, Speculation
from dflash_mcmc.engine.speculative.steps import Tracer
from dflash_mcmc.ops import Chain, Draw, Operation, Score, counted_from
from dflash_mcmc.process import bars
from dflash_mcmc.types import Cost, Trajectory


class Scheduler(ChainPool):
    """Admits chains, gives their operations rows and their generators the answers, and takes them out when they end.

    Operations of live chains come before new chains. A request may have more operations than there are rows.

    Args:
        source: (tag, generator) pairs, or None where no chain waits now.
        num_rows: operations in the batch at once.
        memory, loop: hold the state of the rows; the loop takes the draws that need decode steps.
        speculation: the rule for drawing block by block; None to draw token by token.
        options: the engine's options.
        sharing: whether draws share forwards while their tokens are equal.
        meter: counts the work and measures time.

    Attributes:
        running: the slots that work, in the order of their rows.
        waiting: the slots whose operations wait for a row, the longest wait first.
    """

    def __init__(self, source: Iterable[tuple[Hashable, Chain] | None], num_rows: int, memory: SlotMemory, loop: "DecodeLoop",
                 speculation: Speculation[Drafter] | None, options: Options, sharing: bool, meter: Meter):
        super().__init__(source, meter)
        self.running, self.waiting, self._scores = list[Slot](), deque[Slot](), list[Slot]()
        self._slots: list[Slot | None] = [None] * num_rows  # the slot that has each row
        self._memory, self._loop, self._speculation = memory, loop, speculation
        self._options, self._sharing = options, sharing
        self._runner, self._grid = memory.runner, memory.runner.grid
        self._ahead = deque[Next]()  # chains whose prompts have been read
        self._seconds_ahead = 0.0  # the latest reading's seconds, divided among the chains that it was for

    @property
    def busy_slots(self) -> int:
        """The number of rows while chains may wait; 0 afterwards."""
        return len(self._slots) if self._ahead or self.more else 0

    def fill(self) -> list[Finished]:
        """Gives all rows work, as far as there is work. Returns the chains that have ended."""
        if not self.running:
            self.wait_outside()
        self.resume()
        while self._begin_more() or self._carry_out_scores():
            pass
        self.running = self._arrange()
        return self.take_finished()

    def end_steps(self, progress: row_state.RowProgress) -> list[Finished]:
        """Gives chains the answers to draws that have ended, and fills the rows. Returns the chains that have ended."""
        parted = np.flatnonzero(progress.status == Status.DIVERGED).tolist()
        ended = np.flatnonzero((progress.status != Status.LIVE) & (progress.status != Status.DIVERGED)).tolist()
        if not (ended or parted):
            arrived = self._free_rows() and self._take_ahead()  # a chain may have come where the source had none before
            return self.fill() if self.paused or arrived or self._finished else []
        draws = [(row, slot, slot.part) for row in ended if (slot := self.running[row]).part is not None]
        spans = [(row, part.base.sequence_length, int(progress.position[row]) + 1) for row, _, part in draws]
        read = self._loop.rows.read(spans) if spans else []
        self._diverge(parted, progress.position)  # first, because it copies keys of rows whose draws may have ended
        for (row, slot, part), drawn in reversed(list(zip(draws, read, strict=True))):
            if slot.part is None:  # another operation of the chain has failed
                continue
            if progress.status[row] == Status.FAILED:
                self._fail(part.chain, f"{NOT_NUMBERS} (after {part.base.length + len(drawn.tokens)} tokens)")
                continue
            part.answer = self._collected(slot, part, drawn)
            part.charge(**self._loop.stepper.cost(group_of(part.operation), len(drawn.tokens), progress.counts(row)))
            slot.charge(self._meter)
            slot.rest()
            self.advance(part.chain)
        return self.fill()

    def drop(self, tags: Collection[Hashable]) -> list[Finished]:
        """Ends live and waiting chains before their end, and fills the rows. Returns the chains that have ended."""
        self.end_dropped(tags)
        for entry in [entry for entry in self._ahead if entry.tag in tags]:
            self._ahead.remove(entry)
            entry.generator.close()
            self._finished.append(Finished(entry.tag, None, Cost(), 0.0, 0.0, DROPPED))
        return self.fill()

    def _take_ahead(self) -> bool:
        """Takes the next chains and reads their prompts together, if none is ahead. Returns whether one is ahead then.

        A source that is pulled locks the task of a chain, and runs its generator to its first request.
        """
        if not self._ahead and self.more:
            while len(self._ahead) < self._memory.prompts.num_rows and (entry := self._next()) is not None:
                self._ahead.append(entry)
            if self._ahead or not self.more:  # at the end of the source, what was read for the last ones is forgotten
                self._read_ahead()
        return bool(self._ahead)

    def _read_ahead(self) -> None:
        """Reads the prompts of the waiting chains, except those already read. The others are forgotten."""
        started = time.perf_counter()
        prompts = [entry.prompt for entry in self._ahead if entry.prompt is not None]
        self._meter.count_reading(*self._memory.prompts.read(prompts), started, ahead=True)
        self._seconds_ahead = (time.perf_counter() - started) / max(1, len(self._ahead))

    def _begin_more(self) -> bool:
        """Begins operations that wait for a row, or else a chain, where rows are free. Returns whether any began.

        A chain that has paused has no row, and counts as one that has: else ever more chains would be live.
        """
        free = len(self._free_rows())
        if self.waiting:
            return free > 0 and self._begin_waiting()
        return free > len(self.paused) and self._admit()

    def _admit(self) -> bool:
        """Begins the next chain that waits. Returns whether there was one."""
        if not self._take_ahead():
            return False
        entry = self._ahead.popleft()
        chain = LiveChain(entry.tag, entry.generator, len(self._runner.beside))
        self.chains[chain] = None
        chain.seconds = chain.prefill_seconds = self._seconds_ahead
        chain.ask(entry.request)
        if entry.prompt is not None:
            chain.slots.append(Slot(chain))
            self._give_row(chain.slots[0])
            self._memory.admit(chain.slots[0], entry.prompt)
        self._begin(chain)
        self.advance(chain)
        return True

    def _begin(self, chain: LiveChain) -> None:
        """Begins the operations of a new request. Those that get no row wait for one."""
        first, again = dict[bytes, RequestPart](), list[RequestPart]()  # again: after the same tokens as one of the first
        for part in chain.parts:
            if not part.prepare(self._options.skip_identical):
                continue
            part.shares = self._sharing and isinstance(part.operation, Draw)
            if first.setdefault(part.base.sequence.tobytes(), part) is not part:
                again.append(part)
        slots = chain.slots_for(list(first.values()), again)
        working = [slot for slot in slots if self._give_row(slot)]
        placed = dict[bytes, Slot]()
        for slot in slots:
            name = slot.work.base.sequence.tobytes()
            self._place(slot, placed.get(name))
            placed.setdefault(name, slot)
        self.waiting.extend(slot for slot in slots if slot.row is None)
        self._work(working)

    def _place(self, slot: Slot, like: Slot | None) -> None:
        """Prepares a slot's keys and values for its operation. The slot may have a row or none.

        Args:
            like: a slot that has been placed and whose operation extends the same tokens; None for the first such slot.
        """
        part, along = slot.work, None
        sequence = part.base.sequence
        if isinstance(part.operation, Draw):
            along = part.operation.along
            self._memory.reserve(len(sequence) if along is None else along.sequence_length)
        start = self._memory.place(slot, sequence, along, like)
        if like is None or not self._sharing:
            part.charge_reading(start, len(sequence) - 1, self._options.prefill_chunk)

    def _begin_waiting(self) -> bool:
        """Begins the operations that have waited longest, as far as there are rows. Returns whether any began."""
        slots = [self.waiting.popleft() for _ in range(min(len(self.waiting), len(self._free_rows())))]
        for slot in slots:
            self._give_row(slot)
        self._work(slots)
        for chain in dict.fromkeys(slot.chain for slot in slots):
            self.advance(chain)
        return bool(slots)

    def _work(self, slots: Sequence[Slot]) -> None:
        """Begins the operations of slots that have rows. Draws of a chain that extend the same tokens share forwards."""
        first: dict[tuple[LiveChain, bytes], Slot] = {}
        for slot in slots:
            if (part := slot.part) is None:  # another operation of the chain has failed
                continue
            if part.shares:
                leader = first.setdefault((part.chain, part.base.sequence.tobytes()), slot)
                slot.leader = None if leader is slot else leader
            slot.begin(self._meter)
            if isinstance(part.operation, Draw):
                self._draw(slot, part.operation, part.base)
            elif self._memory.cache.recurrent:  # whose states are prepared for one row
                self._score([slot])
            else:  # together with those of other chains
                self._scores.append(slot)

    def _draw(self, slot: Slot, draw: Draw, base: Trajectory) -> None:
        """Prepares the row. Missing tokens are read before the next step, which feeds the last token of the draw's base."""
        row, rows, sequence, origin = slot.row_number, self._loop.rows, base.sequence, len(base.prompt)
        if self._runner.second:
            self._runner.second.begin(row, base.prompt)
        self._memory.reserve(len(sequence))
        if slot.leader is None:
            self._memory.fill(slot)
        uniforms = draw.uniforms()[base.length - draw.trajectory.length :]
        start = Start(row, int(sequence[-1]), len(sequence), origin + draw.horizon - 1, origin, uniforms,
                      row_state.Limit.of(draw, base), self._runner.endings.begin(draw, base.tokens))
        if self._speculation is not None and rows.noise.shape[2]:
            noise = Noise.of(draw.key, base.length, draw.horizon, self._speculation.num_drafted)
            start = start._replace(noise=np.concatenate(noise, axis=1))
        rows.reserve_columns(row_state.num_columns(draw))
        # The tokens that drafters and laws read. A step itself writes only those that it draws.
        every = (draw.params, *draw.laws)
        calls = any(params.function for params in every)
        if self._grid or calls or (self._speculation and self._speculation.drafter.reads_tokens):
            rows.set_tokens(row, sequence)
        if calls:
            rows.reads_tokens = True
        if self._grid:
            self._grid.forget(row)
        if any(params.repetition_penalty != 1.0 for params in every):
            rows.mark_seen(row, sequence)
        if any(params.counts_tokens for params in every):
            rows.set_counts(row, sequence[counted_from(every, len(draw.trajectory.prompt)) :])
        self._loop.begin(slot, start, draw)

    def _collected(self, slot: Slot, part: RequestPart, drawn: row_state.DrawnTokens) -> Trajectory:
        """The answer to a draw whose decode steps have ended."""
        asked, base = part.operation, part.base
        ended = self._runner.endings.ended(asked, np.concatenate([base.tokens, drawn.tokens]))
        answer = base.extended(drawn.tokens, drawn.log_p, drawn.log_q, drawn.interval, ended,
                               *row_state.split_columns(asked, drawn.columns))
        if slot.leader is not None:
            self._memory.follow(slot.leader, slot, answer.sequence_length - 1)
        # The last token has not been fed, and a model that drafts may lack the one before; see `ModelDrafter`.
        slot.contents.hold(answer.sequence[: -2 if self._runner.drafting else -1])
        return answer

    def _carry_out_scores(self) -> bool:
        """Carries out the scores that wait, together. Returns whether there were any."""
        slots, self._scores = [slot for slot in self._scores if slot.part is not None], []  # else the chain has failed
        if slots:
            self._score(slots)
        for chain in dict.fromkeys(slot.chain for slot in slots):
            self.advance(chain)
        return bool(slots)

    def _score(self, slots: Sequence[Slot]) -> None:
        """Teacher-forces tokens after the trajectories of slots that have rows. Those that are no numbers end their chains."""
        asked = []
        for slot in slots:
            score = slot.work.operation
            assert isinstance(score, Score)
            sequence = np.concatenate([score.trajectory.sequence, np.asarray(score.tokens, np.int64)])
            first, last = score.trajectory.sequence_length - 1, len(sequence) - 1  # a token is scored by the logits before it
            asked.append((Span(slot.row_number, sequence, first, last, score.trajectory.prompt), score))
            slot.work.charge(target_forwards=len(list(chunks(first, last, self._options.prefill_chunk))))
            self._memory.reserve(len(sequence))
            self._memory.fill(slot)
        self._memory.read()
        # The plan of the memory has room for as many rows of a forward as prompts are read ahead.
        scored = scores(self._runner, self._memory.cache, asked, self._options.read_ahead)
        answered = list[Slot]()
        for slot, (span, score), result in zip(slots, asked, scored, strict=True):
            if result is None:
                continue
            sequence, origin, start, blocks = span.sequence, len(score.trajectory.prompt), span.start + 1, 0
            slot.contents.hold(sequence[:-1])
            if self._grid and self._runner.drafts({score.source}):
                blocks = self._grid.num_blocks(origin, start, len(sequence))
            slot.work.charge(token_forwards=len(score.tokens), blocks_drafted=blocks)
            log_p, log_q, interval, columns = result
            ended = self._runner.endings.ended(score, sequence[origin:])
            slot.work.answer = score.trajectory.extended(sequence[start:], log_p, log_q, interval, ended,
                                                         *row_state.split_columns(score, columns))
            answered.append(slot)
        for slot in slots:
            if slot in answered:
                slot.rest()
            elif not slot.chain.ended:
                self._fail(slot.chain, NOT_NUMBERS)

    def _diverge(self, parted: Sequence[int], positions: np.ndarray) -> None:
        """Continues draws of rows that have parted from their leaders. Draws that still agree share forwards again.

        Keys and values of a row before its position are those of its leader.
        """
        if not parted:
            return
        rows = self._loop.rows
        tokens = rows.tokens[parted, torch.from_numpy(positions[parted]).to(rows.device)].tolist()
        groups: dict[tuple[Slot | None, int, int], list[Slot]] = {}
        for row, token in zip(parted, tokens, strict=True):
            groups.setdefault((self.running[row].leader, int(positions[row]), token), []).append(self.running[row])
        for (leader, position, _), (first, *others) in groups.items():
            if leader is not None:
                self._memory.follow(leader, first, position)
            first.leader = None
            for other in others:
                other.leader = first
        rows.status[parted] = Status.LIVE

    def _fail(self, chain: LiveChain, reason: str) -> None:
        """Ends a chain whose logits are not numbers, and clears its keys and values."""
        for slot in chain.slots:
            self._memory.clear(slot)
        self._read_ahead()  # prompts that are read ahead are cleared too
        self._give_up(chain, reason)

    def _release(self, chain: LiveChain) -> None:
        for slot in chain.slots:
            if slot in self.waiting:
                self.waiting.remove(slot)
            slot.rest()
            slot.offloaded = None
            if slot.row is not None:
                self._loop.drop(slot.row, 0)
                self._slots[slot.row] = None
                slot.row = None

    def _free_rows(self) -> list[int]:
        """Rows that are free for an operation: first those without a slot, then those of slots that rest."""
        resting = [row for row, slot in enumerate(self._slots) if slot is not None and slot.part is None]
        return [row for row, slot in enumerate(self._slots) if slot is None] + resting

    def _give_row(self, slot: Slot) -> bool:
        """Gives a slot a row, if necessary the row of a resting slot. Returns False if all rows are in use."""
        if slot.row is not None:
            return True
        if not (free := self._free_rows()):
            return False
        other = self._slots[free[0]]
        if other is not None:
            self._memory.move_out(other)
        self._slots[free[0]] = slot
        self._memory.move_in(slot, free[0])
        return True

    def _arrange(self) -> list[Slot]:
        """Brings the rows into their order. Returns the slots that work, by row."""
        working = [slot for slot in self._slots if slot is not None and slot.part is not None]
        fed = [slot for slot in working if slot.leader is None]
        sharing = [slot for slot in working if slot.leader is not None]
        self._bring(fed, 0)
        self._bring(sharing, len(fed))
        for row in range(len(working), len(self._slots)):
            slot = self._slots[row]
            self._loop.drop(row, 0 if slot is None else slot.contents.filled)
        live = sorted(working, key=lambda slot: slot.row_number)
        self._loop.arrange(live, len(fed))
        return live

    def _bring(self, wanted: Sequence[Slot], start: int) -> None:
        """Brings slots to the rows from `start` on, in exchange for those that are there."""
        stop = start + len(wanted)
        outside = [slot.row_number for slot in wanted if not start <= slot.row_number < stop]
        gaps = [row for row in range(start, stop) if self._slots[row] not in wanted]
        for row, gap in zip(reversed(outside), gaps, strict=True):
            slots = self._slots[row], self._slots[gap]
            self._memory.swap(row, gap, slots, [0 if slot is None else slot.positions_held for slot in slots])
            self._loop.swap(row, gap)
            self._slots[gap], self._slots[row] = slots
            for slot, new_row in zip(slots, (gap, row), strict=True):
                if slot is not None:
                    slot.row = new_row


class DecodeLoop:
    """Steps all live rows together.

    Args:
        rows: the state of the draws.
        stepper: makes the steps.
        memory: keys and values of the rows.
        ladder: shapes of the batch.
        steps_per_sync: steps between two checks for ended draws.
        tracer: records the outcome of drafted blocks; None for no trace.
    """

    def __init__(self, rows: Rows, stepper: Stepper, memory: SlotMemory, ladder: Ladder, steps_per_sync: int,
                 tracer: Tracer | None = None):
        self.rows, self.stepper, self.steps_per_sync = rows, stepper, steps_per_sync
        self._memory, self._ladder, self._tracer = memory, ladder, tracer
        self._idle = np.zeros(rows.num_rows, np.int64)  # the position at which each row is idle, or -1
        self.groups: tuple[Group, ...] | None = None  # laws of the rows; None where they are not known
        self._num_fed = 0
        self._riders: row_state.SharedForwards | None = None

    def reset(self) -> None:
        """Forgets all draws."""
        self.groups, self._num_fed, self._riders = None, 0, None
        self.rows.idle(slice(None))
        self._idle[:] = 0

    def begin(self, slot: Slot, start: Start, draw: Draw) -> None:
        """Adds a draw: its row takes part from the next step on."""
        slot.start, slot.top, slot.rounds = start, start.first - 1, 0
        self._idle[slot.row_number] = -1
        if self.groups is not None and (len(self.groups) > 1 or self.groups[0] != group_of(draw)):
            self.groups = None

    def swap(self, a: int, b: int) -> None:
        """Exchanges two rows, whose draws continue."""
        self.rows.swap(a, b)
        self._idle[[a, b]] = self._idle[[b, a]]

    def drop(self, row: int, held: int) -> None:
        """Takes a row out of the batch. A step may still feed it, but overwrites none of its first `held` positions."""
        if self._idle[row] != held:
            self.rows.idle(row, held)
            self._idle[row] = held

    def arrange(self, slots: Sequence[Slot], num_fed: int) -> None:
        """Notes the rows of the next steps.

        Args:
            slots: the live slots in the order of their rows: slots that are fed, then slots that share their forwards.
            num_fed: the number of slots that are fed.
        """
        self._num_fed, self._riders = num_fed, None
        if self.groups is not None and len(self.groups) > 1:  # a single group is that of all rows, wherever they are
            self.groups = None
        if num_fed < len(slots):
            leader = list(range(self._batch(len(slots))))
            for row in range(num_fed, len(leader)):
                rides = slots[row].leader if row < len(slots) else None
                leader[row] = 0 if rides is None else rides.row_number
            self._riders = row_state.SharedForwards(len(leader), torch.tensor(leader, device=self.rows.device))

    def run(self, slots: Sequence[Slot]) -> tuple[row_state.RowProgress, int]:
        """Writes the state of the draws that begin, and steps the live slots until the next check.

        Returns the progress of their rows, and the steps since the last check, summed over rows.
        """
        if starts := [slot.start._replace(row=slot.row_number) for slot in slots if slot.start]:
            self.rows.begin(starts)
        operations = [slot.work.operation for slot in slots]
        if self.groups is None:
            self.groups = _grouped(operations, self.rows.device)
        self.rows.has_floors = any(isinstance(each, Draw) and each.floor is not None for each in operations)
        live, fed, batch = len(slots), self._num_fed, self._batch(self._num_fed)
        before, rounds = (np.array([getattr(slot, name) for slot in slots]) for name in ("top", "rounds"))
        top, idle = int(before.max()), int(self._idle[live:batch].max(initial=0))
        for _ in range(self.steps_per_sync):
            keys = self._memory.reserve_step(max(top, idle) + self.stepper.reach)
            self.stepper.step(self._memory.cache, self.rows, batch, keys, self.groups, self._riders)
            top += self.stepper.tokens_a_step
            if self._tracer:
                self._tracer.keep(slots)
        progress = self.rows.progress(live)
        bars.drew(int((progress.position - before).sum()))
        self._memory.cache.passed(before[:fed], progress.position[:fed])
        for slot, position, count in zip(slots, progress.position.tolist(), progress.rounds.tolist(), strict=True):
            slot.start, slot.top, slot.rounds = None, position, count
        return progress, int((progress.rounds - rounds).sum())

    def _batch(self, rows: int) -> int:
        return min(self._ladder.batch(rows), self.rows.num_rows)


def group_of(operation: Operation) -> Group:
    """The group of an operation's row, without its rows."""
    return Group(operation.params, operation.source, None, operation.laws, operation.entropy, operation.kept)


def _grouped(operations: Sequence[Operation], device: torch.device) -> tuple[Group, ...]:
    """Groups the live rows by what they draw and measure. A single group does not list its rows."""
    rows: dict[Group, list[int]] = {}
    for row, operation in enumerate(operations):
        rows.setdefault(group_of(operation), []).append(row)
    if len(rows) == 1:
        return (next(iter(rows)),)
    return tuple(group._replace(rows=torch.tensor(mine, device=device))
                 for group, mine in sorted(rows.items(), key=lambda item: repr(item[0])))
