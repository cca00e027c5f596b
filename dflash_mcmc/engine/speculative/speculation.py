"""A drafted block, the random numbers that decide about it, and what is decided: what the rules of `rules.py` work on.

Everything is a batch of rows. Slot j of a block stands for the token j + 1 places behind the anchor, the last token that is
settled; n tokens are drafted, and the target gives a law for n + 1 slots: one behind each drafted token too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import torch

from dflash_mcmc.engine import logits_processor as laws
from dflash_mcmc.ops import SamplingParams
from dflash_mcmc.rng import Key


class Block(NamedTuple):
    """A drafted block of each row.

    Attributes:
        drafted: int64 (rows, n).
        target: weights of the law that tokens are to have, (rows * (n + 1)): those of slot j given the drafted tokens before.
        draft: weights of the law that `drafted` was drawn from, (rows * n); None where nothing was drawn: a point mass.
        first: bool (rows,), whether the anchor is the prompt's last token.
    """

    drafted: torch.Tensor
    target: laws.Weights
    draft: laws.Weights | None
    first: torch.Tensor


class Verdict(NamedTuple):
    """What becomes of a block.

    Attributes:
        accepted: int64 (rows,), drafted tokens that are kept, 0 to n.
        tokens: int64 (rows, n + 1): the kept ones and the one that follows them; the rest is of no account.
        interval: float64 (rows, n + 1, 2), the position's uniforms that give the token; (0, 0) where it is no function of that
            uniform alone.
    """

    accepted: torch.Tensor
    tokens: torch.Tensor
    interval: torch.Tensor


class Chance(Protocol):
    """The random numbers of one block. `testing.EnumeratedChance` takes every value of them in turn."""

    def draft(self, weights: laws.Weights, first: int, shared: bool) -> torch.Tensor:
        """Tokens int64 (rows, k) of slots `first` on from weights (rows * k); `shared`: by the uniforms of `walk`."""

    def walk(self, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens, intervals), (rows, n + 1) and (rows, n + 1, 2): a token of each slot from the target, by the uniform of its
        position. What follows the first that differs from the drafted one is of no account."""

    def accepts(self, probability: torch.Tensor, each: bool) -> torch.Tensor:
        """Bool (rows, n): true with this probability; without `each` what follows the first False is of no account."""

    def token(self, weights: laws.Weights, slot: torch.Tensor) -> torch.Tensor:
        """A token int64 (rows,) from weights (rows), for slots int64 (rows,), by the uniform of its position."""

    def again(self, weights: laws.Weights, slot: torch.Tensor, use: str) -> torch.Tensor:
        """The same by another random number: `draft` is the one that the slot was drafted with, `fresh` one of its own."""


Rule: TypeAlias = Callable[[Block, Chance], Verdict]


class Fault(NamedTuple):
    """What a faulty decoder does wrong beside its rule; see `faults.py`."""

    argmax_drafts: bool = False
    """The most likely token of the draft is proposed, and judged as if it had been drawn."""
    raw_draft: bool = False
    """Drafts are judged by the draft's law before temperature and filters."""
    late_history: bool = False
    """A penalty's history lacks the last token."""


class Speculation(NamedTuple):
    """How draws are carried out block by block."""

    rule: Rule
    drafter: object
    """`num_drafted`: n. See `drafter.py`; in the tests a `TabularDraft`."""
    shared_noise: bool
    """Drafts are drawn by the uniforms of the positions, as the target's tokens are."""
    temperature: float | None
    """Of the draft; None takes that of the law that is drawn from."""
    noisy: bool
    """Whether the rule takes random numbers beside those of the positions."""
    fault: Fault = Fault()
    trace: bool = False
    """Keep what becomes of every block."""

    @property
    def num_noise(self) -> int:
        """Those random numbers of a block."""
        return 2 * self.drafter.num_drafted if self.noisy else 0

    def draft_params(self, params: SamplingParams) -> SamplingParams:
        """What the draft draws from where the target draws from `law`: without a penalty, since its slots do not know each
        other. Any law of the draft is right; one like the target's is kept more often."""
        temperature = self.temperature if self.temperature is not None and params.temperature > 0.0 else params.temperature
        return params._replace(temperature=temperature, repetition_penalty=1.0)

    def draft(self, weights: laws.Weights, chance: Chance, first: int) -> torch.Tensor:
        """Drafted tokens int64 (rows, k), of slots `first` on, from weights (rows * k) of the draft's law."""
        tokens = chance.draft(weights, first, self.shared_noise)
        if self.fault.argmax_drafts:
            return laws.argmax(weights.logits).view(tokens.shape)
        return tokens


class Noise(NamedTuple):
    """The uniforms of a draw that are not those of its positions, by the anchor of the block: float64 (anchors, n) each.

    A position is drafted anew behind each anchor, by a new number: what was drafted there before has had a part in where
    the anchor is (block verification judges whole prefixes).
    """

    drafts: np.ndarray
    accepting: np.ndarray

    @staticmethod
    def of(key: Key, start: int, stop: int, count: int) -> Noise:
        """For anchors before generated token `start` to `stop - 1` and blocks of `count`."""
        return Noise(*(key.fold_in("speculation", use).uniforms(start * count, stop * count).reshape(-1, count)
                       for use in ("draft", "accept")))


class Uniforms(NamedTuple):
    """A Chance of given uniforms, float64: `tokens` (rows, n + 1), of positions; `drafts` and `accepting` (rows, n)."""

    tokens: torch.Tensor
    drafts: torch.Tensor
    accepting: torch.Tensor

    def draft(self, weights: laws.Weights, first: int, shared: bool) -> torch.Tensor:
        rows = len(self.tokens)
        count = len(weights.logits) // rows
        uniforms = (self.tokens if shared else self.drafts)[:, first : first + count]
        return laws.draw(weights, uniforms.reshape(-1))[0].view(rows, count)

    def walk(self, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, interval = laws.draw(block.target, self.tokens.reshape(-1))
        return tokens.view(self.tokens.shape), interval.view(*self.tokens.shape, 2)

    def accepts(self, probability: torch.Tensor, each: bool) -> torch.Tensor:
        return self.accepting < probability

    def token(self, weights: laws.Weights, slot: torch.Tensor) -> torch.Tensor:
        return laws.draw(weights, self.tokens.gather(1, slot[:, None])[:, 0])[0]

    def again(self, weights: laws.Weights, slot: torch.Tensor, use: str) -> torch.Tensor:
        last = self.drafts.shape[1] - 1
        uniforms = (self.drafts if use == "draft" else self.accepting).gather(1, slot.clamp(max=last)[:, None])[:, 0]
        return laws.draw(weights, uniforms)[0]


def at_slot(weights: laws.Weights, slot: torch.Tensor) -> torch.Tensor:
    """Probabilities (rows, vocabulary) of one slot of each row, int64 (rows,)."""
    rows = torch.arange(len(slot), device=slot.device)
    chosen = rows * (len(weights.logits) // len(slot)) + slot
    return _probabilities(weights, chosen)


def all_slots(weights: laws.Weights, num_rows: int) -> torch.Tensor:
    """Probabilities (rows, slots, vocabulary)."""
    values = _probabilities(weights, slice(None))
    return values.view(num_rows, -1, values.shape[-1])


def _probabilities(weights: laws.Weights, chosen: torch.Tensor | slice) -> torch.Tensor:
    values = weights.values[chosen]
    return (values.flatten(1) / weights.upto[chosen, -1:].to(values.dtype))[:, : weights.logits.shape[-1]]
