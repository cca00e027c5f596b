"""The exact law of `sampler=temperature` on the tabular engine, for every truncation, and mutants that miss it."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from dflash_mcmc.engine.tabular import TabularEngine, TabularModel
from dflash_mcmc.ops import Draw, Law
from dflash_mcmc.sampler.temperature import Temperature
from dflash_mcmc.testing import PROMPT, law_of, total_variation
from dflash_mcmc.types import ChainResult, Path

HORIZON, VOCAB, EXACT, WRONG = 3, 4, 1e-12, 1e-3


def make(**changes) -> Temperature:
    return Temperature(**{**dict(alpha=2.0, temperature=None, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0),
                          **changes})


def by_hand(engine: TabularEngine, options: dict) -> dict:
    """The law from the definitions of the truncations, written out with sorted lists and no shared code."""
    law = {}
    temperature = options.get("temperature") or 1.0 / options.get("alpha", 2.0)
    for length in range(1, HORIZON + 1):
        for tokens in itertools.product(range(VOCAB), repeat=length):
            if any(t in engine.model.stop_ids for t in tokens[:-1]):
                continue
            if length < HORIZON and tokens[-1] not in engine.model.stop_ids:
                continue
            probability = 1.0
            for position, token in enumerate(tokens):
                prefix = (*PROMPT.tolist(), *tokens[:position])
                logits = list(engine.model.logits(prefix, "last"))
                penalty = options.get("repetition_penalty", 1.0)
                logits = [(x / penalty if x > 0 else x * penalty) if v in prefix else x for v, x in enumerate(logits)]
                weights = {v: math.exp(x / temperature) for v, x in enumerate(logits)}
                if options.get("top_k"):
                    weights = dict(sorted(weights.items(), key=lambda item: -item[1])[: options["top_k"]])
                if options.get("top_p"):
                    kept, mass, total = {}, 0.0, sum(weights.values())
                    for v, w in sorted(weights.items(), key=lambda item: -item[1]):
                        if mass >= options["top_p"]:
                            break
                        kept[v], mass = w, mass + w / total
                    weights = kept
                if options.get("min_p"):
                    weights = {v: w for v, w in weights.items() if w >= options["min_p"] * max(weights.values())}
                probability *= weights.get(token, 0.0) / sum(weights.values())
            if probability:
                law[tokens] = probability
    return law


OPTIONS = {
    "from_alpha": {"alpha": 4.0}, "given": {"temperature": 0.7}, "top_k": {"top_k": 2}, "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.3}, "penalty": {"repetition_penalty": 1.7},
    "all": {"temperature": 1.3, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("stop_ids", [(0,), (1, 3), ()])
def test_exact_law(options, stop_ids):
    engine, sampler = TabularEngine(TabularModel(VOCAB, stop_ids, seed=4)), make(**options)
    law = law_of(lambda key: engine.run(sampler.chain(PROMPT, HORIZON, key)).path)
    assert total_variation(law, by_hand(engine, options)) <= EXACT


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p", "penalty"])
def test_leaving_a_truncation_out_fails(name):
    engine, sampler = TabularEngine(TabularModel(VOCAB, (0,), seed=4)), make()
    law = law_of(lambda key: engine.run(sampler.chain(PROMPT, HORIZON, key)).path)
    assert total_variation(law, by_hand(engine, OPTIONS[name])) > WRONG


def test_taking_the_argmax_for_the_first_token_fails():
    def mutant(key):
        first = yield Draw(Path.start(PROMPT), 1, Law(0.0), key.fold_in("first"))
        path = yield Draw(first, HORIZON, sampler.law(), key)
        return ChainResult(path)

    engine, sampler = TabularEngine(TabularModel(VOCAB, (0,), seed=4)), make()
    law = law_of(lambda key: engine.run(mutant(key)).path)
    assert total_variation(law, by_hand(engine, {})) > WRONG


def test_sampling_with_real_keys_has_the_same_law():
    """20,000 draws against the exact law: chi-square at a fixed seed, so the p-value is a constant."""
    from scipy import stats

    from dflash_mcmc.rng import Key

    engine, sampler = TabularEngine(TabularModel(VOCAB, (0,), seed=4)), make()
    exact = by_hand(engine, {})
    states = sorted(exact)
    counts = dict.fromkeys(states, 0)
    for number in range(20_000):
        counts[tuple(engine.run(sampler.chain(PROMPT, HORIZON, Key(number))).path.tokens.tolist())] += 1
    expected = np.array([exact[s] for s in states]) * 20_000
    common = expected > 5
    observed = np.array([counts[s] for s in states])
    statistic = ((observed - expected) ** 2 / expected)[common].sum()
    assert stats.chi2.sf(statistic, common.sum() - 1) > 0.001
