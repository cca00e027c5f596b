"""Fixtures of the tests of training."""

from collections.abc import Callable, Iterator

import pytest
import torch

from dflash_mcmc.train.recipe import DraftPlan, compose


@pytest.fixture(autouse=True)
def keep_threads() -> Iterator[None]:
    """Brings back the number of threads, which a training sets."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def plan(request, tmp_path) -> Callable[..., DraftPlan]:
    """A function from overrides to a plan of a draft with the values `SMALL` of the test's module."""
    return lambda *overrides: compose("tiny", [*request.module.SMALL, f"paths.outputs={tmp_path}", *overrides])
