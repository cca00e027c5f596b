"""Early rejection on the device: its floors are those that `ops.Floor` defines, and `eps` decides as `off` does."""

import math

import numpy as np
import pytest
import torch

from dflash_mcmc.engine.batching.batched import BatchedEngine
from dflash_mcmc.engine.batching.interface import Options
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.batching.rows import Limit, Rows, Start, below_floor
from dflash_mcmc.ops import Draw, Floor, SamplingParams, Score
from dflash_mcmc.rng import Key
from dflash_mcmc.types import ChainResult, Trajectory
from tests.engine.batching.test_batched import BLENDS, TOLERANCE
from tests.engine.speculative.test_speculator import drafter, match


@pytest.mark.parametrize("length", [None, 3, 9])
@pytest.mark.parametrize("margin", [0.0, 2.5])
def test_a_row_is_below_its_floor_exactly_where_the_floor_is_crossed(length, margin):
    """b_t + margin <= log u, with b_t = W_t - reference + log(length / t), for weights on both sides of it."""
    prompt, horizon = np.arange(4), 12
    floor = Floor(log_uniform=-0.7, alpha=2.0, reference=1.3, length=length, margin=margin)
    draw = Draw(Trajectory.start(prompt), horizon, SamplingParams(), Key(0), floor=floor)
    state = Rows(1, 20, 5, torch.device("cpu"))
    state.begin([Start(0, 3, 4, 3 + horizon, 4, np.full(horizon, 0.5), Limit.of(draw, draw.trajectory))])
    found = set()
    for generated in range(1, horizon + 1):
        edge = -0.7 + 1.3 - margin - (math.log(length / generated) if length else 0.0)
        for weight in (edge - 0.1, edge + 0.1):
            at = torch.tensor([[len(prompt) + generated - 1]])
            below = bool(below_floor(state, at, torch.tensor([[weight]], dtype=torch.float64)))
            assert below == floor.crossed(weight, generated) == (weight < edge)
            found.add(below)
    assert found == {True, False}


LAW = SamplingParams(0.4, top_k=30)


def drawn_early(number: int, shared: bool):
    """A draw with a floor, and the same draw without one. The floor is crossed somewhere in most of these draws."""
    start, key = Trajectory.start(np.array([11, 5, number])), Key(number)
    along = (yield Draw(start, 12, LAW, key.fold_in("along"))) if shared else None
    whole = yield Draw(start, 12, LAW, key.fold_in("draw"))
    floor = Floor(0.0, 1.5, 0.0, 9 if number % 2 else None, 0.25)
    bounds = [floor.bound(float(weight), generated) for generated, weight in enumerate(floor.weights(whole, 0), 1)]
    place = number % len(bounds)
    floor = floor._replace(log_uniform=bounds[place] + floor.margin + 1e-6)
    early = yield Draw(start, 12, LAW, key.fold_in("draw"), along=along, floor=floor)
    crossed = [floor.crossed(float(weight), generated) for generated, weight in enumerate(floor.weights(whole, 0), 1)]
    expected = whole.prefix(crossed.index(True) + 1)
    return ChainResult(early, measures={"expected": expected.length, "whole": whole.length,
                                        "same": float(np.array_equal(early.tokens, expected.tokens))})


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "along"])
@pytest.mark.parametrize("decoder", [None, match()], ids=["plain", "match"])
def test_a_draw_ends_with_the_first_token_at_which_its_floor_is_crossed(qwen3, decoder, shared):
    """Also if some of its tokens are those of another trajectory, and need no forward."""
    parts = LanguageModel(qwen3, stop_ids=(3,))
    speculation = None if decoder is None else decoder.speculation(drafter("self", parts, qwen3))
    engine = BatchedEngine(parts, BLENDS["none"], 8, 24, Options(), None, speculation)
    found = [done for done in engine.run((number, drawn_early(number, shared)) for number in range(24))]
    for done in found:
        assert done.result.measures["same"], done.tag
    assert sum(done.result.measures["expected"] < done.result.measures["whole"] for done in found) >= 8
    assert not shared or sum(done.cost.tokens_skipped for done in found) >= 10


def abandoned_and_scored(key: Key):
    """A draw, another that overwrites its keys, the first again up to an early end, and a score of all of the first."""
    start, law = Trajectory.start(np.array([11, 5, 23])), SamplingParams()
    whole = yield Draw(start, 12, law, key.fold_in("first"))
    other = yield Draw(start, 12, law, key.fold_in("second"))
    early = yield Draw(start, 12, law, key.fold_in("first"), floor=Floor(1e3, 1.0, 0.0, None, 0.0))
    scored = yield Score(whole.prefix(early.length + 1), whole.tokens[early.length + 1:], law)
    return ChainResult(scored, measures={"differs": float(other.tokens[0] != whole.tokens[0] and early.length < whole.length),
                                         "off": float(np.abs(scored.log_p - whole.log_p).max())})


def test_the_last_token_of_an_abandoned_draw_has_no_keys(qwen3):
    """It has not been fed. A later operation that begins with the draw's tokens reads it."""
    engine = BatchedEngine(LanguageModel(qwen3, stop_ids=(3,)), BLENDS["none"], 3, 24, Options())
    found = [done.result.measures for done in engine.run((number, abandoned_and_scored(Key(number))) for number in range(8))]
    assert sum(measures["differs"] for measures in found) >= 5
    assert max(measures["off"] for measures in found) < TOLERANCE
