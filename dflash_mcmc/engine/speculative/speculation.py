"""The inputs and outputs of `rules.py`: drafted blocks, the random numbers that decide about them, and the verdicts.

All values are batches of rows. The anchor of a block is the last decided token. Slot j is the token j + 1 places after the
anchor. The draft proposes n tokens. The target gives distributions ("laws") for n + 1 slots, the last one after all drafted
tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import torch

from dflash_mcmc.engine.batching import logits_processor as laws
from dflash_mcmc.ops import SamplingParams
from dflash_mcmc.rng import Key


class Block(NamedTuple):
    """A drafted block of each row.

    Attributes:
        drafted: int64 (rows, n).
        target: weights of the target's law for each slot, given the drafted tokens before it; (rows * (n + 1)).
        draft: weights of the law from which `drafted` was drawn, (rows * n); None for a point mass.
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
        interval: float64 (rows, n + 1, 2), the interval of uniforms at the position that give the token; (0, 0) if the
            token does not depend on that uniform alone.
    """

    accepted: torch.Tensor
    tokens: torch.Tensor
    interval: torch.Tensor


class BlockRandom(Protocol):
    """The random numbers of one block. `testing.EnumeratedChance` enumerates their values."""

    def draft(self, weights: laws.Weights, first: int, shared: bool) -> torch.Tensor:
        """Draws tokens int64 (rows, k) for slots `first` on, from weights (rows * k).

        With `shared` the uniforms are those of `walk`.
        """

    def walk(self, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
        """Draws a token for each slot from the target, with the uniform of its position.

        Returns (tokens, intervals) of shapes (rows, n + 1) and (rows, n + 1, 2). Tokens after the first one that differs from
        the draft are ignored.
        """

    def accepts(self, probability: torch.Tensor, each: bool) -> torch.Tensor:
        """Bool (rows, n), True with the given probability. Without `each`, values after the first False are ignored."""

    def token(self, weights: laws.Weights, slot: torch.Tensor) -> torch.Tensor:
        """Draws a token for one slot per row, int64 (rows,), from weights (rows), with the uniform of its position."""

    def again(self, weights: laws.Weights, slot: torch.Tensor, use: str) -> torch.Tensor:
        """Like `token`, with another random number: `draft` is the number that drafted the slot, `fresh` a separate one."""


Rule: TypeAlias = Callable[[Block, BlockRandom], Verdict]


class Fault(NamedTuple):
    """Mistakes of a faulty decoder outside its rule; see `rules.py`."""

    argmax_drafts: bool = False
    """The draft proposes its most likely token, but the token is judged like a drawn one."""
    raw_draft: bool = False
    """Drafts are judged by the draft's law before temperature and filters."""
    late_history: bool = False
    """A penalty's history lacks the last token."""
    window: int | None = None
    """The target reads a block with the latest `window` tokens alone; None reads it with all tokens."""


class Drafts(Protocol):
    """Anything that drafts blocks of `num_drafted` tokens."""

    @property
    def num_drafted(self) -> int:
        """n."""


D = TypeVar("D", bound=Drafts)


class Speculation(NamedTuple, Generic[D]):
    """The settings for drawing block by block: drafter, rule, and randomness."""

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
    def num_drafted(self) -> int:
        """The number of drafted tokens of a block."""
        return self.drafter.num_drafted

    @property
    def num_noise(self) -> int:
        """The number of additional random numbers of a block."""
        return 2 * self.num_drafted if self.noisy else 0

    def draft_params(self, params: SamplingParams) -> SamplingParams:
        """Sampling parameters of the draft in a draw with `params`.

        They have no penalties, because the slots of the draft do not know one another. Every law of the draft is correct, but
        a law that is closer to the target's is accepted more often.
        """
        temperature = self.temperature if self.temperature is not None and params.temperature > 0.0 else params.temperature
        return params.without_penalties()._replace(temperature=temperature)

    def draft(self, weights: laws.Weights, chance: BlockRandom, first: int) -> torch.Tensor:
        """Draws drafted tokens int64 (rows, k) for slots `first` on, from weights (rows * k) of the draft's law."""
        tokens = chance.draft(weights, first, self.shared_noise)
        if self.fault.argmax_drafts:
            return weights.logits.argmax(dim=-1).view(tokens.shape)
        return tokens


class Noise(NamedTuple):
    """Additional uniforms of a draw, for each anchor at which a block may start: float64 (anchors, n) each.

    A position that is drafted again after a later anchor gets a new number. The earlier draft at that position has influenced
    the place of the anchor, because block verification judges whole prefixes.
    """

    drafts: np.ndarray
    accepting: np.ndarray

    @staticmethod
    def of(key: Key, start: int, stop: int, count: int) -> Noise:
        """The uniforms for anchors directly before the generated tokens `start` to `stop - 1`, for `count` drafted tokens."""
        return Noise(*(key.fold_in("speculation", use).uniforms(start * count, stop * count).reshape(-1, count)
                       for use in ("draft", "accept")))


class Uniforms(NamedTuple):
    """A BlockRandom with given uniforms, float64: `tokens` (rows, n + 1) by position, `drafts` and `accepting` (rows, n)."""

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


def joined(parts: Sequence[laws.Weights], num_rows: int) -> laws.Weights:
    """Weights of all slots, (rows * slots), from the weights of some slots each, in turn."""
    if len(parts) == 1:
        return parts[0]
    return laws.Weights(*(torch.cat([value.unflatten(0, (num_rows, -1)) for value in values], dim=1).flatten(0, 1)
                          for values in zip(*parts, strict=True)))


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
