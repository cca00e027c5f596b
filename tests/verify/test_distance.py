"""The distance between the law of an engine in half precision and the stated one: exact at a place, estimated over places."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import dflash_mcmc as dm
from dflash_mcmc.engine.oracle import exact_law
from dflash_mcmc.ops import SamplingParams
from dflash_mcmc.verify.distance import distances, laws_of, mean_interval, sampled, total_variation
from dflash_mcmc.verify.drawn import DrawnText
from tests.cases import quick

LAWS = (SamplingParams(), SamplingParams(temperature=0.7, top_p=0.8), SamplingParams(frequency_penalty=1.5))
TEXTS = [DrawnText("one", np.array([5, 17, 200, 31]), np.array([40, 41, 42, 40, 12, 9])),
         DrawnText("two", np.array([300, 12]), np.array([77, 5, 5, 31, 30, 8, 8, 8, 17, 44, 46]))]


@pytest.fixture(scope="module")
def coarse():
    return dm.component("model", "tiny", dtype="bfloat16").load("cpu")


@pytest.fixture(scope="module")
def exact():
    return dm.component("model", "tiny").load("cpu")


def places(text: DrawnText) -> np.ndarray:
    return np.arange(len(text.tokens))


def variation(coarse, exact, law: SamplingParams) -> np.ndarray:
    """The exact total variation at every place of the texts."""
    return np.concatenate([total_variation(laws_of(coarse, text, law, places(text), 1, None),
                                           laws_of(exact, text, law, places(text), None, None)) for text in TEXTS])


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("width", [None, 1, 4])
def test_the_law_of_a_place_is_the_models(law, width, exact):
    """With the law of the reference implementation, over logits that transformers computes for the whole text."""
    text = TEXTS[1]
    whole = torch.from_numpy(np.concatenate([text.prompt, text.tokens]))[None]
    with torch.no_grad():
        logits = exact.logits(exact.hidden(whole))[0, len(text.prompt) - 1 : -1].double().numpy()
    chosen = np.array([0, 3, 4, 10])
    found = laws_of(exact, text, law, chosen, width, None).exp().numpy()
    for row, place in zip(found, chosen, strict=True):
        expected = np.exp(exact_law.process(logits[place], law, text.prompt, text.tokens[:place]))
        assert row == pytest.approx(expected, abs=2e-5)


@pytest.mark.slow
def test_the_estimate_has_no_bias_and_all_places_give_the_exact_distance(coarse, exact):
    """The mean of 40 estimates lies within four of its standard errors of the exact mean over all tokens."""
    law = LAWS[1]
    known = variation(coarse, exact, law)
    assert known.mean() > 1e-3
    (whole,) = distances(coarse, exact, TEXTS, law, 1_000, 1, 0.05, 0)
    assert (whole.tv.value, whole.tv.low) == (pytest.approx(known.mean()), pytest.approx(known.mean()))
    assert (whole.largest, whole.tokens, whole.places) == (pytest.approx(known.max()), 17, 17)
    assert whole.answer == pytest.approx(known.sum() / 2)
    estimates = [distances(coarse, exact, TEXTS, law, 8, 1, 0.05, seed)[0] for seed in range(40)]
    assert {each.places for each in estimates} == {8}
    error = known.std() / np.sqrt(8 * 40)
    assert np.mean([each.tv.value for each in estimates]) == pytest.approx(known.mean(), abs=4 * error)


def test_the_interval_covers_the_exact_distance(coarse, exact):
    """At a level of 0.05, in at least 93 of 100 repetitions: the embedded model in bfloat16, all tokens of the texts."""
    for law in LAWS:
        known, covered = variation(coarse, exact, law), 0
        for seed in range(100):
            rng = np.random.default_rng(seed)
            found = mean_interval(known[rng.integers(len(known), size=2_000)], 0.05)
            covered += found.low <= known.mean() <= found.high
            assert 0.0 < found.low < found.value < found.high < 6.0 * known.mean()
        assert covered >= 93


def test_total_variation_is_half_the_absolute_difference():
    one, other = (torch.tensor([row], dtype=torch.float64).log() for row in ([0.5, 0.3, 0.2, 0.0], [0.25, 0.3, 0.2, 0.25]))
    assert total_variation(one, other) == pytest.approx([0.25])
    assert total_variation(one, one) == pytest.approx([0.0])


@pytest.mark.parametrize("share", quick([0.01, 0.3, 0.9], 0.01))
def test_the_interval_covers_the_mean_of_rare_large_values(share):
    """Values that are 0 or 1, the hardest case: 400 repetitions of 60 values at a level of 0.2."""
    rng = np.random.default_rng(3)
    found = [mean_interval((rng.random(60) < share).astype(float), 0.2) for _ in range(400)]
    missed = sum(not one.low <= share <= one.high for one in found)
    assert missed <= 400 * 0.2
    assert all(0.0 <= one.low <= one.value <= one.high <= 1.0 for one in found)


def test_places_are_drawn_with_replacement_below_their_number():
    chosen, times = sampled(50, 40, 1)
    assert len(times) == 40 > len(chosen) == len(set(chosen.tolist()))
    assert chosen.max() < 50
    assert set(times.tolist()) == set(range(len(chosen)))
    drawn = np.concatenate([np.take(*sampled(5, 4, seed)) for seed in range(2_000)])
    assert np.bincount(drawn) / 8_000 == pytest.approx(np.full(5, 0.2), abs=0.02)
    assert [part.tolist() for part in sampled(3, 3, 0)] == [[0, 1, 2], [0, 1, 2]]
