"""DSpark and DFlash 2: the rules keep the target's law with the sequential q, whatever the confidence head cuts off."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from dflash_mcmc.engine.oracle import exact_law
from dflash_mcmc.engine.oracle.tabular import TabularEngine, _weights
from dflash_mcmc.ops import SamplingParams
from dflash_mcmc.testing import PROMPT
from tests.engine.speculative.slotwise_drafts import KINDS, NetworkDraft, random_network, shape_of, small_table
from tests.engine.speculative.test_speculator import match, reject
from tests.speculation import speculative_error

LAW = SamplingParams(0.8)
RULES = {"match": match(), "match_drawn": match(0.9), "token": reject(), "block": reject(verification="block"),
         "greedy_draft": reject(0.0)}


def draft(kind: str = "vanilla", threshold: float = 0.0, cls: type[NetworkDraft] = NetworkDraft, seed: int = 0):
    table = small_table()
    return cls(random_network(shape_of(kind, table.parts, 2 + (kind == "dflash2"), 2), seed), table, threshold)


@functools.cache
def splitting(kind: str) -> tuple[float, int]:
    """(threshold, seed) with which the block at the prompt's end has one or two tokens, depending on the first one.

    It ends after a token that rejection may reject; a token with p >= q is kept by every rule. Without a Markov head the
    number cannot depend on a token, and it is one.
    """
    for seed in range(100):
        drafted = draft(kind, seed=seed)
        drafter, prompt = drafted._drafter, tuple(PROMPT.tolist())
        drafter.prefix = prompt
        with torch.no_grad():
            hidden, anchor = drafter.hidden(None)[0], torch.tensor([drafter.prefix[-1]])
            first = torch.sigmoid(drafter.network.confidence_logits(hidden[:1], anchor)).item()
            second = sorted(torch.sigmoid(drafter.network.confidence_logits(hidden[[1, 1, 1]], torch.arange(3))).tolist())
        high = first if kind == "independent" else min(first, second[1])
        threshold = 0.5 * (high + second[0])
        ended = [not draft(kind, threshold, seed=seed).offers(prompt, (token,), 0) for token in range(3)]
        p, q = (exact_law.process(logits, LAW, (), ()) for logits in (
            small_table().logits(prompt, "last"), drafted.logits(prompt, ())))
        if high - second[0] > 0.02 and (p - q)[ended].min() < -0.3:
            return threshold, seed
    raise AssertionError(f"no seed splits the blocks of {kind}")


def gated(kind: str = "vanilla", cls: type[NetworkDraft] = NetworkDraft) -> NetworkDraft:
    """A draft whose blocks end early after some tokens."""
    threshold, seed = splitting(kind)
    return draft(kind, threshold, cls, seed)


def error(rule: str, drafted: NetworkDraft) -> float:
    """Of the law of two tokens. A block that ends with the first one is followed by another."""
    return speculative_error(RULES[rule].speculation(drafted), LAW, 2, small_table())


def slow_but(quick: set[tuple[str, str]], kinds: tuple[str, ...]) -> list:
    """All pairs of kind and rule. Each takes about a second, so that all but the quick ones are slow tests."""
    return [pytest.param(kind, rule, marks=[pytest.mark.slow] * ((kind, rule) not in quick))
            for kind in kinds for rule in RULES]


@pytest.mark.parametrize(("kind", "rule"), slow_but(
    {("vanilla", "block"), ("rnn", "token"), ("dflash2", "block"), ("dflash2", "match")}, (*KINDS, "independent")))
def test_law_is_exact(kind, rule):
    assert error(rule, draft(kind)) <= 1e-12


def marginal(drafted: NetworkDraft, prefix, before):
    """log q_k(x_k) without the tokens drafted before it: the sum over all of them."""
    if not before:
        return np.log(np.exp(exact_law.process(drafted.logits(prefix, ()), LAW, (), ())))
    first = np.exp(exact_law.process(drafted.logits(prefix, ()), LAW, (), ()))
    rows = [np.exp(exact_law.process(drafted.logits(prefix, (x,)), LAW, (), ())) for x in range(3)]
    return np.log(sum(share * row for share, row in zip(first, rows, strict=True)))


@pytest.mark.parametrize("rule", ["token", pytest.param("block", marks=pytest.mark.slow)])
def test_another_q_than_the_sequential_one_is_caught(rule, monkeypatch):
    drafted, right = draft(), TabularEngine._block

    def judged(self, operation, trajectory, chance):
        block = right(self, operation, trajectory, chance)
        prefix, tokens = (*trajectory.prompt.tolist(), *trajectory.tokens.tolist()), block.drafted[0].tolist()
        log_q = [marginal(drafted, prefix, tuple(tokens[:slot])) for slot in range(len(tokens))]
        return block._replace(draft=_weights(log_q))

    monkeypatch.setattr(TabularEngine, "_block", judged)
    assert error(rule, drafted) > 0.01


def test_blocks_really_end_early():
    prompt = tuple(PROMPT.tolist())
    for kind in ("vanilla", "gated", "rnn", "independent"):
        drafted = gated(kind)
        assert drafted.offers(prefix=prompt, drafted=(), token=0)
        assert {drafted.offers(prompt, (token,), 0) for token in range(3)} == (
            {False} if kind == "independent" else {True, False})


@pytest.mark.parametrize(("kind", "rule"), slow_but(
    {("vanilla", "token"), ("vanilla", "block"), ("independent", "match")}, ("vanilla", "gated", "rnn", "independent")))
def test_confidence_changes_no_law(kind, rule):
    assert error(rule, gated(kind)) <= 1e-12


class SeesItsToken(NetworkDraft):
    """Judges a slot by the confidence of the next slot, which has seen the slot's token."""

    def offers(self, prefix, drafted, token):
        return super().offers(prefix, (*drafted, token), 0) if len(drafted) + 1 < self.num_drafted else True


@pytest.mark.parametrize("rule", ["token", pytest.param("block", marks=pytest.mark.slow)])
def test_a_confidence_that_has_seen_the_token_is_caught(rule):
    assert error(rule, gated(cls=SeesItsToken)) > 1e-3


def test_nothing_is_drafted_below_the_threshold():
    drafted = draft(threshold=1.0)
    assert not drafted.offers((1, 2), (), 0)
    assert error("token", drafted) <= 1e-12
