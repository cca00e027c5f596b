"""`draft=model`: laws by enumeration, the cache that follows the target's rows, and what is refused."""

import functools
import math
import shutil
from typing import cast

import numpy as np
import pytest
import torch
import transformers

from dflash_mcmc.chains import cost
from dflash_mcmc.config.identity import identity_hash, identity_of
from dflash_mcmc.draft.model import ModelDraft
from dflash_mcmc.engine.batching.batched import BatchedEngine
from dflash_mcmc.engine.batching.interface import Options
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.batching.plan import DraftSize, Workload, predict
from dflash_mcmc.engine.oracle.tabular import TabularDraft, TabularEngine, TabularModel
from dflash_mcmc.engine.speculative.drafter import Anchors, ModelDrafter, SelfDrafter
from dflash_mcmc.errors import ConfigError, UserError
from dflash_mcmc.model import hf
from dflash_mcmc.ops import Draw, SamplingParams, Score
from dflash_mcmc.rng import Key
from dflash_mcmc.sampler.draft_refine import DraftRefine
from dflash_mcmc.testing import PROMPT, law_of, total_variation
from dflash_mcmc.types import ChainResult, Trajectory
from tests.blend.test_model import another_tokenizer, held_by, swap_two
from tests.cases import quick
from tests.engine.batching.test_batched import (
    BLENDS,
    HORIZON,
    PROMPTS,
    SAMPLERS,
    STOPS,
    TOLERANCE,
    all_same,
    chains,
    power_smc,
    run_batched,
)
from tests.engine.speculative.slotwise_drafts import ModelTable, small_table
from tests.engine.speculative.test_block_grid import draft_mh
from tests.engine.speculative.test_mixed_steps import drawn
from tests.engine.speculative.test_slotwise import LAW, RULES
from tests.engine.speculative.test_speculator import match, reject
from tests.laws import conditional, sequences
from tests.runs import execute, records_of
from tests.sampler import test_draft_mh as of_draft_mh
from tests.sampler.stages import step_error
from tests.speculation import speculative_error
from tests.targets import random_model

MATCH = match()

# The law of what the drafter proposes, by enumeration.


class ProposedDraft(TabularDraft):
    """A `ModelDrafter` as the draft of a tabular engine: its laws are those that `propose` gives to the engine.

    Its model has read all tokens before the anchor but the last one, as after a block that was kept as a whole.
    """

    def __init__(self, table: ModelTable, num_drafted: int):
        super().__init__(table.vocab_size, num_drafted, sequential=True)
        self._drafter, self._table_of = ModelDrafter(table.parts, num_drafted), table
        self.proposed = functools.cache(self._proposed)

    def _proposed(self, prefix: tuple[int, ...], drafted: tuple[int, ...]) -> np.ndarray:
        """Logits of the slot after `drafted`."""
        known = dict(enumerate((*prefix[:-2], None)))
        found: list[np.ndarray] = []

        def forward(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            known.update(zip(positions[0].tolist(), tokens[0].tolist(), strict=True))
            last = int(positions[0, -1])
            return torch.from_numpy(self._table_of.logits(tuple(known[at] for at in range(last + 1)), "last"))[None]

        def draw(logits: torch.Tensor, first: int) -> torch.Tensor:
            found.append(logits[0, 0].numpy())
            return torch.tensor([[drafted[first] if first < len(drafted) else 0]])

        at = Anchors(slice(0, 1), cast("object", None), torch.tensor([prefix]), torch.tensor([len(prefix) - 1]), 0, forward)
        self._drafter.propose(at, draw)
        return found[len(drafted)]

    def logits(self, prefix: tuple[int, ...], drafted: tuple[int, ...]) -> np.ndarray:
        return self.proposed(prefix, drafted)


@functools.cache
def other_table() -> ModelTable:
    return ModelTable(random_model("llama", sharpness=0.4, vocab_size=3, eos_token_id=0))


@pytest.mark.parametrize(("rule", "num_drafted", "horizon"), [
    (rule, *sizes) for rule in RULES for sizes in ((2, 2), (1, 3))])
def test_law_is_exact(rule, num_drafted, horizon):
    draft = ProposedDraft(other_table(), num_drafted)
    assert speculative_error(RULES[rule].speculation(draft), LAW, horizon, small_table()) <= 1e-12


def test_the_law_of_a_slot_is_that_after_all_tokens_before():
    draft, tokens = ProposedDraft(other_table(), 3), (1, 0, 2, 1, 2)
    for count in range(3):
        assert np.array_equal(draft.logits(tokens[:3], tokens[3 : 3 + count]),
                              other_table().logits(tokens[: 3 + count], "last"))
    assert np.array_equal(draft.logits((2,), ()), other_table().logits((2,), "last"))  # a prompt of one token


# Samplers that draw from the draft. The law of a token in a block is that after all tokens before it.

STARTS = TabularModel(3, (), seed=11, scale=0.7)


class ChainDraft(TabularDraft):
    """A model, given by the table `STARTS`, that drafts token by token."""

    def __init__(self, num_drafted: int = 2):
        super().__init__(3, num_drafted, sequential=True)

    def logits(self, prefix: tuple[int, ...], drafted: tuple[int, ...]) -> np.ndarray:
        return STARTS.logits((*prefix, *drafted), "last")


def tabular(num_drafted: int = 2) -> TabularEngine:
    return TabularEngine(TabularModel(3, (0,), seed=0, scale=0.5), None, None, ChainDraft(num_drafted))


def test_a_draw_from_the_draft_has_the_law_by_hand():
    """Tokens 0 and 3 start blocks, and are drawn from the target."""
    engine, law = tabular(), SamplingParams(0.9)
    drawn = law_of(lambda key: engine.answer(Draw(Trajectory.start(PROMPT), 4, law, key, "draft")))
    expected = {}
    for tokens in sequences(engine.model, 4):
        parts = [conditional([float(x) for x in (STARTS if at % 3 else engine.model).logits((*PROMPT, *tokens[:at]), "last")],
                             (), 0.9)[token] for at, token in enumerate(tokens)]
        expected[tokens] = math.prod(parts)
    assert total_variation(drawn, expected) <= 1e-12


@pytest.mark.parametrize("changes", [{}, {"proposal": "mixture", "draft_temperature": 0.6}], ids=str)
@pytest.mark.parametrize("num_drafted", [1, 2])
def test_draft_mh_leaves_the_power_target_invariant(changes, num_drafted):
    assert step_error(tabular(num_drafted), of_draft_mh.make(**changes), 3) <= 1e-12


# The batched engine, with a draft of another family, fewer layers and another number of rows in its head.


@pytest.fixture(scope="module")
def qwen3():
    return random_model("qwen3")


def other(rows: int = 70) -> torch.nn.Module:
    """Its law is near enough to the target's that some tokens are kept."""
    return random_model("llama", sharpness=0.5, vocab_size=rows, num_hidden_layers=2)


LENGTH = max(map(len, PROMPTS)) + HORIZON


def run(model, draft, sampler, decoder=MATCH, blend="none", **more):
    return run_batched(model, SAMPLERS[sampler] if isinstance(sampler, str) else sampler, BLENDS[blend], decoder=decoder,
                       draft=lambda parts: ModelDrafter(LanguageModel(draft), 3), **more)


@pytest.fixture(scope="module")
def plain(qwen3):
    return functools.cache(lambda name, blend: run_batched(qwen3, SAMPLERS[name], BLENDS[blend]))


@pytest.mark.parametrize("name", quick(SAMPLERS, "truncated"))
def test_match_is_plain(qwen3, plain, name):
    for draft, decoder in ((other(), match()), (qwen3, match(0.8))):
        found = run(qwen3, draft, name, decoder)
        all_same(found, plain(name, "none"))
        for done in found.values():
            assert done.cost.companion_forwards == done.cost.token_forwards
            assert done.cost.tokens_drafted == 3 * done.cost.blocks_drafted


@pytest.mark.slow
@pytest.mark.parametrize("rows", [53, 70])
def test_a_head_of_another_size_drafts_the_tokens_that_both_have(qwen3, rows):
    """The target's tokens are the first 53 rows of its head of 61."""
    parts, found = LanguageModel(qwen3, stop_ids=STOPS), []
    parts.forbid(range(53, 61))
    for decoder in (None, match(0.8), reject()):
        drafter = ModelDrafter(LanguageModel(other(rows)), 3)
        engine = BatchedEngine(parts, BLENDS["none"], 8, LENGTH, speculation=decoder and decoder.speculation(drafter))
        todo = [(tag, SAMPLERS["truncated"].chain(prompt % 53, HORIZON, Key(tag))) for tag, prompt in enumerate(PROMPTS)]
        found.append({done.tag: done for done in engine.run(todo)})
    all_same(found[1], found[0])
    assert all(done.result.trajectory.tokens.max() < 53 for done in found[2].values())


@pytest.mark.slow
@pytest.mark.parametrize(("sampler", "settings"), [
    ("power_mh", {"slots": 2}), ("replica_exchange", {"slots": 3}), ("csmc", {})], ids=str)
def test_drafts_are_those_of_a_fresh_forward(qwen3, monkeypatch, sampler, settings):
    """The draft's laws are those after all tokens of the row, even after roll-backs, copies and moves of the cache."""
    seen, propose = [], ModelDrafter.propose

    def keep(self, anchors, draw):
        drafted = []

        def keeping(logits, first):
            for row in anchors.live.nonzero()[:, 0].tolist():
                before = anchors.tokens[row, : int(anchors.position[row]) + 1].tolist()
                seen.append((before + [int(tokens[row, 0]) for tokens in drafted], logits[row, 0].clone()))
            drafted.append(draw(logits, first))
            return drafted[-1]
        return propose(self, anchors, keeping)

    monkeypatch.setattr(ModelDrafter, "propose", keep)
    draft = other()
    run(qwen3, draft, sampler, reject(), **settings)
    wrong = 0
    with torch.inference_mode():
        for tokens, logits in seen[:: max(1, len(seen) // 300)]:
            fresh = draft(torch.tensor([tokens])).logits[0, -1, :61]
            wrong += float((fresh - logits).abs().max()) > 1e-3
    assert len(seen) > 300
    assert wrong == 0


DRAWING = {"draft": draft_mh(num_steps=3), "mixture": draft_mh(proposal="mixture", num_steps=3),
           "refine": DraftRefine(num_blocks=3, num_steps=2), "smc": power_smc(proposal="draft")}


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWING)
def test_draws_from_the_draft_have_the_laws_of_fresh_forwards(qwen3, name):
    """log p and log q of every answer, and the same answers in few slots."""
    draft, sampler = other(), DRAWING[name]
    expected = run(qwen3, draft, sampler, None, uses_draft=True)
    for changes in ({"slots": 3}, {"skip_identical": False}):
        all_same(run(qwen3, draft, sampler, None, uses_draft=True, **changes), expected)
    if name != "draft":
        return
    for done in expected.values():
        path = done.result.trajectory
        assert done.cost.companion_forwards == done.cost.token_forwards
        with torch.inference_mode():
            own, drafts = (model(torch.tensor(path.sequence[None])).logits[0, :, :61].double() for model in (qwen3, draft))
            p, warm, q = (torch.log_softmax(logits, dim=-1) for logits in (own, own / 0.7, drafts / 0.7))
        at = len(path.prompt) + np.arange(path.length)
        drafted = np.arange(path.length) % 4 > 0
        assert np.allclose(path.log_p, p[at - 1, path.tokens], atol=TOLERANCE)
        assert np.allclose(path.log_q, np.where(drafted, q[at - 1, path.tokens], warm[at - 1, path.tokens]), atol=TOLERANCE)


def test_a_score_after_a_whole_block_is_that_of_a_fresh_forward(qwen3):
    """The draft has not read the last token that it drafted, and the target has drawn one after it."""
    draft, law, scored = other(), SamplingParams(0.9), np.array([5, 9, 30])

    def chain(number):
        path = yield Draw(Trajectory.start(PROMPTS[0]), 5, law, Key(number), "draft")
        return ChainResult((yield Score(path, scored, law, "draft")))

    engine = BatchedEngine(LanguageModel(qwen3), BLENDS["none"], 4, LENGTH, drafter=ModelDrafter(LanguageModel(draft), 3))
    for done in engine.run([(number, chain(number)) for number in range(6)]):
        path = done.result.trajectory
        with torch.inference_mode():
            logits = draft(torch.tensor(path.sequence[None])).logits[0, :, :61].double() / 0.9
        at = len(path.prompt) + np.arange(5, 8)
        assert np.allclose(path.log_q[5:], torch.log_softmax(logits, dim=-1)[at - 1, scored], atol=TOLERANCE)


@pytest.mark.slow
def test_each_kind_of_rows_draws_as_it_does_alone(qwen3):
    """By rejection, whose tokens depend on the draft: the rows beside a row change neither its drafts nor its verdicts."""
    def alone(numbers, decoder, uses_draft):
        parts, drafter = LanguageModel(qwen3, stop_ids=STOPS), ModelDrafter(LanguageModel(other()), 3)
        engine = BatchedEngine(parts, BLENDS["none"], 8, LENGTH, Options(), None,
                               decoder.speculation(drafter) if decoder else None, drafter if uses_draft else None)
        return {done.tag: done for done in engine.run([(number, drawn(number)) for number in numbers])}

    mixed = alone(range(10), reject(), True)
    targets, drafts = alone(range(0, 10, 2), reject(), False), alone(range(1, 10, 2), None, True)
    assert sum(done.cost.tokens_kept for done in targets.values()) > 0
    all_same(mixed, targets | drafts)


@pytest.mark.slow
def test_beside_a_blend_with_a_model(qwen3):
    """Both models have a cache of their own that follows the target's rows."""
    from dflash_mcmc.blend.model import ModelBlend

    blend, amateur = ModelBlend(beta=-0.6, model="x"), random_model("llama", num_hidden_layers=1)
    found = []
    for drafts in (False, True):
        drafter = ModelDrafter(LanguageModel(other()), 3)
        engine = BatchedEngine(LanguageModel(qwen3, stop_ids=STOPS), blend, 8, LENGTH, companion=LanguageModel(amateur),
                               speculation=match().speculation(drafter) if drafts else None)
        found.append({done.tag: done for done in engine.run(list(chains(SAMPLERS["power_mh"])))})
    all_same(found[1], found[0])
    assert all(done.cost.companion_forwards == 2 * done.cost.token_forwards for done in found[1].values())


def test_steps_have_as_many_rows_as_without_a_second_model(make_config):
    """On a machine whose products keep the bits of a row, a step with such a draft is not padded to eight rows either."""
    target = make_config("model=tiny").model.load("cpu")
    alone, beside = (BatchedEngine(target, None, 1, LENGTH, speculation=match().speculation(drafter))._loop._ladder.row_step
                     for drafter in (SelfDrafter(3), ModelDrafter(target, 3)))
    assert alone == beside


def test_the_plan_counts_the_drafts_cache(qwen3):
    drafter = ModelDrafter(LanguageModel(other()), 3)
    engine = BatchedEngine(LanguageModel(qwen3, stop_ids=STOPS), BLENDS["none"], 12, LENGTH, Options(), None,
                           match().speculation(drafter))
    total = held_by(engine, 3)
    work = Workload(engine.model, LENGTH, LENGTH, Options(), drafter)
    found, without = predict(work, 12), predict(work._replace(drafter=DraftSize(3)), 12)
    assert found.caches == total > without.caches


def test_a_draft_with_too_few_positions_is_refused(qwen3):
    with pytest.raises(UserError, match=r"prompt and generation need 162 positions; allowed: 100 \(those of draft.model\)"):
        run(qwen3, random_model("llama", max_position_embeddings=100), "greedy")


# The configuration.

GIVEN = ("draft=model", "draft.model=tiny", "decoder=speculative_match")
SHORT = ("sampler=temperature", "dataset.limit=2", "dataset.max_new_tokens=12")


def test_an_option_of_model_is_its_folder(make_config):
    config = make_config(*GIVEN)
    assert config.draft.model.endswith("assets/tiny")
    by_folder = make_config(f"draft={config.draft.model}", "decoder=speculative_match")
    assert isinstance(by_folder.draft, ModelDraft)
    assert identity_hash(by_folder) == identity_hash(config)
    rejecting = identity_of(make_config(*GIVEN, "decoder=speculative_rejection"))
    assert rejecting["draft.content"] == rejecting["model.content"]
    assert "draft.model" not in rejecting


@pytest.mark.parametrize(("given", "line"), [
    (["draft=model", "decoder=speculative_match"], r"draft.model: not given; allowed: a text \(the other model, as model="),
    ([*GIVEN, "draft.model=/nowhere/model"], r"draft.model: given '/nowhere/model'; allowed: a folder that exists, or a hub"),
    ([*GIVEN, "draft.num_drafted=0"], r"draft.num_drafted: given 0; allowed: a whole number >= 1"),
    ([*GIVEN, "engine=vllm"], r"decoder: given 'speculative_match'; allowed: plain with engine=vllm, or engine"),
    (["draft=model", "draft.model=tiny", "blend=draft"], r"draft: given 'model'; allowed: tiny, smollm2 or dflash with"),
    (["draft=self", "sampler=draft_mh"], r"draft: given 'self'; allowed: .*dflash.* model .*with sampler=draft_mh, which"),
])
def test_what_is_refused(make_config, given, line):
    with pytest.raises(UserError, match=line):
        make_config(*given)


def test_a_tokenizer_with_other_tokens_is_refused(make_config, tmp_path):
    folder = another_tokenizer(make_config, tmp_path / "other", swap_two)
    config = make_config("draft=model", f"draft.model={folder}", "decoder=speculative_match", *SHORT)
    with pytest.raises(ConfigError, match=r"draft.model: given '.*other'; allowed: a model with the target's tokenizer \(its "
                       r"token 30 is '.', and the target's is '.'; 2 of \d+ differ\)"):
        config.draft.check_model(config.model)
    with pytest.raises(ConfigError, match=r"draft\.model: given"):
        execute(config)


@pytest.mark.slow
def test_a_run_has_the_tokens_of_plain_and_counts_the_draft_apart(make_config, tmp_path):
    folder = tmp_path / "draft"
    shutil.copytree(make_config(*GIVEN).draft.model, folder)
    drafted = records_of(execute(make_config(*SHORT, f"draft={folder}", "decoder=speculative_match")).folder)
    plain = records_of(execute(make_config(*SHORT)).folder)
    assert [record["tokens"] for record in drafted.values()] == [record["tokens"] for record in plain.values()]
    for record in drafted.values():
        assert record["companion_forwards"] == record["token_forwards"] > 0
        assert record["tokens_drafted"] == 4 * record["blocks_drafted"] > 0
    line = "draft=model: counted for the target alone; its model adds as many token-forwards"
    assert line in cost.assumptions(make_config(*GIVEN))


@pytest.mark.slow
def test_models_beside_the_target_stay_loaded(make_config, tmp_path, monkeypatch):
    """A second run reads no weights, two uses of a model share it, and another draft takes the place of the last one alone."""
    read, pretrained = [], hf._pretrained

    def counted(kind, path, *more, **settings):
        if kind is transformers.AutoModelForCausalLM:
            read.append(path.rpartition("/")[2])
        return pretrained(kind, path, *more, **settings)

    tiny = make_config("model=tiny")
    target, folders = tiny.model.load("cpu"), {}
    for name in ("small", "amateur", "other"):
        folders[name] = shutil.copytree(make_config(*GIVEN).draft.model, tmp_path / name)
    monkeypatch.setattr(hf, "_pretrained", counted)

    def loaded(draft, blend):
        config = make_config(f"draft={folders[draft]}", "decoder=speculative_match", "blend=model",
                             f"blend.model={folders[blend]}")
        read.clear()
        models = config.draft.load(target).model, config.blend.companion(target)
        return models, read.copy()

    first, found = loaded("small", "amateur")
    assert found == ["small", "amateur"]
    assert loaded("small", "amateur") == (first, [])
    assert loaded("amateur", "amateur") == (first[1:] * 2, [])
    again, found = loaded("other", "amateur")
    assert (again[1:], found) == (first[1:], ["other"])
    assert loaded("small", "amateur")[1] == ["small"]


def test_rows_that_do_not_draw_are_fed_their_last_token_alone():
    """What a model has read before the anchor of such a row stays: it is another one after a draw from another source."""
    fed = []

    def forward(tokens, positions):
        fed.append((tokens.tolist(), positions.tolist()))
        return torch.zeros(3, 5)

    rows = torch.tensor([[1, 2, 3, 4], [4, 3, 2, 1], [2, 0, 0, 0]])
    anchors = Anchors(slice(0, 3), cast("object", None), rows, torch.tensor([2, 2, 0]), 4, forward)
    drafter = ModelDrafter(LanguageModel(random_model("llama"), stop_ids=STOPS), 1)
    drafter.propose(anchors._replace(live=torch.tensor([True, False, True])), lambda logits, first: logits.argmax(-1))
    assert fed.pop() == ([[2, 3], [2, 2], [2, 2]], [[1, 2], [2, 2], [0, 0]])
    drafter.propose(anchors, lambda logits, first: logits.argmax(-1))
    assert fed.pop() == ([[2, 3], [3, 2], [2, 2]], [[1, 2], [1, 2], [0, 0]])
