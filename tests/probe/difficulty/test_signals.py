"""Signals compared with float64 loops and numbers by hand; each place has its own distributions, whatever the pieces."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from dflash_mcmc.engine.speculative.drafter import DFlashDrafter
from dflash_mcmc.forcing import sequences
from dflash_mcmc.probe import difficulty
from tests.train.drafts import BLOCK_SIZE, block_alone, random_draft, random_target

TOKENS = np.random.default_rng(3).integers(0, 58, 33)
PROMPT_LENGTH = 7
NAMES = {*difficulty.SIGNALS["draft"], *difficulty.SIGNALS["target"]}


def by_loops(target: np.ndarray, draft: np.ndarray, token: int) -> dict[str, float]:
    """The signals of one token from float64 logits (vocabulary,), by definition."""
    p, q = (np.exp(logits - logits.max()) for logits in (target, draft))
    p, q = p / p.sum(), q / q.sum()
    pairs = [(float(a), float(b)) for a, b in zip(p, q, strict=True) if a > 0 or b > 0]
    return {
        "kl_target_draft": sum(a * math.log(a / b) for a, b in pairs),
        "kl_draft_target": sum(b * math.log(b / a) for a, b in pairs),
        "total_variation": sum(abs(a - b) for a, b in pairs) / 2,
        "minus_log_acceptance": -math.log(sum(min(a, b) for a, b in pairs)),
        "draft_entropy": -sum(b * math.log(b) for _, b in pairs),
        "draft_surprisal": -math.log(q[token]),
        "top1_disagreement": float(p.argmax() != q.argmax()),
        "target_entropy": -sum(a * math.log(a) for a, _ in pairs),
        "target_surprisal": -math.log(p[token]),
        "least_confidence": 1 - max(a for a, _ in pairs),
    }


def test_by_hand():
    p, q = torch.tensor([[0.8, 0.15, 0.05, 0.0]]), torch.tensor([[0.5, 0.3, 0.2, 0.0]])  # the fourth id has no token
    found = {name: float(values[0]) for name, values in difficulty.of_tokens(p.log(), q.log(), torch.tensor([1])).items()}
    assert set(found) == NAMES
    assert found["total_variation"] == pytest.approx(0.30, abs=1e-6)  # the document's example, section 4.1
    assert found["minus_log_acceptance"] == pytest.approx(-math.log(0.70), abs=1e-6)
    assert found["kl_target_draft"] == pytest.approx(0.8 * math.log(1.6) - 0.15 * math.log(2) - 0.05 * math.log(4), abs=1e-6)
    assert found["draft_surprisal"] == pytest.approx(-math.log(0.3), abs=1e-6)
    assert found["target_surprisal"] == pytest.approx(-math.log(0.15), abs=1e-6)
    assert found["least_confidence"] == pytest.approx(0.2, abs=1e-6)
    assert found["top1_disagreement"] == 0.0


def test_equal_distributions_do_not_disagree():
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    found = difficulty.of_tokens(logits, logits + 3.0, torch.arange(5))
    for name in ("kl_target_draft", "kl_draft_target", "total_variation", "minus_log_acceptance", "top1_disagreement"):
        assert float(found[name].abs().max()) < 1e-6
    assert torch.allclose(found["draft_entropy"], found["target_entropy"], atol=1e-5)


@pytest.mark.parametrize("block_size", [BLOCK_SIZE, 3])
def test_signals_along_an_answer_equal_those_of_single_blocks(block_size):
    model = random_target()
    draft = random_draft(model)
    found = difficulty.along(model, DFlashDrafter(draft, model, block_size), TOKENS[:PROMPT_LENGTH], TOKENS[PROMPT_LENGTH:])
    anchors = range(PROMPT_LENGTH, len(TOKENS) - block_size + 1, block_size)
    places = [anchor + slot - PROMPT_LENGTH for anchor in anchors for slot in range(1, block_size)]
    assert all(len(values) == len(places) for values in found.values())
    with torch.no_grad():
        target = model.logits(model.decoder(input_ids=torch.from_numpy(TOKENS)[None]).last_hidden_state[0])
        for number, place in enumerate(places):
            position = place + PROMPT_LENGTH
            anchor = PROMPT_LENGTH + place // block_size * block_size
            alone = shorter(draft, block_size, model, anchor)[position - anchor - 1]
            expected = by_loops(target[position - 1].double().numpy(), alone.double().numpy(), int(TOKENS[position]))
            assert {name: values[number] for name, values in found.items()} == pytest.approx(expected, abs=2e-4)


def shorter(draft, block_size, model, anchor):
    """Logits of a block of this size, drafted alone."""
    whole = draft.shape
    draft.shape = replace(whole, block_size=block_size)
    try:
        return block_alone(draft, model, torch.from_numpy(TOKENS), anchor)
    finally:
        draft.shape = whole


def test_pieces_change_nothing(monkeypatch):
    model = random_target()
    drafter = DFlashDrafter(random_draft(model), model, BLOCK_SIZE)
    whole = difficulty.along(model, drafter, TOKENS[:7], TOKENS[7:])
    monkeypatch.setattr(sequences, "_LOGITS_BYTES", 3 * 4 * model.vocab_size)
    widest, plain = [], difficulty.of_tokens
    monkeypatch.setattr(difficulty, "of_tokens", lambda *tensors: widest.append(len(tensors[0])) or plain(*tensors))
    pieces = difficulty.along(model, drafter, TOKENS[:7], TOKENS[7:])
    assert max(widest) == 3
    for name in NAMES:
        np.testing.assert_allclose(pieces[name], whole[name], atol=1e-5)
