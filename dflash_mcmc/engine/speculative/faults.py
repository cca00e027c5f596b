"""Rules that look right but are wrong. They are mistakes of published speculative samplers, and the tests detect them.

A decoder uses a fault only if the configuration names it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from dflash_mcmc.engine.batching import logits_processor as laws
from dflash_mcmc.engine.speculative import rules
from dflash_mcmc.engine.speculative.speculation import Block, Chance, Fault, Rule, Verdict, all_slots, at_slot


class Faulty(NamedTuple):
    """A fault: a wrong rule (None keeps the right rule), and mistakes outside the rule."""

    rule: Rule | None
    fault: Fault


def greedy_first(block: Block, chance: Chance) -> Verdict:
    """Like `rules.match`, but the first token of a generation is the most likely one (lucebox PR 374, spot 1)."""
    right = rules.match(block, chance)
    best = laws.argmax(at_slot(block.target, torch.zeros_like(right.accepted)))
    tokens = right.tokens.clone()
    tokens[:, 0] = torch.where(block.first, best, tokens[:, 0])
    return Verdict(rules.leading((tokens[:, :-1] == block.drafted) & block.is_offered()), tokens, right.interval)


def greedy_bonus(block: Block, chance: Chance) -> Verdict:
    """Like `rules.match`, but the token after the kept ones is the most likely one (lucebox PR 374, spot 2)."""
    right = rules.match(block, chance)
    best = laws.argmax(at_slot(block.target, right.accepted))
    return rules.with_token(block, right.accepted, best)


def greedy_walk(block: Block, chance: Chance) -> Verdict:
    """Like `rules.match`, but a drafted token is kept where it is the most likely one (lucebox PR 374, spot 3)."""
    best = laws.argmax(all_slots(block.target, len(block.drafted)).flatten(0, 1)).view(len(block.drafted), -1)
    accepted = rules.leading((best[:, :-1] == block.drafted) & block.is_offered())
    return rules.with_token(block, accepted, chance.token(laws.of_values(at_slot(block.target, accepted)), accepted))


def redraw_after_mismatch(block: Block, chance: Chance) -> Verdict:
    """Like `rules.match`, but the target's token that differs from the drafted one is discarded and drawn again."""
    right = rules.match(block, chance)
    weights = laws.of_values(at_slot(block.target, right.accepted))
    drawn = right.tokens.gather(1, right.accepted[:, None])[:, 0]
    again = chance.again(weights, right.accepted, "fresh")
    whole = right.accepted == (block.drafted.shape[1] if block.offered is None else block.offered)
    return rules.with_token(block, right.accepted, torch.where(whole, drawn, again))


def reject_then_p(block: Block, chance: Chance) -> Verdict:
    """Like `rules.reject`, but the first rejected token is replaced by a token of p instead of (p - q)+."""
    ratio = rules.ratios(block)
    accepted = rules.leading(chance.accepts(ratio, each=False))
    return rules.replaced(block, chance, accepted, at_slot(block.target, accepted))


def residual_by_draft_noise(block: Block, chance: Chance) -> Verdict:
    """Like `rules.reject`, but the token of (p - q)+ is drawn with the random number of the draft (vLLM issue 47386)."""
    ratio = rules.ratios(block)
    accepted = rules.leading(chance.accepts(ratio, each=False))
    weights = laws.of_values(rules.residual(block, accepted, torch.ones_like(ratio[:, 0])))
    fresh = chance.token(weights, accepted)
    again = chance.again(weights, accepted.clamp(max=block.drafted.shape[1] - 1), "draft")
    whole = accepted == (block.drafted.shape[1] if block.offered is None else block.offered)
    return rules.with_token(block, accepted, torch.where(whole, fresh, again))


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


def matching(name: str | None, window: int | None = None) -> tuple[Rule, Fault]:
    """Sample and match with a fault of `MATCH`; None is the correct rule.

    Args:
        window: tokens that `finite_window` attends to (lucebox PR 374, `fa_window`). Other faults do not use it.
    """
    if name is None:
        return rules.match, Fault()
    rule, fault = MATCH[name]
    return rule or rules.match, fault._replace(window=window) if name == "finite_window" else fault
