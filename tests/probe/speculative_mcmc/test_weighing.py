"""Weights of blocks given their own tokens, up to a stop id; chains of a small case."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.forcing import sequences
from dflash_mcmc.probe.speculative_mcmc.weighing import Proposed, chains, draw_from_target, ended, joint_log_p
from tests.targets import random_model

TOKENS = torch.randint(0, 58, (1, 24), generator=torch.Generator().manual_seed(7))


def log_p_of(model: LanguageModel, prefix: list[int], tokens: list[int]) -> list[float]:
    """log p of each token, one forward per token, float64."""
    found = []
    for token in tokens:
        with torch.no_grad():
            logits = model.logits(model.decoder(input_ids=torch.tensor([prefix]), use_cache=False).last_hidden_state[0, -1])
        found.append(torch.log_softmax(logits.double(), -1)[token].item())
        prefix = [*prefix, token]
    return found


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("anchor", [0, 11, 23])
def test_joint_weights_condition_on_the_drawn_tokens(anchor, share, monkeypatch):
    model = LanguageModel(random_model())
    drawn = np.random.default_rng(8).integers(0, 3, (9, 3))
    monkeypatch.setattr("dflash_mcmc.probe.speculative_mcmc.weighing.positions_at_once", lambda size: 4)  # in pieces
    with torch.no_grad():
        found = joint_log_p(model, sequences.read(model, TOKENS, keep_cache=True), anchor, drawn, share)
    prefix = TOKENS[0, : anchor + 1].tolist()
    np.testing.assert_allclose(found, [log_p_of(model, prefix, row) for row in drawn.tolist()], atol=2e-4)


@pytest.mark.parametrize("share", [True, False])
def test_the_targets_own_blocks_have_its_probabilities(share):
    model = LanguageModel(random_model(sharpness=1.0))
    reading = sequences.read(model, TOKENS, keep_cache=True)
    uniforms = torch.from_numpy(np.random.default_rng(0).random((6, 3)).repeat(2, axis=0))
    with torch.no_grad():
        found = draw_from_target(model, reading, 10, 0.5, uniforms, share)
    prefix = TOKENS[0, :11].tolist()
    for tokens, log_p in zip(found.tokens[0], found.log_p[0], strict=True):
        np.testing.assert_allclose(log_p, log_p_of(model, prefix, tokens.tolist()), atol=2e-4)
    assert found.tokens.shape == (1, 12, 3)
    # The distribution of the first token by hand: uniforms fall as the cumulative sharpened probabilities require.
    with torch.no_grad():
        law = torch.softmax(model.logits(reading.hidden[0, 10]).double() / 0.5, -1)
    upto = law.cumsum(-1)
    assert found.tokens[0, :, 0].tolist() == [int(torch.searchsorted(upto, u)) for u in uniforms[:, 0]]
    np.testing.assert_allclose(found.log_q[0, :, 0], law.log()[torch.from_numpy(found.tokens[0, :, 0])].numpy(), atol=1e-5)


def test_nothing_counts_after_a_stop_id():
    tokens = np.array([[[5, 3, 7], [3, 3, 9], [1, 2, 4]]])
    ones = np.ones(tokens.shape)
    found = ended(Proposed(tokens, -ones, -2 * ones), (3,))
    np.testing.assert_array_equal(found.tokens[0], [[5, 3, -1], [3, -1, -1], [1, 2, 4]])
    np.testing.assert_array_equal(found.log_p[0], [[-1, -1, 0], [-1, 0, 0], [-1, -1, -1]])
    np.testing.assert_array_equal(found.log_q[0], [[-2, -2, 0], [-2, 0, 0], [-2, -2, -2]])


def test_weights_use_alpha():
    """alpha 2: log w = 2 log p - log q = (-1, 1, -1): the second is accepted, the third with probability exp(-2)."""
    log_p, log_q = np.array([[[-1.0], [-0.5], [-1.5]]]), np.array([[[-1.0], [-2.0], [-2.0]]])
    proposed = Proposed(np.array([[[4], [5], [4]]]), log_p, log_q)
    kept, taken = (chains(proposed, 2.0, np.array([[0.5, uniform]])) for uniform in (0.14, 0.13))
    assert (kept["acceptance"][0], taken["acceptance"][0]) == (0.5, 1.0)
    assert kept["log_w"][0] == pytest.approx(-1 / 3)
    assert kept["log_w_std"][0] == pytest.approx(np.std([-1, 1, -1], ddof=1))
    assert taken["moved"][0] == 1.0
    same = chains(proposed._replace(tokens=np.full((1, 3, 1), 4)), 2.0, np.array([[0.5, 0.13]]))
    assert (same["acceptance"][0], same["moved"][0]) == (1.0, 0.0)
