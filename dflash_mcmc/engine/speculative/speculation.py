"""Drafted blocks, the random numbers that decide about them, and the verdicts: the inputs and outputs of `rules.py`.

All values are batches of rows. Slot j of a block is the token j + 1 places after the anchor, the last decided token. n tokens
are drafted, and the target gives laws for n + 1 slots, including one after the last drafted token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import torch

from dflash_mcmc.engine import logits_processor as laws
from dflash_mcmc.ops import SamplingParams
from dflash_mcmc.rng import Key


class Block(NamedTuple):
    """A drafted block of each row.

    Attributes:
        drafted: int64 (rows, n).
        target: weights of the target's law, (rows * (n + 1)): of slot j given the drafted tokens before it.
        draft: weights of the law that `drafted` was drawn from, (rows * n); None for a point mass.
        first: bool (rows,), whether the anchor is the prompt's last token.
    """

    drafted: torch.Tensor
    target: laws.Weights
    draft: laws.Weights | None
    first: torch.Tensor


class Verdict(NamedTuple):
    """The decision about a block.

    Attributes:
        accepted: int64 (rows,), drafted tokens that are kept, 0 to n.
        tokens: int64 (rows, n + 1): the kept tokens and the next one; the rest is ignored.
        interval: float64 (rows, n + 1, 2), uniforms of the position that give the token; (0, 0) where the token is not a
            function of that uniform alone.
    """

    accepted: torch.Tensor
    tokens: torch.Tensor
    interval: torch.Tensor


class Chance(Protocol):
    """The random numbers of one block. `testing.EnumeratedChance` enumerates their values."""

    def draft(self, weights: laws.Weights, first: int, shared: bool) -> torch.Tensor:
        """Tokens int64 (rows, k) of slots `first` on from weights (rows * k); `shared`: with the uniforms of `walk`."""

    def walk(self, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens, intervals), (rows, n + 1) and (rows, n + 1, 2): a token of each slot from the target, drawn with the
        uniform of its position. Tokens after the first that differs from the draft are ignored."""

    def accepts(self, probability: torch.Tensor, each: bool) -> torch.Tensor:
        """Bool (rows, n): true with this probability; without `each`, values after the first False are ignored."""

    def token(self, weights: laws.Weights, slot: torch.Tensor) -> torch.Tensor:
        """A token int64 (rows,) from weights (rows), for slots int64 (rows,), drawn with the uniform of its position."""

    def again(self, weights: laws.Weights, slot: torch.Tensor, use: str) -> torch.Tensor:
        """The same with another random number: `draft` is the number that drafted the slot, `fresh` a separate one."""


Rule: TypeAlias = Callable[[Block, Chance], Verdict]


class Fault(NamedTuple):
    """Mistakes of a faulty decoder outside its rule; see `faults.py`."""

    argmax_drafts: bool = False
    """The most likely token of the draft is proposed, and judged like a drawn one."""
    raw_draft: bool = False
    """Drafts are judged by the draft's law before temperature and filters."""
    late_history: bool = False
    """A penalty's history lacks the last token."""


class Drafts(Protocol):
    """Anything that drafts blocks of `num_drafted` tokens."""

    @property
    def num_drafted(self) -> int:
        """n."""


D = TypeVar("D", bound=Drafts)


class Speculation(NamedTuple, Generic[D]):
    """How draws are carried out block by block."""

    rule: Rule
    drafter: D
    """A `Drafter` of `drafter.py`; on the tabular engine a `TabularDraft`."""
    shared_noise: bool
    """Whether drafts are drawn with the uniforms of the positions, like the target's tokens."""
    temperature: float | None
    """Temperature of the draft; None takes that of the draw."""
    noisy: bool
    """Whether the rule needs random numbers besides those of the positions."""
    fault: Fault = Fault()
    trace: bool = False
    """Whether the verdict about each block is kept."""

    @property
    def num_noise(self) -> int:
        """The number of additional random numbers of a block."""
        return 2 * self.drafter.num_drafted if self.noisy else 0

    def draft_params(self, params: SamplingParams) -> SamplingParams:
        """Sampling parameters of the draft in a draw with `params`: without a penalty, since its slots do not know each other.

        Any law of the draft is correct; one close to the target's is accepted more often.
        """
        temperature = self.temperature if self.temperature is not None and params.temperature > 0.0 else params.temperature
        return params._replace(temperature=temperature, repetition_penalty=1.0)

    def draft(self, weights: laws.Weights, chance: Chance, first: int) -> torch.Tensor:
        """Drafted tokens int64 (rows, k), of slots `first` on, from weights (rows * k) of the draft's law."""
        tokens = chance.draft(weights, first, self.shared_noise)
        if self.fault.argmax_drafts:
            return laws.argmax(weights.logits).view(tokens.shape)
        return tokens


class Noise(NamedTuple):
    """Uniforms of a draw besides those of its positions, by the anchor of the block: float64 (anchors, n) each.

    A position is drafted again after each anchor, with a new number: the earlier draft at that position has influenced where
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
