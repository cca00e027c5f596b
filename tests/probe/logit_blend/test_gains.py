"""Sums of blends compared with a loop over tokens in float64, and cases by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dflash_mcmc.blend.layer import LayerBlend
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.forcing import layers, sequences
from dflash_mcmc.forcing.answers import Answer
from dflash_mcmc.probe import logit_blend
from dflash_mcmc.probe.logit_blend import SUMS, Blended, Settings
from tests.targets import FAMILIES, random_model

ANSWER = Answer(np.array([5, 9, 30, 2]), np.array([7, 7, 41, 3, 60, 12, 33, 8]))
BETAS = [0.0, 0.1, 0.6, 1.0]


def sums_of(model: LanguageModel, norm: str = "none", betas=BETAS, hard_below: float = 0.01) -> dict:
    return logit_blend.record(model, None, ANSWER, Settings([0, 1, 2], norm, betas, hard_below))


@torch.no_grad()
def by_loop(model: LanguageModel, name: str, norm: str, beta: float, hard_below: float) -> dict[str, list[float]]:
    """`SUMS` of the hard and the easy tokens, token by token in float64, from hidden states blended as in the engine."""
    (states,) = layers.readings(model, ANSWER, [0, 1, 2])
    head, totals = model.head.weight.double(), {"hard": np.zeros(len(SUMS)), "easy": np.zeros(len(SUMS))}
    for t, token in enumerate(ANSWER.tokens):
        target = head @ states.last[t].double()
        if name == "flattened":
            mixed = (1 - beta) * target
        else:
            blend = LayerBlend(beta=beta, layer=int(name), layers=None, norm=norm)
            mixed = head @ blend.mix(states.last[t].double(), [states.outputs[int(name)][t].double()],
                                     lambda hidden: model.final_norm(hidden.float()).double())
        log_p, target_log_p, flat_log_p = (float(x.log_softmax(-1)[token]) for x in (mixed, target, (1 - beta) * target))
        rank, target_rank = (1 + int((x > x[token]).sum()) for x in (mixed, target))
        gain, over = log_p - target_log_p, log_p - flat_log_p
        totals["hard" if target_log_p < math.log(hard_below) else "easy"] += [
            1, gain, gain > 0, gain < 0, rank < target_rank, rank > target_rank, over, over > 0]
    return {part: total.tolist() for part, total in totals.items()}


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("norm", ["none", "final"])
def test_sums_equal_those_of_a_loop_over_tokens(family, norm):
    model = LanguageModel(random_model(family, sharpness=1.0))
    found = sums_of(model, norm)
    assert (found["num_tokens"], found["num_hard"]) == (8, found["sums"]["hard"]["0"][0][0])
    assert 0 < found["num_hard"] < 8
    assert list(found["sums"]["hard"]) == ["0", "1", "2", "flattened"]
    for name, beta in (("0", 0.1), ("0", 0.6), ("1", 0.6), ("1", 1.0), ("flattened", 0.1), ("flattened", 0.6)):
        expected = by_loop(model, name, norm, beta, 0.01)
        for part in ("hard", "easy"):
            cell = found["sums"][part][name][BETAS.index(beta)]
            assert cell == pytest.approx(expected[part], rel=1e-4, abs=1e-4), (name, beta, part)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_gain_at_beta_zero_or_from_the_target_itself(family):
    model = LanguageModel(random_model(family))
    model.forbid([50, 55])  # their logits are -inf, and nan once blended
    for norm in ("none", "final"):
        for part, sources in sums_of(model, norm)["sums"].items():
            for name, cells in sources.items():
                assert cells[0][1:] == [0.0] * (len(SUMS) - 1), (part, name)
                assert all(math.isfinite(value) for cell in cells for value in cell)
    last = sums_of(model, "final")["sums"]
    for part in ("hard", "easy"):
        for number in range(len(BETAS)):
            cell = dict(zip(SUMS, last[part]["2"][number], strict=True))
            assert [cell[name] for name in ("gain", "wins", "losses", "rank_wins", "rank_losses")] == [0.0] * 5


def test_beta_one_is_the_layer_alone():
    model = LanguageModel(random_model(sharpness=1.0))
    (states,) = layers.readings(model, ANSWER, [0])
    tokens = torch.from_numpy(ANSWER.tokens)
    alone = layers.standings(model, layers.layer_source(model, states.outputs[0], "none"), tokens)
    target = layers.standings(model, layers.target_source(model, states.last), tokens)
    found = sums_of(model)["sums"]
    gain = sum(found[part]["0"][-1][1] for part in ("hard", "easy"))
    assert gain == pytest.approx(float((alone.log_p - target.log_p).sum()), rel=1e-5)
    uniform = sum(found[part]["flattened"][-1][1] for part in ("hard", "easy"))
    assert uniform == pytest.approx(float((-math.log(model.vocab_size) - target.log_p).sum()), rel=1e-5)


def test_results_do_not_depend_on_pieces_or_groups_of_layers(monkeypatch):
    model = LanguageModel(random_model(sharpness=1.0))
    whole = sums_of(model)
    monkeypatch.setattr(layers, "_STATES_BYTES", 1)
    monkeypatch.setattr(sequences, "_LOGITS_BYTES", 3 * 4 * model.vocab_size)
    parts = sums_of(model)
    assert list(parts["sums"]["hard"]) == list(whole["sums"]["hard"])
    for part, sources in whole["sums"].items():
        for name, cells in sources.items():
            np.testing.assert_allclose(parts["sums"][part][name], cells, rtol=1e-4, atol=1e-5)


def test_flattening_wins_the_hard_tokens_of_any_target():
    """Why the published 20.5 % needs a control: a blend without information wins too if tokens are selected for a low p."""
    generator = torch.Generator().manual_seed(0)
    logits, tokens = 4.0 * torch.randn(2000, 61, generator=generator), torch.arange(2000) % 61
    forbidden = torch.zeros(61, dtype=torch.bool)
    target = layers.log_probability(logits, tokens)
    flat = layers.log_probability(logit_blend.blended(logits, None, 0.05, forbidden), tokens)
    hard = target < math.log(0.01)
    assert hard.sum() > 500
    assert (flat > target)[hard].double().mean() > 0.9
    assert (flat - target)[~hard].mean() < (flat - target)[hard].mean()


CELL = {"hard": [[4, 2.0, 3, 1, 2, 1, 1.0, 2]], "easy": [[6, -3.0, 1, 5, 0, 3, -1.0, 0]]}
NONE = {"hard": [[0] * 8], "easy": [[10, 1.0, 10, 0, 0, 0, 1.0, 10]]}


def test_rows_by_hand():
    records = [{"sums": {part: {"5": cells[part], "flattened": cells[part]} for part in ("hard", "easy")}}
               for cells in (CELL, NONE)]
    blended = Blended(records, [0.05])
    row, control = blended.rows(logit_blend.HARD, "hard")
    assert (row["source"], row["layer"], row["beta"], row["n"]) == ("layer", 5, 0.05, 4)
    assert (control["source"], control["layer"]) == ("flattened", None)
    assert (row["gain"], row["wins"], row["wins_minus_losses"]) == (0.5, 0.75, 0.5)
    assert (row["rank_wins"], row["rank_losses"], row["rank_wins_minus_losses"]) == (0.5, 0.25, 0.25)
    assert (row["gain_over_flattened"], row["wins_over_flattened"]) == (0.25, 0.5)
    row, _ = blended.rows(logit_blend.GRID, "hard", "easy")
    assert (row["n"], row["gain"], row["wins"], row["rank_losses"]) == (20, 0.0, 0.7, 0.2)
    assert row["gain_low"] == -0.1  # the first problem twice
    assert row["gain_high"] == 0.1
    assert "wins_minus_losses" not in row
    row, _ = blended.rows(logit_blend.EASY, "easy")
    assert (row["n"], row["gain"]) == (16, -0.125)


def test_a_part_without_tokens_has_no_values():
    (row,) = Blended([{"sums": {part: {"5": NONE[part]} for part in ("hard", "easy")}}], [0.05]).rows(logit_blend.HARD, "hard")
    assert row["n"] == 0
    assert {value for name, value in row.items() if name not in ("source", "layer", "beta", "n")} == {None}
