"""Fixtures of the engine: a random model, and what it draws token by token."""

import functools

import pytest

from tests.targets import random_model


@pytest.fixture(scope="session")
def qwen3():
    return random_model("qwen3")


@pytest.fixture(scope="session")
def plain(qwen3):
    """Results of a sampler under a blend with default options, drawn once, token by token: plain("power_mh", "layer")."""
    from tests.engine.batching.test_batched import BLENDS, SAMPLERS, run_batched

    return functools.cache(lambda name, blend="none": run_batched(qwen3, SAMPLERS[name], BLENDS[blend]))
