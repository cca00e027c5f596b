"""The batched engine: many chains of many problems in one ragged batch over a cache of slots.

Each chain lives in a slot. A draw continues some sequence; the keys and values of the longest prefix that the slot still
holds are kept, what is missing is read in pieces, and the last token of the path always goes through the decode step, so
that every token of every chain is drawn by one code path. A slot that falls free takes the next chain before the next
step; once no chain waits, the last live row moves into the gap, so that no step computes finished rows.

What makes it fast, each with its switch: prompts are read ahead, many at once (`prompts.py`); a draw along the current
sequence begins at the first token that differs, found from the stored intervals without asking the model; a draw that
crosses its floor ends there; and a spare row keeps the current sequence's keys and values while a draw overwrites them.

Shapes are kept to a ladder, so that on a CPU in float32 the numbers of a row do not depend on what else is in the batch.
`tests/engine/test_batched.py` holds the engine to the reference engine, and to itself under other batch sizes, orders and
switches.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable, Iterator

import numpy as np
import torch

from dflash_mcmc.engine import attention, graphs, scoring
from dflash_mcmc.engine.cache import SlotCache
from dflash_mcmc.engine.draws import is_abandoned, uniforms_of, until_abandoned, with_floor
from dflash_mcmc.engine.interface import DEFAULTS, NOT_NUMBERS, Counters, Finished, Options
from dflash_mcmc.engine.ladder import cache_size, ladder_of
from dflash_mcmc.engine.language_model import LanguageModel
from dflash_mcmc.engine.model_runner import Group, ModelRunner, Span
from dflash_mcmc.engine.prompts import PromptReader
from dflash_mcmc.engine.rows import DrawnTokens, Rows, Start, Status
from dflash_mcmc.engine.slots import Slot, chunks
from dflash_mcmc.engine.speculative.block_grid import BlockGrid
from dflash_mcmc.engine.speculative.blockwise import BlockSteps
from dflash_mcmc.engine.speculative.drafter import Drafter
from dflash_mcmc.engine.speculative.speculation import Noise, Speculation
from dflash_mcmc.engine.speculative.speculator import Speculator
from dflash_mcmc.engine.speculative.trace import Tracer
from dflash_mcmc.engine.waiting import Waiting
from dflash_mcmc.errors import UserError
from dflash_mcmc.ops import Chain, Draw, SamplingParams, Score, grid_origin
from dflash_mcmc.types import ChainResult, Cost, Trajectory, common_prefix


class BatchedEngine:
    """Runs chains of operations on a language model.

    Args:
        model: the target.
        blend: what is mixed into its last hidden state.
        num_slots: chains in the batch at once.
        max_length: longest sequence, prompt included.
        options: see `Options`.
        prompt_length: longest prompt; None takes `max_length`.
        speculation: how draws are carried out block by block; None for token by token.
        drafter: a draft that the blend mixes in, or that laws are drawn from; None where neither asks one.
    """

    def __init__(self, model: LanguageModel, blend: object, num_slots: int, max_length: int, options: Options = DEFAULTS,
                 prompt_length: int | None = None, speculation: Speculation | None = None,
                 drafter: Drafter | None = None):
        if model.max_positions is not None and max_length > model.max_positions:
            raise UserError(f"dataset.max_new_tokens: prompt and generation need {max_length} positions; allowed: "
                            f"{model.max_positions} (the model's)")
        self.model, self.num_slots, self.options, self.counters = model, num_slots, options, Counters()
        self._on_gpu = model.device.type == "cuda"
        self._ladder = ladder_of(model.device)
        implementation = attention.implementation(options.attention, model.device, model.dtype)
        asked, drafter = drafter, speculation.drafter if speculation else drafter
        padding = attention.padding(implementation, options.prefill_chunk, drafter.num_drafted if drafter else 0)
        shape = cache_size(model.device, num_slots, max_length, padding)
        companion = drafter.companion if drafter else None
        self._padding = padding
        # On a GPU graphs hold on to the memory, so that all of it is there from the start.
        length = shape[1] if self._on_gpu else self._ladder.key_step
        self._cache = SlotCache(model.cache_shape, shape[0], length, model.device, companion)
        keeps = options.keep_current and options.reuse_prefix
        self._spare = SlotCache(model.cache_shape, shape[0], length, model.device, companion) if keeps else None
        self._decoder = ModelRunner(model, blend, implementation, shape[1], self._ladder.key_step, options.prefill_chunk,
                                drafter if companion else None)
        self._prompts = None
        if options.read_ahead and options.reuse_prefix:
            length = cache_size(model.device, 1, prompt_length or max_length, padding)[1]
            rows = min(options.read_ahead, num_slots)
            self._prompts = PromptReader(self._decoder, SlotCache(model.cache_shape, rows, length, model.device, companion))
        if asked is not None:
            if self._decoder.on_grid and not asked.plain_head:
                raise UserError("blend: given draft; allowed: another, since this draft scales or caps its logits, which a "
                                "mixture of hidden states cannot")
            self._decoder.grid = BlockGrid(asked, shape[0], self._ladder.row_step, model.device)
        self._speculation, self._grid = speculation, self._decoder.grid
        self._rows = Rows(*shape, model.vocab_size, model.device, speculation.num_noise if speculation else 0)
        self._tracer = Tracer() if speculation and speculation.trace else None
        stepper = self._decoder
        if speculation:
            stepper = Speculator(self._decoder, speculation)
        elif self._grid and options.whole_blocks:
            stepper = BlockSteps(self._decoder)
        graphed = options.cuda_graphs and self._on_gpu and model.capturable and not (self._tracer or self._grid)
        self._stepper = graphs.GraphedSteps(stepper) if graphed else stepper
        self._checks = options.steps_between_checks or (4 if self._on_gpu else 1)
        self._reset(())

    def _reset(self, chains: Iterable[tuple[Hashable, Chain]]) -> None:
        self._waiting = Waiting(chains, self._prompts, self._prompts_read)
        self._slots: list[Slot] = []
        self._unread: list[Span] = []
        self._starts: dict[int, Start] = {}
        self._rows.idle(slice(None))
        self._clock = 0.0
        self._groups: tuple[Group, ...] = ()
        # The host's copies of the rows' positions, of which it may know no more than a bound, and of their rounds.
        self._top, self._rounds = (np.zeros(self._rows.num_rows, np.int64) for _ in range(2))

    def run(self, chains: Iterable[tuple[Hashable, Chain]]) -> Iterator[Finished]:
        """Yields chains as they end. `chains` are (tag, generator) pairs, taken a few ahead of the slots that fall free."""
        return (done for done in self.steps(chains) if done is not None)

    @torch.inference_mode()
    def steps(self, chains: Iterable[tuple[Hashable, Chain]]) -> Iterator[Finished | None]:
        """The same, and None after every step, so that the caller can do something else in between."""
        self._reset(chains)
        with self._decoder.ready():
            yield from self._fill()
            while self._slots:
                started, live = time.perf_counter(), len(self._slots)
                ended = self._step()
                self._clock += (time.perf_counter() - started) / live
                for row, drawn, status in reversed(ended):
                    if status == Status.FAILED:
                        yield from self._fail(row, drawn)
                    else:
                        yield from self._advance(row, self._collect(row, drawn))
                yield None

    def _fill(self) -> Iterator[Finished]:
        while len(self._slots) < self.num_slots:
            taken = yield from self._take()
            if taken is None:
                return
            row = len(self._slots)
            self._slots.append(taken)
            yield from self._start(row)

    def _take(self):
        """The next chain in a new slot, or None; a generator of chains that end before they ask for anything."""
        while True:
            entry = self._waiting.next()
            if entry is None:
                return None
            if entry.operation is not None:
                return Slot(entry.tag, entry.chain, entry.operation, self._clock)
            yield Finished(entry.tag, entry.result, Cost(), 0.0, 0.0)

    def _start(self, row: int) -> Iterator[Finished]:
        """The first operation of the row's new chain."""
        slot, prompt = self._slots[row], self._slots[row].operation.path.prompt
        if self._prompts:
            self._reserve(len(prompt))
            length = self._prompts.copy(prompt, self._cache, row)
            slot.held = prompt[:length]
            # Each chain is charged the reading of its prompt, shared or not: what it cost must not hang on its neighbours.
            slot.charge(target_forwards=len(list(chunks(0, length, self.options.prefill_chunk))), token_forwards=length)
        yield from self._advance(row, None)

    def _advance(self, row: int, answer: Trajectory | None) -> Iterator[Finished]:
        """Gives the row's generator its answer, and answers its operations until one needs decode steps.

        None where the first operation is at hand. Where the generator ends, the next chain begins.
        """
        slot = self._slots[row]
        while True:
            if answer is not None:
                try:
                    slot.operation = slot.chain.send(answer)
                except StopIteration as stop:
                    yield from self._end(row, stop.value)
                    return
            operation = slot.operation
            if isinstance(operation, Score):
                answer = self._score(row, operation)
                if answer is None:
                    slot.chain.close()
                    yield from self._end(row, None, NOT_NUMBERS)
                    return
            else:
                uniforms = uniforms_of(operation)
                answer = self._along(slot, operation, uniforms)
                if not answer.complete(operation.horizon) and not is_abandoned(operation, answer):
                    self._begin(row, operation, answer, uniforms)
                    return

    def _along(self, slot: Slot, draw: Draw, uniforms: np.ndarray) -> Trajectory:
        """The draw's path, and what it shares with the path that it goes along."""
        start, along = draw.path.length, draw.along
        if along is None or not self.options.skip_identical or draw.path.complete(draw.horizon):
            return draw.path
        along = along.prefix(draw.horizon)
        shared = along.drawn_again(start, uniforms[: along.length - start])
        shared = min(shared, until_abandoned(draw, along))
        slot.charge(tokens_skipped=shared)
        return along.prefix(start + shared)

    def _end(self, row: int, result: ChainResult | None, failure: str = "") -> Iterator[Finished]:
        """Puts the next chain into the row, or closes the gap with the last live row."""
        slot = self._slots[row]
        done = Finished(slot.tag, result, slot.cost, time.perf_counter() - slot.started, self._clock - slot.clock, failure,
                        tuple(slot.walk))
        taken = yield from self._take()
        if taken is None:
            self._remove(row)
            yield done
        else:
            self._slots[row] = taken
            yield done
            yield from self._start(row)

    def _fail(self, row: int, drawn: DrawnTokens) -> Iterator[Finished]:
        """Ends a chain whose numbers are none, and clears what they may have spoilt."""
        self._slots[row].chain.close()
        for cache in (self._cache, self._spare):
            if cache is not None:
                cache.clear(row)
        if self._prompts:
            self._prompts.clear()
            self._waiting.read()
        generated = self._slots[row].base.length + len(drawn.tokens)
        yield from self._end(row, None, f"{NOT_NUMBERS} (after {generated} tokens)")

    def _remove(self, row: int) -> None:
        last = len(self._slots) - 1
        if row != last:
            slot = self._slots[last]
            self._cache.copy(self._cache, last, row, 0, int(self._top[last]) + 1)
            if self._spare is not None:
                self._spare.copy(self._spare, last, row, slot.saved_from, len(slot.saved))
            self._rows.move(last, row)
            if self._grid:
                self._grid.move(last, row)
            self._slots[row], self._top[row], self._rounds[row] = slot, self._top[last], self._rounds[last]
            self._unread = [span._replace(row=row) if span.row == last else span for span in self._unread]
            if last in self._starts:
                self._starts[row] = self._starts.pop(last)._replace(row=row)
        self._rows.idle(last)
        self._slots.pop()
        if len(self._groups) > 1:
            self._groups = ()

    def _begin(self, row: int, draw: Draw, base: Trajectory, uniforms: np.ndarray) -> None:
        """Prepares the row: what its cache lacks is read before the next step, which feeds the last token of the path."""
        slot, origin = self._slots[row], len(draw.path.prompt)
        sequence = np.concatenate([base.prompt, base.tokens])
        self._reserve(len(sequence) if draw.along is None else origin + draw.along.length)
        self._place(row, sequence, draw.along)
        slot.base, first = base, len(sequence)
        left = uniforms[base.length - draw.path.length :]
        start = Start(row, int(sequence[-1]), first, origin + draw.horizon - 1, origin, left,
                      grid_origin=grid_origin(self._decoder.blend, draw.path))
        if draw.floor is not None:
            start = with_floor(start, draw, base)
        if self._rows.noise.shape[2]:
            noise = Noise.of(draw.key, base.length, draw.horizon, self._speculation.drafter.num_drafted)
            start = start._replace(noise=np.concatenate(noise, axis=1))
        if self._grid or (self._speculation and self._speculation.drafter.reads_tokens):
            self._rows.set_tokens(row, sequence)
        if self._grid:
            self._grid.forget(row)
        self._starts[row] = start
        self._top[row], self._rounds[row] = first - 1, 0
        if draw.law.repetition_penalty != 1.0:
            self._rows.mark_seen(row, sequence)
        if len(self._groups) != 1 or self._groups[0][:2] != (draw.law, draw.source):
            self._groups = ()

    def _place(self, row: int, sequence: np.ndarray, along: Trajectory | None) -> None:
        """Has the row hold a sequence but for its last token, from the next reading on."""
        slot, end = self._slots[row], len(sequence) - 1
        held = min(common_prefix(slot.held, sequence), end) if self.options.reuse_prefix else 0
        start = held
        if self._spare is not None:
            start = min(slot.restorable(sequence, held), end)
            self._copy(self._cache, self._spare, row, held, start)
            slot.held = np.concatenate([slot.held[:held], sequence[held:start]]) if start > held else slot.held
            if along is not None:
                self._copy(self._spare, self._cache, row, *slot.save(np.concatenate([along.prompt, along.tokens])[:-1], end))
        if start < end:
            self._unread.append(Span(row, sequence, start, end))
            slot.charge(target_forwards=len(list(chunks(start, end, self.options.prefill_chunk))), token_forwards=end - start)
        slot.held = sequence[:-1]

    def _reserve(self, length: int) -> None:
        """Has the rows hold a sequence of so many tokens, and what pads it."""
        self._cache.reserve(min(self._ladder.keys(length + self._padding), self._rows.tokens.shape[1]))

    def _copy(self, cache: SlotCache, source: SlotCache, row: int, start: int, stop: int) -> None:
        if start < stop:
            cache.reserve(self._cache.length)  # spare rows are as long once something is kept: plain draws never do
            cache.copy(source, row, row, start, stop)

    def _step(self) -> list[tuple[int, DrawnTokens, Status]]:
        """Decode steps until the next look. Returns the rows whose draw has ended, in rising order."""
        if self._unread:
            started = time.perf_counter()
            tokens = sum(span.stop - span.start for span in self._unread)
            self._count_reading(tokens, self._decoder.read(self._cache, self._unread), started)
            self._unread = []
        if self._starts:
            self._rows.begin(list(self._starts.values()))
            self._starts = {}
        self._groups = self._groups or self._grouped()
        started, live = time.perf_counter(), len(self._slots)
        batch = min(self._ladder.batch(live), self._rows.num_rows)
        floors = any(slot.operation.floor is not None for slot in self._slots)
        for _ in range(self._checks):
            reach = int(self._top[:live].max()) + self._stepper.reach
            keys = min(self._ladder.keys(reach), self._rows.tokens.shape[1])
            self._cache.reserve(keys)
            self._stepper.step(self._cache, self._rows, batch, keys, self._groups, floors)
            self._top[:live] += self._stepper.tokens_a_step
            if self._tracer:
                self._tracer.keep(self._stepper.walk, self._slots)
        progress = self._rows.progress(live)
        position, status, rounds = progress.position, progress.status, progress.rounds
        self._count_steps(int((rounds - self._rounds[:live]).sum()), live, time.perf_counter() - started)
        self._top[:live], self._rounds[:live] = position, rounds
        ended = np.flatnonzero(status != Status.LIVE).tolist()
        if not ended:
            return []
        for row in ended:
            self._slots[row].counts = progress.counts(row)
        spans = [(row, len(self._slots[row].base.prompt) + self._slots[row].base.length, int(position[row]) + 1)
                 for row in ended]
        return [(row, drawn, Status(status[row])) for row, drawn in zip(ended, self._rows.read(spans), strict=True)]

    def _grouped(self) -> tuple[Group, ...]:
        """The laws of the live rows, and the rows of each where there are several."""
        rows: dict[tuple[SamplingParams, str], list[int]] = {}
        for row, slot in enumerate(self._slots):
            rows.setdefault((slot.operation.law, slot.operation.source), []).append(row)
        if len(rows) == 1:
            return (Group(*next(iter(rows)), None),)
        return tuple(Group(*setting, torch.tensor(mine, device=self.model.device)) for setting, mine in sorted(rows.items()))

    def _collect(self, row: int, drawn: DrawnTokens) -> Trajectory:
        """The path that the row's draw has made."""
        slot, count = self._slots[row], len(drawn.tokens)
        slot.held = np.concatenate([slot.base.prompt, slot.base.tokens, drawn.tokens])[:-1]  # the last has not been fed
        slot.charge(**self._stepper.cost(count, slot.counts))
        return slot.base.extended(*drawn, int(drawn.tokens[-1]) in self.model.stop_ids)

    def _score(self, row: int, score: Score) -> Trajectory | None:
        """Teacher-forces tokens after a path, piece by piece; None where the logits are not numbers."""
        slot, path, given = self._slots[row], score.path, np.asarray(score.tokens, dtype=np.int64)
        if not len(given):
            return path
        sequence = np.concatenate([path.prompt, path.tokens, given])
        start = len(sequence) - len(given) - 1  # position whose logits are those of the first given token
        self._reserve(len(sequence))
        self._place(row, sequence[: start + 1], None)
        self._decoder.read(self._cache, self._unread)
        self._unread = []
        slot.charge(target_forwards=len(list(chunks(start, len(sequence) - 1, self.options.prefill_chunk))))
        scores = scoring.scores(self._decoder, self._cache, row, score, sequence)
        if scores is None:
            self._cache.clear(row)
            return None
        slot.held = sequence[:-1]
        slot.charge(token_forwards=len(given))
        if self._grid:
            slot.charge(blocks_drafted=self._grid.num_blocks(grid_origin(self._decoder.blend, path), start + 1, len(sequence)))
        return path.extended(given, *scores, int(given[-1]) in self.model.stop_ids)

    def _prompts_read(self, tokens: int, forwards: int, started: float) -> None:
        self._count_reading(tokens, forwards, started)
        self._clock += (time.perf_counter() - started) / max(1, len(self._slots))

    def _count_reading(self, tokens: int, forwards: int, started: float) -> None:
        counters = self.counters
        self.counters = counters._replace(
            read_tokens=counters.read_tokens + tokens, read_forwards=counters.read_forwards + forwards,
            read_seconds=counters.read_seconds + time.perf_counter() - started)

    def _count_steps(self, rows: int, live: int, seconds: float) -> None:
        counters = self.counters
        busy = self._waiting.more
        self.counters = counters._replace(
            steps=counters.steps + self._checks, row_steps=counters.row_steps + rows,
            busy_row_steps=counters.busy_row_steps + busy * rows,
            busy_slot_steps=counters.busy_slot_steps + busy * self._checks * self.num_slots,
            step_seconds=counters.step_seconds + seconds)
