"""Statistical tests of decoders on the batched engine: laws of short sequences, and long texts.

Every deliberate fault is detected. The exact tests of the rules use the tabular engine (`test_speculative_match.py`,
`test_speculative_rejection.py`).
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import pytest

from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.speculative import rules
from dflash_mcmc.engine.speculative.drafter import NgramDrafter
from dflash_mcmc.ops import SamplingParams
from dflash_mcmc.rng import Key
from tests.campaigns import chi_square, drawn, exact_law, random_drafter
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

LONG, NUM_LONG = 1200, 16


def test_long_texts_by_match_equal_those_of_plain_decoding():
    """Of a random model with 2,048 positions, at a temperature so low that repeated greedy tokens would lead to loops."""
    parts = LanguageModel(random_model(sharpness=1.0, max_position_embeddings=2048, eos_token_id=None))
    prompts = [np.array([11, 5, 23])] * NUM_LONG
    plain, by_match = (drawn(parts, speculation, prompts, SamplingParams(0.5), LONG, Key(1), NUM_LONG)
                       for speculation in (None, match().speculation(NgramDrafter(3, 2))))
    same = sum(a == b for a, b in zip(by_match, plain, strict=True))
    assert same >= NUM_LONG - 1  # one of 19,200 draws may differ by rounding
