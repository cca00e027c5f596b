"""Speculative decoding: drafted blocks, the random numbers that decide about them, and the rules that keep drafted tokens.

All values are batches of rows. The anchor of a block is the last decided token. Slot j is the token j + 1 places after the
anchor. The draft proposes n tokens. The target gives distributions ("laws") for n + 1 slots, the last one after all drafted
tokens. With each rule the drawn tokens have exactly the target's law.

Rejection is from Leviathan et al. 2023 (arXiv 2211.17192) and Chen et al. 2023 (arXiv 2302.01318). Block verification is from
Sun et al. 2024 (arXiv 2403.10444). Sample and match draws from the target; the draft decides only how many of these
draws can be used. `tests/decoder` enumerates all rules and the faults on tabular targets.

The faults look right but are wrong. They are mistakes of published speculative samplers, and the tests detect them. A decoder
uses a fault only if the configuration names it.
"""

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
    """Mistakes of a faulty decoder outside its rule."""

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
    def of(key: Key, start: int, stop: int, count: int) -> "Noise":
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


def match(block: Block, chance: BlockRandom) -> Verdict:
    """Draw a token for each slot from the target. Keep all up to and including the first that differs from the draft."""
    tokens, interval = chance.walk(block)
    return Verdict(leading(tokens[:, :-1] == block.drafted), tokens, interval)


def reject(block: Block, chance: BlockRandom) -> Verdict:
    """Keep x with probability min(1, p(x) / q(x)). Replace the first rejected token by a token drawn from (p - q)+."""
    ratio = ratios(block)
    accepted = leading(chance.accepts(ratio, each=False))
    return replaced(block, chance, accepted, residual(block, accepted, torch.ones_like(ratio[:, 0])))


def reject_block(block: Block, chance: BlockRandom) -> Verdict:
    """Block verification: keep the longest prefix that passes. Whole prefixes are judged instead of single tokens.

    Let w_0 = 1, w_i = min(1, w_(i-1) p(x_i) / q(x_i)), and Z_i the mass of (w_i p - q_(i+1))+. Prefix i < n passes with
    probability Z_i / (Z_i + 1 - w_i). The whole block passes with probability w_n. The token after the kept prefix i is
    drawn from (w_i p - q_(i+1))+.
    """
    accepted, weight = _kept_prefix(block, chance)
    return replaced(block, chance, accepted, residual(block, accepted, weight))


def _kept_prefix(block: Block, chance: BlockRandom) -> tuple[torch.Tensor, torch.Tensor]:
    """The number i of tokens that `reject_block` keeps, and w_i, each (rows,)."""
    ratio = ratios(block)
    weight, weights = torch.ones_like(ratio[:, 0]), []
    for slot in range(ratio.shape[1]):
        weight = (weight * ratio[:, slot]).clamp(max=1.0)
        weights.append(weight)
    kept = torch.stack(weights, dim=1)
    rows, drafted = block.drafted.shape
    p, q = all_slots(block.target, rows)[:, 1:drafted], _draft_slots(block)[:, 1:]
    mass = (kept[:, :-1, None].to(p.dtype) * p - q).clamp(min=0).sum(dim=-1, dtype=torch.float64)
    short = mass + 1.0 - kept[:, :-1]
    passes = torch.where(short > 0, mass / short.clamp(min=torch.finfo(short.dtype).tiny), 1.0)
    yes = chance.accepts(torch.cat([passes, kept[:, -1:]], dim=1), each=True)
    accepted = (yes * torch.arange(1, drafted + 1, device=yes.device)).amax(dim=1)
    return accepted, torch.cat([torch.ones_like(kept[:, :1]), kept], dim=1).gather(1, accepted[:, None])[:, 0]


def leading(yes: torch.Tensor) -> torch.Tensor:
    """Number of leading True values in each row of (rows, n), int64 (rows,)."""
    return yes.long().cumprod(dim=1).sum(dim=1)


def replaced(block: Block, chance: BlockRandom, accepted: torch.Tensor, values: torch.Tensor) -> Verdict:
    """The verdict of a rule that draws the token after the kept ones from unnormalised probabilities (rows, vocabulary)."""
    return with_token(block, accepted, chance.token(laws.of_values(values), accepted))


def with_token(block: Block, accepted: torch.Tensor, token: torch.Tensor) -> Verdict:
    """The verdict that keeps the first `accepted` drafted tokens, followed by `token`."""
    tokens = torch.nn.functional.pad(block.drafted, (0, 1)).scatter(1, accepted[:, None], token[:, None])
    return Verdict(accepted, tokens, torch.zeros(*tokens.shape, 2, dtype=torch.float64, device=tokens.device))


def ratios(block: Block) -> torch.Tensor:
    """p(x) / q(x) of the drafted tokens, float64 (rows, n)."""
    return torch.exp(target_log_p(block) - draft_log_q(block))


def residual(block: Block, slot: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """(weight * p - q)+ at one slot of each row. After the last drafted token, or if rounding leaves only zeros, it is p."""
    p, last = at_slot(block.target, slot), block.drafted.shape[1] - 1
    inside = slot.clamp(max=last)
    if block.draft is None:
        q = torch.zeros_like(p).scatter_(1, block.drafted.gather(1, inside[:, None]), 1.0)
    else:
        q = at_slot(block.draft, inside)
    left = (weight[:, None].to(p.dtype) * p - q).clamp(min=0)
    return torch.where((slot > last)[:, None] | (left.amax(dim=1, keepdim=True) <= 0), p, left)


def target_log_p(block: Block) -> torch.Tensor:
    """Log-probabilities of the drafted tokens under the target, float64 (rows, n)."""
    padded = torch.nn.functional.pad(block.drafted, (0, 1))
    return block.target.log_probability(padded.reshape(-1)).view(padded.shape)[:, :-1]


def draft_log_q(block: Block) -> torch.Tensor:
    """Log-probabilities of the drafted tokens under the draft, float64 (rows, n); 0 for a point mass."""
    if block.draft is None:
        return torch.zeros_like(block.drafted, dtype=torch.float64)
    return block.draft.log_probability(block.drafted.reshape(-1)).view(block.drafted.shape)


def _draft_slots(block: Block) -> torch.Tensor:
    if block.draft is not None:
        return all_slots(block.draft, len(block.drafted))
    vocabulary = block.target.logits.shape[-1]
    return torch.nn.functional.one_hot(block.drafted, vocabulary).to(block.target.values.dtype)


class Faulty(NamedTuple):
    """A fault: a wrong rule (None keeps the right rule), and mistakes outside the rule."""

    rule: Rule | None
    fault: Fault


def greedy_first(block: Block, chance: BlockRandom) -> Verdict:
    """Like `match`, but the first token of a generation is the most likely one (lucebox PR 374, spot 1)."""
    right = match(block, chance)
    best = at_slot(block.target, torch.zeros_like(right.accepted)).argmax(dim=-1)
    tokens = right.tokens.clone()
    tokens[:, 0] = torch.where(block.first, best, tokens[:, 0])
    return Verdict(leading(tokens[:, :-1] == block.drafted), tokens, right.interval)


def greedy_bonus(block: Block, chance: BlockRandom) -> Verdict:
    """Like `match`, but the token after the kept ones is the most likely one (lucebox PR 374, spot 2)."""
    right = match(block, chance)
    best = at_slot(block.target, right.accepted).argmax(dim=-1)
    return with_token(block, right.accepted, best)


def greedy_walk(block: Block, chance: BlockRandom) -> Verdict:
    """Like `match`, but a drafted token is kept where it is the most likely one (lucebox PR 374, spot 3)."""
    best = all_slots(block.target, len(block.drafted)).flatten(0, 1).argmax(dim=-1).view(len(block.drafted), -1)
    accepted = leading(best[:, :-1] == block.drafted)
    return with_token(block, accepted, chance.token(laws.of_values(at_slot(block.target, accepted)), accepted))


def redraw_after_mismatch(block: Block, chance: BlockRandom) -> Verdict:
    """Like `match`, but the target's token that differs from the drafted one is discarded and drawn again."""
    right = match(block, chance)
    weights = laws.of_values(at_slot(block.target, right.accepted))
    drawn = right.tokens.gather(1, right.accepted[:, None])[:, 0]
    again = chance.again(weights, right.accepted, "fresh")
    whole = right.accepted == block.drafted.shape[1]
    return with_token(block, right.accepted, torch.where(whole, drawn, again))


def reject_then_p(block: Block, chance: BlockRandom) -> Verdict:
    """Like `reject`, but the first rejected token is replaced by a token of p instead of (p - q)+."""
    ratio = ratios(block)
    accepted = leading(chance.accepts(ratio, each=False))
    return replaced(block, chance, accepted, at_slot(block.target, accepted))


def residual_by_draft_noise(block: Block, chance: BlockRandom) -> Verdict:
    """Like `reject`, but the token of (p - q)+ is drawn with the random number of the draft (vLLM issue 47386)."""
    ratio = ratios(block)
    accepted = leading(chance.accepts(ratio, each=False))
    weights = laws.of_values(residual(block, accepted, torch.ones_like(ratio[:, 0])))
    fresh = chance.token(weights, accepted)
    again = chance.again(weights, accepted.clamp(max=block.drafted.shape[1] - 1), "draft")
    whole = accepted == block.drafted.shape[1]
    return with_token(block, accepted, torch.where(whole, fresh, again))


def block_residual(block: Block, chance: BlockRandom) -> Verdict:
    """Like `reject_block`, but the token after the kept prefix is drawn from (p - q)+, not (w p - q)+ (vllm-ascend 7807)."""
    accepted, weight = _kept_prefix(block, chance)
    return replaced(block, chance, accepted, residual(block, accepted, torch.ones_like(weight)))


MATCH = {
    "greedy_first": Faulty(greedy_first, Fault()),
    "greedy_bonus": Faulty(greedy_bonus, Fault()),
    "redraw_after_mismatch": Faulty(redraw_after_mismatch, Fault()),
    "late_penalty": Faulty(None, Fault(late_history=True)),
    "greedy_walk": Faulty(greedy_walk, Fault()),
    "finite_window": Faulty(None, Fault()),
}
"""Faults of sample and match. `matching` sets the window of `finite_window`."""

REJECTION = {
    "argmax_proposal": Faulty(None, Fault(argmax_drafts=True)),
    "reject_then_p": Faulty(reject_then_p, Fault()),
    "residual_by_draft_noise": Faulty(residual_by_draft_noise, Fault()),
    "unprocessed_draft": Faulty(None, Fault(raw_draft=True)),
    "late_penalty": Faulty(None, Fault(late_history=True)),
}
"""Faults of rejection sampling."""

BLOCK = {"block_residual": Faulty(block_residual, Fault())}
"""Faults of block verification."""


def matching(name: str | None, window: int | None = None) -> tuple[Rule, Fault]:
    """Sample and match with a fault of `MATCH`; None is the correct rule.

    Args:
        window: tokens that `finite_window` attends to (lucebox PR 374, `fa_window`). Other faults do not use it.
    """
    if name is None:
        return match, Fault()
    rule, fault = MATCH[name]
    return rule or match, fault._replace(window=window) if name == "finite_window" else fault
