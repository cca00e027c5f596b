"""Rules that decide which drafted tokens are kept. With each of them the drawn tokens have exactly the target's law.

Rejection is from Leviathan et al. 2023 (arXiv 2211.17192) and Chen et al. 2023 (arXiv 2302.01318). Block verification is from
Sun et al. 2024 (arXiv 2403.10444). Sample and match draws from the target; the draft decides only how many of these
draws can be used. `tests/decoder` enumerates all rules and the faults on tabular targets.

The faults look right but are wrong. They are mistakes of published speculative samplers, and the tests detect them. A decoder
uses a fault only if the configuration names it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from dflash_mcmc.engine.batching import logits_processor as laws
from dflash_mcmc.engine.batching.rows import Rows, Status
from dflash_mcmc.engine.batching.stop_strings import Endings
from dflash_mcmc.engine.speculative.speculation import (
    Block,
    BlockRandom,
    Fault,
    Rule,
    Verdict,
    all_slots,
    at_slot,
)


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


class Proposal(NamedTuple):
    """Tokens offered to the first rows of the batch, in slots.

    Attributes:
        at: int64 (rows, slots), the positions of the slots.
        first, last: int64 (rows,), the first and the last slot offered.
        tokens: int64 (rows, slots).
        scores: float64 (rows, slots, 4), as in `Rows`.
        bad: bool (rows, slots), where logits were not numbers.
    """

    at: torch.Tensor
    first: torch.Tensor
    last: torch.Tensor
    tokens: torch.Tensor
    scores: torch.Tensor
    bad: torch.Tensor
    columns: torch.Tensor | None = None
    """float64 (rows, slots, k), further columns of the tokens (`engine/batching/rows.py`)."""


def commit(state: Rows, offer: Proposal, endings: Endings) -> torch.Tensor:
    """Adds the offered tokens to the live rows, up to the token that ends their draw. Other rows do not change.

    Args:
        endings: finds the tokens that end a draw.

    Returns:
        int64 (rows,), the number of tokens that each row has gained.
    """
    batch, slots = offer.at.shape
    slot = torch.arange(slots, device=offer.at.device)
    live = state.status[:batch] == Status.LIVE
    offered = (slot >= offer.first[:, None]) & (slot <= offer.last[:, None])
    states = endings.states(state, offer.tokens, offered)
    stop = endings.ends(state, offer.tokens, offer.at, states)
    kind = Status.DONE * stop
    if state.has_floors:
        gain = state.alpha[:batch, None] * offer.scores[..., 0] - offer.scores[..., 1]
        weight = state.weight[:batch, None] + torch.where(offered, gain, 0.0).cumsum(dim=1)
        kind = torch.where(stop, kind, Status.ABANDONED * below_floor(state, offer.at, weight))
    kind = torch.where(offer.bad, Status.FAILED, kind)
    ends = (kind != Status.LIVE) & offered
    ended, at = ends.any(dim=1), ends.long().argmax(dim=1)
    status = torch.where(ended, kind.gather(1, at[:, None])[:, 0], Status.LIVE)
    # A token that ends its draw is kept. One whose logits were not numbers is not.
    following = torch.where(ended, at + (status != Status.FAILED), offer.last + 1)
    gained = offered & (slot < following[:, None]) & live[:, None]
    count = gained.sum(dim=1)
    rows, where = state.ids[:batch, None], torch.where(gained, offer.at, state.nowhere)
    state.tokens[rows, where], state.scores[rows, where] = offer.tokens, offer.scores
    if offer.columns is not None:
        state.columns[rows, where] = offer.columns
    if len(state.seen):
        counts = torch.zeros(batch, state.seen.shape[1], dtype=torch.int32, device=gained.device)
        state.seen[:batch] |= counts.scatter_add_(1, offer.tokens, gained.int()) > 0
    if len(state.counts):
        state.counts[:batch].scatter_add_(1, offer.tokens, gained.to(state.counts.dtype))
    if state.has_floors:
        last = weight.gather(1, (following - 1).clamp(min=0)[:, None])[:, 0]
        # A row that gained nothing has no last token: for it `following` was clamped to the first slot.
        state.weight[:batch] = torch.where(count > 0, last, state.weight[:batch])
    if states is not None:
        after = states.gather(1, (following - 1).clamp(min=0)[:, None])[:, 0]
        state.matched[:batch] = torch.where(count > 0, after, state.matched[:batch])
    state.position[:batch] += count
    state.rounds[:batch] += live
    state.fed[:batch] += live * slots
    state.status[:batch] = torch.where(live, status, state.status[:batch])
    return count


def below_floor(state: Rows, at: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Whether the first rows may be abandoned at positions int64 (rows, slots), given weights float64 (rows, slots)."""
    batch = len(at)
    generated, log_length = (at - state.origin[:batch, None] + 1).double(), state.log_length[:batch, None]
    term = torch.where(torch.isfinite(log_length), log_length - generated.log(), 0.0)
    return weight + term <= state.floor[:batch, None]
