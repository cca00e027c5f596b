"""The memory plan equals the allocated memory. An engine that does not fit is refused with an error that gives the sizes."""

from __future__ import annotations

import pytest

from dflash_mcmc.blend.none import NoBlend
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.inference.batched import BatchedEngine
from dflash_mcmc.inference.interface import Options
from dflash_mcmc.inference.language_model import LanguageModel
from dflash_mcmc.inference.plan import plan, predict
from tests.targets import random_model


@pytest.fixture(scope="module")
def model():
    return LanguageModel(random_model(), stop_ids=(3,))


@pytest.mark.parametrize("changes", [{}, {"read_ahead": 0}, {"keep_current": False}, {"reuse_prefix": False}])
def test_caches_are_as_large_as_predicted(model, changes):
    options = Options(**changes)
    engine = BatchedEngine(model, NoBlend(), 12, 150, options, prompt_length=100)
    memory, rows = engine._memory, engine._loop.rows
    memory.reserve(150)
    if memory.spare:
        memory.spare.reserve(memory.cache.length)
    caches = [memory.cache, memory.spare, memory.prompts and memory.prompts._cache]
    held = sum(cache.keys.nbytes + cache.values.nbytes for cache in caches if cache)
    held += rows.tokens.nbytes + rows.uniforms.nbytes + rows.scores.nbytes
    assert predict(model, 12, 150, 100, options).caches == held


def test_slots_that_do_not_fit_are_refused_with_the_numbers(model):
    one = predict(model, 8, 150, 100, Options()).total
    with pytest.raises(ConfigError) as refused:
        plan(model, 64, 1000, 150, 100, Options(), memory_gb=1.2 * one / 1e9)
    text = str(refused.value)
    assert text.startswith("hardware.num_slots: given 64; allowed: at most 8 (64 slots of 150 tokens take 0.0")
    assert "hardware.memory_gb" in text
    with pytest.raises(ConfigError, match="allowed: none: one slot takes"):
        plan(model, None, 1000, 150, 100, Options(), memory_gb=1e-5)


def test_null_takes_what_fits_and_no_more_than_there_are_chains(model):
    one = predict(model, 8, 150, 100, Options()).total
    assert plan(model, None, 1000, 150, 100, Options(), memory_gb=1.2 * one / 1e9).num_slots == 8
    assert plan(model, None, 1000, 150, 100, Options(), memory_gb=None).num_slots == 256
    assert plan(model, None, 5, 150, 100, Options(), memory_gb=None).num_slots == 5
    assert plan(model, 3, 1000, 150, 100, Options(), memory_gb=None).num_slots == 3
