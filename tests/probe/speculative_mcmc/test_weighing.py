"""Weights of blocks given their own tokens, up to a stop id; chains of a small case."""

import itertools
import math

import numpy as np
import pytest
import torch

from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.forcing import sequences
from dflash_mcmc.probe.speculative_mcmc import acceptance_floor, chance_of_moves
from dflash_mcmc.probe.speculative_mcmc.weighing import (
    Proposed,
    chains,
    distances,
    draw,
    draw_from_target,
    effective_samples,
    ended,
    in_equilibrium,
    joint_log_p,
    simulate,
)
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


@pytest.mark.parametrize("anchor", [0, 11, 23])
def test_joint_weights_condition_on_the_drawn_tokens(anchor, monkeypatch):
    model = LanguageModel(random_model())
    drawn = np.random.default_rng(8).integers(0, 3, (9, 3))
    monkeypatch.setattr("dflash_mcmc.probe.speculative_mcmc.weighing.positions_at_once", lambda size: 4)  # in pieces
    with torch.no_grad():
        found = joint_log_p(model, sequences.read(model, TOKENS, keep_cache=True), anchor, drawn)
    prefix = TOKENS[0, : anchor + 1].tolist()
    np.testing.assert_allclose(found, [log_p_of(model, prefix, row) for row in drawn.tolist()], atol=2e-4)


def test_the_targets_own_blocks_have_its_probabilities():
    model = LanguageModel(random_model(sharpness=1.0))
    reading = sequences.read(model, TOKENS, keep_cache=True)
    uniforms = torch.from_numpy(np.random.default_rng(0).random((6, 3)).repeat(2, axis=0))
    with torch.no_grad():
        found = draw_from_target(model, reading, 10, 0.5, uniforms)
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


# Simulated acceptance compared with the exact one of a small case; the document's derived numbers.

TARGET, PROPOSAL = np.array([0.6, 0.25, 0.1, 0.05]), np.array([0.2, 0.2, 0.3, 0.3])
WEIGHTS = TARGET / PROPOSAL
EXACT = sum(TARGET[x] * PROPOSAL[y] * min(1.0, WEIGHTS[y] / WEIGHTS[x]) for x, y in itertools.product(range(4), repeat=2))
MOVED = sum(TARGET[x] * PROPOSAL[y] * min(1.0, WEIGHTS[y] / WEIGHTS[x]) for x, y in itertools.permutations(range(4), 2))


def samples(rows: int, count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).choice(4, size=(rows, count), p=PROPOSAL)


def test_long_chains_have_the_exact_acceptance():
    drawn = samples(400, 500, 0)
    found = simulate(np.log(WEIGHTS)[drawn], np.random.default_rng(1).random((400, 499)), drawn[..., None])
    for share, exact in zip(found, (EXACT, MOVED), strict=True):
        assert abs(share.mean() - exact) < 4 * share.std() / 20 + 2e-3


def test_equilibrium_is_estimated_without_a_chain():
    drawn = samples(2000, 100, 2)
    found = in_equilibrium(np.log(WEIGHTS)[drawn])
    assert abs(found.mean() - EXACT) < 0.01
    for row in range(3):  # pair by pair
        w = WEIGHTS[drawn[row]]
        pairs = sum(min(w[i], w[j]) for i, j in itertools.permutations(range(100), 2))
        assert found[row] == pytest.approx(pairs / (99 * w.sum()))


def test_very_small_weights():
    drawn = samples(5, 20, 3)
    small = np.log(WEIGHTS)[drawn] - 5000.0
    np.testing.assert_allclose(in_equilibrium(small), in_equilibrium(small + 5000.0))
    np.testing.assert_allclose(effective_samples(small), effective_samples(small + 5000.0))


def test_a_step_by_hand():
    """Weights 1, 2, 0.5, 0.5: the second is accepted, the third with probability 1/4; then the fourth is accepted."""
    log_weights, tokens = np.log([[1.0, 2.0, 0.5, 0.5]] * 2), np.array([[[7, 0], [7, 1], [8, 1], [8, 1]]] * 2)
    acceptance, moved = simulate(log_weights, np.array([[0.99, 0.2, 0.99], [0.99, 0.3, 0.3]]), tokens)
    np.testing.assert_allclose(acceptance, [1.0, 1 / 3])
    np.testing.assert_allclose(moved, [2 / 3, 1 / 3]), "the fourth is the third again"


def test_the_floor_of_the_simulated_acceptance():
    """Weights differ by thousands of nats: the true acceptance is 0, the simulated one is the floor, 4.2 % at K = 100."""
    assert acceptance_floor(2) == 0.5
    assert acceptance_floor(100) == pytest.approx(0.0423, abs=1e-4)
    weights = 1e4 * np.random.default_rng(4).random((4000, 100))
    acceptance, moved = simulate(weights, np.random.default_rng(5).random((4000, 99)),
                                 np.tile(np.arange(100), (4000, 1))[..., None])
    assert abs(acceptance.mean() - acceptance_floor(100)) < 4 * acceptance.std() / math.sqrt(4000)
    np.testing.assert_array_equal(acceptance, moved)
    assert in_equilibrium(weights).mean() < 1e-3


def test_the_document_s_chances():
    """Section 4.3. The document's 65 % and 7 % are right; its 99.5 % and 99 % should be 99.9 % and 96 %."""
    assert chance_of_moves(0.10, 10, 1) == pytest.approx(1 - 0.9**10) == pytest.approx(0.65, abs=0.005)
    assert chance_of_moves(0.10, 10, 3) == pytest.approx(0.07, abs=0.005)
    assert chance_of_moves(0.53, 10, 1) == pytest.approx(1 - 0.47**10) == pytest.approx(0.9995, abs=5e-5)
    assert chance_of_moves(0.53, 10, 3) == pytest.approx(0.963, abs=5e-4)
    assert chance_of_moves(0.0, 10, 1) == 0.0
    assert chance_of_moves(1.0, 3, 3) == 1.0
    assert [chance_of_moves(rate, 1, 3) for rate in (0.0, 0.3, 1.0)] == [0.0] * 3
    assert chance_of_moves(1.0, 1, 1) == 1.0


# Distances and draws compared with float64 loops and numbers by hand.

def laws(target, draft, alpha, temperature) -> tuple[np.ndarray, np.ndarray]:
    def law(logits):
        weights = [math.exp(x) if x > -math.inf else 0.0 for x in logits]
        return np.array(weights) / sum(weights)

    return law([alpha * x for x in target]), law([x / temperature for x in draft])


@pytest.mark.parametrize(("alpha", "temperature"), [(1.0, 1.0), (4.0, 1.0), (4.0, 0.25), (2.5, 0.7)])
def test_against_loops(alpha, temperature):
    generator = torch.Generator().manual_seed(0)
    target, draft = (3 * torch.randn(9, 11, generator=generator) for _ in range(2))
    target[:, -2:] = draft[:, -2:] = -torch.inf  # ids without a token
    kls, variations = distances(target, draft, alpha, temperature)
    for row in range(9):
        p, q = laws(target[row].tolist(), draft[row].tolist(), alpha, temperature)
        kl = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)
        assert kls[row].item() == pytest.approx(kl, rel=1e-4, abs=1e-6)
        assert variations[row].item() == pytest.approx(0.5 * np.abs(p - q).sum(), rel=1e-4, abs=1e-6)


def test_draws_follow_q_and_have_its_probabilities():
    logits = torch.tensor([[1.0, -torch.inf, 0.0, 2.0], [0.0, 0.0, 0.0, -torch.inf]])
    grid = (torch.arange(20_000, dtype=torch.float64) + 0.5).div(20_000).expand(2, -1)
    tokens, log_q = draw(logits, 0.5, grid)
    law = torch.softmax(logits.double() / 0.5, dim=-1)
    for row in range(2):
        shares = torch.bincount(tokens[row], minlength=4) / 20_000
        torch.testing.assert_close(shares.double(), law[row], atol=1e-4, rtol=0)
        torch.testing.assert_close(log_q[row], law[row].log()[tokens[row]], atol=1e-6, rtol=1e-6)
    assert (tokens[0] != 1).all()
    assert (tokens[1] != 3).all()


def test_extreme_uniforms_draw_valid_tokens():
    logits = torch.tensor([[-torch.inf, 0.0, 30.0, -torch.inf]])
    tokens = draw(logits, 1.0, torch.tensor([[2.0**-53, 1 - 2.0**-53]], dtype=torch.float64))[0]
    assert tokens.tolist() == [[1, 2]]
