"""Draws tokens from the draft, with one forward of the target for a block.

The draft's distributions in a block depend only on the anchor and earlier tokens, so all tokens of a block are drawn at once.
One forward of the target over them gives their log-probabilities and the target's distribution for the next anchor. A draw
that starts inside a block keeps the tokens in the first slots. The answers equal those of drawing token by token
(`drafter.py`).

`MixedSteps` steps a batch whose rows draw in different ways: from the draft, from the target, or by a decoder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch

from dflash_mcmc.engine.batching import logits_processor as laws
from dflash_mcmc.engine.batching.cache import KVCache
from dflash_mcmc.engine.batching.decode_loop import plain_cost
from dflash_mcmc.engine.batching.model_runner import ModelRunner
from dflash_mcmc.engine.batching.rows import Group, RowCounts, Rows, SharedForwards, Status, Stepper, num_columns, processed
from dflash_mcmc.engine.speculative.drafter import Anchors, BlockGrid, DFlashDrafter, DraftStates
from dflash_mcmc.engine.speculative.rules import Proposal, commit
from dflash_mcmc.engine.speculative.speculation import joined
from dflash_mcmc.engine.speculative.speculator import Speculator


class GridBlocks(NamedTuple):
    """Blocks that are drawn from the draft, and that the target has not read yet.

    Attributes:
        fed, at: int64 (rows, slots), the anchors and the drawn tokens, and their positions.
        offset: int64 (rows,), the slots that the row has already.
        started: bool (rows,), whether the anchor is a generated token.
        drafting: bool (rows,), whether the row draws from the draft in this step.
        uniforms: float64 (rows, slots).
        hidden: the draft's hidden states, (rows, n, width); None for a model that drafts.
        draft, interval: weights of the draft's law, (rows * n), and the intervals of the drawn tokens.
    """

    fed: torch.Tensor
    at: torch.Tensor
    offset: torch.Tensor
    started: torch.Tensor
    drafting: torch.Tensor
    uniforms: torch.Tensor
    hidden: torch.Tensor | None
    draft: laws.Weights
    interval: torch.Tensor


class BlockSteps:
    """Draws a block per step for rows that draw from the draft."""

    def __init__(self, runner: ModelRunner, grid: BlockGrid):
        self.runner, self.drafter = runner, grid.drafter
        self.tokens_a_step = self.reach = grid.block_size
        self._offsets = torch.arange(self.reach, device=runner.model.device)

    def cost(self, group: Group, tokens: int, counts: RowCounts) -> dict[str, int]:
        """See `Stepper.cost`."""
        return plain_cost(tokens, counts)

    def step(self, cache: KVCache, state: Rows, batch: int, key_length: int, groups: tuple[Group, ...],
             riders: SharedForwards | None = None) -> None:
        """See `Stepper.step`. A live row gains up to a block."""
        drawn = self.propose(cache, state, batch, key_length, groups)
        states = self.runner.forward(cache, slice(0, batch), drawn.fed, drawn.at, key_length, is_block=True)
        self.settle(state, drawn, states, groups)

    def propose(self, cache: KVCache, state: Rows, batch: int, key_length: int, groups: tuple[Group, ...]) -> GridBlocks:
        """What the target has to read for the first `batch` rows. Arguments are those of `step`."""
        position, rows = state.position[:batch], state.ids[:batch, None]
        last = position - state.origin[:batch]  # number of the last token; -1 for the prompt's
        started, offset = last >= 0, torch.remainder(last.clamp(min=0), self.reach)
        drafting = (state.status[:batch] == Status.LIVE) & started
        # A row of another group keeps its keys and values: it is fed only its last token.
        offset = torch.where(drafting, offset, 0)
        anchor = position - offset
        at = anchor[:, None] + self._offsets
        uniforms = state.uniforms[rows, at + 1]
        taken, known = self._offsets[1:] <= offset[:, None], state.tokens[rows, at[:, 1:]]
        parts, intervals = list[laws.Weights](), list[torch.Tensor]()

        def draw(logits: torch.Tensor, first: int) -> torch.Tensor:
            slots = slice(first, first + logits.shape[1])
            parts.append(laws.weigh(processed(logits.flatten(0, 1), groups, logits.shape[1])))
            drawn, interval = laws.draw(parts[-1], uniforms[:, slots].reshape(-1))
            intervals.append(interval.view(batch, -1, 2))
            return torch.where(taken[:, slots], known[:, slots], drawn.view(batch, -1))

        def forward(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return self.runner.draft_logits(cache, slice(0, batch), tokens, positions, key_length)

        anchors, hidden = Anchors(slice(0, batch), cache, state.tokens, anchor, key_length, forward, drafting), None
        if isinstance(self.drafter, DFlashDrafter) and self.drafter.is_parallel:
            hidden = self.drafter.hidden(anchors)
            tokens = draw(self.drafter.logits(hidden), 0)
        else:
            tokens = self.drafter.propose(anchors, draw)
        fed = torch.cat([state.tokens[rows, at[:, :1]], tokens], dim=1)
        return GridBlocks(fed, at, offset, started, drafting, uniforms, hidden, joined(parts, batch),
                          torch.cat(intervals, dim=1).flatten(0, 1))

    def settle(self, state: Rows, drawn: GridBlocks, states: torch.Tensor, groups: tuple[Group, ...]) -> None:
        """Gives live rows their tokens.

        Args:
            drawn: the result of `propose`.
            states: the target's hidden states for it, (rows, slots, width).
        """
        fed, at, offset, started, drafting, uniforms, hidden, draft, interval = drawn
        batch = len(fed)
        said = None if hidden is None else DraftStates(
            torch.nn.functional.pad(hidden, (0, 0, 0, 1)).flatten(0, 1),
            (started[:, None] & (self._offsets < self.drafter.num_drafted)).flatten())
        tapped = [tap.flatten(0, 1) for tap in self.runner.tapped]
        target = laws.weigh(self.runner.logits(states.flatten(0, 1), tapped, (), said)["blended"])
        slot = torch.where(started, self.drafter.num_drafted, 0)  # the slot whose token is drawn from the target
        own = laws.weigh(processed(target.logits.view(batch, self.reach, -1)[state.ids[:batch], slot], groups, 1))
        token, own_interval = laws.draw(own, uniforms.gather(1, slot[:, None])[:, 0])
        tokens = torch.nn.functional.pad(fed[:, 1:], (0, 1)).scatter(1, slot[:, None], token[:, None])
        log_q = draft.log_probability(tokens[:, :-1].reshape(-1)).view(batch, -1)
        scores = torch.cat([
            target.log_probability(tokens.reshape(-1)).view(batch, -1, 1),
            torch.nn.functional.pad(log_q, (0, 1)).scatter(1, slot[:, None], own.log_probability(token)[:, None])[..., None],
            torch.nn.functional.pad(interval.view(batch, -1, 2), (0, 0, 0, 1)).scatter(
                1, slot[:, None, None].expand(-1, 1, 2), own_interval[:, None])], dim=-1)
        bad = ~torch.isfinite(target.maximum).view(batch, -1)
        bad[:, :-1] |= ~torch.isfinite(draft.maximum).view(batch, -1) & started[:, None]
        bad |= (self._offsets == slot[:, None]) & ~torch.isfinite(own.maximum)
        commit(state, Proposal(at + 1, offset, slot, tokens, scores, bad), self.runner.endings)
        state.blocks[:batch] += drafting & (offset < self.drafter.num_drafted)


_Parts: TypeAlias = Mapping[Stepper, tuple[Group, ...]]


class MixedSteps:
    """Lets each row's own stepper make its steps.

    Each kind of rows has a separate step, because the numbers of a row must not depend on other rows. A step leaves the keys
    and values of other rows before their last token as they are. Steppers that read as many tokens of each row can share the
    forward of the target, since a row then has the same numbers.

    Args:
        runner: runs the target.
        blocks: draws from the draft, a block in a step.
        tokens: draws from the draft whose tokens need a penalty or further columns, token by token.
        others: draws from other sources.
        joined: `blocks` and `others` if their rows share forwards of the target; empty if not.
    """

    def __init__(self, runner: ModelRunner, blocks: Stepper, tokens: Stepper, others: Stepper,
                 joined: tuple[BlockSteps | Speculator, ...] = ()):
        self._runner, self._blocks, self._tokens, self._others, self._joined = runner, blocks, tokens, others, joined
        self._all = tuple(dict.fromkeys((blocks, tokens, others)))
        self.tokens_a_step = max(stepper.tokens_a_step for stepper in self._all)
        self.reach = max(stepper.reach for stepper in self._all)

    def cost(self, group: Group, tokens: int, counts: RowCounts) -> dict[str, int]:
        """See `Stepper.cost`."""
        return self._of(group).cost(group, tokens, counts)

    def step(self, cache: KVCache, state: Rows, batch: int, key_length: int, groups: tuple[Group, ...],
             riders: SharedForwards | None = None) -> None:
        """See `Stepper.step`. No row rides here."""
        parts: dict[Stepper, tuple[Group, ...]] = {
            stepper: mine for stepper in self._all if (mine := tuple(g for g in groups if self._of(g) is stepper))}
        if len(parts) == 1:
            next(iter(parts)).step(cache, state, batch, key_length, groups)
        elif tuple(parts) == self._joined:
            self._together(cache, state, batch, key_length, parts)
        else:
            for stepper, mine, _ in _each(state, batch, parts):
                stepper.step(cache, state, batch, key_length, mine)

    def _together(self, cache: KVCache, state: Rows, batch: int, key_length: int, parts: _Parts) -> None:
        proposed, fed, at = list[Any](), torch.zeros(0), torch.zeros(0)
        for (_, mine, live), stepper in zip(_each(state, batch, parts), self._joined, strict=True):
            new = stepper.propose(cache, state, batch, key_length, mine)
            fed, at = (new.fed, new.at) if not proposed else (
                torch.where(live[:, None], new.fed, fed), torch.where(live[:, None], new.at, at))
            proposed.append(new)
        # A model that drafts reads all blocks again: for rows of the other part it has drafted what they do not draw.
        hidden = self._runner.forward(cache, slice(0, batch), fed, at, key_length)
        for (_, mine, _), stepper, new in zip(_each(state, batch, parts), self._joined, proposed, strict=True):
            stepper.settle(state, new, hidden, mine)

    def _of(self, group: Group) -> Stepper:
        """The stepper of a group's rows.

        A penalty needs the history of every slot of a block, and further columns need the logits of every slot.
        """
        if group.source != "draft":
            return self._others
        return self._tokens if group.has_penalty or num_columns(group) else self._blocks


def _each(state: Rows, batch: int, parts: _Parts) -> Iterator[tuple[Stepper, tuple[Group, ...], torch.Tensor]]:
    """(stepper, groups, bool (rows,)) of each part in turn. Meanwhile the rows of the other parts are not live."""
    status = state.status[:batch].clone()
    for stepper, mine in parts.items():
        live = torch.zeros(batch, dtype=torch.bool, device=state.device)
        live[torch.cat([group.members() for group in mine])] = True
        state.status[:batch] = torch.where(live, status, Status.DONE)
        yield stepper, mine, live
        status = torch.where(live, state.status[:batch], status)
    state.status[:batch] = status
