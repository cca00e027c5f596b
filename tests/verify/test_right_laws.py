"""Whole audits of right laws of each step, and of engines that take a step wrongly, over a language with a table of logits."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from dflash_mcmc.engine.oracle import exact_law
from dflash_mcmc.ops import SamplingParams
from dflash_mcmc.verify import audit as audits
from dflash_mcmc.verify.audit import Audit, Bet, Evidence, Steps, payments
from dflash_mcmc.verify.drawn import DrawnText
from tests.cases import quick
from tests.verify.test_evidence import exclude_top_choices

VOCABULARY, TEXTS, TOKENS, DRAFTED = 24, 6, 40, 3
TABLE = np.random.default_rng(5).normal(size=(VOCABULARY, VOCABULARY)) * 2.0
"""The logits behind each token."""
FIRST, LAST = (SamplingParams(temperature=0.6, top_p=0.8, temperature_last=last) for last in (False, True))
SIGMA, TYPICAL, WARM = SamplingParams(top_n_sigma=1.5), SamplingParams(typical_p=0.6), SamplingParams(temperature=0.8)
Drawn = tuple[list[int], tuple[int, ...] | None]
"""The tokens of an answer, and the numbers of them of each step."""


def by_law(law: SamplingParams) -> Callable[[np.random.Generator, int], Drawn]:
    """Draws one token after another, by the definition of the law."""
    none = np.empty(0, np.int64)
    p = np.array([np.exp(exact_law.process(row, law, none, none)) for row in TABLE])

    def draw(rng: np.random.Generator, token: int) -> Drawn:
        tokens = [token]
        for _ in range(TOKENS):
            tokens.append(_inverse(p[tokens[-1]], rng.random()))
        return tokens[1:], None

    return draw


def by_blocks(fault: str = "") -> Callable[[np.random.Generator, int], Drawn]:
    """Speculative sampling of `WARM` from a flatter draft; the bonus token may come from the draft, or a key may be stale."""
    p, q = (torch.from_numpy(TABLE / temperature).softmax(-1).numpy() for temperature in (WARM.temperature, 1.6))

    def draw(rng: np.random.Generator, token: int) -> Drawn:
        tokens, steps, read = [token], [], token
        while len(tokens) <= TOKENS:
            for place in range(DRAFTED + 1):
                target, draft = p[read], q[read]
                accepted = place < DRAFTED
                if accepted:
                    drafted = _inverse(draft, rng.random())
                    accepted = bool(rng.random() * draft[drafted] < target[drafted])
                    tokens.append(drafted if accepted else _inverse(np.maximum(target - draft, 0.0), rng.random()))
                    read = tokens[-1] if accepted or fault != "stale" else drafted
                else:
                    tokens.append(_inverse(draft if fault == "bonus" else target, rng.random()))
                    read = tokens[-1]
                if not accepted:
                    steps.append(place + 1)
                    break
        return tokens[1:], tuple(steps)

    return draw


def by_excluding(probability: float) -> Callable[[np.random.Generator, int], Drawn]:
    """XTC as engines have it: with a probability all likely tokens but the least likely of them are out of a draw."""
    p = torch.from_numpy(TABLE).softmax(-1).numpy()

    def draw(rng: np.random.Generator, token: int) -> Drawn:
        tokens = [token]
        for _ in range(TOKENS):
            row = p[tokens[-1]].copy()
            likely = np.flatnonzero(row >= 0.15)
            if rng.random() < probability and len(likely):
                row[np.setdiff1d(likely, likely[row[likely].argmin()])] = 0.0
            tokens.append(_inverse(row, rng.random()))
        return tokens[1:], None

    return draw


def _inverse(weights: np.ndarray, uniform: float) -> int:
    upto = weights.cumsum()
    return int(np.searchsorted(upto, uniform * upto[-1], side="right"))


class Step(NamedTuple):
    """A step of a law as it is stated, an engine that takes it, and engines that take it wrongly."""

    law: SamplingParams
    right: Callable[[np.random.Generator, int], Drawn]
    wrong: dict[str, Callable[[np.random.Generator, int], Drawn]]


STEPS = {
    "order=temperature_last": Step(LAST, by_law(LAST), {"the temperature is first": by_law(FIRST)}),
    "order=temperature_first": Step(FIRST, by_law(FIRST), {"the temperature is last": by_law(LAST)}),
    "top_n_sigma": Step(SIGMA, by_law(SIGMA), {
        "it is ignored": by_law(SamplingParams()), "1.2 in place of 1.5": by_law(SamplingParams(top_n_sigma=1.2))}),
    "typical_p": Step(TYPICAL, by_law(TYPICAL), {
        "it is ignored": by_law(SamplingParams()), "it is read as top-p": by_law(SamplingParams(top_p=0.6))}),
    "steps": Step(WARM, by_blocks(), {"the bonus token is the draft's": by_blocks("bonus"),
                                            "a rejected token's key stays": by_blocks("stale")}),
    "function, XTC": Step(SamplingParams(function=exclude_top_choices), by_excluding(0.5), {
        "it is ignored": by_excluding(0.0), "it excludes always": by_excluding(1.0)})}


def audited(step: Step, draw: Callable[[np.random.Generator, int], Drawn], seed: int, texts: int = TEXTS) -> Audit:
    """The audit of texts of two prompts, at a level of 0.001."""
    rng, read = np.random.default_rng(seed), []
    for number in range(texts):
        prompt = np.array([number % 2, 7 + number % 2])
        tokens, steps = draw(rng, int(prompt[-1]))
        read.append(DrawnText(str(number), prompt, np.array(tokens), steps=steps))

    def of_table(model: object, text: DrawnText, law: SamplingParams, blend: None):
        logits = torch.from_numpy(TABLE[np.append(text.prompt[-1:], text.tokens[:-1])]).float()
        return payments(lambda piece: logits[piece], text.prompt, text.tokens, law, [slice(0, len(text.tokens))])

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(audits, "read_text", of_table)
        return audits.audit(SimpleNamespace(dtype=torch.float32), read, step.law, 1e-3)


def red_at(found: Audit) -> int | None:
    """The number of tokens after which an audit is red: by evidence, or by a token that the law cannot draw."""
    lengths = np.diff(found.course[:, 0], prepend=0.0).cumsum()
    outside = [int((lengths[int(name) - 1] if int(name) else 0) + place + 1) for name, place, away in found.outside
               if away > found.near]
    return min([*outside, *([found.together.red_at] if found.together.red_at else [])], default=None)


@pytest.mark.parametrize("name", quick(STEPS, "order=temperature_last", "steps"))
@pytest.mark.parametrize("count", [20, pytest.param(1_000, marks=pytest.mark.slow)])
def test_right_laws_are_red_at_most_as_often_as_stated(name, count):
    """At levels of 0.1, 0.01 and 0.001: no more audits than the level's share, plus three standard errors for few of them."""
    found = [audited(STEPS[name], STEPS[name].right, seed) for seed in range(count)]
    assert not any(each.outside[each.near_ties:] for each in found)
    for level in (0.1, 0.01, 0.001):
        red = sum(each.together.largest >= -np.log10(level) for each in found)
        assert red <= count * level + (count < 1_000) * 3 * np.sqrt(count * level), (level, red)


@pytest.mark.parametrize(("name", "fault"), quick(
    [(name, fault) for name, step in STEPS.items() for fault in step.wrong], "top_n_sigma", "steps"))
def test_a_step_that_is_taken_wrongly_is_red(name, fault):
    assert red_at(audited(STEPS[name], STEPS[name].wrong[fault], 0, 100)) is not None


@pytest.mark.parametrize(("fault", "says"), quick(
    [("bonus", "were all accepted"), ("stale", "after a rejected token"), ("", "")], "stale"))
def test_a_fault_of_speculation_is_seen_at_its_place_in_a_block(fault, says):
    """Bets on its place have more evidence than those on all places, and a right decoder has none."""
    rng, draw, learned = np.random.default_rng(6), by_blocks(fault), Steps()
    p = torch.from_numpy(TABLE / WARM.temperature).softmax(-1).numpy()
    placed, everywhere = Evidence(Steps.bets, 1e-3), Evidence([Bet("top", "")] * 6, 1e-3)
    for number in range(300):
        tokens, steps = draw(rng, number % VOCABULARY)
        law = p[[number % VOCABULARY, *tokens[:-1]]]
        top, expected = (tokens == law.argmax(axis=1)).astype(float), law.max(axis=1)
        placed.add(learned.payments(steps, top, expected))
        everywhere.add(Steps().payments([1, 1] * (len(top) // 2) + [1] * (len(top) % 2), top, expected)[:, :6])
    best = max(range(len(Steps.bets)), key=lambda bet: placed.each()[bet].evidence)
    assert (placed.together().red_at is not None) == bool(fault)
    if fault:
        assert says in Steps.bets[best].says
        assert placed.together().evidence > everywhere.together().evidence + 10.0
