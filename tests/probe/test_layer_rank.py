"""`probe=layer_rank` on the embedded pair: each rank equals that of a float64 loop, and every option has its effect."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dflash_mcmc import probe
from dflash_mcmc.forcing.answers import Answer
from dflash_mcmc.probe import layer_rank
from dflash_mcmc.probe.layer_rank import NORMS, median_of
from dflash_mcmc.statistics.estimates import Clusters
from tests.composing import composed
from tests.probes import changed, measured, records
from tests.runs import execute

RUN = ("probe=layer_rank", "dataset.limit=4", "probe.hard_below=0.3")
DRAFT = ("draft=tiny",)
NUM_LAYERS = 8


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """A run with the draft: (configuration, result)."""
    config = composed(tmp_path_factory.mktemp("outputs"), *RUN, *DRAFT)
    return config, execute(config)


def tables_of(config) -> dict[str, list[dict]]:
    return config.probe.summarise(config, measured(config)).tables


def row_of(rows: list[dict], source: str, layer: int | None = None, norm: str | None = None) -> dict:
    (row,) = [row for row in rows if (row["source"], row["layer"], row["norm"]) == (source, layer, norm)]
    return row


@torch.no_grad()
def streams(model: torch.nn.Module, tokens: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """(outputs of all layers, logits) of transformers' own model, float64 logits."""
    outputs = []

    def keep(module, given, output):
        outputs.append(output[0] if isinstance(output, tuple) else output)

    handles = [layer.register_forward_hook(keep) for layer in model.model.layers]
    logits = model(input_ids=tokens).logits[0].double()
    for handle in handles:
        handle.remove()
    return [output.reshape(tokens.shape[1], -1) for output in outputs], logits


def bounds(logits: torch.Tensor, token: int) -> tuple[int, int]:
    """The smallest and the largest possible rank of a token if logits within 1e-4 count as equal."""
    return 1 + int((logits > logits[token] + 1e-4).sum()), int((logits > logits[token] - 1e-4).sum())


def test_every_rank_equals_that_of_a_loop_in_float64(result):
    config = changed(result[0], limit=2, drafting=False)
    model = config.model.load("cpu")
    theirs = AutoModelForCausalLM.from_pretrained(config.model.path)
    allowed, head = (~model.forbidden).nonzero()[:, 0], theirs.lm_head.weight.detach().double()
    for record, problem in zip(measured(config), config.dataset.problems(), strict=True):
        prompt = model.encode(config.model.prompt(model.tokenizer, problem.question))
        answer = model.encode(problem.solution)
        outputs, target = streams(theirs, torch.from_numpy(np.concatenate([prompt, answer]))[None])
        first, hard, log_p = len(prompt) - 1, [], 0.0
        for t, token in enumerate(answer):
            laws = {"target": target[first + t]}
            for layer, output in enumerate(outputs):
                state = output[first + t]
                laws[f"{layer} none"] = head @ state.double()
                laws[f"{layer} final"] = head @ theirs.model.norm(state).detach().double()
            place = allowed.tolist().index(token)
            for name, logits in laws.items():
                low, high = bounds(logits[allowed], place)
                assert low <= record["ranks"][name][t] <= high, (name, t)
            values = target[first + t][allowed].tolist()
            of_token = values[place] - math.log(math.fsum(math.exp(value) for value in values))
            log_p += of_token
            hard += [t] if of_token < math.log(0.3) else []
        assert record["hard"] == hard
        assert (record["num_tokens"], record["num_hard"]) == (len(answer), len(hard))
        assert record["log_p"]["target"][0] == pytest.approx(log_p, rel=1e-5, abs=1e-4)
        assert record["vocabulary"] == len(allowed)


def test_tables_equal_those_of_the_records(result):
    _, found = result
    tables, of = found.summary["tables"], records(found.folder)
    assert len(tables["layers"]) == len(tables["hard_layers"]) == 2 * NUM_LAYERS + 3
    assert len(tables["norms"]) == len(tables["hard_norms"]) == NUM_LAYERS
    for prefix in ("", "hard_"):
        for name in ("target", "3 none", "3 final", "draft"):
            layer, _, norm = name.partition(" ")
            row = row_of(tables[f"{prefix}layers"], *(("layer", int(layer), norm) if norm else (name,)))
            ranks = [rank for record in of for t, rank in enumerate(record["ranks"][name])
                     if rank is not None and (not prefix or t in record["hard"])]
            assert (row["n"], row["mean_rank"]) == (len(ranks), pytest.approx(np.mean(ranks)))
            assert row["median_rank"] == np.quantile(ranks, 0.5, method="inverted_cdf")
            assert row["share_rank_1"] == pytest.approx(np.mean(np.array(ranks) == 1))
            assert row["mean_rank_low"] <= row["mean_rank"] <= row["mean_rank_high"]
    assert found.summary["num_tokens"] == sum(record["num_tokens"] for record in of)
    assert 0 < found.summary["num_hard"] == tables["hard_norms"][0]["n"] < found.summary["num_tokens"]
    assert found.summary["published_layer/none/mean_rank"] == row_of(tables["layers"], "layer", 5, "none")["mean_rank"]
    assert found.summary["chance_rank"] == 237.0  # of 473 words


def test_the_last_layer_after_the_final_norm_is_the_target(result):
    for rows in (result[1].summary["tables"]["layers"], result[1].summary["tables"]["hard_layers"]):
        target, last = row_of(rows, "target"), row_of(rows, "layer", NUM_LAYERS - 1, "final")
        assert {**last, "source": "target", "layer": None, "norm": None} == target
        assert target["agreement"] == 1.0


def test_draft_and_target_are_compared_on_the_same_tokens(result):
    config, found = result
    drafted = config.draft.load(config.model.load("cpu")).num_drafted
    for record in records(found.folder):
        there = [t for t, rank in enumerate(record["ranks"]["draft"]) if rank is not None]
        assert there == [t for t in range(record["num_tokens"] // (drafted + 1) * (drafted + 1)) if t % (drafted + 1)]
        assert [record["ranks"]["target where drafted"][t] for t in there] == [record["ranks"]["target"][t] for t in there]
    draft, target = (row_of(found.summary["tables"]["layers"], source) for source in ("draft", "target where drafted"))
    assert 0 < draft["n"] == target["n"] < found.summary["num_tokens"]
    assert target["mean_rank"] < draft["mean_rank"] < found.summary["chance_rank"]


def test_without_the_draft_the_rest_is_the_same(result):
    alone, together = tables_of(changed(result[0], drafting=False)), result[1].summary["tables"]
    assert alone["layers"] == [row for row in together["layers"] if row["source"] in ("target", "layer")]
    assert alone["hard_norms"] == together["hard_norms"]


def test_the_target_always_predicts_its_own_greedy_answers(result):
    config = changed(result[0], answers="greedy", hard_below=0.01)
    config.dataset = replace(config.dataset, limit=2, max_new_tokens=12)
    found = measured(config)
    summary = config.probe.summarise(config, found)
    target = row_of(summary.tables["layers"], "target")
    assert (target["mean_rank"], target["share_rank_1"]) == (1.0, 1.0)
    assert 0 < target["n"] <= 24
    assert summary.values["num_hard"] == 0
    assert row_of(summary.tables["hard_layers"], "target")["mean_rank"] is None
    assert list(config.probe.figures(config, found, summary)) == ["fig_layer_probe_ranks"]


def test_an_answer_shorter_than_a_block_has_no_ranks_of_the_draft(result, monkeypatch):
    given = probe.answers
    monkeypatch.setattr(probe, "answers", lambda *arguments: (
        (unit, Answer(answer.prompt, answer.tokens[:5])) for unit, answer in given(*arguments)))
    config = changed(result[0], limit=2)
    found = measured(config)
    assert all(record["ranks"]["draft"] == [None] * 5 for record in found)
    summary = config.probe.summarise(config, found)
    row = row_of(summary.tables["layers"], "draft")
    assert (row["n"], row["mean_rank"], row["median_rank"]) == (0, None, None)
    assert list(config.probe.figures(config, found, summary)) == ["fig_layer_probe_ranks"]


# Medians by bisection equal those of all observations, and tables equal those of a loop over tokens.

@pytest.mark.parametrize(("problems", "tokens", "largest"), [(2, 1, 2), (7, 3, 4), (20, 31, 100), (15, 8, 150_000)])
def test_median_and_interval_equal_those_of_all_tokens(problems, tokens, largest):
    generator = np.random.default_rng(problems)
    ranks = [generator.integers(1, largest + 1, tokens + number % 3).astype(float) for number in range(problems)]
    found = Clusters(range(problems)).statistic(median_of(ranks))
    (expected,) = Clusters(np.repeat(range(problems), [len(of) for of in ranks])).quantiles(np.concatenate(ranks), [0.5])
    assert (found.value, found.low, found.high) == (expected.value, expected.low, expected.high)


def test_median_if_problems_have_no_tokens():
    median = median_of([np.array([]), np.array([4.0, 9.0, 1.0]), np.array([7.0])])
    assert median(np.array([[1, 1, 1], [5, 0, 1]])).tolist() == [4.0, 7.0]
    assert np.isnan(median(np.array([[3, 0, 0]]))).all()
    assert Clusters(range(2)).statistic(median_of([np.array([]), np.array([])])).value is None


RECORDS = [
    {"problem": "a", "num_tokens": 3, "hard": [1],
     "ranks": {"target": [1, 8, 1], "0 none": [2, 20, 1], "0 final": [1, 30, 1], "draft": [None, 6, 1]},
     "log_p": {"target": [-6.0, -5.0], "0 none": [-9.0, -7.0], "0 final": [-8.0, -6.0], "draft": [-4.0, -3.0]},
     "agreements": {"target": [3, 1], "0 none": [1, 0], "0 final": [2, 0], "draft": [1, 0]}},
    {"problem": "b", "num_tokens": 1, "hard": [], "ranks": {"target": [3], "0 none": [5], "0 final": [4], "draft": [None]},
     "log_p": {"target": [-1.0, 0.0], "0 none": [-3.0, 0.0], "0 final": [-2.0, 0.0], "draft": [0.0, 0.0]},
     "agreements": {"target": [1, 0], "0 none": [0, 0], "0 final": [1, 0], "draft": [0, 0]}},
]


def test_the_effect_of_the_norm_by_hand():
    raw, normed = (layer_rank.row_of(RECORDS, f"0 {norm}", False) for norm in ("none", "final"))
    row = NORMS[""].row(raw.row(raw=raw, normed=normed))
    assert row["mean_rank_raw_over_normed"] == pytest.approx(28 / 36)
    assert (row["share_better_raw"], row["share_better_normed"], row["n"]) == (0.25, 0.5, 4)
