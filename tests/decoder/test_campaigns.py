"""Decoders at work: laws of sequences counted out, answers of the embedded model, long texts. Every planted mistake shows.

The rules are proved on tables (`test_speculative_match.py`, `test_speculative_rejection.py`); here the engine is beneath them.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import pytest

from dflash_mcmc.bench.subject import subject_of
from dflash_mcmc.config.schema import PACKAGE
from dflash_mcmc.engine.language_model import LanguageModel
from dflash_mcmc.engine.speculative import faults
from dflash_mcmc.engine.speculative.drafter import NgramDrafter
from dflash_mcmc.ops import SamplingParams
from dflash_mcmc.rng import Key
from tests.campaigns import chi_square, drawn, exact_law, random_drafter, swapped, two_histograms, two_means
from tests.engine.speculative.test_speculator import match, reject
from tests.targets import random_model

pytestmark = pytest.mark.slow

SIX, LENGTH, MASK = 6, 4, 5
NUM_DRAWS, REPEATS, LEVEL = 20_000, 40, 1e-4


class Setting(NamedTuple):
    """A law, after a prompt in which tokens occur again."""

    law: SamplingParams
    stops: tuple[int, ...] = ()
    prompt: tuple[int, ...] = (4, 1, 0, 2, 1, 0)


SETTINGS = {
    "temperature": Setting(SamplingParams(0.7)),
    "stops": Setting(SamplingParams(1.0), stops=(3,)),
    "filters": Setting(SamplingParams(1.2, top_k=5, top_p=0.95, min_p=0.05)),
    # Of a penalty it is the drafted tokens that count, not those of the prompt.
    "penalty": Setting(SamplingParams(0.9, repetition_penalty=4.0), prompt=(4,)),
}
RIGHT = {"match": match(), "match_sampled": match(1.0), "token": reject(), "token_flat": reject(1.5),
         "block": reject(verification="block")}
CASES = [*((decoder, "dflash", "temperature") for decoder in RIGHT),
         *((decoder, "ngram", "temperature") for decoder in ("match", "token", "block")),
         *((decoder, "dflash", setting) for setting in ("stops", "filters", "penalty")
           for decoder in ("match_sampled", "token", "block"))]
WRONG = [pytest.param(decoder, name, id=f"{word}-{name}") for word, decoder, names in (
    ("match", match(1.0), faults.MATCH), ("rejection", reject(), faults.REJECTION)) for name in names]


@pytest.fixture(scope="module")
def six():
    """A target of six tokens: 1,296 sequences of four, most of them likely enough to be counted."""
    return random_model(sharpness=0.5, vocab_size=SIX, eos_token_id=None)


def p_value(model, decoder, draft: str, setting: Setting, count: int) -> float:
    parts = LanguageModel(model, stop_ids=setting.stops)
    drafter = NgramDrafter(3, 2) if draft == "ngram" else random_drafter(parts, model, MASK)
    prompts = [np.array(setting.prompt)] * (count // REPEATS)
    found = drawn(parts, decoder.speculation(drafter), prompts, setting.law, LENGTH, Key(7), 256, REPEATS)
    return chi_square(found, exact_law(model, setting.prompt, setting.law, LENGTH, setting.stops))


@pytest.mark.parametrize(("decoder", "draft", "setting"), CASES, ids=lambda word: word)
def test_sequences_have_the_law_of_the_target(six, decoder, draft, setting):
    assert p_value(six, RIGHT[decoder], draft, SETTINGS[setting], NUM_DRAWS) > LEVEL


@pytest.mark.parametrize(("decoder", "name"), WRONG)
def test_every_fault_shows(six, decoder, name):
    setting = SETTINGS[{"late_penalty": "penalty", "unprocessed_draft": "filters"}.get(name, "temperature")]
    count = 24_000 if name == "residual_by_draft_noise" else 8000  # a small fault; the others are far off
    assert p_value(six, dataclasses.replace(decoder, fault=name), "dflash", setting, count) < LEVEL


NUM_ANSWERS = 150
NOISE, FAR = 1e-3, 8.0
"""A p-value that is still noise, and standard deviations that are not."""


class Answers:
    """Of the embedded model at temperature 1, with its own draft, to the first problems."""

    def __init__(self):
        self.subject = subject_of("tiny", 64, str(PACKAGE / "assets/tiny_draft"))
        self.plain = self.by(None, "plain")

    def by(self, decoder, name: str) -> list[tuple[int, ...]]:
        """By a decoder, or by plain decoding; the draws of a name are independent of those of another."""
        model, prompts = self.subject.model, self.subject.prompts[:NUM_ANSWERS]
        speculation = decoder.speculation(self.subject.draft.load(model)) if decoder else None
        return drawn(model, speculation, prompts, SamplingParams(1.0), self.subject.horizon, Key(0).fold_in(name), 64)

    def against_plain(self, answers: list[tuple[int, ...]], length: int | None) -> tuple[float, float]:
        """Of the histograms of their tokens, or of the first ones."""
        def histograms(found):
            return np.stack([np.bincount(tokens[:length], minlength=self.subject.model.vocab_size) for tokens in found])

        return swapped(two_histograms, histograms(self.plain), histograms(answers))


@pytest.fixture(scope="module")
def answers():
    return Answers()


@pytest.mark.parametrize("verification", ["token", "block"])
def test_answers_have_the_tokens_of_plain_ones(answers, verification):
    found = answers.by(reject(verification=verification), verification)
    assert answers.against_plain(found, None)[0] > NOISE
    assert answers.against_plain(found, 1)[0] > NOISE


@pytest.mark.parametrize(("name", "length"), [("greedy_first", 1), ("greedy_bonus", 1), ("greedy_bonus", None)])
def test_answers_of_a_greedy_fault_have_not(answers, name, length):
    found = answers.by(dataclasses.replace(match(), fault=name), name)
    assert answers.against_plain(found, length)[1] > FAR


LONG, NUM_LONG, NO_TOKEN = 1200, 16, 60


class Texts:
    """Long ones of a random model with room for them: the embedded model has 1,024 positions."""

    def __init__(self):
        self.model = random_model(sharpness=1.0, max_position_embeddings=2048, eos_token_id=None)
        self.parts = LanguageModel(self.model)
        self.plain = self.by(None, "plain")

    def by(self, decoder, key: str, draft: str = "ngram") -> list[tuple[int, ...]]:
        """At a temperature at which the most likely tokens alone would go in circles."""
        drafter = NgramDrafter(3, 2) if draft == "ngram" else random_drafter(self.parts, self.model, NO_TOKEN)
        speculation = decoder.speculation(drafter) if decoder else None
        prompts = [np.array([11, 5, 23])] * NUM_LONG
        return drawn(self.parts, speculation, prompts, SamplingParams(0.5), LONG, Key(1).fold_in(key), NUM_LONG)


def new_fours(texts: list[tuple[int, ...]]) -> np.ndarray:
    """Share of four consecutive tokens that no others of the text equal, (texts,)."""
    fours = [list(zip(*(text[start:] for start in range(4)), strict=False)) for text in texts]
    return np.array([len(set(mine)) / len(mine) for mine in fours])


@pytest.fixture(scope="module")
def texts():
    return Texts()


def test_long_texts_by_match_are_plain_ones(texts):
    same = sum(a == b for a, b in zip(texts.by(match(), "plain"), texts.plain, strict=True))
    assert same >= NUM_LONG - 1  # in 19,200 draws one may fall on rounding


@pytest.mark.parametrize("verification", ["token", "block"])
def test_long_texts_do_not_degenerate(texts, verification):
    found = texts.by(reject(verification=verification), verification, "dflash")
    assert {len(text) for text in found} == {LONG}
    assert swapped(two_means, new_fours(texts.plain), new_fours(found))[0] > NOISE


def test_long_texts_with_greedy_tokens_between_do(texts):
    found = texts.by(dataclasses.replace(match(), fault="greedy_bonus"), "bonus")
    assert new_fours(found).mean() < 0.5 * new_fours(texts.plain).mean()
