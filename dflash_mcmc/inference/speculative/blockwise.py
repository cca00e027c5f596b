"""Draws tokens from the draft, with one forward of the target for a block.

The draft's distributions in a block depend only on the anchor and earlier tokens, so all tokens of a block are drawn at once.
One forward of the target over them gives their log-probabilities and the target's distribution for the next anchor. A draw
that starts inside a block keeps the tokens in the first slots. The answers equal those of drawing token by token
(`block_grid.py`).
"""

from __future__ import annotations

import torch

from dflash_mcmc.inference import logits_processor as laws
from dflash_mcmc.inference.cache import SlotCache
from dflash_mcmc.inference.model_runner import ModelRunner
from dflash_mcmc.inference.plain_steps import PlainSteps
from dflash_mcmc.inference.rows import RowCounts, Rows, Status
from dflash_mcmc.inference.speculative.block_grid import BlockGrid, Said
from dflash_mcmc.inference.speculative.commit import Offer, commit
from dflash_mcmc.inference.speculative.drafter import Anchors
from dflash_mcmc.inference.stepper import Group, Riders


class BlockSteps:
    """Draws a block per step for rows that draw from the draft, and one token per step for all other rows."""

    def __init__(self, runner: ModelRunner, grid: BlockGrid):
        self.runner, self.drafter, self._plain = runner, grid.drafter, PlainSteps(runner)
        self.tokens_a_step = self.reach = grid.block_size
        self._offsets = torch.arange(self.reach, device=runner.model.device)

    def cost(self, tokens: int, counts: RowCounts) -> dict[str, int]:
        """See `Stepper.cost`."""
        return self._plain.cost(tokens, counts)

    def step(self, cache: SlotCache, state: Rows, batch: int, key_length: int, groups: tuple[Group, ...],
             floors: bool, riders: Riders | None = None) -> None:
        """See `Stepper.step`. A live row that draws from the draft gains up to a block."""
        # A penalty needs the history of every slot, and further columns need the logits of every slot. Rows with one of them
        # are therefore drawn token by token.
        whole = [group.source == "draft" and not (group.has_penalty or group.columns) for group in groups]
        from_draft = tuple(group for group, mine in zip(groups, whole, strict=True) if mine)
        others = tuple(group for group, mine in zip(groups, whole, strict=True) if not mine)
        if not others:
            self._block(cache, state, batch, key_length, groups, floors)
        elif not from_draft:
            self._plain.step(cache, state, batch, key_length, groups, floors)
        else:  # each kind of rows has a separate step, because the numbers of a row must not depend on other rows
            status, mine = state.status[:batch].clone(), torch.zeros(batch, dtype=torch.bool, device=state.device)
            mine[torch.cat([group.members() for group in from_draft])] = True
            for step, part, live in ((self._block, from_draft, mine), (self._plain.step, others, ~mine)):
                state.status[:batch] = torch.where(live, status, Status.DONE)
                step(cache, state, batch, key_length, part, floors)
                status = torch.where(live, state.status[:batch], status)
            state.status[:batch] = status

    def _block(self, cache: SlotCache, state: Rows, batch: int, key_length: int, groups: tuple[Group, ...],
               floors: bool) -> None:
        position, rows = state.position[:batch], state.ids[:batch, None]
        number = position - state.grid_origin[:batch]  # number of the last token; -1 for the prompt's
        started, offset = number >= 0, torch.remainder(number.clamp(min=0), self.reach)
        drafting = (state.status[:batch] == Status.LIVE) & started
        # A row of another group keeps its keys and values: it is fed only its last token.
        offset = torch.where(drafting, offset, 0)
        anchor = position - offset
        at = anchor[:, None] + self._offsets
        uniforms = state.uniforms[rows, at + 1]
        with self.runner.step_of(batch):
            hidden = self.drafter.hidden(Anchors(slice(0, batch), cache, state.tokens, anchor, key_length))
            draft = laws.weigh(self._processed(self.drafter.logits(hidden).flatten(0, 1), groups, self.drafter.num_drafted))
            drawn, interval = laws.draw(draft, uniforms[:, :-1].reshape(-1))
            taken = self._offsets[1:] <= offset[:, None]
            tokens = torch.where(taken, state.tokens[rows, at[:, 1:]], drawn.view(batch, -1))
            fed = torch.cat([state.tokens[rows, at[:, :1]], tokens], dim=1)
            target = self._target(cache, fed, at, key_length, hidden, started)
        slot = torch.where(started, self.drafter.num_drafted, 0)  # the slot whose token is drawn from the target
        own = laws.weigh(self._processed(target.logits.view(batch, self.reach, -1)[state.ids[:batch], slot], groups, 1))
        token, own_interval = laws.draw(own, uniforms.gather(1, slot[:, None])[:, 0])
        tokens = torch.nn.functional.pad(tokens, (0, 1)).scatter(1, slot[:, None], token[:, None])
        log_q = draft.log_probability(tokens[:, :-1].reshape(-1)).view(batch, -1)
        scores = torch.cat([
            target.log_probability(tokens.reshape(-1)).view(batch, -1, 1),
            torch.nn.functional.pad(log_q, (0, 1)).scatter(1, slot[:, None], own.log_probability(token)[:, None])[..., None],
            torch.nn.functional.pad(interval.view(batch, -1, 2), (0, 0, 0, 1)).scatter(
                1, slot[:, None, None].expand(-1, 1, 2), own_interval[:, None])], dim=-1)
        bad = ~torch.isfinite(target.maximum).view(batch, -1)
        bad[:, :-1] |= ~torch.isfinite(draft.maximum).view(batch, -1) & started[:, None]
        bad |= (self._offsets == slot[:, None]) & ~torch.isfinite(own.maximum)
        commit(state, Offer(at + 1, offset, slot, tokens, scores, bad), self.runner.endings, floors)
        state.blocks[:batch] += drafting & (offset < self.drafter.num_drafted)

    def _target(self, cache: SlotCache, fed: torch.Tensor, at: torch.Tensor, key_length: int, hidden: torch.Tensor,
                started: torch.Tensor) -> laws.Weights:
        """Weights of the blended target after each token, (rows * slots)."""
        batch = len(fed)
        states = self.runner.forward(cache, slice(0, batch), fed, at, key_length)
        said = Said(torch.nn.functional.pad(hidden, (0, 0, 0, 1)).flatten(0, 1),
                    (started[:, None] & (self._offsets < self.drafter.num_drafted)).flatten())
        tapped = [tap.flatten(0, 1) for tap in self.runner.tapped]
        return laws.weigh(self.runner.logits(states.flatten(0, 1), tapped, (), said)["blended"])

    def _processed(self, logits: torch.Tensor, groups: tuple[Group, ...], slots: int) -> torch.Tensor:
        """Logits processed by each row's group, (rows * slots, vocabulary)."""
        if len(groups) == 1:
            return laws.process(logits, groups[0].params, laws.NO_HISTORY)
        processed = torch.zeros_like(logits)
        for group in groups:
            mine = group.slots(slots)
            processed[mine] = laws.process(logits[mine], group.params, laws.NO_HISTORY)
        return processed
