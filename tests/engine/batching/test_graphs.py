"""Steps without CUDA graphs say so once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dflash_mcmc.engine.batching import batched
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.batching.rows import Group, Rows
from dflash_mcmc.engine.batching.stop_strings import Endings, StopStrings, TokenTexts
from dflash_mcmc.engine.speculative.steps import PlainSteps
from dflash_mcmc.errors import note
from dflash_mcmc.ops import Draw, SamplingParams
from dflash_mcmc.rng import Key
from dflash_mcmc.types import Trajectory
from tests.targets import random_model


class Runner:
    grid = None


ENDINGS = Endings([1], None, torch.device("cpu"))


@pytest.fixture(autouse=True)
def first_note():
    note.cache_clear()
    yield
    note.cache_clear()


def test_a_reason_against_graphs_is_noted_once(capsys):
    steps = PlainSteps(Runner())
    for _ in range(2):
        assert batched.graphed(steps, "the model has recurrent layers", ENDINGS) is steps
    noted = capsys.readouterr().err.splitlines()
    assert noted == ["decode steps run without CUDA graphs, because the model has recurrent layers"]


def test_steps_are_captured_without_a_reason_against_it(capsys):
    assert isinstance(batched.graphed(PlainSteps(Runner()), None, ENDINGS), batched.GraphedSteps)
    assert not capsys.readouterr().err


def test_steps_are_captured_again_after_new_stop_strings(monkeypatch):
    """A graph holds the tensors of its capture, and new strings are in other tensors."""
    captured = []

    class Graph:
        def replay(self):
            captured[-1] += 1

    texts = TokenTexts((b"a", b"b"), {})
    endings = Endings([1], None, torch.device("cpu"), lambda stop: StopStrings(stop, texts))
    steps = batched.GraphedSteps(PlainSteps(Runner()), endings)
    monkeypatch.setattr(batched.GraphedSteps, "_capture", lambda *arguments: captured.append(0) or Graph())
    draw, state = Draw(Trajectory.start(np.array([1])), 9, SamplingParams(), Key(0)), Rows(1, 4, 2, torch.device("cpu"))
    for stop in ((), ("ab",), ("ab",), ("b",)):
        endings.begin(draw._replace(stop=stop), np.array([], np.int64))
        steps.step(None, state, 1, 4, (Group(SamplingParams(), "blended", None),))
    assert captured == [1, 2, 1]


@pytest.mark.parametrize(("family", "changes", "reason"), [
    ("qwen3", {}, None), ("qwen3_5", {}, "the model has recurrent layers"),
    ("qwen3_next", {}, "the model is a mixture of experts"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
     "the model's rotary embedding grows with the text")])
def test_models_say_why_they_are_not_captured(family, changes, reason):
    assert LanguageModel(random_model(family, **changes)).uncaptured == reason
