"""Teacher forcing in pieces equals one forward, blocks equal separately drafted ones, and ties share a rank."""

import numpy as np
import pytest
import torch

from dflash_mcmc.dataset.arith import Arith
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.errors import UserError
from dflash_mcmc.forcing import sequences
from dflash_mcmc.forcing.answers import Answer, answers, check_source
from dflash_mcmc.forcing.sequences import Tree, predictors
from dflash_mcmc.probe import Unit, Work
from dflash_mcmc.store.records import read_records
from dflash_mcmc.types import Problem
from tests.cases import quick
from tests.runs import execute
from tests.targets import FAMILIES, random_model
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
    monkeypatch.setattr(sequences, "_ROWS_AT_ONCE", 2 * BLOCK_SIZE)  # in three forwards
    with torch.no_grad():
        hidden = sequences.drafted(draft, model, features, TOKENS, torch.tensor([33]), torch.tensor([anchors]))[0]
        for found, anchor in zip(hidden, anchors, strict=True):
            expected = block_alone(draft, model, TOKENS[0], anchor)
            # Padding ids have -inf in both.
            torch.testing.assert_close(model.logits(found), expected, atol=3e-4, rtol=1e-4)


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


# Continuations of a prefix that are read together have the states of separate forwards. Common beginnings are read once.

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


def together(model: LanguageModel, length: int, tokens: np.ndarray) -> torch.Tensor:
    reading = sequences.read(model, PREFIX[None], keep_cache=True)
    with torch.no_grad():
        hidden, which = predictors(model, reading.cache, reading.hidden[0, length - 1], length, tokens)
    assert reading.cache.layers[0].keys.shape[2] == 20, "the prefix is only looked at"
    return hidden[torch.from_numpy(which)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", quick([20, 9, 1], 9))
@pytest.mark.parametrize("tokens", [APART, ALIKE], ids=["apart", "alike"])
def test_each_is_read_as_if_alone(family, length, tokens, monkeypatch):
    model = LanguageModel(random_model(family))
    expected = alone(model, length, tokens)
    for at_once in (512, 6, 1):
        monkeypatch.setattr(sequences, "_ROWS_AT_ONCE", at_once)
        torch.testing.assert_close(together(model, length, tokens), expected, atol=2e-4, rtol=1e-3)


def test_what_is_shared_is_read_once():
    model = LanguageModel(random_model())
    reading = sequences.read(model, PREFIX[None], keep_cache=True)
    begins = {tuple(row[:length]) for row in ALIKE.tolist() for length in range(4)}  # the empty beginning is the prefix
    with torch.no_grad():
        shared, _ = predictors(model, reading.cache, reading.hidden[0, 19], 20, ALIKE)
        single, which = predictors(model, reading.cache, reading.hidden[0, 19], 20, ALIKE[:, :1])
    assert len(shared) == len(begins)
    assert (len(single), which.any()) == (1, False)


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


def test_recurrent_layers_are_refused():
    model = LanguageModel(random_model("qwen3_5"))
    with pytest.raises(UserError, match="probe: given one that reads many continuations"):
        Tree(model, sequences.read(model, PREFIX[None], keep_cache=True).kept_cache(), 20)


# The answers that probes teacher-force.

@pytest.fixture
def found(make_config):
    """The answers of a configuration: found("gold", "dataset.limit=3")."""

    def get(source, *overrides):
        config = make_config(*overrides)
        work = Work([Unit(problem.id) for problem in config.dataset.problems()], "cpu")
        return config, dict(answers(config, config.model.load("cpu"), work, source))

    return get


def test_gold_is_the_solution_behind_the_prompt(found):
    config, given = found("gold", "dataset.limit=3")
    model = config.model.load("cpu")
    for problem in config.dataset.problems():
        answer = given[Unit(problem.id)]
        assert model.decode(answer.tokens) == problem.solution
        assert problem.question in model.decode(answer.prompt)
        np.testing.assert_array_equal(answer.sequence, np.concatenate([answer.prompt, answer.tokens]))


def test_greedy_is_what_the_greedy_sampler_draws(found, make_config):
    config, given = found("greedy", "dataset.limit=3", "sampler=greedy")
    folder = execute(config).folder
    records = read_records(folder)
    assert {record["problem"]: record["tokens"] for record in records} == {
        unit.problem: answer.tokens.tolist() for unit, answer in given.items()}


def test_what_cannot_be_measured_says_why():
    prompt, some = np.arange(3), np.arange(5)
    assert Answer(prompt, some).skipped(5) is None
    assert Answer(prompt, some).skipped(6) == "shorter than 6 tokens"
    assert Answer(prompt, some[:0]).skipped() == "empty"
    assert Answer(prompt, some[:0], "not numbers").skipped() == "not numbers"


def test_an_answer_longer_than_the_positions_is_one_line(found, monkeypatch):
    monkeypatch.setattr(Arith, "problems", lambda self: [Problem("a", "How many?", "1", solution="1 2 3 4 " * 400)])
    with pytest.raises(UserError, match=r"dataset: the solution of problem a takes \d+ tokens after a prompt of \d+; "
                                        r"allowed: 1024 positions together"):
        found("gold")
    with pytest.raises(UserError, match=r"dataset.max_new_tokens: given 1024; allowed: at most"):
        found("greedy", "dataset.max_new_tokens=1024")


def test_gold_without_solutions_is_one_line(make_config, monkeypatch):
    config = make_config()
    check_source(config, "gold")
    monkeypatch.setattr(Arith, "problems", lambda self: [Problem("a", "How many?", "1")])
    check_source(config, "greedy")
    with pytest.raises(UserError, match=r"probe.answers: given 'gold'; allowed: 'greedy', since there are problems of "
                                        "dataset=arith without a solution"):
        check_source(config, "gold")
