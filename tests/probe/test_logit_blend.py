"""`probe=logit_blend` on the embedded pair: sums equal those of a float64 loop, controls are exact, options have effects."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dflash_mcmc.blend.layer import LayerBlend
from dflash_mcmc.blend.model import ModelBlend
from dflash_mcmc.blend.prompt import PromptBlend
from dflash_mcmc.config.identity import identity_of
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.errors import UserError
from dflash_mcmc.forcing import sequences
from dflash_mcmc.forcing.answers import Answer
from dflash_mcmc.probe import logit_blend
from dflash_mcmc.probe.logit_blend import SUMS, LogitBlend, rows_of
from tests.composing import composed
from tests.probes import changed, measured, records
from tests.runs import execute
from tests.targets import FAMILIES, random_model

RUN = ("probe=logit_blend", "dataset.limit=4", "probe.hard_below=0.3", "probe.layers=[0,-3,-1]", "probe.betas=[0,0.05,0.5]")
DRAFT = ("draft=tiny",)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """A run with the draft: (configuration, result)."""
    config = composed(tmp_path_factory.mktemp("outputs"), *RUN, *DRAFT)
    return config, execute(config)


def row_of(rows: list[dict], name: str, beta: float) -> dict:
    (row,) = [row for row in rows if name in (row["source"], str(row["layer"])) and row["beta"] == beta]
    return row


def test_tables_equal_those_of_the_records(result):
    _, found = result
    tables, of = found.summary["tables"], records(found.folder)
    assert [len(rows) for rows in tables.values()] == [5 * 3] * 3 + [4]
    for name, number, beta in (("5", 1, 0.05), ("draft", 2, 0.5), ("flattened", 1, 0.05)):
        hard, easy = (dict(zip(SUMS, np.sum([record["sums"][part][name][number] for record in of], axis=0), strict=True))
                      for part in ("hard", "easy"))
        row = row_of(tables["hard"], name, beta)
        assert (row["n"], row["gain"]) == (hard["n"], pytest.approx(hard["gain"] / hard["n"]))
        assert row["wins_minus_losses"] == pytest.approx((hard["wins"] - hard["losses"]) / hard["n"])
        assert row["wins_minus_losses_low"] <= row["wins_minus_losses"] <= row["wins_minus_losses_high"]
        grid = row_of(tables["grid"], name, beta)
        assert (grid["n"], grid["wins"]) == (hard["n"] + easy["n"], pytest.approx((hard["wins"] + easy["wins"]) / grid["n"]))
        assert row_of(tables["easy"], name, beta)["n"] == easy["n"]
    assert found.summary["num_hard"] == row_of(tables["hard"], "5", 0.05)["n"] > 0
    assert found.summary["num_tokens"] == row_of(tables["grid"], "5", 0.05)["n"]
    gains = {(row["source"], row["layer"], row["beta"]): row["gain"] for row in tables["hard"] if row["source"] != "flattened"}
    assert found.summary["best/gain"] == max(gains.values())


@torch.no_grad()
def test_the_agreement_is_that_of_a_loop_over_hard_tokens(result):
    """KL by its sum, and the rank correlation by scipy, of layer 5 and the target; the target agrees with itself."""
    from scipy import stats

    config, found = result
    model, theirs = config.model.load("cpu"), AutoModelForCausalLM.from_pretrained(config.model.path)
    allowed, head, kls, correlations = ~model.forbidden, theirs.lm_head.weight.double(), [], []
    for problem in config.dataset.problems():
        prompt, answer = model.encode(config.model.prompt(model.tokenizer, problem.question)), model.encode(problem.solution)
        output = theirs(input_ids=torch.from_numpy(np.concatenate([prompt, answer]))[None], output_hidden_states=True)
        for t, token in enumerate(answer):
            target, layer = ((head @ output.hidden_states[at][0, len(prompt) - 1 + t].double()) for at in (8, 6))
            p, q = target[allowed].softmax(-1), layer[allowed].log_softmax(-1)
            if target[allowed].logsumexp(-1) - target[token] > -math.log(0.3):
                kls.append(float((p * (p.log() - q)).sum()))
                correlations.append(stats.spearmanr(target[allowed], layer[allowed]).statistic)
    row, = (row for row in found.summary["tables"]["agreement"] if row["layer"] == 5)
    assert (row["n"], row["kl"]) == (len(kls), pytest.approx(np.mean(kls), rel=1e-3))
    assert row["rank_correlation"] == pytest.approx(np.mean(correlations), abs=1e-4)
    logits = torch.randn(3, 61, generator=torch.Generator().manual_seed(0))
    assert logit_blend.agreeing(logits, logits).tolist() == pytest.approx([3.0, 0.0, 3.0])
    assert logit_blend.agreeing(logits, -logits)[2] == pytest.approx(-3.0)


def test_the_control_wins_hard_tokens_and_no_rank(result):
    config = changed(result[0], limit=60, hard_below=0.1, layers=[5], drafting=False)
    tables = config.probe.summarise(config, measured(config)).tables
    hard, easy = (row_of(tables[part], "flattened", 0.05) for part in ("hard", "easy"))
    assert hard["n"] >= 10
    assert hard["wins"] > 0.8 > 0.2 > easy["wins"]
    assert hard["gain"] > 0 > easy["gain"]
    assert hard["rank_wins"] == hard["rank_losses"] == hard["gain_over_flattened"] == hard["wins_over_flattened"] == 0.0


def test_the_draft_is_blended_on_the_tokens_that_it_predicts(result):
    config, found = result
    block = config.draft.load(config.model.load("cpu")).num_drafted + 1
    expected = sum(record["num_tokens"] // block * (block - 1) for record in records(found.folder))
    rows = [row for row in found.summary["tables"]["grid"] if row["source"] == "draft"]
    assert [row["n"] for row in rows] == [expected] * 3
    assert rows[1]["gain"] != 0.0


@pytest.mark.parametrize(("change", "sources", "cells"), [
    ({"layers": None}, [*map(str, range(8)), "draft", "flattened"], 3), ({"layers": [2]}, ["2", "draft", "flattened"], 3),
    ({"betas": [0.2], "drafting": False}, ["0", "5", "7", "flattened"], 1)], ids=str)
def test_layers_and_betas_are_those_asked_for(result, change, sources, cells):
    (record,) = measured(changed(result[0], limit=1, **change))
    assert list(record["sums"]["hard"]) == sources
    assert all(len(cell) == cells for part in record["sums"].values() for cell in part.values())


def test_both_numbers_of_a_layer_give_the_same_identity(result, monkeypatch):
    monkeypatch.setattr("dflash_mcmc.model.hf.HFModel.fingerprint", lambda self: "model")
    config, _ = result
    base = identity_of(config)
    assert base["probe.layers"] == [0, 5, 7]
    assert identity_of(changed(config, limit=9, layers=[0, 5, 7])) == base
    every = [0, 1, 2, 3, 4, 5, -2, 7]
    assert identity_of(changed(config, layers=None)) == identity_of(changed(config, layers=every))
    for change in ({"layers": [0]}, {"betas": [0.05]}, {"norm": "final"}, {"hard_below": 0.2}, {"answers": "greedy"}):
        assert identity_of(changed(config, **change)) != base


def test_without_hard_tokens_the_other_tables_remain(result):
    config = changed(result[0], limit=2, hard_below=1e-9)
    summary = config.probe.summarise(config, measured(config))
    assert summary.values["num_hard"] == 0
    assert {row["gain"] for row in summary.tables["hard"]} == {None}
    assert summary.values["best/gain"] is None
    assert row_of(summary.tables["grid"], "5", 0.5)["gain"] < 0


# Sums of blends compared with a loop over tokens in float64, and cases by hand.

ANSWER = Answer(np.array([5, 9, 30, 2]), np.array([7, 7, 41, 3, 60, 12, 33, 8]))
BETAS = [0.0, 0.1, 0.6, 1.0]


def sums_of(model: LanguageModel, norm: str = "none", betas=BETAS, hard_below: float = 0.01) -> dict:
    return LogitBlend(layers=[0, 1, 2], norm=norm, betas=betas, hard_below=hard_below).record(model, None, ANSWER)


@torch.no_grad()
def by_loop(model: LanguageModel, name: str, norm: str, beta: float, hard_below: float) -> dict[str, list[float]]:
    """`SUMS` of the hard and the easy tokens, token by token in float64, from hidden states blended as in the engine."""
    ((last, outputs),) = sequences.readings(model, ANSWER, [0, 1, 2])
    head, totals = model.head.weight.double(), {"hard": np.zeros(len(SUMS)), "easy": np.zeros(len(SUMS))}
    for t, token in enumerate(ANSWER.tokens):
        target = head @ last[t].double()
        if name == "flattened":
            mixed = (1 - beta) * target
        else:
            blend = LayerBlend(beta=beta, layer=int(name), norm=norm)
            mixed = head @ blend.mix(last[t].double(), [outputs[int(name)][t].double()],
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


CELL = {"hard": [[4, 2.0, 3, 1, 2, 1, 1.0, 2]], "easy": [[6, -3.0, 1, 5, 0, 3, -1.0, 0]]}
NONE = {"hard": [[0] * 8], "easy": [[10, 1.0, 10, 0, 0, 0, 1.0, 10]]}


def test_rows_by_hand():
    records = [{"sums": {part: {"5": cells[part], "flattened": cells[part]} for part in ("hard", "easy")}}
               for cells in (CELL, NONE)]
    row, control = rows_of(logit_blend.HARD, records, [0.05], "hard")
    assert (row["source"], row["layer"], row["beta"], row["n"]) == ("layer", 5, 0.05, 4)
    assert (control["source"], control["layer"]) == ("flattened", None)
    assert (row["gain"], row["wins"], row["wins_minus_losses"]) == (0.5, 0.75, 0.5)
    assert (row["rank_wins"], row["rank_losses"], row["rank_wins_minus_losses"]) == (0.5, 0.25, 0.25)
    assert (row["gain_over_flattened"], row["wins_over_flattened"]) == (0.25, 0.5)
    row, _ = rows_of(logit_blend.GRID, records, [0.05], "hard", "easy")
    assert (row["n"], row["gain"], row["wins"], row["rank_losses"]) == (20, 0.0, 0.7, 0.2)
    assert row["gain_low"] == -0.1  # the first problem twice
    assert row["gain_high"] == 0.1
    assert "wins_minus_losses" not in row
    row, _ = rows_of(logit_blend.EASY, records, [0.05], "easy")
    assert (row["n"], row["gain"]) == (16, -0.125)


# What a chosen blend mixes in.

def law_after(model: torch.nn.Module, tokens: np.ndarray) -> list[torch.Tensor]:
    """Float64 logits of transformers' own model for the answer's tokens, after any prompt: (n, vocabulary)."""
    logits = model(input_ids=torch.from_numpy(tokens)[None]).logits[0].double()
    return logits[len(tokens) - len(ANSWER.tokens) - 1 : -1]


@pytest.mark.parametrize("kind", ["model", "prompt", "layer", "noise"])
@torch.no_grad()
def test_the_source_of_a_blend_is_what_it_mixes_in(kind):
    """Logits along an answer, by transformers' own models; neither the blend's own beta nor its mask matters."""
    own, amateur = (random_model(family, sharpness=1.0) for family in ("qwen3", "llama"))
    model, whole, second = LanguageModel(own), ANSWER.sequence, np.array([30, 2])
    ((last, outputs),) = sequences.readings(model, ANSWER, [0, 1, 2])
    hidden = [outputs[layer].double() @ model.head.weight.double().T for layer in (0, 1, 2)]
    blend, companion, expected = {
        "model": (ModelBlend(beta=-0.5, model="x", alpha_mask=0.4), amateur, law_after(amateur, whole)),
        "prompt": (PromptBlend(beta=0.7), own, law_after(own, np.concatenate([second, ANSWER.tokens]))),
        "layer": (LayerBlend(beta=0.05, layer=2), None, hidden[2]),
        "noise": (LayerBlend(beta=0.05, layer=1, direction="random"), None, None),
    }[kind]
    source = sequences.other_source(model, blend, None if companion is None else LanguageModel(companion), ANSWER, last,
                                 second if kind == "prompt" else None)
    found = source.head(source.states).double()
    torch.testing.assert_close(torch.cat([source.head(source.states[:3]), source.head(source.states[3:])]).double(), found)
    if kind == "noise":
        turned = blend.auxiliary([outputs[1].double()], lambda state: state) @ model.head.weight.double().T
        torch.testing.assert_close(found, turned, rtol=1e-4, atol=1e-4)
        assert (found - hidden[1]).abs().max() > 0.1
    else:
        torch.testing.assert_close(found.log_softmax(-1), expected.log_softmax(-1), rtol=1e-4, atol=1e-4)
    assert bool(source.speaks.all())


@pytest.mark.slow
def test_a_chosen_blend_is_one_more_source(result):
    """The others keep their records; without one the identity is that of before."""
    config, found = result
    chosen = replace(config, blend=PromptBlend(beta=-0.5))
    for own, before in zip(measured(chosen), records(found.folder), strict=True):
        assert list(own["agreement"]) == ["0", "5", "7", "draft", "blend"]
        assert own["agreement"]["blend"][1] > 0.01 * own["num_hard"]
        for part in ("hard", "easy"):
            assert {name: cells for name, cells in own["sums"][part].items() if name != "blend"} == before["sums"][part]
    assert identity_of(chosen) == {**identity_of(config), "blend": "prompt", "blend.alpha_mask": 0.0, "blend.beta": -0.5,
                                   "blend.prompt": None}
    row, = (row for row in config.probe.summarise(chosen, measured(chosen)).tables["agreement"] if row["source"] == "blend")
    assert row["layer"] is None


def test_a_blend_s_model_with_too_few_positions_is_refused(result, monkeypatch):
    amateur = LanguageModel(random_model("llama", max_position_embeddings=40))
    monkeypatch.setattr(PromptBlend, "companion", lambda self, target: amateur)
    with pytest.raises(UserError, match=r"blend: prompt and answer need \d+ positions; allowed: 40 \(those of the blend's"):
        measured(replace(result[0], blend=PromptBlend()))
