"""Steps without CUDA graphs say so once."""

from __future__ import annotations

import pytest

from dflash_mcmc.inference import graphs
from dflash_mcmc.inference.language_model import LanguageModel
from dflash_mcmc.inference.plain_steps import PlainSteps
from tests.targets import random_model


class Runner:
    grid = None


@pytest.fixture(autouse=True)
def first_note():
    graphs._note.cache_clear()
    yield
    graphs._note.cache_clear()


def test_a_reason_against_graphs_is_noted_once(capsys):
    steps = PlainSteps(Runner())
    for _ in range(2):
        assert graphs.graphed(steps, "the model has recurrent layers") is steps
    noted = capsys.readouterr().err.splitlines()
    assert noted == ["hardware.cuda_graphs: decode steps run without CUDA graphs, because the model has recurrent layers"]


def test_steps_are_captured_without_a_reason_against_it(capsys):
    assert isinstance(graphs.graphed(PlainSteps(Runner()), None), graphs.GraphedSteps)
    assert not capsys.readouterr().err


@pytest.mark.parametrize(("family", "changes", "reason"), [
    ("qwen3", {}, None), ("qwen3_5", {}, "the model has recurrent layers"),
    ("qwen3_next", {}, "the model is a mixture of experts"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
     "the model's rotary embedding grows with the text")])
def test_models_say_why_they_are_not_captured(family, changes, reason):
    assert LanguageModel(random_model(family, **changes)).uncaptured == reason
