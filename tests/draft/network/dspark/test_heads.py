"""The heads of DSpark against their formulas, written out for one row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.engine.speculative.slotwise_drafts import random_network, shape_of
from tests.targets import random_model

SLOTS = 4


@pytest.fixture(scope="module")
def target():
    return random_model("qwen3")


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def given(network):
    """(base logits, hidden states, tokens before the slots) of one block, as arrays."""
    numbers = np.random.default_rng(1)
    shape = network.shape
    return (numbers.normal(size=(SLOTS, shape.vocab_size)).astype(np.float32),
            numbers.normal(size=(SLOTS, shape.hidden_size)).astype(np.float32), numbers.integers(0, 50, SLOTS))


def by_formula(kind: str, weights: dict, base, hidden, previous):
    w1, w2 = weights["markov_w1.weight"], weights["markov_w2.weight"]
    state, rows = np.zeros(w1.shape[1]), []
    for u, h, x in zip(base, hidden, previous, strict=True):
        e = w1[x]
        if kind == "gated":
            e = sigmoid(weights["gate_proj.weight"] @ np.concatenate([h, e]) + weights["gate_proj.bias"]) * e
        if kind == "rnn":
            z = weights["joint_proj.weight"] @ np.concatenate([state, e, h]) + weights["joint_proj.bias"]
            i, c, o = np.split(z, 3)
            e, state = np.tanh(o), sigmoid(i) * state + (1.0 - sigmoid(i)) * np.tanh(c)
        rows.append(u + w2 @ e)
    return np.stack(rows)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_markov_heads(target, kind):
    network = random_network(shape_of(kind, target, SLOTS, 60))
    base, hidden, previous = given(network)
    weights = {name: value.double().numpy() for name, value in network.markov_head.state_dict().items()}
    logits = network.along(*(torch.from_numpy(values)[None] for values in (base, hidden, previous)))[0]
    assert np.abs(logits.numpy() - by_formula(kind, weights, base, hidden, previous)).max() < 1e-4


@pytest.mark.parametrize("with_markov", [True, False])
def test_confidence(target, with_markov):
    network = random_network(shape_of("vanilla", target, SLOTS, 60, confidence_with_markov=with_markov))
    _, hidden, previous = given(network)
    weight, bias = (value.double().numpy() for value in network.confidence_head.state_dict().values())
    before = network.markov_head.markov_w1.weight.numpy()[previous]
    expected = (np.concatenate([hidden, before], axis=1) if with_markov else hidden) @ weight[0] + bias
    found = network.confidence_logits(torch.from_numpy(hidden), torch.from_numpy(previous))
    assert np.abs(found.numpy() - expected).max() < 1e-5


def test_without_heads_it_is_the_networks_law(target):
    network = random_network(shape_of("independent", target, SLOTS, 60, confidence=False))
    base, hidden, previous = (torch.from_numpy(values)[None] for values in given(network))
    assert torch.equal(network.along(base, hidden, previous), base)
    assert network.confidence_logits(hidden[0], previous[0]) is None
