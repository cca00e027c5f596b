"""The draft's law of every token. The batched engine is compared with the reference engine and with itself."""

import itertools

import numpy as np
import pytest

from dflash_mcmc.blend.draft import DraftBlend
from dflash_mcmc.blend.none import NoBlend
from dflash_mcmc.engine.batching.batched import BatchedEngine
from dflash_mcmc.engine.batching.interface import Options
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.ops import Draw, SamplingParams, Score
from dflash_mcmc.rng import Key
from dflash_mcmc.sampler.draft_mh import DraftMH
from dflash_mcmc.sampler.draft_refine import DraftRefine
from dflash_mcmc.types import ChainResult, Trajectory
from tests.cases import quick
from tests.engine.batching.test_batched import HORIZON, PROMPTS, SAMPLERS, STOPS, TOLERANCE, chains, same, same_as_reference
from tests.engine.speculative.test_speculator import drafter
from tests.targets import RememberingReference, random_model, rows_do_not_depend_on_the_batch

BLEND = DraftBlend(beta=0.4)


@pytest.fixture(scope="module")
def reference(qwen3):
    """The reference engine with a blend and a draft, made once for each pair."""
    known = {}

    def engine(blend=BLEND, draft="dflash"):
        if (repr(blend), draft) not in known:
            parts = LanguageModel(qwen3, stop_ids=STOPS)
            known[repr(blend), draft] = RememberingReference(qwen3, parts, blend, drafter(draft, parts, qwen3))
        return known[repr(blend), draft]

    return engine


def run(model, todo, blend=BLEND, draft="dflash", slots=8, **options):
    parts = LanguageModel(model, stop_ids=STOPS)
    engine = BatchedEngine(parts, blend, slots, max(map(len, PROMPTS)) + HORIZON, Options(**options), None, None,
                           drafter(draft, parts, model))
    return {done.tag: done for done in engine.run(todo)}


@pytest.mark.parametrize(("name", "draft"), quick(
    itertools.product(("greedy", "truncated", "power_mh", "power_mh_matched", "power_mh_early"),
                      ("dflash", "dflash_short", "dflash_sliding")),
    ("truncated", "dflash_short"), ("truncated", "dflash_sliding")))
def test_draft_blend_is_reference(qwen3, reference, name, draft):
    same_as_reference(run(qwen3, chains(SAMPLERS[name]), draft=draft), SAMPLERS[name], reference(draft=draft))


def redrawn(prompt, number):
    """A chain that draws from the draft, also from inside blocks, and scores tokens that were drawn from the target."""
    key, law = Key(5).fold_in(number), SamplingParams(0.8, top_k=20)
    path = yield Draw(Trajectory.start(prompt), HORIZON, law, key.fold_in("a"), "draft")
    path = yield Draw(path.prefix(min(path.length, 7)), HORIZON, law, key.fold_in("b"), "draft", path)
    start = path.prefix(min(path.length, 3))
    other = yield Draw(start, HORIZON, SamplingParams(), key.fold_in("c"))
    scored = yield Score(start, other.tokens[start.length :], SamplingParams(0.8), "draft")
    assert scored.tokens.tolist() == other.tokens.tolist()
    np.testing.assert_allclose(scored.log_p, other.log_p, atol=TOLERANCE)
    last = yield Draw(scored.prefix(min(scored.length, 8)), HORIZON, law, key.fold_in("d"), "draft")
    return ChainResult(Trajectory(prompt, *(np.concatenate([getattr(p, name) for p in (path, scored, last)])
                                      for name in ("tokens", "log_p", "log_q", "interval"))))


def redraws():
    return [(number, redrawn(PROMPTS[number % len(PROMPTS)], number)) for number in range(10)]


@pytest.mark.slow
@pytest.mark.parametrize("blend", [
    pytest.param(NoBlend(), id="none"), pytest.param(BLEND, id="draft")])
def test_drawing_from_the_draft_is_reference(qwen3, reference, blend):
    batched = run(qwen3, redraws(), blend)
    for tag, chain in redraws():
        same(batched[tag].result, reference(blend).run(chain))


@pytest.mark.parametrize(("blend", "source", "blocks"), [
    (NoBlend(), "blended", 0), (NoBlend(), "base", 0), (NoBlend(), "draft", 3), (BLEND, "blended", 3), (BLEND, "base", 3)])
def test_a_score_drafts_blocks_only_where_something_reads_them(qwen3, blend, source, blocks):
    """12 tokens after a prompt of 5: they are in three blocks of 5, whose first tokens nothing drafts."""
    def chain():
        return ChainResult((yield Score(Trajectory.start(np.arange(5, 10)), np.arange(20, 32), SamplingParams(), source)))

    assert run(qwen3, [(0, chain())], blend)[0].cost.blocks_drafted == blocks


DRAFT_MH = {"draft": {}, "mixture": {"proposal": "mixture"}}


def draft_mh(**changes) -> DraftMH:
    values = dict(alpha=2.0, draft_temperature=0.7, num_blocks=3, num_steps=2, proposal="draft",
                  draft_weight=0.5, proposal_temperature=None)
    return DraftMH(**{**values, **changes})


@pytest.mark.slow
@pytest.mark.parametrize("changes", [
    pytest.param(changes, id=name) for name, changes in DRAFT_MH.items()])
@pytest.mark.parametrize("blend", [pytest.param(NoBlend(), id="none"), pytest.param(BLEND, id="draft")])
def test_draft_mh_is_reference_and_does_not_depend_on_the_batch(qwen3, reference, blend, changes):
    sampler = draft_mh(**changes)
    batched, alone = run(qwen3, chains(sampler), blend), run(qwen3, list(chains(sampler))[1:4], blend, slots=1)
    same_as_reference(batched, sampler, reference(blend))
    assert len(alone) == 3
    for tag in alone:
        if rows_do_not_depend_on_the_batch():
            assert batched[tag].result.trace == alone[tag].result.trace
        assert batched[tag].cost == alone[tag].cost
    assert sum(done.result.moved for done in batched.values())


@pytest.mark.slow
def test_draft_refine_is_reference(qwen3, reference):
    """With early rejection, since it changes no decision."""
    sampler = DraftRefine(alpha=2.0, start_temperature=0.7, proposal_temperature=1.0, num_blocks=2, num_steps=3,
                          cut="confidence", early_reject="exact")
    few = [entry for entry in chains(sampler) if entry[0] % 5 < 2]
    results = {tag: done.result for tag, done in run(qwen3, few, NoBlend(), slots=8).items()}
    assert sum(result.moved for result in results.values())
    assert sum(result.abandoned for result in results.values())
    for tag, chain in list(chains(sampler))[:2]:
        same(results[tag], reference(NoBlend()).run(chain))


@pytest.mark.slow
@pytest.mark.parametrize("source", ["blend", "draft_mh"])
def test_recurrent_layers(source):
    """Draws from the draft go token by token there."""
    model = random_model("qwen3_5")
    parts = LanguageModel(model, stop_ids=STOPS)
    blend, sampler = (BLEND, SAMPLERS["power_mh"]) if source == "blend" else (NoBlend(), draft_mh())
    reference = RememberingReference(model, parts, blend, drafter("dflash", parts, model))
    same_as_reference(run(model, chains(sampler), blend, snapshot_every=8), sampler, reference)
