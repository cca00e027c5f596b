"""The draft's readout: one masked pass compared with drafting block by block, with a cache that grows."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.special import ndtri
from transformers import Qwen3Config, Qwen3ForCausalLM

from dflash_mcmc.draft.network.dflash import DFlash
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.speculative.drafter import DFlashDrafter
from dflash_mcmc.forcing import sequences
from dflash_mcmc.probe import deep_readout
from dflash_mcmc.probe.deep_readout import MODES, TARGET, parameter_rows, tokens_of
from dflash_mcmc.probe.deep_readout.readout import Hidden, count_parameters, hidden_states, noise, read_out
from dflash_mcmc.rng import Key
from tests.draft.network.test_dflash import QWEN3_4B
from tests.engine.speculative.test_speculator import MASK, network
from tests.targets import random_model

TOLERANCE = 3e-5
KEY = Key(3).fold_in("noise")
PROMPT, ANSWER = np.array([11, 5, 23, 9, 40, 2, 17]), np.arange(23) * 13 % 59


@pytest.fixture(scope="module")
def model():
    return random_model("qwen3")


def pair(model, block_size: int = 5, sliding=(None, None)) -> DFlashDrafter:
    return DFlashDrafter(network(model, sliding=sliding), LanguageModel(model), block_size)


def anchors_of(drafter: DFlashDrafter) -> list[int]:
    return sequences.whole_blocks(len(PROMPT), len(ANSWER), drafter.num_drafted + 1)


def scaled_noise(features: torch.Tensor, segments) -> torch.Tensor:
    """Noise drawn position by position and scaled segment by segment, in float64."""
    width = features.shape[1]
    drawn = np.stack([ndtri(KEY.uniforms(place * width, (place + 1) * width)) for place in range(len(features))])
    for start, stop in segments:
        drawn[start:stop] *= np.sqrt((features[start:stop].double().numpy() ** 2).sum() / (drawn[start:stop] ** 2).sum())
    return torch.from_numpy(drawn).float()


@torch.inference_mode()
def block_by_block(model, drafter, mode: str, context: str, again=()) -> torch.Tensor:
    """Hidden states (blocks, size - 1, hidden) with a cache that grows by one block at a time.

    Args:
        again: numbers of the blocks whose cache has the prompt's entries once more.
    """
    draft, anchors, size = drafter.network, anchors_of(drafter), drafter.num_drafted + 1
    sequence, last = np.concatenate([PROMPT, ANSWER]), anchors[-1]
    states = model(torch.from_numpy(sequence)[None], output_hidden_states=True).hidden_states
    features = torch.cat([states[layer + 1][0] for layer in drafter.tapped_layers], dim=-1)[:last]
    starts = [0, *anchors[:-1]]
    if mode == "random":
        features = scaled_noise(features, list(zip(starts, anchors, strict=True)))
    cached, found = [], []
    for start, anchor in zip(starts, anchors, strict=True):
        positions = torch.arange(start, anchor)
        cached.append((*draft.keys_values(draft.context(features[None, start:anchor]), positions[None]), positions))
        shown = {"full": cached, "block": cached[-1:], "prompt": cached[:1]}[context]
        shown = shown + cached[:1] if len(cached) - 1 in again else shown
        fed = torch.from_numpy(sequence[anchor : anchor + size]).clone()
        if mode in ("mask", "reinject"):
            fed[1:] = MASK
        own = anchor + torch.arange(size)
        place = torch.cat([*(positions for *_, positions in shown), own])

        def attend(layer, queries, keys, values, shown=shown, own=own, place=place):
            keys, values = (torch.cat([*(entry[part][layer] for entry in shown), new], dim=2).repeat_interleave(2, dim=1)
                            for part, new in enumerate((keys, values)))
            window = draft.shape.sliding[layer]
            seen = torch.ones(len(own), len(place), dtype=torch.bool)
            if window is not None:
                seen = (place <= own[:, None]) & (place > own[:, None] - window)
            scores = torch.einsum("rhqd,rhkd->rhqk", queries, keys) * queries.shape[-1] ** -0.5
            return torch.einsum("rhqk,rhkd->rhqd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values)

        found.append(draft(model.get_input_embeddings()(fed)[None], own[None], attend)[0, 1:])
    return torch.stack(found)


@pytest.mark.parametrize("context", ["full", "block", "prompt"])
@pytest.mark.parametrize(("size", "sliding"), [(5, (None, None)), (3, (None, None)), (5, (4, None))],
                         ids=["whole", "short", "sliding"])
def test_one_pass_equals_block_by_block(model, context, size, sliding):
    drafter = pair(model, size, sliding)
    together = hidden_states(drafter, PROMPT, ANSWER, context, KEY, MODES)
    assert together.draft.shape == (3, len(ANSWER) // size, size - 1, 32)
    for row, mode in enumerate(MODES):
        alone = hidden_states(drafter, PROMPT, ANSWER, context, KEY, (mode,)).draft[0]
        torch.testing.assert_close(together.draft[row], alone, atol=TOLERANCE, rtol=0)
        expected = block_by_block(model, drafter, mode, context)
        torch.testing.assert_close(together.draft[row], expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("context", ["full", "block", "prompt"])
def test_the_prompt_is_injected_again_every_second_block(model, context):
    """Blocks 2 and 4 of five see it, as in a cache with the prompt's entries once more. Other blocks stay as with masks."""
    drafter = pair(model, 4, (4, None))
    assert len(anchors_of(drafter)) == 5
    modes = ("mask", "gold", "reinject")
    masks, gold, found = hidden_states(drafter, PROMPT, ANSWER, context, KEY, modes, 2).draft
    for mode, rows in (("mask", masks), ("gold", gold)):
        expected = block_by_block(model, drafter, mode, context)
        torch.testing.assert_close(rows, expected, atol=TOLERANCE, rtol=0)
    right = block_by_block(model, drafter, "reinject", context, again=(2, 4))
    torch.testing.assert_close(found, right, atol=TOLERANCE, rtol=0)
    for wrong in ((1, 3), (1, 2, 3, 4), (2,)):
        planted = block_by_block(model, drafter, "reinject", context, again=wrong)
        assert (found - planted).abs().max() > 0.01
    assert ((found - masks).abs().amax(dim=(1, 2)) > 0.01).tolist() == [False, False, True, False, True]


def test_noise_has_the_norm_of_each_segment():
    features = torch.randn(40, 24, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.1, 9.0, 40)[:, None]
    segments = [(0, 13), (13, 14), (14, 30), (30, 40)]
    drawn = noise(features, segments, KEY)
    for start, stop in segments:
        wanted, found = (float(np.linalg.norm(part[start:stop].double().numpy())) for part in (features, drawn))
        assert abs(found / wanted - 1.0) < 1e-6
    np.testing.assert_allclose(drawn, scaled_noise(features, segments), rtol=1e-5)
    unscaled = drawn[:13] / drawn[:13].square().mean().sqrt()
    assert abs(float(unscaled.mean())) < 0.2
    assert 0.6 < float((unscaled.abs() < 1.0).float().mean()) < 0.76
    assert not torch.equal(drawn, noise(features, segments, Key(4).fold_in("noise")))


def test_noise_does_not_depend_on_pieces(monkeypatch):
    features = torch.randn(40, 24, generator=torch.Generator().manual_seed(0))
    whole = noise(features, [(0, 30), (30, 40)], KEY)
    monkeypatch.setattr("dflash_mcmc.probe.deep_readout.readout._NOISE_VALUES", 7 * 24)
    torch.testing.assert_close(noise(features, [(0, 30), (30, 40)], KEY), whole, rtol=1e-6, atol=0)


def test_ranks_and_probabilities_by_hand():
    """The hidden states are the logits themselves: 4 words, two positions."""
    target = SimpleNamespace(logits=lambda hidden: hidden, vocab_size=4)
    drafter = SimpleNamespace(target=target, logits=lambda hidden: 2.0 * hidden)
    low, tied = [0.0, np.log(2.0), np.log(5.0), -np.inf], [1.0, 1.0, 1.0, 0.0]
    rows = torch.tensor([[low, tied]], dtype=torch.float32)
    found = read_out(drafter, Hidden(rows, rows.flip(1)[None], torch.tensor([[1, 0]])), ("mask",))
    assert found["rank"] == {"target": [2, 1], "mask": [1, 3]}
    equal = np.e / (3.0 * np.e + 1.0)
    assert found["p"]["target"] == pytest.approx([0.25, equal], rel=1e-5)
    assert found["p"]["mask"] == pytest.approx([np.e**2 / (3.0 * np.e**2 + 1.0), 1.0 / 30.0], rel=1e-5)
    worst = read_out(drafter, Hidden(rows, rows[None], torch.tensor([[3, 3]])), ("mask",))
    assert (worst["rank"]["target"], worst["p"]["target"][0]) == ([4, 4], 0.0)


def test_the_target_predicts_from_the_position_before(model, monkeypatch):
    drafter, sequence = pair(model), np.concatenate([PROMPT, ANSWER])
    hidden = hidden_states(drafter, PROMPT, ANSWER, "full", KEY, MODES)
    found = read_out(drafter, hidden, MODES)
    with torch.inference_mode():
        logits = model(torch.from_numpy(sequence)[None]).logits[0].double().numpy()
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    places = [anchor + slot for anchor in anchors_of(drafter) for slot in range(1, 5)]
    assert found["p"]["target"] == pytest.approx([p[place - 1, sequence[place]] for place in places], rel=1e-3, abs=1e-12)
    assert found["rank"]["target"] == [1 + int((p[place - 1] > p[place - 1, sequence[place]]).sum()) for place in places]
    monkeypatch.setattr(sequences, "positions_at_once", lambda vocab_size: 3)
    pieces = read_out(drafter, hidden, MODES)
    assert pieces["rank"] == found["rank"]
    for name, values in found["p"].items():
        assert pieces["p"][name] == pytest.approx(values, rel=1e-4)


# The deep readout tables: the document's own numbers, cases by hand, and no records.

WORDS = 151_669


def record(problem: str, p_target: list[float], ranks: dict[str, list[int]], p_draft: float = 0.2, **changes) -> dict:
    """A record of a block of len(p_target) + 1 tokens, with changes of its other entries."""
    n = len(p_target)
    return {"problem": problem, "chain": 0, "prompt_length": 96, "block_size": n + 1, "block": [0] * n,
            "p": {name: p_target if name == "target" else [p_draft] * n for name in (TARGET, *MODES)}, "rank": ranks,
            "parameters": {"words": WORDS}, **changes}


def ranks(target, mask, gold, random) -> dict[str, list[int]]:
    return {"target": target, "mask": mask, "gold": gold, "random": random}


def pick(rows: list[dict], **wanted) -> dict:
    (row,) = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    return row


def test_the_documents_factors_from_its_ranks():
    """Section 3.3. The document truncates its 42.3 instead of rounding: 12,920 / 305 = 42.36."""
    tokens = tokens_of([record("a", [0.001] * 2, ranks([205, 405], [2161] * 2, [1476] * 2, [12000, 13840]))], "full")
    for name in ("p_target < 0.01", "all"):
        rows = {row["component"]: row for row in deep_readout.rows(tokens)["decomposition"] if row["tokens"] == name}
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
    tokens = tokens_of([record("a", [0.5], ranks([1], [1], [1], [1]), parameters={"words": 4})], "full")
    row = pick(deep_readout.rows(tokens)["decomposition"], tokens="all", component="chance")
    assert (row["mean_rank"], row["factor"]) == (2.5, 0.4)
    assert row["factor_of_geometric_means"] == pytest.approx((1 * 2 * 3 * 4) ** -0.25)


def test_low_confidence_tokens_have_their_own_rows():
    tokens = tokens_of([record("a", [0.001, 0.5, 0.01], ranks([9, 1, 1], [20, 2, 2], [10, 1, 1], [100, 4, 4]))], "full")
    table = deep_readout.rows(tokens)["decomposition"]
    low, every = (pick(table, tokens=name, component="+ features") for name in ("p_target < 0.01", "all"))
    assert (low["factor"], low["n"], every["factor"], every["n"]) == (5.0, 1, 108 / 24, 3)
    values = deep_readout.VALUES.row(tokens.row(records=[], decomposition=table))
    assert (values["features_factor_low_confidence"], values["features_factor"]) == (5.0, 4.5)
    assert (values["num_tokens"], values["num_low_confidence_tokens"]) == (3, 1)


def test_wins_are_strict_and_buckets_include_their_lower_ends():
    """Five tokens: their ranks are better, equal and worse; two have the same probability as the draft, 0.1."""
    given = [0.009, 0.01, 0.1, 0.1, 0.9]
    tokens = tokens_of([record("a", given, ranks([5, 5, 5, 1, 1], [4, 5, 6, 1, 2], [1] * 5, [7] * 5), p_draft=0.1)], "full")
    row = pick(deep_readout.rows(tokens)["overall"], mode="mask")
    assert (row["rank_draft_wins"], row["p_draft_wins"], row["n"]) == (0.2, 0.4, 5)
    assert (row["mean_rank_target"], row["mean_rank_draft"]) == (17 / 5, 18 / 5)
    assert (row["median_rank_target"], row["median_rank_draft"]) == (5, 4)
    assert (row["mean_p_target"], row["mean_p_draft"]) == (pytest.approx(sum(given) / 5), pytest.approx(0.1))
    assert pick(deep_readout.rows(tokens)["overall"], mode="gold")["rank_draft_wins"] == 0.6
    table = [row for row in deep_readout.rows(tokens)["confidence"] if row["mode"] == "mask"]
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
    tokens = tokens_of([record(name, [0.5] * 5, ranks([1] * 5, [n, 2, 2, 2, 9], [3] * 5, [4] * 5), **place)
                     for name, n, place in (("a", 10, one), ("b", 30, other))], context)
    table = deep_readout.rows(tokens)["blocks"]
    present = [row for row in table if row["n"]]
    assert [row["block"] for row in table] == [*map(str, range(10)), "10 - 19"]
    assert [(row["block"], row["n"], row["rank_mask"]) for row in present] == [("0", 2, 20), ("1", 6, 2), ("10 - 19", 2, 9)]
    assert [row["context_positions"] for row in present] == means
    # A resample of two problems has the first alone, both, or the second alone.
    assert (present[0]["context_positions_low"], present[0]["context_positions_high"]) == (96.0, 100.0)
    assert (present[0]["rank_mask_low"], present[0]["rank_mask_high"]) == (10, 30)
    curve = [row for row in deep_readout.rows(tokens)["block_curves"] if row["reader"] == "mask" and row["n"]]
    assert [row["geometric_mean_rank"] for row in curve] == pytest.approx([math.sqrt(300), 2, 9])
    bins = [row for row in deep_readout.rows(tokens)["position_curves"] if row["reader"] == "target"]
    assert [(row["from"], row["to_below"], row["n"]) for row in bins] == [(91, 128, 8), (128, 182, 2)]


def test_tables_without_a_token():
    tokens = tokens_of([{"problem": "a", "chain": 0, "skipped": "empty"}], "full")
    assert [row["mean_p_draft"] for row in deep_readout.rows(tokens)["overall"]] == [None] * 3
    assert {row["n"] for row in deep_readout.rows(tokens)["confidence"]} == {0}
    table = deep_readout.rows(tokens)["decomposition"]
    assert {row["factor"] for row in table} == {None}
    assert deep_readout.rows(tokens)["blocks"] == deep_readout.rows(tokens)["block_curves"] == []
    assert deep_readout.rows(tokens)["position_curves"] == []
    assert deep_readout.VALUES.row(tokens.row(records=[], decomposition=table))["mean_rank_mask"] is None


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
    tokens = tokens_of([record("a", [0.001] * 2, ranks([205, 405], [2161] * 2, [1476] * 2, [12000, 13840]))], "full")
    assert "n = 2" in texts(deep_readout.buckets(deep_readout.rows(tokens)["confidence"]))
    fall = texts(deep_readout.decomposition(deep_readout.rows(tokens)["decomposition"]))
    assert all(text in fall for text in ("12,920", "2,161\n6.0x better", "1,476\n1.5x better", "305\n42.4x better", "75,835"))
    assert "0\n2" in texts(deep_readout.by_block(deep_readout.rows(tokens)["block_curves"], "block"))
    assert "91-127\n2" in texts(deep_readout.by_position(deep_readout.rows(tokens)["position_curves"], "full"))
    diagram = texts(deep_readout.architecture(qwen3_4b()))
    assert all(text in diagram for text in ("36 layers", "12,800 to 2,560", "33", "same weights as the embedding"))
