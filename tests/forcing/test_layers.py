"""Compares states, laws and ranks along an answer with transformers' hidden states and with loops in float64."""

import math

import numpy as np
import pytest
import torch

from dflash_mcmc.draft.network.dflash import block_pass
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.forcing import sequences
from dflash_mcmc.forcing.answers import Answer
from tests.targets import FAMILIES, random_model

ANSWER = Answer(np.array([5, 9, 30, 2]), np.array([7, 7, 41, 3, 60, 12]))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("states_bytes", [1, 2**30])
@torch.no_grad()
def test_states_equal_those_of_transformers_for_every_group_size(family, states_bytes, monkeypatch):
    monkeypatch.setattr(sequences, "_STATES_BYTES", states_bytes)
    model = random_model(family)
    expected = model(input_ids=torch.from_numpy(ANSWER.sequence)[None], output_hidden_states=True)
    groups = list(sequences.readings(LanguageModel(model), ANSWER, range(3)))
    assert len(groups) == (3 if states_bytes == 1 else 1)
    outputs = {layer: output for _, group in groups for layer, output in group.items()}
    assert list(outputs) == [0, 1, 2]
    for layer in (0, 1):
        torch.testing.assert_close(outputs[layer], expected.hidden_states[layer + 1][0, 3:-1])
    for last, _ in groups:
        torch.testing.assert_close(last, expected.hidden_states[3][0, 3:-1])


def test_standing_of_a_case_by_hand():
    logits = torch.tensor([[0.0, math.log(2.0), math.log(2.0), -torch.inf], [1000.0, 1000.0 + math.log(4.0), 0.0, -torch.inf]])
    found = sequences.standing(logits, torch.tensor([2, 0]))
    assert found.rank.tolist() == [1, 2]  # tied tokens all have the better rank
    assert found.best.tolist() == [1, 1]
    assert found.log_p.tolist() == pytest.approx([math.log(0.4), math.log(0.2)], abs=1e-4)
    assert sequences.standing(logits, torch.tensor([0, 2])).rank.tolist() == [3, 3]


def test_log_p_of_large_logits_keeps_its_digits():
    generator = torch.Generator().manual_seed(0)
    logits, tokens = 3000.0 * torch.randn(50, 61, generator=generator), torch.arange(50)
    tokens[::2] = logits[::2].argmax(dim=-1)
    exact = [row.double().log_softmax(dim=-1)[token].item() for row, token in zip(logits, tokens, strict=True)]
    assert sequences.log_probability(logits, tokens).tolist() == pytest.approx(exact, rel=1e-6, abs=1e-12)
    close = torch.tensor([[20_000.0, 19_990.0]])
    assert float(sequences.log_probability(close, torch.tensor([0]))) == pytest.approx(-math.log1p(math.exp(-10.0)), rel=1e-6)


def test_no_logits_of_a_whole_answer_are_made(monkeypatch):
    """Pieces give the same result as the whole answer. With 151,936 token ids a piece has 110 positions."""
    model = LanguageModel(random_model())
    tokens = torch.from_numpy(ANSWER.tokens)
    ((last, _),) = sequences.readings(model, ANSWER, [0])
    whole = sequences.standings(model, sequences.layer_source(model, last, "none"), tokens)
    monkeypatch.setattr(sequences, "_LOGITS_BYTES", 2 * 4 * model.vocab_size)
    assert [(piece.start, piece.stop) for piece in sequences.pieces(model, 5)] == [(0, 2), (2, 4), (4, 5)]
    rows, source = [], sequences.layer_source(model, last, "none")

    def counted(hidden):
        rows.append(len(hidden))
        return model.logits(hidden)

    parts = sequences.standings(model, source._replace(head=counted), tokens)
    assert rows == [2, 2, 2]
    assert all(torch.allclose(a.double(), b.double()) for a, b in zip(whole, parts, strict=True))


@pytest.fixture
def pair(make_config):
    """A configuration with the embedded target and draft, the loaded target, and a gold answer."""
    config = make_config("probe=layer_rank", "draft=tiny", "dataset.limit=1")
    model = config.model.load("cpu")
    (problem,) = config.dataset.problems()
    prompt = model.encode(config.model.prompt(model.tokenizer, problem.question))
    return config, model, Answer(prompt, model.encode(problem.solution))


@pytest.mark.parametrize("block_size", [8, 5])
@torch.no_grad()
def test_the_draft_is_asked_block_by_block(pair, block_size):
    """Compares with a loop over blocks, in which each block has only the context before its anchor."""
    config, model, answer = pair
    config.draft.block_size = block_size
    draft = config.draft.load(model)
    source, n = sequences.draft_source(model, draft, answer), len(answer.tokens)
    assert source.speaks.tolist() == [t % block_size != 0 and t < n - n % block_size for t in range(n)]
    assert source.speaks.sum() >= 2 * (block_size - 1)
    network, mask = draft.network, draft.network.shape.mask_token_id
    for start in range(0, n - n % block_size, block_size):
        anchor = len(answer.prompt) + start
        sequence = torch.from_numpy(answer.sequence[:anchor])[None]
        features = sequences.read(model, sequence, draft.tapped_layers).features(model, draft.tapped_layers)
        positions = torch.arange(anchor)[None]
        keys, values = network.keys_values(network.context(features), positions)
        given = torch.tensor([[int(answer.tokens[start])] + [mask] * (block_size - 1)])
        embeddings = model.decoder.get_input_embeddings()(given) * network.shape.embedding_scale
        hidden = block_pass(network, keys, values, positions, torch.tensor([[anchor]]), embeddings[:, None])
        slots = slice(start + 1, start + block_size)
        torch.testing.assert_close(source.head(source.states[slots]), draft.logits(hidden[0, 0, 1:]), rtol=1e-4, atol=1e-4)
