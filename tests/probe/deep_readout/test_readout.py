"""The draft's readout: one masked pass compared with drafting block by block, and with what the engine drafts."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.special import ndtri

from dflash_mcmc.blend.none import NoBlend
from dflash_mcmc.engine.batching.cache import ContiguousCache
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.batching.model_runner import ModelRunner, Span
from dflash_mcmc.engine.speculative.drafter import Anchors, DFlashDrafter
from dflash_mcmc.forcing import sequences
from dflash_mcmc.probe.deep_readout.readout import AnswerBlocks, Hidden, hidden_states, noise, read_out
from dflash_mcmc.probe.deep_readout.tables import CONTEXTS, MODES
from dflash_mcmc.rng import Key
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


def example(drafter: DFlashDrafter) -> tuple[np.ndarray, AnswerBlocks]:
    return np.concatenate([PROMPT, ANSWER]), AnswerBlocks.of(len(PROMPT), len(ANSWER), drafter.num_drafted + 1)


def scaled_noise(features: torch.Tensor, segments) -> torch.Tensor:
    """Noise drawn position by position and scaled segment by segment, in float64."""
    width = features.shape[1]
    drawn = np.stack([ndtri(KEY.uniforms(place * width, (place + 1) * width)) for place in range(len(features))])
    for start, stop in segments:
        drawn[start:stop] *= np.sqrt((features[start:stop].double().numpy() ** 2).sum() / (drawn[start:stop] ** 2).sum())
    return torch.from_numpy(drawn).float()


@torch.inference_mode()
def block_by_block(model, drafter, sequence, blocks, mode: str, context: str, again=()) -> torch.Tensor:
    """Hidden states (blocks, size - 1, hidden) with a cache that grows by one block at a time.

    Args:
        again: numbers of the blocks whose cache has the prompt's entries once more.
    """
    draft, last = drafter.network, blocks.anchors[-1]
    states = model(torch.from_numpy(sequence)[None], output_hidden_states=True).hidden_states
    features = torch.cat([states[layer + 1][0] for layer in drafter.tapped_layers], dim=-1)[:last]
    starts = [0, *blocks.anchors[:-1]]
    if mode == "random":
        features = scaled_noise(features, list(zip(starts, blocks.anchors, strict=True)))
    cached, found = [], []
    for start, anchor in zip(starts, blocks.anchors, strict=True):
        positions = torch.arange(start, anchor)
        cached.append((*draft.keys_values(draft.context(features[None, start:anchor]), positions[None]), positions))
        shown = {"full": cached, "block": cached[-1:], "prompt": cached[:1]}[context]
        shown = shown + cached[:1] if len(cached) - 1 in again else shown
        fed = torch.from_numpy(sequence[anchor : anchor + blocks.size]).clone()
        if mode in ("mask", "reinject"):
            fed[1:] = MASK
        own = anchor + torch.arange(blocks.size)
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


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize(("size", "sliding"), [(5, (None, None)), (3, (None, None)), (5, (4, None))],
                         ids=["whole", "short", "sliding"])
def test_one_pass_equals_block_by_block(model, context, size, sliding):
    drafter = pair(model, size, sliding)
    sequence, blocks = example(drafter)
    together = hidden_states(drafter, sequence, blocks, context, KEY)
    assert together.draft.shape == (3, len(ANSWER) // size, size - 1, 32)
    for row, mode in enumerate(MODES):
        alone = hidden_states(drafter, sequence, blocks, context, KEY, (mode,)).draft[0]
        torch.testing.assert_close(together.draft[row], alone, atol=TOLERANCE, rtol=0)
        expected = block_by_block(model, drafter, sequence, blocks, mode, context)
        torch.testing.assert_close(together.draft[row], expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("context", CONTEXTS)
def test_the_prompt_is_injected_again_every_second_block(model, context):
    """Blocks 2 and 4 of five see it, as in a cache with the prompt's entries once more. Other blocks stay as with masks."""
    drafter = pair(model, 4, (4, None))
    sequence, blocks = example(drafter)
    assert len(blocks.anchors) == 5
    modes = ("mask", "gold", "reinject")
    masks, gold, found = hidden_states(drafter, sequence, blocks, context, KEY, modes, 2).draft
    for mode, rows in (("mask", masks), ("gold", gold)):
        expected = block_by_block(model, drafter, sequence, blocks, mode, context)
        torch.testing.assert_close(rows, expected, atol=TOLERANCE, rtol=0)
    right = block_by_block(model, drafter, sequence, blocks, "reinject", context, again=(2, 4))
    torch.testing.assert_close(found, right, atol=TOLERANCE, rtol=0)
    for wrong in ((1, 3), (1, 2, 3, 4), (2,)):
        planted = block_by_block(model, drafter, sequence, blocks, "reinject", context, again=wrong)
        assert (found - planted).abs().max() > 0.01
    assert ((found - masks).abs().amax(dim=(1, 2)) > 0.01).tolist() == [False, False, True, False, True]


def test_modes_and_contexts_differ(model):
    drafter = pair(model)
    sequence, blocks = example(drafter)
    found = {context: hidden_states(drafter, sequence, blocks, context, KEY).draft for context in CONTEXTS}
    for first, other in ((0, 1), (0, 2), (1, 2)):
        assert (found["full"][first] - found["full"][other]).abs().max() > 0.1
    for context in ("block", "prompt"):
        torch.testing.assert_close(found[context][:, 0], found["full"][:, 0], atol=TOLERANCE, rtol=0)
        assert ((found[context] - found["full"])[:, 1:].abs().amax(dim=(2, 3)) > 0.01).all()
    assert (found["block"] - found["prompt"])[:, 1:].abs().max() > 0.1


def test_masks_hide_the_predicted_tokens(model):
    """In the mode `mask` a block does not see its own tokens after the known one; in the mode `gold` it sees all of them."""
    drafter = pair(model)
    sequence, blocks = example(drafter)
    other = sequence.copy()
    other[blocks.anchors[-1] + 1 :] += 1
    before, after = (hidden_states(drafter, tokens, blocks, "full", KEY).draft[:, -1] for tokens in (sequence, other))
    torch.testing.assert_close(before[0], after[0], atol=TOLERANCE, rtol=0)
    assert (before[1:] - after[1:]).abs().amax(dim=(1, 2)).min() > 0.1


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
    assert found.rank == {"target": [2, 1], "mask": [1, 3]}
    equal = np.e / (3.0 * np.e + 1.0)
    assert found.p["target"] == pytest.approx([0.25, equal], rel=1e-5)
    assert found.p["mask"] == pytest.approx([np.e**2 / (3.0 * np.e**2 + 1.0), 1.0 / 30.0], rel=1e-5)
    worst = read_out(drafter, Hidden(rows, rows[None], torch.tensor([[3, 3]])), ("mask",))
    assert (worst.rank["target"], worst.p["target"][0]) == ([4, 4], 0.0)


def test_the_target_predicts_from_the_position_before(model, monkeypatch):
    drafter = pair(model)
    sequence, blocks = example(drafter)
    hidden = hidden_states(drafter, sequence, blocks, "full", KEY)
    found = read_out(drafter, hidden)
    with torch.inference_mode():
        logits = model(torch.from_numpy(sequence)[None]).logits[0].double().numpy()
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    places = [anchor + slot for anchor in blocks.anchors for slot in range(1, blocks.size)]
    assert found.p["target"] == pytest.approx([p[place - 1, sequence[place]] for place in places], rel=1e-3, abs=1e-12)
    assert found.rank["target"] == [1 + int((p[place - 1] > p[place - 1, sequence[place]]).sum()) for place in places]
    monkeypatch.setattr(sequences, "positions_at_once", lambda vocab_size: 3)
    pieces = read_out(drafter, hidden)
    assert pieces.rank == found.rank
    for name, values in found.p.items():
        assert pieces.p[name] == pytest.approx(values, rel=1e-4)


def engine_logits(drafter: DFlashDrafter, sequence: np.ndarray, anchors: list[int], aside: bool) -> torch.Tensor:
    """The draft logits of a decoder at these anchors, (blocks, drafted, vocabulary), from a slot cache that it fills itself.

    With `aside` it drafts after all positions are read, as samplers and blends do that visit a sequence again; else it drafts
    each block before the block is read.
    """
    model, size, length = drafter.target, drafter.num_drafted + 1, 256
    runner = ModelRunner(model, NoBlend(), "sdpa", length, 32, 64, drafter)
    cache = ContiguousCache(model.cache_shape, 2, length, model.device, drafter.companion)
    tokens = torch.zeros(2, length, dtype=torch.int64)
    tokens[1, : len(sequence)] = torch.from_numpy(sequence)
    rows, found, start = torch.tensor([1]), [], 0
    with torch.inference_mode(), runner.ready():
        if aside:
            runner.read(cache, [Span(1, sequence, 0, len(sequence))])
        for anchor in anchors:
            if not aside:
                runner.read(cache, [Span(1, sequence, start, anchor)])
            at = Anchors(rows, cache, tokens, torch.tensor([anchor]), -(-(anchor + size) // 32) * 32)
            found.append(drafter.logits((drafter.hidden_aside if aside else drafter.hidden)(at))[0])
            start = anchor
    return torch.stack(found)


@pytest.mark.parametrize("aside", [False, True])
@pytest.mark.parametrize("which", ["random", "sliding", "embedded"])
def test_mask_mode_equals_the_engines_drafts(model, make_config, which, aside):
    if which == "embedded":
        config = make_config("decoder=speculative_match", "draft=tiny")
        parts = config.model.load("cpu")
        drafter, problem = config.draft.load(parts), config.dataset.problems()[4]
        prompt = parts.encode(config.model.prompt(parts.tokenizer, problem.question))
        sequence = np.concatenate([prompt, parts.encode(problem.solution)])
        blocks = AnswerBlocks.of(len(prompt), len(sequence) - len(prompt), drafter.num_drafted + 1)
        assert len(blocks.anchors) > 3
    else:
        drafter = pair(model, sliding=(4, None) if which == "sliding" else (None, None))
        sequence, blocks = example(drafter)
    hidden = hidden_states(drafter, sequence, blocks, "full", KEY)
    drafted = engine_logits(drafter, sequence, blocks.anchors, aside)
    with torch.inference_mode():
        torch.testing.assert_close(drafter.logits(hidden.draft[0]), drafted, atol=3e-4, rtol=0)
        assert (drafter.logits(hidden.draft[1]) - drafted)[..., :50].abs().max() > 0.1
