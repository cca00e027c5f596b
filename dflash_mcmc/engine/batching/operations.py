"""Carries out operations of the batched engine. It answers some at once and leaves the others to decode steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from dflash_mcmc.engine.batching import logits_processor as laws
from dflash_mcmc.engine.batching.cache import KVCache, chunks
from dflash_mcmc.engine.batching.chains import LiveChain, Slot
from dflash_mcmc.engine.batching.decode_loop import DecodeLoop
from dflash_mcmc.engine.batching.interface import Options
from dflash_mcmc.engine.batching.model_runner import ModelRunner, Span
from dflash_mcmc.engine.batching.rows import DrawnTokens, Start, columns_of_tokens, num_columns, split_columns
from dflash_mcmc.engine.batching.slot_memory import SlotMemory
from dflash_mcmc.engine.speculative.drafter import Drafter
from dflash_mcmc.engine.speculative.speculation import Noise, Speculation
from dflash_mcmc.ops import Draw, Operation, Score, counted_from, grid_origin
from dflash_mcmc.types import Trajectory


def uniforms_of(draw: Draw) -> np.ndarray:
    """Uniforms of the positions that the draw may fill, float64; greedy decoding needs none."""
    length = max(draw.horizon - draw.trajectory.length, 0)
    if draw.params.temperature == 0.0:
        return np.full(length, 0.5)
    return draw.key.uniforms(draw.trajectory.length, draw.trajectory.length + length)


def until_abandoned(draw: Draw, along: Trajectory) -> int:
    """Number of tokens of `along` after the draw's trajectory, up to the first one at which the draw may be abandoned."""
    start, floor = draw.trajectory.length, draw.floor
    if floor is None or along.length == start:
        return along.length - start
    weights = floor.weights(along, start)
    crossed = [floor.crossed(float(weight), start + num_tokens) for num_tokens, weight in enumerate(weights, start=1)]
    return crossed.index(True) + 1 if True in crossed else len(crossed)


def is_abandoned(draw: Draw, trajectory: Trajectory) -> bool:
    """Whether the tokens that the draw shares with `along` have crossed its floor. If so, the draw ends without a step."""
    if draw.floor is None or trajectory.length == draw.trajectory.length:
        return False
    return draw.floor.crossed(draw.floor.weight(trajectory, draw.trajectory.length), trajectory.length)


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
    shared = _shared(chain, number, operation) if skip_identical else operation.trajectory
    if shared.complete(operation.horizon) or is_abandoned(operation, shared):
        chain.note(number, shared)
        return None
    return shared


def _shared(chain: LiveChain, number: int, draw: Draw) -> Trajectory:
    """The draw's trajectory, with the tokens that it shares with `draw.along`."""
    start, along = draw.trajectory.length, draw.along
    if along is None or draw.trajectory.complete(draw.horizon):
        return draw.trajectory
    along = along.prefix(draw.horizon)
    shared = along.drawn_again(start, uniforms_of(draw)[: along.length - start])
    shared = min(shared, until_abandoned(draw, along))
    chain.charge(number, tokens_skipped=shared)
    return along.prefix(start + shared)


def start_of(draw: Draw, base: Trajectory, row: int, uniforms: np.ndarray, grid_origin: int) -> Start:
    """The start of a draw in a row.

    Args:
        base: the draw's trajectory, with the tokens that it shares with `along`.
        uniforms: the uniforms of the positions after `base`.
        grid_origin: position at which the draft's first block starts.
    """
    origin, first = len(base.prompt), base.sequence_length
    start = Start(row, int(base.sequence[-1]), first, origin + draw.horizon - 1, origin, uniforms, grid_origin=grid_origin)
    if (floor := draw.floor) is None:
        return start
    return start._replace(alpha=floor.alpha, weight=floor.weight(base, draw.trajectory.length), floor=floor.threshold,
                          log_length=-np.inf if floor.length is None else float(np.log(floor.length)))


class ScoreRequest(NamedTuple):
    """A score of a row.

    Attributes:
        row: this row of the cache holds the tokens before the scored ones, except the last of them.
        sequence: int64, the tokens of prompt and trajectory, then the scored tokens.
    """

    row: int
    score: Score
    sequence: np.ndarray

    def span(self) -> Span:
        """The tokens to read. The first logits are at the position before the first scored token."""
        return Span(self.row, self.sequence, len(self.sequence) - len(self.score.tokens) - 1, len(self.sequence) - 1,
                    self.score.trajectory.prompt)


Scored: TypeAlias = tuple[np.ndarray, ...]
"""(log p, log q, intervals, columns) of scored tokens."""


def scores(runner: ModelRunner, cache: KVCache, asked: Sequence[ScoreRequest], most_rows: int) -> list[Scored | None]:
    """The scores of different rows, read piece by piece. Pieces of the same size share a forward.

    None is for a score with logits or processed logits that are not finite.

    Args:
        most_rows: rows of a forward.
    """
    spans = [each.span() for each in asked]
    todo = [list(chunks(span.start, span.stop, runner.prefill_chunk)) for span in spans]
    scored: list[list[Scored] | None] = [[] for _ in asked]
    while waiting := [index for index, left in enumerate(todo) if left and scored[index] is not None]:
        size = todo[waiting[0]][0][1]
        together = [index for index in waiting if todo[index][0][1] == size][:most_rows]
        pieces = [spans[index]._replace(start=todo[index].pop(0)[0]) for index in together]
        hidden, tapped = runner.states(cache, pieces, size), list(runner.tapped)
        for row, (index, piece) in enumerate(zip(together, pieces, strict=True)):
            score, own = asked[index].score, scored[index]
            logits = runner.logits_of(cache, piece, grid_origin(runner.blend.restarts_grid(), score.trajectory), hidden[row],
                                      [state[row] for state in tapped], {score.source})
            new = _piece(logits, score, piece.sequence, piece.start)
            if new is None or own is None:
                scored[index] = None
            else:
                own.append(new)
    return [None if own is None else tuple(np.concatenate(values) for values in zip(*own, strict=True)) for own in scored]


def _piece(logits: dict[str, torch.Tensor], score: Score, sequence: np.ndarray, first: int) -> Scored | None:
    """The scores of the tokens after the positions from `first` on; None if they are not finite. Each has its own history."""
    if not all(torch.isfinite(values.amax(dim=-1)).all() for values in logits.values()):
        return None
    values = logits[score.source]
    targets = torch.from_numpy(sequence[first + 1 : first + 1 + len(values)]).to(values.device)
    history = _history(values, score, sequence, first)
    weights, target = laws.weigh(laws.process(values, score.params, history)), laws.weigh(logits["blended"])
    further = values[:, :0].double()
    if num_columns(score):
        further = columns_of_tokens(targets, values, target, score, history)
    scores = tuple(x.cpu().numpy() for x in (target.log_probability(targets), weights.log_probability(targets),
                                             laws.intervals(weights, targets), further))
    return None if any(np.isnan(values).any() for values in scores) else scores  # processed logits are not finite


def _history(values: torch.Tensor, score: Score, sequence: np.ndarray, first: int) -> laws.History:
    """The tokens that penalties read, for the logits `values` at the positions from `first` on."""
    seen = counts = None
    if any(params.repetition_penalty != 1.0 for params in (score.params, *score.laws)):
        seen = torch.zeros_like(values, dtype=torch.bool)
        for offset in range(len(values)):
            seen[offset, sequence[: first + offset + 1]] = True
    if any(params.counts_tokens for params in (score.params, *score.laws)):
        counts = torch.zeros_like(values)
        begin = counted_from((score.params, *score.laws), len(score.trajectory.prompt))
        counts[0] = laws.counts_of(sequence[begin : first + 1], counts[0])
        later = torch.from_numpy(sequence[first + 1 : first + len(values)]).to(values.device)
        counts[1:].scatter_(1, later[:, None], 1.0)
        counts = counts.cumsum(dim=0)
    return laws.History(seen, counts)


class UnusableLogits(ArithmeticError):
    """The logits of an operation are not numbers."""


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
        self._options, self.sharing = options, sharing
        self._most_rows = options.read_ahead  # of a forward that scores; the plan of the memory has room for them
        self._runner, self._grid, self._adaptive = memory.runner, memory.runner.grid, memory.runner.adaptive

    def prepare(self, chain: LiveChain, number: int) -> Trajectory | None:
        """See the function `prepare`."""
        return prepare(chain, number, self._options.skip_identical)

    def shares(self, operation: Operation) -> bool:
        """Whether an operation can share forwards with another: a draw token by token, by the target alone."""
        return self.sharing and isinstance(operation, Draw)

    @property
    def scores_wait(self) -> bool:
        """Whether scores wait for those of other chains, to be carried out together.

        The states of recurrent layers, and a draft that learns from each operation, are prepared for one row.
        """
        return not self._adaptive and not self._memory.cache.recurrent

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
            slot.chain.charge_reading(slot.number, start, len(sequence) - 1, self._options.prefill_chunk)

    def begin(self, slot: Slot) -> None:
        """Begins the operation of a slot that has a row and its keys and values. A score is carried out at once.

        Raises UnusableLogits.
        """
        if self._runner.second:
            self._runner.second.begin(slot.place, slot.in_progress.prompt)
        if self._adaptive:
            # Where tokens depend on the draft, a draft learns from its own draw alone: other options of the engine, such as
            # early rejection, change what earlier draws have verified.
            learned = slot.adapter if self._speculation and not self._speculation.noisy else None
            self._adaptive.begin(slot.place, slot.in_progress.prompt, learned)
        if isinstance(slot.operation, Score):
            if not self.score([slot])[0]:
                raise UnusableLogits
        elif isinstance(slot.operation, Draw):
            self._draw(slot, slot.operation)

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
        self._end_adapting(slot)
        return answer

    def _end_adapting(self, slot: Slot) -> None:
        """Keeps what the draft has learned, and charges the chain for it."""
        if self._adaptive:
            slot.adapter, work = self._adaptive.end(slot.place, not slot.chain.adapted)
            slot.chain.adapted = True
            slot.chain.charge(slot.number, adapt_steps=work.steps, adapt_dropped=work.dropped)
            slot.chain.adapt_seconds += work.seconds

    def _draw(self, slot: Slot, draw: Draw) -> None:
        """Prepares the row. Missing tokens are read before the next step, which feeds the last token of the draw's base."""
        base, row = slot.in_progress, slot.place
        sequence = base.sequence
        self._memory.reserve(len(sequence))
        if slot.leader is None:
            self._memory.fill(slot)
        uniforms = uniforms_of(draw)[base.length - draw.trajectory.length :]
        start = start_of(draw, base, row, uniforms, self._grid_origin(draw))
        start = start._replace(matched=self._runner.endings.begin(draw, base.tokens))
        if self._speculation is not None and self._loop.rows.noise.shape[2]:
            noise = Noise.of(draw.key, base.length, draw.horizon, self._speculation.num_drafted)
            start = start._replace(noise=np.concatenate(noise, axis=1))
        self._loop.rows.reserve_columns(num_columns(draw))
        self._write_history(row, draw, sequence)
        self._loop.begin(start, draw)

    def _write_history(self, row: int, draw: Draw, sequence: np.ndarray) -> None:
        """Writes the tokens that drafters and penalties read."""
        if self._grid or (self._speculation and self._speculation.drafter.reads_tokens):
            self._loop.rows.set_tokens(row, sequence)
        if self._grid:
            self._grid.forget(row)
        every = (draw.params, *draw.laws)
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
            pieces = list(chunks(span.start, span.stop, self._options.prefill_chunk))
            slot.chain.charge(slot.number, target_forwards=len(pieces))
        scored = scores(self._runner, self._memory.cache, asked, self._most_rows)
        for slot, each, result in zip(slots, asked, scored, strict=True):
            self._end_adapting(slot)
            if result is not None:
                self._note_score(slot, each, result)
        return [result is not None for result in scored]

    def _note_score(self, slot: Slot, asked: ScoreRequest, scored: Scored) -> None:
        _, score, sequence = asked
        start = len(sequence) - len(score.tokens)
        slot.contents.hold(sequence[:-1])
        slot.chain.charge(slot.number, token_forwards=len(score.tokens),
                          blocks_drafted=self._blocks(score, start, len(sequence)))
        log_p, log_q, interval, columns = scored
        ended = self._runner.endings.ended(score, sequence[len(score.trajectory.prompt):])
        slot.chain.note(slot.number, score.trajectory.extended(
            sequence[start:], log_p, log_q, interval, ended, *split_columns(score, columns)))

    def _blocks(self, score: Score, start: int, stop: int) -> int:
        read = self._grid and self._runner.drafts({score.source})
        return self._grid.num_blocks(self._grid_origin(score), start, stop) if self._grid and read else 0

    def _grid_origin(self, operation: Operation) -> int:
        return grid_origin(self._runner.blend.restarts_grid(), operation.trajectory)


def _asked(slot: Slot) -> ScoreRequest:
    """The score of a slot that has a row. Raises TypeError for a draw."""
    if not isinstance(slot.operation, Score):
        raise TypeError(f"{slot.operation} is no score")
    tokens = np.asarray(slot.operation.tokens, dtype=np.int64)
    return ScoreRequest(slot.place, slot.operation, np.concatenate([slot.operation.trajectory.sequence, tokens]))
