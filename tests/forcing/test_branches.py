"""Continuations of a prefix that are read together have the states of separate forwards. Common beginnings are read once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.errors import UserError
from dflash_mcmc.forcing import sequences
from dflash_mcmc.forcing.sequences import Tree, predictors
from tests.targets import FAMILIES, random_model

PREFIX = torch.randint(0, 58, (20,), generator=torch.Generator().manual_seed(5))
APART = np.random.default_rng(6).integers(0, 58, (7, 4))
ALIKE = np.random.default_rng(7).integers(0, 2, (40, 4))
"""Forty continuations over two token ids. At most sixteen of them differ."""


def alone(model: LanguageModel, length: int, tokens: np.ndarray) -> torch.Tensor:
    """Hidden states (count, n, hidden) that predict continuations after `length` tokens, from one forward per continuation."""
    with torch.no_grad():
        rows = [model.decoder(input_ids=torch.cat([PREFIX[:length], torch.from_numpy(row)])[None],
                              use_cache=False).last_hidden_state[0] for row in tokens]
    return torch.stack([row[length - 1 : -1] for row in rows])


def together(model: LanguageModel, length: int, tokens: np.ndarray, share: bool = True) -> torch.Tensor:
    reading = sequences.read(model, PREFIX[None], keep_cache=True)
    with torch.no_grad():
        found = predictors(model, reading.cache, reading.hidden[0, length - 1], length, tokens, share)
    assert reading.cache.layers[0].keys.shape[2] == 20, "the prefix is only looked at"
    return found.hidden[torch.from_numpy(found.which)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [20, 9, 1])
@pytest.mark.parametrize("tokens", [APART, ALIKE], ids=["apart", "alike"])
def test_each_is_read_as_if_alone(family, length, tokens, monkeypatch):
    model = LanguageModel(random_model(family))
    expected = alone(model, length, tokens)
    for at_once in (512, 6, 1):
        monkeypatch.setattr(sequences, "_ROWS_AT_ONCE", at_once)
        for share in (True, False):
            torch.testing.assert_close(together(model, length, tokens, share), expected, atol=2e-4, rtol=1e-3)


def test_what_is_shared_is_read_once():
    model = LanguageModel(random_model())
    reading = sequences.read(model, PREFIX[None], keep_cache=True)
    begins = {tuple(row[:length]) for row in ALIKE.tolist() for length in range(4)}  # the empty beginning is the prefix
    with torch.no_grad():
        counts = [len(predictors(model, reading.cache, reading.hidden[0, 19], 20, ALIKE, share).hidden)
                  for share in (True, False)]
        single = predictors(model, reading.cache, reading.hidden[0, 19], 20, ALIKE[:, :1])
    assert counts == [len(begins), 1 + 40 * 3]
    assert len(single.hidden) == 1
    assert not single.which.any()


def test_no_forward_reads_more_than_is_allowed(monkeypatch):
    model, sizes = LanguageModel(random_model()), []

    class Counted(Tree):
        def read(self, parents, tokens):
            sizes.append(len(tokens))
            return super().read(parents, tokens)

    monkeypatch.setattr(sequences, "Tree", Counted)
    monkeypatch.setattr(sequences, "_ROWS_AT_ONCE", 6)
    together(model, 20, ALIKE)
    assert max(sizes) <= 6
    assert len(sizes) > 1


def test_growing_token_by_token_is_reading_at_once():
    model = LanguageModel(random_model())
    cache = sequences.read(model, PREFIX[None], keep_cache=True).cache
    parents, tokens = [-1, 0, 0, 2, -1, 4], [5, 6, 7, 6, 8, 6]
    with torch.no_grad():
        whole = Tree(model, cache, 12).read(parents, tokens)
        grown = Tree(model, cache, 12)
        steps = torch.cat([grown.read(parents[part], tokens[part]) for part in (slice(0, 1), slice(1, 4), slice(4, 6))])
    torch.testing.assert_close(steps, whole, atol=2e-5, rtol=1e-4)


class SeesNeighbours(Tree):
    """A mutant: the parent of a token is the token read before it, even if that belongs to another continuation."""

    def read(self, parents, tokens):
        return super().read([number - 1 for number in range(len(parents))], tokens)


class Forgets(sequences._Nodes):
    """A mutant: equal tokens share a node even after different prefixes."""

    @classmethod
    def of(cls, rows, share):
        known = {token: number for number, token in enumerate(dict.fromkeys(rows.ravel().tolist()))}
        return cls([-1] * len(known), list(known), np.vectorize(known.__getitem__)(rows))


@pytest.mark.parametrize(("name", "mutant"), [("Tree", SeesNeighbours), ("_Nodes", Forgets)])
def test_what_is_wrong_is_noticed(name, mutant, monkeypatch):
    model = LanguageModel(random_model())
    right = alone(model, 20, ALIKE)
    monkeypatch.setattr(sequences, name, mutant)
    assert (together(model, 20, ALIKE) - right).abs().max() > 1e-2


def test_recurrent_layers_are_refused():
    model = LanguageModel(random_model("qwen3_5"))
    with pytest.raises(UserError, match="probe: given one that reads many continuations"):
        Tree(model, sequences.read(model, PREFIX[None], keep_cache=True).kept_cache(), 20)
