"""One commit by hand: what a row gains, where it ends, and what penalties read afterwards."""

import numpy as np
import pytest
import torch

from dflash_mcmc.engine.batching.rows import Limit, Proposal, Rows, Start, Status, commit
from dflash_mcmc.engine.batching.stop_strings import FOUND, Endings, StopStrings
from dflash_mcmc.ops import Draw, SamplingParams
from dflash_mcmc.rng import Key
from dflash_mcmc.tokenizer import TokenTexts
from dflash_mcmc.types import Trajectory

STOPS, PROMPT, HORIZON, SLOTS = Endings([7], None, torch.device("cpu"), None), 3, 9, 4


@pytest.fixture
def state() -> Rows:
    """Three rows after a prompt of three tokens: live, live with a floor, and idle."""
    rows = Rows(3, 20, 10, torch.device("cpu"))
    rows.set_counts(0, np.array([], np.int64))
    start = Start(0, 5, PROMPT, PROMPT + HORIZON - 1, PROMPT, np.full(HORIZON, 0.5))
    rows.begin([start, start._replace(row=1, limit=Limit(2.0, threshold=-3.0))])
    return rows


def offered(tokens: list[list[int]], last: list[int], bad: list[tuple[int, int]] = (), first=(0, 0, 0)) -> Proposal:
    """Tokens with log p -1 and log q -0.5 each."""
    scores = torch.zeros(3, SLOTS, 4, dtype=torch.float64)
    scores[..., 0], scores[..., 1] = -1.0, -0.5
    wrong = torch.zeros(3, SLOTS, dtype=torch.bool)
    for place in bad:
        wrong[place] = True
    at = PROMPT + torch.arange(SLOTS).repeat(3, 1)
    return Proposal(at, torch.tensor(first), torch.tensor(last), torch.tensor(tokens), scores, wrong)


def test_rows_gain_what_is_offered_and_idle_rows_nothing(state):
    state.has_floors = True
    gained = commit(state, offered([[4, 4, 6, 1]] * 3, [2, 0, 3]), STOPS)
    assert gained.tolist() == [3, 1, 0]
    assert state.position.tolist() == [5, 3, 0]
    assert state.status.tolist() == [Status.LIVE, Status.LIVE, Status.DONE]
    assert state.tokens[0, PROMPT : PROMPT + 3].tolist() == [4, 4, 6]
    assert state.weight[1] == pytest.approx(2.0 * -1.0 + 0.5)


def test_tokens_are_counted_as_often_as_they_are_gained(state):
    commit(state, offered([[4, 4, 6, 1]] * 3, [2, 1, 3]), STOPS)
    assert state.counts[0].tolist() == [0, 0, 0, 0, 2, 0, 1, 0, 0, 0]
    assert state.counts[2].sum() == 0


def test_a_row_ends_with_the_first_stop_id(state):
    assert commit(state, offered([[4, 7, 7, 1]] * 3, [3, 0, 0]), STOPS).tolist() == [2, 1, 0]
    assert state.status.tolist() == [Status.DONE, Status.LIVE, Status.DONE]


def test_a_row_is_abandoned_with_the_first_token_below_its_floor(state):
    """Two tokens of weight -1.5 reach the floor -3. A stop id before it ends the draw instead."""
    state.has_floors = True
    assert commit(state, offered([[4, 4, 4, 4]] * 3, [3, 3, 3]), STOPS).tolist() == [4, 2, 0]
    assert state.status[1] == Status.ABANDONED


def test_the_token_before_bad_logits_is_the_last(state):
    gained = commit(state, offered([[4, 4, 4, 4]] * 3, [3, 3, 3], [(0, 2)]), STOPS)
    assert gained.tolist() == [2, 4, 0]
    assert state.status.tolist()[:2] == [Status.FAILED, Status.LIVE]


def test_slots_before_the_first_offered_one_stay(state):
    assert commit(state, offered([[9, 4, 5, 1]] * 3, [2, 2, 2], first=(1, 1, 1)), STOPS).tolist() == [2, 2, 0]
    assert state.tokens[0, PROMPT : PROMPT + 3].tolist() == [0, 4, 5]


def test_a_stop_string_ends_a_row_and_its_state_follows_the_tokens(state):
    """Token 4 is "a" and token 6 is "b". Row 1 begins after an "a"; what comes after its end changes nothing."""
    texts = TokenTexts(tuple(b"c" if token not in (4, 6) else b"ab"[token // 6:][:1] for token in range(10)), {})
    strings = StopStrings(["aab"], texts)
    endings = Endings([7], strings, torch.device("cpu"), None)
    draw = Draw(Trajectory.start(np.array([1])), 9, SamplingParams(), Key(0))
    nothing, a, aa = (endings.begin(draw, np.array(tokens, np.int64)) for tokens in ([], [4], [4, 4]))
    state.matched[:3] = torch.tensor([nothing, a, nothing])
    offer = offered([[1, 4, 4, 6], [4, 6, 1, 4], [4, 4, 6, 1]], [2, 3, 3])
    assert commit(state, offer, endings).tolist() == [3, 2, 0]
    assert state.status.tolist() == [Status.LIVE, Status.DONE, Status.DONE]
    assert state.matched.tolist() == [aa, FOUND, nothing]
