"""Decode steps of a batch whose rows draw in different ways: from a draft, from the target, or from the target by a decoder."""

from __future__ import annotations

import torch

from dflash_mcmc.inference.cache import SlotCache
from dflash_mcmc.inference.rows import RowCounts, Rows, Status
from dflash_mcmc.inference.stepper import Group, Riders, Stepper


class MixedSteps:
    """Lets each row's own stepper make its steps.

    Args:
        blocks: draws from the draft, a block in a step.
        tokens: draws from the draft whose tokens need a penalty or further columns, token by token.
        others: draws from other sources.
    """

    def __init__(self, blocks: Stepper, tokens: Stepper, others: Stepper):
        self._blocks, self._tokens, self._others = blocks, tokens, others
        self._all = tuple(dict.fromkeys((blocks, tokens, others)))
        self.tokens_a_step = max(stepper.tokens_a_step for stepper in self._all)
        self.reach = max(stepper.reach for stepper in self._all)

    def cost(self, group: Group, tokens: int, counts: RowCounts) -> dict[str, int]:
        """See `Stepper.cost`."""
        return self._of(group).cost(group, tokens, counts)

    def step(self, cache: SlotCache, state: Rows, batch: int, key_length: int, groups: tuple[Group, ...],
             floors: bool, riders: Riders | None = None) -> None:
        """See `Stepper.step`. No row rides here."""
        parts = {stepper: tuple(group for group in groups if self._of(group) is stepper) for stepper in self._all}
        parts = {stepper: mine for stepper, mine in parts.items() if mine}
        if len(parts) == 1:
            next(iter(parts)).step(cache, state, batch, key_length, groups, floors)
            return
        # Each kind of rows has a separate step, because the numbers of a row must not depend on other rows. A step leaves the
        # keys and values of other rows before their last token as they are.
        status = state.status[:batch].clone()
        for stepper, mine in parts.items():
            live = torch.zeros(batch, dtype=torch.bool, device=state.device)
            live[torch.cat([group.members() for group in mine])] = True
            state.status[:batch] = torch.where(live, status, Status.DONE)
            stepper.step(cache, state, batch, key_length, mine, floors)
            status = torch.where(live, state.status[:batch], status)
        state.status[:batch] = status

    def _of(self, group: Group) -> Stepper:
        """The stepper of a group's rows.

        A penalty needs the history of every slot of a block, and further columns need the logits of every slot.
        """
        if group.source != "draft":
            return self._others
        return self._tokens if group.has_penalty or group.columns else self._blocks
