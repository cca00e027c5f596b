"""The interface of decode steps. A step is plain, block by block, speculative, or a captured graph."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from dflash_mcmc.engine.batching.cache import SlotCache
from dflash_mcmc.engine.batching.rows import RowCounts, Rows
from dflash_mcmc.ops import SamplingParams


class Group(NamedTuple):
    """Rows that draw with the same sampling parameters from the same logits."""

    params: SamplingParams
    source: str
    rows: torch.Tensor | None
    """int64 indices; None for all rows of the batch."""
    laws: tuple[SamplingParams, ...] = ()
    """Further laws under which the tokens get log q and interval."""
    entropy: bool = False
    """Whether the tokens get the entropy of p."""

    @property
    def columns(self) -> bool:
        """Whether the tokens get further columns."""
        return bool(self.laws) or self.entropy

    @property
    def has_penalty(self) -> bool:
        """Whether a law of the group has a penalty, which depends on earlier tokens directly and not only by the logits."""
        return any(params.has_penalty for params in (self.params, *self.laws))

    def slots(self, count: int) -> torch.Tensor:
        """Indices of `count` consecutive slots for each of the rows, int64 (rows * count,)."""
        rows = self.members()
        return (rows[:, None] * count + torch.arange(count, device=rows.device)).reshape(-1)

    def members(self) -> torch.Tensor:
        """The indices of the rows. Raises ValueError for a single group, which does not list its rows."""
        if self.rows is None:
            raise ValueError("a single group has all rows of the batch and does not list them")
        return self.rows


class Riders(NamedTuple):
    """Rows that share the forwards of other rows, since they have had the same tokens."""

    batch: int
    """Rows that draw: a shape of the ladder, at least the rows that are fed."""
    leader: torch.Tensor
    """int64 (batch,), the row that makes the forward for each row; a row's own number if it makes it itself."""


class Stepper(Protocol):
    """Makes decode steps."""

    @property
    def tokens_a_step(self) -> int:
        """The most tokens that a row can gain in a step."""

    @property
    def reach(self) -> int:
        """Number of positions after the row's position that a step may touch."""

    def cost(self, group: Group, tokens: int, counts: RowCounts) -> dict[str, int]:
        """The cost of a draw of `tokens` tokens in a row of this group, by the names of `Cost`."""

    def step(self, cache: SlotCache, state: Rows, batch: int, key_length: int, groups: tuple[Group, ...],
             floors: bool, riders: Riders | None = None) -> None:
        """One step for every live row among the first `batch`. The results are in `state`.

        Args:
            cache, state: the cache and the state of all rows.
            batch, key_length: a shape of the ladder.
            groups: the sampling parameters of the rows.
            floors: whether any row has a floor. If not, floors are not checked.
            riders: rows after these that draw from the logits of other rows. Only plain steps can have them.
        """


class TwoPartStepper(Stepper, Protocol):
    """A stepper whose steps consist of a proposal, one forward of the target over it, and a decision."""

    @property
    def window(self) -> int | None:
        """Number of tokens that the target attends to; None for all."""

    def propose(self, cache: SlotCache, state: Rows, batch: int, key_length: int,
                groups: tuple[Group, ...]) -> Any:
        """What the target has to read for the first `batch` rows. Arguments are those of `step`.

        The result has `fed` and `at`, int64 (rows, slots): tokens and their positions.
        """

    def settle(self, cache: SlotCache, state: Rows, proposed: Any, hidden: torch.Tensor, groups: tuple[Group, ...],
               floors: bool) -> None:
        """Gives live rows their tokens.

        Args:
            proposed: the result of `propose`.
            hidden: the target's hidden states for it, (rows, slots, width).
        """
