"""Scores of several chains share a forward: records and costs are those of scores row by row, to the last bit."""

import math

import numpy as np
import pytest
import torch

from dflash_mcmc.blend.none import NoBlend
from dflash_mcmc.draft import load_feature_drafter
from dflash_mcmc.engine.batching.batched import BatchedEngine
from dflash_mcmc.engine.batching.interface import Options
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.batching.model_runner import ModelRunner
from dflash_mcmc.ops import SamplingParams, Score, Together
from dflash_mcmc.rng import Key
from dflash_mcmc.sampler.draft_mh import DraftMH
from dflash_mcmc.types import ChainResult, Trajectory
from tests.targets import random_model, rows_do_not_depend_on_the_batch

PROMPTS = [np.arange(1, 1 + length) for length in (5, 9, 14, 30)]


@pytest.fixture
def forwards(monkeypatch):
    """The number of rows of each forward that reads tokens, and the length of its rows."""
    found, states = [], ModelRunner.states

    def counted(self, cache, spans, size):
        found.append((len(spans), size))
        return states(self, cache, spans, size)

    monkeypatch.setattr(ModelRunner, "states", counted)
    return found


def drawn(model, drafter, forwards, slots=8, **options):
    """Results by chain, and the number of forwards that read or score tokens."""
    sampler = DraftMH(alpha=2.0, draft_temperature=0.8, num_blocks=2, num_steps=2, proposal="mixture",
                      draft_weight=0.4, proposal_temperature=None)
    engine = BatchedEngine(model, NoBlend(), slots, 60, Options(**options), drafter=drafter)
    forwards.clear()
    found = {done.tag: done for done in engine.run((number, sampler.chain(PROMPTS[number % 4], 16, Key(3).fold_in(number)))
                                                   for number in range(8))}
    return found, len(forwards)


@pytest.mark.slow
def test_scores_together_are_scores_row_by_row(make_config, forwards):
    config = make_config("draft=tiny", "sampler=draft_mh")
    model = config.model.load("cpu")
    drafter = load_feature_drafter(config, model)
    together, few = drawn(model, drafter, forwards)
    tolerance = 0.0 if rows_do_not_depend_on_the_batch() else 1e-4
    apart, many = drawn(model, drafter, forwards, slots=1)
    assert len(apart) == len(together) == 8
    for tag, done in together.items():
        one, other = done.result.trajectory, apart[tag].result.trajectory
        assert one.tokens.tolist() == other.tokens.tolist()
        for name in ("log_p", "log_q", "interval"):
            np.testing.assert_allclose(getattr(one, name), getattr(other, name), atol=tolerance, rtol=0)
        assert done.result.trace == apart[tag].result.trace or tolerance
        assert done.cost == apart[tag].cost
    assert few < many


def test_a_score_without_numbers_spoils_none_beside_it(forwards):
    """Six chains score two continuations each at once, in one forward. Two of the chains have one without numbers."""
    model = random_model("qwen3")
    with torch.no_grad():
        model.model.embed_tokens.weight[40] = torch.nan

    def scored(token):
        paths = yield Together(tuple(Score(Trajectory.start(PROMPTS[0]), np.array([5, each, 6]), SamplingParams())
                                     for each in (token, 8)))
        return ChainResult(paths[0])

    engine = BatchedEngine(LanguageModel(model, stop_ids=(3,)), NoBlend(), 12, 60)
    done = {each.tag: each for each in engine.run([(number, scored(40 if number % 3 == 1 else 41)) for number in range(6)])}
    assert max(forwards[1:])[0] == 12
    for number, each in done.items():
        if number % 3 == 1:
            assert each.result is None
            assert "not numbers" in each.failure
        else:
            assert each.result.trajectory.tokens.tolist() == [5, 41, 6]
            assert np.isfinite(each.result.trajectory.log_p).all()
    assert len(done) == 6


@pytest.mark.parametrize("chunk", [8, 16])
def test_pieces_of_different_lengths(forwards, chunk):
    """Scores of 1 to 40 tokens in one request, in pieces of at most `chunk` tokens, are those of one piece each. Each piece of
    the longest prompt (29 tokens are read) and of the longest score is a forward."""
    def scored():
        lengths = enumerate((1, 7, 8, 9, 23, 40))
        paths = yield Together(tuple(Score(Trajectory.start(PROMPTS[number % 4]), np.arange(length) + 1, SamplingParams(0.7))
                                     for number, length in lengths))
        return ChainResult(paths[0], trace=tuple({"log_p": float(path.log_p.sum()), "log_q": float(path.log_q.sum())}
                                                 for path in paths))

    model = LanguageModel(random_model("qwen3"), stop_ids=(3,))
    traces = []
    for largest in (chunk, 64):
        forwards.clear()
        (done,) = BatchedEngine(model, NoBlend(), 6, 80, Options(prefill_chunk=largest)).run([(0, scored())])
        assert max(size for _, size in forwards) <= largest
        assert done.cost.target_forwards == math.ceil(29 / largest) + math.ceil(40 / largest)
        traces.append([tuple(entry.values()) for entry in done.result.trace])
    np.testing.assert_allclose(*traces, atol=1e-3, rtol=0)
