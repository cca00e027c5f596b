"""Statistical tests of decoders on the batched engine: laws of short sequences, answers of the embedded model, and long texts.

Every deliberate fault is detected. The exact tests of the rules use the tabular engine (`test_speculative_match.py`,
`test_speculative_rejection.py`).
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import pytest

from dflash_mcmc.config.schema import PACKAGE
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.speculative import rules
from dflash_mcmc.engine.speculative.drafter import NgramDrafter
from dflash_mcmc.ops import SamplingParams
from dflash_mcmc.rng import Key
from tests.bench.subject import subject_of
from tests.campaigns import chi_square, drawn, exact_law, random_drafter, swapped, two_histograms, two_means
from tests.engine.speculative.test_speculator import match, reject
from tests.targets import random_model

pytestmark = pytest.mark.slow

SIX, LENGTH, MASK = 6, 4, 5
NUM_DRAWS, REPEATS, LEVEL = 20_000, 40, 1e-4


class Setting(NamedTuple):
    """A law and a prompt. The prompt repeats tokens, so the n-gram draft finds matches in it."""

    law: SamplingParams
    stops: tuple[int, ...] = ()
    prompt: tuple[int, ...] = (4, 1, 0, 2, 1, 0)


SETTINGS = {
    "temperature": Setting(SamplingParams(0.7)),
    "stops": Setting(SamplingParams(1.0), stops=(3,)),
    "filters": Setting(SamplingParams(1.2, top_k=5, top_p=0.95, min_p=0.05)),
    # With a short prompt the penalty applies to drafted tokens.
    "penalty": Setting(SamplingParams(0.9, repetition_penalty=4.0), prompt=(4,)),
}
RIGHT = {"match": match(), "match_sampled": match(1.0), "token": reject(), "token_flat": reject(1.5),
         "block": reject(verification="block")}
CASES = [*((decoder, "dflash", "temperature") for decoder in RIGHT),
         *((decoder, "ngram", "temperature") for decoder in ("match", "token", "block")),
         *((decoder, "dflash", setting) for setting in ("stops", "filters", "penalty")
           for decoder in ("match_sampled", "token", "block"))]
WRONG = [pytest.param(decoder, name, id=f"{word}-{name}") for word, decoder, names in (
    ("match", match(1.0), rules.MATCH), ("rejection", reject(), rules.REJECTION)) for name in names]


@pytest.fixture(scope="module")
def six():
    """A target with six tokens. Most of its 1,296 sequences of four tokens are likely enough to be counted."""
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


def faulty(decoder, name: str):
    """The decoder with a fault, and the setting in which the fault is large."""
    settings = {"finite_window": {"fault_window": 3}, "greedy_walk": {"draft_temperature": 0.0}}
    return dataclasses.replace(decoder, fault=name, **settings.get(name, {}))


@pytest.mark.parametrize(("decoder", "name"), WRONG)
def test_every_fault_is_detected(six, decoder, name):
    setting = SETTINGS[{"late_penalty": "penalty", "unprocessed_draft": "filters"}.get(name, "temperature")]
    count = 24_000 if name == "residual_by_draft_noise" else 8000  # this fault is small; the others are large
    assert p_value(six, faulty(decoder, name), "dflash", setting, count) < LEVEL


NUM_ANSWERS = 150
NOISE, FAR = 1e-3, 8.0
"""A correct decoder has a p-value above NOISE. A fault is more than FAR standard deviations away."""


class Answers:
    """Answers of the embedded model to the first problems, at temperature 1 and with its own draft."""

    def __init__(self):
        self.subject = subject_of("tiny", 64, str(PACKAGE / "assets/tiny_draft"))
        self.plain = self.by(None, "plain")

    def by(self, decoder, name: str) -> list[tuple[int, ...]]:
        """Answers by a decoder; None is plain decoding. Answers under different names are independent."""
        model, prompts = self.subject.model, self.subject.prompts[:NUM_ANSWERS]
        speculation = decoder.speculation(self.subject.draft.load(model)) if decoder else None
        return drawn(model, speculation, prompts, SamplingParams(1.0), self.subject.horizon, Key(0).fold_in(name), 64)

    def against_plain(self, answers: list[tuple[int, ...]], length: int | None) -> tuple[float, float]:
        """Compares the token histograms of the first `length` tokens, or of all tokens, with plain decoding: see `swapped`."""
        def histograms(found):
            return np.stack([np.bincount(tokens[:length], minlength=self.subject.model.vocab_size) for tokens in found])

        return swapped(two_histograms, histograms(self.plain), histograms(answers))


@pytest.fixture(scope="module")
def answers():
    return Answers()


@pytest.mark.parametrize("verification", ["token", "block"])
def test_answers_have_the_token_histogram_of_plain_decoding(answers, verification):
    found = answers.by(reject(verification=verification), verification)
    assert answers.against_plain(found, None)[0] > NOISE
    assert answers.against_plain(found, 1)[0] > NOISE


@pytest.mark.parametrize(("name", "length"), [("greedy_first", 1), ("greedy_bonus", 1), ("greedy_bonus", None)])
def test_answers_with_a_greedy_fault_have_another_token_histogram(answers, name, length):
    found = answers.by(dataclasses.replace(match(), fault=name), name)
    assert answers.against_plain(found, length)[1] > FAR


LONG, NUM_LONG, NO_TOKEN = 1200, 16, 60


class Texts:
    """Long texts of a random model with 2,048 positions. The embedded model has only 1,024."""

    def __init__(self):
        self.model = random_model(sharpness=1.0, max_position_embeddings=2048, eos_token_id=None)
        self.parts = LanguageModel(self.model)
        self.plain = self.by(None, "plain")

    def by(self, decoder, key: str, draft: str = "ngram") -> list[tuple[int, ...]]:
        """Texts by a decoder. The temperature is so low that repeated greedy tokens would lead to loops."""
        drafter = NgramDrafter(3, 2) if draft == "ngram" else random_drafter(self.parts, self.model, NO_TOKEN)
        speculation = decoder.speculation(drafter) if decoder else None
        prompts = [np.array([11, 5, 23])] * NUM_LONG
        return drawn(self.parts, speculation, prompts, SamplingParams(0.5), LONG, Key(1).fold_in(key), NUM_LONG)


def new_fours(texts: list[tuple[int, ...]]) -> np.ndarray:
    """Number of different 4-grams divided by the number of all 4-grams, for each text."""
    fours = [list(zip(*(text[start:] for start in range(4)), strict=False)) for text in texts]
    return np.array([len(set(mine)) / len(mine) for mine in fours])


@pytest.fixture(scope="module")
def texts():
    return Texts()


def test_long_texts_by_match_equal_those_of_plain_decoding(texts):
    same = sum(a == b for a, b in zip(texts.by(match(), "plain"), texts.plain, strict=True))
    assert same >= NUM_LONG - 1  # one of 19,200 draws may differ by rounding


@pytest.mark.parametrize("verification", ["token", "block"])
def test_long_texts_do_not_degenerate(texts, verification):
    found = texts.by(reject(verification=verification), verification, "dflash")
    assert {len(text) for text in found} == {LONG}
    assert swapped(two_means, new_fours(texts.plain), new_fours(found))[0] > NOISE


def test_long_texts_with_greedy_bonus_tokens_degenerate(texts):
    found = texts.by(dataclasses.replace(match(), fault="greedy_bonus"), "bonus")
    assert new_fours(found).mean() < 0.5 * new_fours(texts.plain).mean()
