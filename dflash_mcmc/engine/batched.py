"""The batched engine: many chains of many problems in one ragged batch over a cache of slots.

Each chain lives in a slot. A draw continues some sequence; the keys and values of the longest prefix that the slot still
holds are kept, what is missing is read in chunks, and the last token of the path always goes through the decode step, so
that every token of every chain is drawn by one code path. A slot that falls free takes the next chain before the next
step; once no chain waits, the last live row moves into the gap, so that no step computes finished rows.

Shapes are kept to a ladder (rows in eights, keys in 64s, chunks in powers of two), so that on a CPU in float32 the numbers of
a row do not depend on what else is in the batch. `tests/engine/test_batched.py` holds the engine to the reference engine,
and to itself under other batch sizes and orders.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from dflash_mcmc.engine import law as laws
from dflash_mcmc.engine.cache import SlotCache
from dflash_mcmc.engine.language_model import LanguageModel
from dflash_mcmc.engine.slots import Rows, Slot, chunks, round_up
from dflash_mcmc.errors import UserError
from dflash_mcmc.ops import Chain, Draw, Law, Score
from dflash_mcmc.types import ChainResult, Cost, Path, common_prefix

_ROW_STEP, _KEY_STEP = 8, 64


class Finished(NamedTuple):
    """A chain that has ended."""

    tag: Hashable
    result: ChainResult
    cost: Cost
    seconds: float
    """From the chain's start in a slot to its end."""
    share_seconds: float
    """Its share of the engine's time: each step's time divided among the chains that took part."""


class BatchedEngine:
    """Runs chains of operations on a language model.

    Args:
        model: the target.
        blend: what is mixed into its last hidden state.
        num_slots: chains in the batch at once.
        max_length: longest sequence, prompt included.
        prefill_chunk: longest chunk in which prompts and re-read prefixes are fed, a power of two >= 8.
        reuse_prefix: keep keys and values between the operations of a chain; False reads every path anew.
    """

    def __init__(self, model: LanguageModel, blend: object, num_slots: int, max_length: int, prefill_chunk: int = 64,
                 reuse_prefix: bool = True):
        if model.max_positions is not None and max_length > model.max_positions:
            raise UserError(f"dataset.max_new_tokens: prompt and generation need {max_length} positions; allowed: "
                            f"{model.max_positions} (the model's)")
        self.model, self.blend, self.num_slots = model, blend, num_slots
        self.prefill_chunk, self.reuse_prefix = prefill_chunk, reuse_prefix
        self._tapped_layers = blend.tapped_layers(len(model.layers))
        self._tapped: list[torch.Tensor] = []
        rows, device = round_up(num_slots, _ROW_STEP), model.device
        length = round_up(max_length + prefill_chunk, _KEY_STEP)
        self._cache = SlotCache(len(model.layers), rows, length)
        self._keys = torch.arange(length, device=device)
        self._rows = Rows(rows, length, model.vocab_size, device)
        self._stops = torch.tensor(model.stop_ids, dtype=torch.int64, device=device)
        self._waiting: Iterator[tuple[Hashable, Chain]] = iter(())
        self._slots: list[Slot] = []
        self._unread: dict[int, tuple[int, int]] = {}  # row -> span to be read before the next step

    def run(self, chains: Iterable[tuple[Hashable, Chain]]) -> Iterator[Finished]:
        """Yields chains as they end. `chains` are (tag, generator) pairs, taken as slots fall free."""
        return (done for done in self.steps(chains) if done is not None)

    @torch.inference_mode()
    def steps(self, chains: Iterable[tuple[Hashable, Chain]]) -> Iterator[Finished | None]:
        """The same, and None after every step, so that the caller can do something else in between."""
        self._waiting = iter(chains)
        self._slots, self._unread = [], {}
        with self.model.tapped(self._tapped_layers) as self._tapped:
            yield from self._fill()
            while self._slots:
                started = time.perf_counter()
                ended = self._step()
                live = len(self._slots)
                for slot in self._slots:
                    slot.share_seconds += (time.perf_counter() - started) / live
                for row in reversed(ended):
                    yield from self._advance(row, self._collect(row))
                yield None

    def _fill(self) -> Iterator[Finished]:
        while len(self._slots) < self.num_slots:
            entry = next(self._waiting, None)
            if entry is None:
                return
            self._slots.append(Slot(*entry))
            yield from self._advance(len(self._slots) - 1, None)

    def _advance(self, row: int, answer: Path | None) -> Iterator[Finished]:
        """Gives the row's generator its answer and starts its next operation; where it ends, the next chain's first."""
        while True:
            slot = self._slots[row]
            try:
                slot.operation = slot.chain.send(answer)
            except StopIteration as stop:
                seconds, entry = time.perf_counter() - slot.started, next(self._waiting, None)
                if entry is None:
                    self._remove(row)
                else:
                    self._slots[row], answer = Slot(*entry), None
                yield Finished(slot.tag, stop.value, slot.cost, seconds, slot.share_seconds)
                if entry is None:
                    return
                continue
            if isinstance(slot.operation, Score):
                answer = self._score(row, slot.operation)
            elif slot.operation.path.ended or slot.operation.path.length >= slot.operation.horizon:
                answer = slot.operation.path
            else:
                self._begin(row, slot.operation)
                return

    def _remove(self, row: int) -> None:
        """Closes the gap with the last live row."""
        last = len(self._slots) - 1
        if row != last:
            self._cache.move_row(last, row, self._slots[last].top + 1)
            self._rows.move(last, row)
            self._slots[row] = self._slots[last]
            if last in self._unread:
                self._unread[row] = self._unread.pop(last)
        self._slots.pop()

    def _begin(self, row: int, draw: Draw) -> None:
        """Prepares the row: what its cache lacks is read before the next step, which feeds the last token of the path."""
        path = draw.path
        sequence = np.concatenate([path.prompt, path.tokens])
        self._unread[row] = self._place(row, sequence)
        first, last = len(sequence), len(path.prompt) + draw.horizon - 1
        noise = torch.from_numpy(draw.key.uniforms(path.length, draw.horizon)) if draw.law.temperature else torch.zeros(1)
        self._rows.uniforms[row, first : last + 1] = noise.to(self.model.device)
        self._rows.position[row], self._rows.last[row], self._slots[row].top = first - 1, last, first - 1
        if draw.law.repetition_penalty != 1.0:
            self._rows.mark_seen(row, sequence)

    def _place(self, row: int, sequence: np.ndarray) -> tuple[int, int]:
        """Puts a sequence into the row. Returns the span that its cache lacks; the last token is never part of it."""
        slot, end = self._slots[row], len(sequence) - 1
        start = min(common_prefix(slot.held, sequence), end) if self.reuse_prefix else 0
        self._rows.put(row, start, sequence[start:])
        slot.held = sequence
        return start, end

    def _prefill(self, spans: dict[int, tuple[int, int]]) -> None:
        """Feeds spans of rows, chunk by chunk, rows with chunks of one size together."""
        waiting = {row: list(chunks(start, end, self.prefill_chunk)) for row, (start, end) in spans.items()}
        for row, (start, end) in spans.items():
            self._slots[row].charge(0, len(waiting[row]), end - start)
        while waiting := {row: todo for row, todo in waiting.items() if todo}:
            size = next(iter(waiting.values()))[0][1]
            together = [row for row, todo in waiting.items() if todo[0][1] == size]
            first = torch.tensor([waiting[row].pop(0)[0] for row in together], device=self.model.device)
            positions = first[:, None] + self._keys[:size]
            self._forward(torch.tensor(together, device=self.model.device), positions, int(positions.max()) + 1)
        spans.clear()

    def _forward(self, rows: slice | torch.Tensor, positions: torch.Tensor, key_length: int) -> torch.Tensor:
        """Hidden states behind the final norm of the tokens that stand at `positions` of `rows`: (rows, queries, width)."""
        key_length = round_up(key_length, _KEY_STEP)
        self._cache.aim(rows, positions, key_length)
        mask = (self._keys[:key_length] <= positions[..., None])[:, None]
        tokens = self._rows.tokens[rows].gather(1, positions)
        # A chunk may reach beyond the last position: those queries are padding, and only their rotation is clamped.
        position_ids = positions if self.model.max_positions is None else positions.clamp(max=self.model.max_positions - 1)
        output = self.model.decoder(input_ids=tokens, attention_mask=mask, position_ids=position_ids,
                                    past_key_values=self._cache, use_cache=True)
        return output.last_hidden_state

    def _logits(self, hidden: torch.Tensor, sources: set[str], select: slice) -> dict[str, torch.Tensor]:
        """Float32 logits (rows, vocabulary) of the blend, and of the base where a law draws from it."""
        hidden = hidden[select].flatten(0, 1)
        tapped = [state[select].flatten(0, 1).float() for state in self._tapped]
        mixed = self.blend.mix(hidden.float(), tapped, lambda h: self.model.final_norm(h.to(self.model.dtype)).float())
        logits = {"blended": self.model.logits(mixed)}
        if "base" in sources:
            logits["base"] = self.model.logits(hidden) if self._tapped_layers else logits["blended"]
        return logits

    def _step(self) -> list[int]:
        """One token for every live row. Returns the rows whose draw has ended, in rising order."""
        self._prefill(self._unread)
        state, live = self._rows, len(self._slots)
        batch = slice(0, round_up(live, _ROW_STEP))
        state.position[live : batch.stop] = 0
        hidden = self._forward(batch, state.position[batch, None], max(slot.top for slot in self._slots) + 1)
        settings = {(slot.operation.law, slot.operation.source) for slot in self._slots}
        logits = self._logits(hidden, {source for _, source in settings}, batch)
        drawn_at, rows = state.position[:live] + 1, self._keys[:live]
        for values in logits.values():
            if not torch.isfinite(values[:live].amax(dim=-1)).all():
                raise UserError("model.path: the model gave logits that are not numbers; try model.dtype=float32")
        log_p = laws.log_softmax(logits["blended"])[:live]
        tokens, log_q = self._draw(logits, state.uniforms[rows, drawn_at], settings)
        state.tokens[rows, drawn_at] = tokens
        state.log_p[rows, drawn_at] = log_p.gather(1, tokens[:, None])[:, 0].double()
        state.log_q[rows, drawn_at] = log_q
        if len(state.seen):
            state.seen[rows, tokens] = True
        state.position[:live] = drawn_at
        for slot in self._slots:
            slot.top += 1
        ended = torch.isin(tokens, self._stops) | (drawn_at >= state.last[:live])
        return ended.nonzero()[:, 0].tolist()

    def _draw(self, logits: dict[str, torch.Tensor], uniforms: torch.Tensor,
              settings: set[tuple[Law, str]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens int64 (live,) and their log q float64 (live,), each row by its own law."""
        live = len(uniforms)
        tokens = torch.zeros(live, dtype=torch.int64, device=uniforms.device)
        log_q = torch.zeros(live, dtype=torch.float64, device=uniforms.device)
        for law, source in sorted(settings):
            mine = slice(0, live)
            if len(settings) > 1:
                rows = [r for r, s in enumerate(self._slots) if (s.operation.law, s.operation.source) == (law, source)]
                mine = torch.tensor(rows, device=uniforms.device)
            values = logits[source][:live][mine]
            log_law = laws.process(values, law, self._rows.seen[:live][mine] if len(self._rows.seen) else None)
            tokens[mine] = laws.draw(log_law, uniforms[mine])
            log_q[mine] = log_law.gather(1, tokens[mine][:, None])[:, 0].double()
        return tokens, log_q

    def _collect(self, row: int) -> Path:
        """The path that the row's draw has made."""
        slot = self._slots[row]
        path, stop = slot.operation.path, slot.top + 1
        tokens, log_p, log_q = self._rows.read(row, len(path.prompt) + path.length, stop)
        slot.held = np.concatenate([slot.held, tokens])[: stop - 1]  # the last token drawn has not been fed
        slot.charge(len(tokens), len(tokens), len(tokens))
        return path.extended(tokens, log_p, log_q, int(tokens[-1]) in self.model.stop_ids)

    def _score(self, row: int, score: Score) -> Path:
        """Teacher-forces tokens after a path, chunk by chunk."""
        slot, path, given = self._slots[row], score.path, np.asarray(score.tokens, dtype=np.int64)
        if not len(given):
            return path
        sequence = np.concatenate([path.prompt, path.tokens, given])
        start = len(sequence) - len(given) - 1  # position whose logits are those of the first given token
        self._prefill({row: self._place(row, sequence[: start + 1])})
        self._rows.put(row, 0, sequence)
        log_p, log_q = [], []
        for first, chunk in chunks(start, len(sequence) - 1, self.prefill_chunk):
            positions = torch.arange(first, first + chunk, device=self.model.device)
            hidden = self._forward(torch.tensor([row], device=self.model.device), positions[None], first + chunk)
            slot.charge(0, 1, 0)
            wanted = min(chunk, len(sequence) - 1 - first)
            logits = {k: v[:wanted] for k, v in self._logits(hidden, {score.source}, slice(0, 1)).items()}
            targets = torch.from_numpy(sequence[first + 1 : first + 1 + wanted]).to(self.model.device)[:, None]
            log_p.append(laws.log_softmax(logits["blended"]).gather(1, targets)[:, 0].double())
            log_q.append(self._law_at(logits[score.source], score.law, sequence, first).gather(1, targets)[:, 0].double())
        slot.held = sequence[:-1]
        slot.charge(0, 0, len(given))
        return path.extended(given, torch.cat(log_p).cpu().numpy(), torch.cat(log_q).cpu().numpy(),
                             int(given[-1]) in self.model.stop_ids)

    def _law_at(self, logits: torch.Tensor, law: Law, sequence: np.ndarray, first: int) -> torch.Tensor:
        """Log-probabilities of a law at consecutive positions, each with its own history."""
        seen = None
        if law.repetition_penalty != 1.0:
            seen = torch.zeros_like(logits, dtype=torch.bool)
            for offset in range(len(logits)):
                seen[offset, sequence[: first + offset + 1]] = True
        return laws.process(logits, law, seen)
