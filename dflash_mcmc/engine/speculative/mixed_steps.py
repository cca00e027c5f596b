"""Decode steps of a batch whose rows draw in different ways: from the draft, from the target, or by a decoder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch

from dflash_mcmc.engine.batching.cache import SlotCache
from dflash_mcmc.engine.batching.model_runner import ModelRunner
from dflash_mcmc.engine.batching.rows import Group, Riders, RowCounts, Rows, Status, Stepper, TwoPartStepper

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
                 joined: tuple[TwoPartStepper, ...] = ()):
        self._runner, self._blocks, self._tokens, self._others, self._joined = runner, blocks, tokens, others, joined
        self._all = tuple(dict.fromkeys((blocks, tokens, others)))
        self.tokens_a_step = max(stepper.tokens_a_step for stepper in self._all)
        self.reach = max(stepper.reach for stepper in self._all)

    def cost(self, group: Group, tokens: int, counts: RowCounts) -> dict[str, int]:
        """See `Stepper.cost`."""
        return self._of(group).cost(group, tokens, counts)

    def step(self, cache: SlotCache, state: Rows, batch: int, key_length: int, groups: tuple[Group, ...],
             floors: bool, riders: Riders | None = None) -> None:
        """See `Stepper.step`. No row rides here."""
        parts: dict[Stepper, tuple[Group, ...]] = {
            stepper: mine for stepper in self._all if (mine := tuple(g for g in groups if self._of(g) is stepper))}
        if len(parts) == 1:
            next(iter(parts)).step(cache, state, batch, key_length, groups, floors)
        elif tuple(parts) == self._joined:
            self._together(cache, state, batch, key_length, parts, floors)
        else:
            for stepper, mine, _ in _each(state, batch, parts):
                stepper.step(cache, state, batch, key_length, mine, floors)

    def _together(self, cache: SlotCache, state: Rows, batch: int, key_length: int, parts: _Parts, floors: bool) -> None:
        """A step in which all rows share one forward of the target."""
        proposed, fed, at = list[Any](), torch.zeros(0), torch.zeros(0)
        for (_, mine, live), stepper in zip(_each(state, batch, parts), self._joined, strict=True):
            new = stepper.propose(cache, state, batch, key_length, mine)
            fed, at = (new.fed, new.at) if not proposed else (
                torch.where(live[:, None], new.fed, fed), torch.where(live[:, None], new.at, at))
            proposed.append(new)
        hidden = self._runner.forward(cache, slice(0, batch), fed, at, key_length)
        for (_, mine, _), stepper, new in zip(_each(state, batch, parts), self._joined, proposed, strict=True):
            stepper.settle(cache, state, new, hidden, mine, floors)

    def _of(self, group: Group) -> Stepper:
        """The stepper of a group's rows.

        A penalty needs the history of every slot of a block, and further columns need the logits of every slot.
        """
        if group.source != "draft":
            return self._others
        return self._tokens if group.has_penalty or group.columns else self._blocks


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
