"""Teacher forcing in pieces equals one forward, blocks equal separately drafted ones, and ties share a rank."""

from __future__ import annotations

import pytest
import torch

from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.forcing import sequences
from tests.targets import random_model
from tests.train.drafts import BLOCK_SIZE, block_alone, random_draft, random_target

TOKENS = torch.randint(0, 58, (1, 33), generator=torch.Generator().manual_seed(3))


def test_reading_in_pieces_is_reading_at_once(monkeypatch):
    model = random_target()
    whole = sequences.read(model, TOKENS, (0, 2), keep_cache=True)
    monkeypatch.setattr(sequences, "_CHUNK", 7)
    pieces = sequences.read(model, TOKENS, (0, 2), keep_cache=True)
    for one, other in ((whole.hidden, pieces.hidden), *zip(whole.outputs, pieces.outputs, strict=True),
                       *((a.keys, b.keys) for a, b in zip(whole.cache.layers, pieces.cache.layers, strict=True))):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)
    assert sequences.read(model, TOKENS).cache is None


def test_features_are_those_of_transformers():
    model, plain = random_target(), random_model()
    with torch.no_grad():
        states = plain.model(input_ids=TOKENS, output_hidden_states=True).hidden_states
    found = sequences.read(model, TOKENS, (0, 2)).features(model, (0, 2))
    torch.testing.assert_close(found, torch.cat([states[1], states[3]], dim=-1), atol=2e-5, rtol=1e-4)
    raw = sequences.read(model, TOKENS, (2,)).outputs[0]
    assert (raw - states[3]).abs().max() > 0.1, "the last layer's output and its norm are distinguished"


def test_blocks_are_those_drafted_alone(monkeypatch):
    model = random_target()
    draft = random_draft(model)
    layers = draft.shape.target_layers
    features = sequences.read(model, TOKENS, layers).features(model, layers)
    anchors = sequences.whole_blocks(6, 27, BLOCK_SIZE)
    assert anchors == [6, 11, 16, 21, 26]
    monkeypatch.setattr(sequences, "_BLOCK_ROWS", 2 * BLOCK_SIZE)  # in three forwards
    with torch.no_grad():
        hidden = sequences.drafted(draft, model, features, TOKENS, torch.tensor([33]), torch.tensor([anchors]))[0]
        for found, anchor in zip(hidden, anchors, strict=True):
            expected = block_alone(draft, model, TOKENS[0], anchor)
            # Padding ids have -inf in both.
            torch.testing.assert_close(model.logits(found), expected, atol=3e-4, rtol=1e-4)


def test_what_a_block_may_not_see_does_not_reach_it():
    model = random_target()
    draft = random_draft(model)
    layers = draft.shape.target_layers
    features = sequences.read(model, TOKENS, layers).features(model, layers)
    arguments = (TOKENS, torch.tensor([33]), torch.tensor([[12, 20]]))
    seen = torch.ones(1, 2, 33, dtype=torch.bool)
    seen[0, 1, 5:12] = False
    with torch.no_grad():
        every = sequences.drafted(draft, model, features, *arguments)
        same = sequences.drafted(draft, model, features, *arguments, seen=torch.ones_like(seen))
        less = sequences.drafted(draft, model, features, *arguments, seen=seen)
        features[:, 5:12] += 9.0
        other = sequences.drafted(draft, model, features, *arguments, seen=seen)
    torch.testing.assert_close(every, same)
    torch.testing.assert_close(less[0, 0], every[0, 0], atol=1e-5, rtol=1e-4)
    assert (less[0, 1] - every[0, 1]).abs().max() > 1e-2
    torch.testing.assert_close(less[0, 1], other[0, 1], atol=1e-5, rtol=1e-4)


def test_given_tokens_take_the_place_of_masks():
    model = random_target()
    draft = random_draft(model)
    layers = draft.shape.target_layers
    features = sequences.read(model, TOKENS, layers).features(model, layers)
    arguments = (TOKENS, torch.tensor([33]), torch.tensor([[12]]))
    masks = torch.tensor([[[int(TOKENS[0, 12]), *[draft.shape.mask_token_id] * (BLOCK_SIZE - 1)]]])
    gold = TOKENS[0, 12 : 12 + BLOCK_SIZE][None, None]
    with torch.no_grad():
        default, said, true = (sequences.drafted(draft, model, features, *arguments, given=given)
                               for given in (None, masks, gold))
    torch.testing.assert_close(default, said)
    assert (default - true).abs().max() > 1e-2


@pytest.mark.parametrize(("tokens", "expected"), [(13, [4, 8, 12]), (12, [4, 8, 12]), (11, [4, 8]), (3, []), (0, [])])
def test_only_whole_blocks_count(tokens, expected):
    assert sequences.whole_blocks(4, tokens, 4) == expected


def test_ties_share_the_better_rank():
    logits = torch.tensor([[3.0, 1.0, 3.0, 2.0, -torch.inf]])
    for token, rank in enumerate((1, 4, 1, 3, 5)):
        assert sequences.ranks(logits, torch.tensor([token])).item() == rank


@pytest.mark.parametrize("wrong", [[0.0, torch.nan, 1.0], [torch.nan] * 3, [0.0, torch.inf, 1.0], [-torch.inf] * 3], ids=str)
def test_what_is_no_law_has_no_ranks(wrong):
    logits = torch.tensor([[2.0, -torch.inf, 0.0], wrong])
    assert sequences.checked(logits[:1]) is not None
    assert sequences.ranks(logits[:1], torch.tensor([2])).tolist() == [2]
    for use in (sequences.checked, lambda logits: sequences.ranks(logits, torch.tensor([0, 0]))):
        with pytest.raises(sequences.NotNumbers, match="gave logits that are not numbers"):
            use(logits)


def test_logits_at_once_are_bounded():
    assert sequences.positions_at_once(151_936) * 151_936 * 4 <= 64 * 2**20
    assert sequences.positions_at_once(151_936, 15) % 15 == 0
    assert sequences.positions_at_once(10**9, 15) == 15


def test_recurrent_layers_go_on_from_piece_to_piece(monkeypatch):
    model = LanguageModel(random_model("qwen3_5"))
    tokens = torch.randint(0, 58, (2, 40), generator=torch.Generator().manual_seed(1))
    whole = sequences.read(model, tokens)
    monkeypatch.setattr(sequences, "_CHUNK", 16)
    torch.testing.assert_close(sequences.read(model, tokens).hidden, whole.hidden, atol=1e-4, rtol=0)
