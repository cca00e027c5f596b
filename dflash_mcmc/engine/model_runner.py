"""The device's side of the batched engine: forwards over a slot cache, and one decode step for a batch of rows.

Nothing in a step looks at a value on the host, makes a tensor from host data or has a shape that depends on values, so that
on a GPU it can be captured once and replayed (`graphs.py`); but for a draft that is asked about every token (`grid.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import numpy as np
import torch

from dflash_mcmc.engine import attention
from dflash_mcmc.engine import logits_processor as laws
from dflash_mcmc.engine.cache import SlotCache
from dflash_mcmc.engine.language_model import LanguageModel
from dflash_mcmc.engine.rows import RowCounts, Rows, Status
from dflash_mcmc.engine.slots import chunks, round_up
from dflash_mcmc.engine.speculative.block_grid import BlockGrid, Said
from dflash_mcmc.engine.speculative.commit import below_floor
from dflash_mcmc.engine.speculative.drafter import Drafter
from dflash_mcmc.ops import SamplingParams


class Group(NamedTuple):
    """Rows that draw from one law."""

    law: SamplingParams
    source: str
    rows: torch.Tensor | None
    """int64 indices; None for all rows of the batch."""


class Span(NamedTuple):
    """Tokens whose keys and values a row of a cache lacks: positions `start` to `stop - 1` of `sequence`."""

    row: int
    sequence: np.ndarray
    start: int
    stop: int


class ModelRunner:
    """Runs the target on slot caches.

    Args:
        model: the target.
        blend: what is mixed into its last hidden state.
        attention: name in `transformers`' registry.
        length: of the longest cache.
        key_step: lengths of keys are multiples of it.
        prefill_chunk: longest piece in which spans are read, a power of two >= 8.
        drafter: is given what it needs of every token that the target reads; None for none.
    """

    tokens_a_step = 1
    """Tokens that a row can gain in a step."""

    def __init__(self, model: LanguageModel, blend: object, attention: str, length: int, key_step: int, prefill_chunk: int,
                 drafter: Drafter | None = None):
        self.model, self.blend, self.attention, self.drafter = model, blend, attention, drafter
        self.grid: BlockGrid | None = None
        """What the draft says of every token; set where a blend or a law asks it."""
        self.on_grid = getattr(blend, "needs_draft", False)
        self.key_step, self.prefill_chunk = key_step, prefill_chunk
        self._blended_layers = blend.tapped_layers(len(model.layers))
        self._last_layer = len(model.layers) - 1
        self._tapped: list[torch.Tensor] = []
        self._keys = torch.arange(length, device=model.device)
        self.stops = torch.tensor(model.stop_ids, dtype=torch.int64, device=model.device)

    @contextmanager
    def ready(self):
        """Inside, the model's layers are tapped and its attention is ours."""
        with ExitStack() as stack:
            if self.model.device.type == "cuda":  # streams and graphs are those of the current device
                stack.enter_context(torch.cuda.device(self.model.device))
            stack.enter_context(self.model.attending(self.attention))
            features = self.drafter.tapped_layers if self.drafter else ()
            self._tapped = stack.enter_context(self.model.tapped((*self._blended_layers, *features)))
            yield

    @property
    def tapped(self) -> list[torch.Tensor]:
        """Outputs of the layers that the blend takes, in the forward before: (rows, queries, width) each."""
        return self._tapped[: len(self._blended_layers)]

    def forward(self, cache: SlotCache, rows: slice | torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor,
                key_length: int) -> torch.Tensor:
        """Hidden states behind the final norm: (rows, queries, width).

        Args:
            rows: the first ones, or int64 (rows,).
            tokens, positions: int64 (rows, queries).
            key_length: above every position.
        """
        cache.aim(rows, positions, key_length)
        mask = (self._keys[:key_length] <= positions[..., None])[:, None]
        if self.attention in attention.ADDITIVE:
            mask = torch.zeros_like(mask, dtype=self.model.dtype).masked_fill_(~mask, -torch.inf)
        # A chunk may reach beyond the last position: those queries are padding, and only their rotation is clamped.
        limit = self.model.max_positions
        output = self.model.decoder(input_ids=tokens, attention_mask=mask, past_key_values=cache, use_cache=True,
                                    position_ids=positions if limit is None else positions.clamp(max=limit - 1))
        if self.drafter is not None:
            self.drafter.absorb(cache.companion, rows, positions, self._features(output.last_hidden_state))
        return output.last_hidden_state

    def _features(self, last: torch.Tensor) -> list[torch.Tensor]:
        """Outputs of the drafter's layers; that of the last layer behind the final norm, as `hidden_states` has it."""
        features = self._tapped[len(self._blended_layers) :]
        return [last if layer == self._last_layer else output
                for layer, output in zip(self.drafter.tapped_layers, features, strict=True)]

    def read(self, cache: SlotCache, spans: Sequence[Span]) -> int:
        """Reads spans, piece by piece, rows with pieces of one size together. Returns the number of forwards."""
        waiting = [(span, list(chunks(span.start, span.stop, self.prefill_chunk))) for span in spans]
        forwards = 0
        while waiting := [(span, todo) for span, todo in waiting if todo]:
            size = waiting[0][1][0][1]
            together = [(span, todo.pop(0)[0]) for span, todo in waiting if todo[0][1] == size]
            first = np.array([start for _, start in together])
            tokens = np.stack([_piece(span, start, size) for span, start in together])
            positions, key_length = self._laid(cache, first, size)
            rows, tokens, positions = (torch.from_numpy(array).to(self.model.device) for array in (
                np.array([span.row for span, _ in together]), tokens, positions))
            self.forward(cache, rows, tokens, positions, key_length)
            forwards += 1
        return forwards

    def _laid(self, cache: SlotCache, first: np.ndarray, size: int) -> tuple[np.ndarray, int]:
        """Positions of pieces that begin at `first`, and the length of the keys that they look at.

        A piece may reach beyond the cache: those tokens are padding, and all fall on its last position, which is no token's.
        """
        key_length = min(round_up(int(first.max()) + size, self.key_step), cache.length)
        return np.minimum(first[:, None] + np.arange(size), cache.length - 1), key_length

    def logits(self, hidden: torch.Tensor, tapped: Sequence[torch.Tensor], sources: Collection[str],
               said: Said | None = None) -> dict[str, torch.Tensor]:
        """Float32 logits (rows, vocabulary) of the blend, and of what else laws are drawn from.

        Args:
            hidden: (rows, width), behind the final norm.
            tapped: outputs of the blend's layers.
            sources: of `ops.Draw`.
            said: by the draft, where it is asked.
        """
        last = hidden.float()
        if said is not None and self.on_grid:
            tapped = [torch.where(said.inside[:, None], said.hidden.float(), last)]
        mixed = self.blend.mix(last, [state.float() for state in tapped],
                               lambda h: self.model.final_norm(h.to(self.model.dtype)).float())
        logits = {"blended": self.model.logits(mixed)}
        if "base" in sources:
            logits["base"] = self.model.logits(hidden) if tapped else logits["blended"]
        if "draft" in sources:
            logits["draft"] = torch.where(said.inside[:, None], self.drafter.logits(said.hidden), logits["blended"])
        return logits

    def logits_at(self, cache: SlotCache, row: int, sequence: np.ndarray, origin: int, first: int, size: int,
                  sources: Collection[str]) -> dict[str, torch.Tensor]:
        """Logits behind each token of a row's sequence from position `first` on, (tokens, vocabulary), padded to `size`."""
        count = min(size, len(sequence) - 1 - first)
        given = np.pad(sequence[first : first + count], (0, size - count))
        positions, key_length = self._laid(cache, np.array([first]), size)
        rows, given, positions = (torch.from_numpy(array).to(self.model.device) for array in (
            np.array([row]), given[None], positions))
        hidden = self.forward(cache, rows, given, positions, key_length)[0, :count]
        said = self.grid.along(cache, row, sequence, origin, first, count) if self.grid else None
        return self.logits(hidden, [state[0, :count] for state in self.tapped], sources, said)

    @property
    def reach(self) -> int:
        """Positions behind those of the rows that a step touches."""
        return self.grid.block_size if self.grid else 1

    def cost(self, tokens: int, counts: RowCounts) -> dict[str, int]:
        """Of a draw, by the names of `Cost`."""
        return {"tokens_drawn": tokens, "target_forwards": counts.rounds, "token_forwards": counts.fed,
                "blocks_drafted": counts.blocks}

    def step(self, cache: SlotCache, state: Rows, batch: int, key_length: int, groups: tuple[Group, ...],
             floors: bool) -> None:
        """One token for every live row among the first `batch`. What it finds is in `state`.

        Args:
            cache, state: of all rows.
            batch, key_length: of the ladder.
            groups: the laws that the rows draw from.
            floors: whether a row has a floor; without, none is looked at.
        """
        rows, position = state.ids[:batch], state.position[:batch]
        fed = state.tokens[rows, position][:, None]
        asked = self.grid is not None and (self.on_grid or any(group.source == "draft" for group in groups))
        said = self.grid.at_step(cache, state, batch, key_length) if asked else None
        hidden = self.forward(cache, slice(0, batch), fed, position[:, None], key_length)[:, 0]
        logits = self.logits(hidden, [tap[:, 0] for tap in self.tapped], {group.source for group in groups}, said)
        target = laws.weigh(logits["blended"])
        failed = ~torch.isfinite(target.maximum[:, 0])
        for values in list(logits.values())[1:]:
            failed |= ~torch.isfinite(values.amax(dim=-1))
        tokens, log_q, interval = self._draw(logits, target, state.uniforms[rows, position + 1], groups, state.seen[:batch])
        log_p = target.log_probability(tokens)
        self._write(state, batch, failed, tokens, torch.cat([log_p[:, None], log_q[:, None], interval], dim=1),
                    floors)

    def _draw(self, logits: dict[str, torch.Tensor], target: laws.Weights, uniforms: torch.Tensor, groups: tuple[Group, ...],
              seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(tokens, log q, intervals): int64 (rows,), float64 (rows,), (rows, 2), each row by its own law."""
        if len(groups) == 1:
            return _draw_group(groups[0], logits[groups[0].source], uniforms, seen, target)
        tokens = torch.zeros_like(uniforms, dtype=torch.int64)
        log_q, interval = torch.zeros_like(uniforms), torch.zeros_like(uniforms)[:, None].repeat(1, 2)
        for group in groups:
            mine = group.rows
            tokens[mine], log_q[mine], interval[mine] = _draw_group(
                group, logits[group.source][mine], uniforms[mine], seen[mine] if len(seen) else seen, None)
        return tokens, log_q, interval

    def _write(self, state: Rows, batch: int, failed: torch.Tensor, tokens: torch.Tensor, scores: torch.Tensor,
               floors: bool) -> None:
        """Moves the live rows on; the others stay as they are."""
        rows, at, status = state.ids[:batch], state.position[:batch] + 1, state.status[:batch]
        live = status == Status.LIVE
        drawn = live & ~failed
        where = torch.where(drawn, at, state.nowhere)
        state.tokens[rows, where], state.scores[rows, where] = tokens, scores
        if len(state.seen):
            state.seen[rows, tokens] = state.seen[rows, tokens] | drawn
        state.position[:batch] += drawn
        state.work[:, :batch] += live
        ended = (tokens[:, None] == self.stops).any(dim=-1) | (at >= state.last[:batch])
        found = Status.DONE * ended
        if floors:
            below = self._below_floor(state, batch, drawn, at, scores)
            found = torch.where(ended, found, Status.ABANDONED * below)
        found = torch.where(failed, Status.FAILED, found)
        state.status[:batch] = torch.where(live, found, status)

    def _below_floor(self, state: Rows, batch: int, drawn: torch.Tensor, at: torch.Tensor,
                     scores: torch.Tensor) -> torch.Tensor:
        """Adds the tokens' weights, and tells which rows may be abandoned."""
        gain = state.alpha[:batch] * scores[:, 0] - scores[:, 1]
        state.weight[:batch] += torch.where(drawn, gain, 0.0)
        return below_floor(state, at[:, None], state.weight[:batch, None])[:, 0]


def _draw_group(group: Group, logits: torch.Tensor, uniforms: torch.Tensor, seen: torch.Tensor,
                target: laws.Weights | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draws of rows with one law; `target` is the target's weights where the rows are those of the whole batch."""
    processed = laws.process(logits, group.law, seen if len(seen) else None)
    if group.law.temperature == 0.0:
        tokens = laws.argmax(processed)
        certain = torch.zeros_like(uniforms)
        return tokens, certain, torch.stack([certain, certain + 1.0], dim=1)
    # Drawing from the target itself, its weights are at hand.
    weights = target if target is not None and processed is target.logits else laws.weigh(processed)
    tokens, interval = laws.draw(weights, uniforms)
    return tokens, weights.log_probability(tokens), interval


def _piece(span: Span, start: int, size: int) -> np.ndarray:
    """Tokens of a span from a position on, padded."""
    tokens = span.sequence[start : min(start + size, span.stop)]
    return np.pad(tokens, (0, size - len(tokens)))
