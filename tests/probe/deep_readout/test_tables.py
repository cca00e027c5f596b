"""The deep readout tables: the document's own numbers, cases by hand, and no records."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from dflash_mcmc.draft.network.dflash import DFlash
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.probe.deep_readout import figures, tables
from dflash_mcmc.probe.deep_readout.tables import READERS, Tokens, count_parameters, parameter_rows
from tests.draft.network.test_dflash import QWEN3_4B
from tests.engine.speculative.test_speculator import network
from tests.targets import random_model

WORDS = 151_669


def record(problem: str, p_target: list[float], ranks: dict[str, list[int]], p_draft: float = 0.2, **changes) -> dict:
    """A record of a block of len(p_target) + 1 tokens, with changes of its other entries."""
    n = len(p_target)
    return {"problem": problem, "chain": 0, "prompt_length": 96, "block_size": n + 1, "block": [0] * n,
            "p": {name: p_target if name == "target" else [p_draft] * n for name in READERS}, "rank": ranks,
            "parameters": {"words": WORDS}, **changes}


def ranks(target, mask, gold, random) -> dict[str, list[int]]:
    return {"target": target, "mask": mask, "gold": gold, "random": random}


def pick(rows: list[dict], **wanted) -> dict:
    (row,) = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    return row


def test_the_documents_factors_from_its_ranks():
    """Section 3.3. The document truncates its 42.3 instead of rounding: 12,920 / 305 = 42.36."""
    tokens = Tokens([record("a", [0.001] * 2, ranks([205, 405], [2161] * 2, [1476] * 2, [12000, 13840]))], "full")
    for name in ("p_target < 0.01", "all"):
        rows = {row["component"]: row for row in tables.decomposition(tokens) if row["tokens"] == name}
        found = {component: row["factor"] for component, row in rows.items()}
        assert round(found["+ features"], 1) == 6.0
        assert round(found["+ gold tokens"], 1) == 1.5
        assert round(found["features and gold tokens"], 1) == 8.8
        assert math.floor(10 * found["target"]) / 10 == 42.3
        assert round(found["chance"], 2) == 0.17
        assert found["random baseline"] == 1.0
        assert rows["chance"]["mean_rank"] == (WORDS + 1) / 2
        assert [row["mean_rank"] for row in rows.values()][:5] == [12920, 2161, 1476, 1476, 305]
        geometric = math.sqrt(12000 * 13840) / math.sqrt(205 * 405)
        assert rows["target"]["factor_of_geometric_means"] == pytest.approx(geometric)


def test_chance_is_the_rank_in_a_random_order():
    tokens = Tokens([record("a", [0.5], ranks([1], [1], [1], [1]), parameters={"words": 4})], "full")
    row = pick(tables.decomposition(tokens), tokens="all", component="chance")
    assert (row["mean_rank"], row["factor"]) == (2.5, 0.4)
    assert row["factor_of_geometric_means"] == pytest.approx((1 * 2 * 3 * 4) ** -0.25)


def test_low_confidence_tokens_have_their_own_rows():
    tokens = Tokens([record("a", [0.001, 0.5, 0.01], ranks([9, 1, 1], [20, 2, 2], [10, 1, 1], [100, 4, 4]))], "full")
    table = tables.decomposition(tokens)
    low, every = (pick(table, tokens=name, component="+ features") for name in ("p_target < 0.01", "all"))
    assert (low["factor"], low["n"], every["factor"], every["n"]) == (5.0, 1, 108 / 24, 3)
    values = tables.VALUES.row(tables.DeepReadoutResult(tokens, table))
    assert (values["features_factor_low_confidence"], values["features_factor"]) == (5.0, 4.5)
    assert (values["num_tokens"], values["num_low_confidence_tokens"]) == (3, 1)


def test_wins_are_strict_and_buckets_include_their_lower_ends():
    """Five tokens: their ranks are better, equal and worse; two have the same probability as the draft, 0.1."""
    given = [0.009, 0.01, 0.1, 0.1, 0.9]
    tokens = Tokens([record("a", given, ranks([5, 5, 5, 1, 1], [4, 5, 6, 1, 2], [1] * 5, [7] * 5), p_draft=0.1)], "full")
    row = pick(tables.overall(tokens), mode="mask")
    assert (row["rank_draft_wins"], row["p_draft_wins"], row["n"]) == (0.2, 0.4, 5)
    assert (row["mean_rank_target"], row["mean_rank_draft"]) == (17 / 5, 18 / 5)
    assert (row["median_rank_target"], row["median_rank_draft"]) == (5, 4)
    assert (row["mean_p_target"], row["mean_p_draft"]) == (pytest.approx(sum(given) / 5), pytest.approx(0.1))
    assert pick(tables.overall(tokens), mode="gold")["rank_draft_wins"] == 0.6
    table = [row for row in tables.confidence(tokens) if row["mode"] == "mask"]
    assert [row["n"] for row in table] == [1, 1, 2, 0, 1]
    assert [row["rank_draft_wins"] for row in table] == [1.0, 0.0, 0.0, None, 0.0]
    assert [row["p_draft_wins"] for row in table] == [1.0, 1.0, 0.0, None, 0.0]
    assert [row["mean_rank_draft"] for row in table] == [4, 5, 3.5, None, 2]


@pytest.mark.parametrize(("context", "means"), [("full", [98.0, 101.0, 134.0]), ("block", [98.0, 3.0, 3.0]),
                                                ("prompt", [98.0, 98.0, 98.0])])
def test_blocks_and_their_contexts(context, means):
    """Blocks of three tokens after prompts of 96 and 100 tokens; block 12 is in the group 10 to 19."""
    one, other = ({"block": numbers, "block_size": 3, "prompt_length": length}
                  for numbers, length in (([0, 1, 1, 1, 12], 96), ([0, 1, 1, 1, 12], 100)))
    tokens = Tokens([record(name, [0.5] * 5, ranks([1] * 5, [n, 2, 2, 2, 9], [3] * 5, [4] * 5), **place)
                     for name, n, place in (("a", 10, one), ("b", 30, other))], context)
    table = tables.blocks(tokens)
    present = [row for row in table if row["n"]]
    assert [row["block"] for row in table] == [*map(str, range(10)), "10 - 19"]
    assert [(row["block"], row["n"], row["rank_mask"]) for row in present] == [("0", 2, 20), ("1", 6, 2), ("10 - 19", 2, 9)]
    assert [row["context_positions"] for row in present] == means
    # A resample of two problems has the first alone, both, or the second alone.
    assert (present[0]["context_positions_low"], present[0]["context_positions_high"]) == (96.0, 100.0)
    assert (present[0]["rank_mask_low"], present[0]["rank_mask_high"]) == (10, 30)
    curve = [row for row in tables.block_curves(tokens) if row["reader"] == "mask" and row["n"]]
    assert [row["geometric_mean_rank"] for row in curve] == pytest.approx([math.sqrt(300), 2, 9])
    bins = [row for row in tables.position_curves(tokens) if row["reader"] == "target"]
    assert [(row["from"], row["to_below"], row["n"]) for row in bins] == [(91, 128, 8), (128, 182, 2)]


def test_a_factor_has_the_bootstraps_interval():
    rng = np.random.default_rng(0)
    records = [record(f"p{n}", rng.uniform(0, 0.02, 9).tolist(),
                      {name: rng.integers(1, 500, 9).tolist() for name in READERS}) for n in range(8)]
    tokens = Tokens(records, "full")
    low = tokens.p["target"] < 0.01
    row = pick(tables.decomposition(tokens), tokens="p_target < 0.01", component="+ features")
    expected = tokens.clusters.statistic(lambda weights: (weights @ (low * tokens.rank["random"]))
                                         / (weights @ (low * tokens.rank["mask"])))
    assert (row["factor"], row["factor_low"], row["factor_high"]) == pytest.approx(expected[:3])
    assert row["factor_low"] < row["factor"] < row["factor_high"]
    assert row["n"] == int(low.sum())


def test_tables_without_a_token():
    tokens = Tokens([{"problem": "a", "chain": 0, "skipped": "empty"}], "full")
    assert [row["mean_p_draft"] for row in tables.overall(tokens)] == [None] * 3
    assert {row["n"] for row in tables.confidence(tokens)} == {0}
    table = tables.decomposition(tokens)
    assert {row["factor"] for row in table} == {None}
    assert tables.blocks(tokens) == tables.block_curves(tokens) == []
    assert tables.position_curves(tokens) == []
    assert tables.VALUES.row(tables.DeepReadoutResult(tokens, table))["mean_rank_mask"] is None


def qwen3_4b() -> dict:
    """The parameter counts of the document's pair, from weights that use no memory."""
    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config(
            vocab_size=151_936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
            num_key_value_heads=8, head_dim=128, tie_word_embeddings=True))
        draft = DFlash(QWEN3_4B)
    forbidden = torch.arange(151_936) >= WORDS
    parts = SimpleNamespace(decoder=model.model, head=model.lm_head, layers=model.model.layers, forbidden=forbidden,
                            vocab_size=151_936)
    return count_parameters(parts, draft)


def test_the_documents_parameters():
    """Section 4.1, in millions, except the target's layers: the document subtracts the tied head once too often.

    36 layers of the draft's size have 3,633.5 M parameters. The draft's 5 layers are 13.9 % of these, not 15.5 % of 3,244.6 M.
    """
    counts = qwen3_4b()
    rows = parameter_rows(counts)
    assert [round(row["parameters"] / 1e6, 1) for row in rows] == [3633.5, 389.0, 389.0, 0.0, 32.8, 504.7, 0.0]
    assert (counts["target_layers"] - counts["head"]) / 1e6 == pytest.approx(3244.6, abs=0.1)
    assert counts["target_layers"] / counts["draft_layers"] == 36 / 5
    assert pick(rows, component="draft: 5 layers")["of_target_layers"] == pytest.approx(0.139, abs=5e-4)
    assert pick(rows, component="draft: fc (12800 to 2560)")["role"] == "linear, 5 to 1"
    assert (counts["tied"], counts["words"]) == (True, WORDS)
    assert counts["draft_fc"] + counts["draft_layers"] + counts["draft_norms"] == 537_427_200  # as in the checkpoint


@pytest.mark.parametrize(("family", "changes"), [("qwen3", {}), ("qwen3", {"tie_word_embeddings": True}), ("gpt2", {})])
def test_components_add_up_to_the_whole_model(family, changes):
    model = random_model(family, **changes)
    counts = count_parameters(LanguageModel(model), network(random_model("qwen3")))
    parts = [counts[name] for name in ("target_layers", "embedding", "target_other")]
    assert sum(parts) + (0 if counts["tied"] else counts["head"]) == sum(p.numel() for p in model.parameters())
    assert counts["tied"] == bool(changes)
    assert counts["target_other"] == {"qwen3": 32, "gpt2": 2 * 32 + 192 * 32}[family]


def texts(figure) -> str:
    return "\n".join(text.get_text() for axes in figure.axes for text in [axes.title, *axes.texts, *axes.get_xticklabels()])


def test_figures_contain_their_numbers():
    tokens = Tokens([record("a", [0.001] * 2, ranks([205, 405], [2161] * 2, [1476] * 2, [12000, 13840]))], "full")
    assert "n = 2" in texts(figures.buckets(tables.confidence(tokens)))
    fall = texts(figures.decomposition(tables.decomposition(tokens)))
    assert all(text in fall for text in ("12,920", "2,161\n6.0x better", "1,476\n1.5x better", "305\n42.4x better", "75,835"))
    assert "0\n2" in texts(figures.by_block(tables.block_curves(tokens), "block"))
    assert "91-127\n2" in texts(figures.by_position(tables.position_curves(tokens), "full"))
    diagram = texts(figures.architecture(qwen3_4b()))
    assert all(text in diagram for text in ("36 layers", "12,800 to 2,560", "33", "same weights as the embedding"))


def test_a_rank_that_gets_worse_is_marked():
    tokens = Tokens([record("a", [0.5], ranks([20], [40], [80], [10]))], "full")
    figure = figures.decomposition(tables.decomposition(tokens))
    assert "40\n4.0x worse" in texts(figure)
    assert [axes.get_title(loc="left") or axes.get_title() for axes in figure.axes] == ["All tokens (n = 1)"]
