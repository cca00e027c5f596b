"""Chains on a stand-in for vLLM against the reference engine: every sampler, batches that change, preemption, failures."""

from pathlib import Path

import numpy as np
import pytest

from dflash_mcmc.blend.none import NoBlend
from dflash_mcmc.engine.batching.interface import NOT_NUMBERS
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.delegated.elsewhere import UnloadedTarget
from dflash_mcmc.engine.vllm.core import VllmEngine
from dflash_mcmc.errors import UserError
from dflash_mcmc.ops import Draw, SamplingParams, Score, Together
from dflash_mcmc.rng import Key
from dflash_mcmc.types import ChainResult, Trajectory
from tests.cases import quick
from tests.engine.batching.test_batched import HORIZON, SAMPLERS, STOPS, same
from tests.engine.batching.test_stop_strings import STOP, byte_level
from tests.engine.vllm.fake import FakeCore
from tests.targets import RememberingReference, random_model

PROMPTS = [np.array([11, 5, 23, 9]), np.array([40]), np.array([3, 7, 3])]


@pytest.fixture(scope="module")
def model():
    return random_model("qwen3")


@pytest.fixture(scope="module")
def reference(model):
    return RememberingReference(model, LanguageModel(model, stop_ids=STOPS), NoBlend())


def target_of(model, stop_ids=STOPS) -> UnloadedTarget:
    return UnloadedTarget(Path("nowhere"), "float32", "cpu", model.config, None, 192, 61, tuple(sorted({*stop_ids, 3})), ())


def engine_of(model, core=None, num_chains: int = 4, **options) -> tuple[VllmEngine, FakeCore]:
    core = core or FakeCore(model)
    return VllmEngine(target_of(model), core, num_chains, **options), core


def chains(sampler):
    return [(index, sampler.chain(PROMPTS[index % len(PROMPTS)], HORIZON, Key(7).fold_in(index))) for index in range(6)]


@pytest.mark.parametrize("name", quick(SAMPLERS, "power_mh_early"))
def test_every_sampler_is_reference(model, reference, name):
    engine, core = engine_of(model)
    results = {done.tag: done for done in engine.run(chains(SAMPLERS[name]))}
    assert len(results) == 6
    for tag, chain in chains(SAMPLERS[name]):
        same(results[tag].result, reference.run(chain))
    assert not len(core.ledger)
    assert not core.running


@pytest.mark.parametrize("changes", quick(
    [dict(preempt_every=3), dict(chunks=2), dict(preempt_every=2, chunks=1, rows=3), dict(rows=1)],
    dict(preempt_every=2, chunks=1, rows=3)), ids=str)
@pytest.mark.parametrize("name", quick(["power_mh_early", "truncated"], "power_mh_early"))
def test_preemption_chunks_and_the_batch_change_no_token(model, name, changes):
    core = FakeCore(model, **changes)
    plain, _ = engine_of(model)
    expected = {done.tag: done.result for done in plain.run(chains(SAMPLERS[name]))}
    for done in engine_of(model, core)[0].run(chains(SAMPLERS[name])):
        same(done.result, expected[done.tag], 0.0)
    assert (core.preempted > 0) == ("preempt_every" in changes)


@pytest.fixture(scope="module")
def stopping(model):
    """(target, reference) with stop strings of `tests/engine/batching/test_stop_strings.py`."""
    tokenizer = byte_level()
    language = LanguageModel(model, tokenizer, stop_ids=STOPS).stopping_at(STOP)
    target = target_of(model, language.stop_ids)._replace(tokenizer=tokenizer, stop_ids=language.stop_ids)
    return target.stopping_at(STOP), RememberingReference(model, language, NoBlend())


@pytest.mark.parametrize(("name", "changes"), quick([
    ("temperature", {}), ("isir", {}), ("power_mh_early", {}), ("power_mh_early", dict(preempt_every=2, chunks=1, rows=3)),
    ("power_mh_early", dict(skip_identical=False))], "temperature", ("power_mh_early", dict(preempt_every=2, chunks=1, rows=3))
), ids=str)
def test_stop_strings_end_draws_as_in_the_reference(model, stopping, name, changes):
    target, reference = stopping
    core = FakeCore(model, **{key: value for key, value in changes.items() if key != "skip_identical"})
    engine = VllmEngine(target, core, 4, changes.get("skip_identical", True))
    ends = set[str]()
    for done in engine.run(chains(SAMPLERS[name])):
        same(done.result, reference.run(dict(chains(SAMPLERS[name]))[done.tag]))
        drawn = done.result.trajectory
        ends.add("length" if not drawn.ended else "id" if drawn.tokens[-1] in target.stop_ids else "string")
    assert "string" in ends
    VllmEngine(target.stopping_at([]), core, 4)  # the next run of the process
    assert core.ledger._stops is None


def test_stop_strings_need_a_stop_id(make_config, model):
    config = make_config("engine=vllm", "dataset.stop=[ab]")
    with pytest.raises(UserError, match=r"dataset.stop: given \['ab'\]; allowed: \[\] with engine=vllm and a model without"):
        config.engine.start(config, target_of(model)._replace(stop_ids=()), 4, 1)


@pytest.mark.slow
def test_skipping_and_floors_change_the_cost_alone(model):
    sampler = SAMPLERS["power_mh_early"]
    on, off = ({done.tag: done for done in engine_of(model, skip_identical=skip)[0].run(chains(sampler))}
               for skip in (True, False))
    for tag, done in on.items():
        same(done.result, off[tag].result, 0.0)
        assert done.cost.tokens_drawn + done.cost.tokens_skipped == off[tag].cost.tokens_drawn
    assert sum(done.cost.tokens_skipped for done in on.values()) > 0
    assert sum(done.result.abandoned for done in on.values()) > 0


def test_a_chain_whose_logits_are_not_numbers_fails_alone(model):
    core = FakeCore(model, broken=[1])
    engine, _ = engine_of(model, core)
    results = {done.tag: done for done in engine.run(chains(SAMPLERS["temperature"]))}
    assert results[1].result is None
    assert results[1].failure == NOT_NUMBERS
    assert [tag for tag, done in results.items() if done.result is None] == [1]


def test_the_other_operations_of_a_failed_chain_are_ended(model):
    def three(prompt):
        start = Trajectory.start(prompt)
        yield Together(tuple(Draw(start, 12, SamplingParams(), Key(number)) for number in range(3)))
        raise AssertionError("the chain has failed")

    core = FakeCore(model, broken=[0])
    engine, _ = engine_of(model, core)
    done, = engine.run([("", three(PROMPTS[0]))])
    assert done.failure == NOT_NUMBERS
    assert sorted(core.aborted) == [1, 2]
    assert not core.running
    assert not len(core.ledger)


def test_a_run_that_is_left_ends_its_requests(model):
    engine, core = engine_of(model)
    steps = engine.steps(chains(SAMPLERS["temperature"]))
    assert next(steps) is None
    assert core.running
    steps.close()
    assert not core.running
    assert not len(core.ledger)


def test_costs_are_those_of_the_requests(model):
    """A draw of n tokens after a prompt of m has m + n - 1 forwards of a token; nothing is cached in the stand-in."""
    def chain(prompt):
        start = Trajectory.start(prompt)
        drawn = yield Draw(start, 5, SamplingParams(), Key(1))
        scored = yield Score(start, drawn.tokens, SamplingParams(0.5))
        empty = yield Score(scored, np.empty(0, np.int64), SamplingParams())
        assert empty.tokens.tolist() == drawn.tokens.tolist()
        np.testing.assert_allclose(scored.log_p, drawn.log_p)
        return ChainResult(scored)

    engine, _ = engine_of(model)
    done, = engine.run([("", chain(PROMPTS[0]))])
    length = done.result.trajectory.length
    assert done.cost.tokens_drawn == length
    assert done.cost.target_forwards == 2 * length
    assert done.cost.token_forwards == 2 * (len(PROMPTS[0]) + length - 1)
    assert engine.counters.row_steps == 2 * length


def test_forbidden_tokens_are_never_drawn(model):
    forbidden = list(range(10, 61))
    engine, _ = engine_of(model, FakeCore(model, forbidden=forbidden))
    for done in engine.run(chains(SAMPLERS["temperature"])):
        assert not set(done.result.trajectory.tokens.tolist()) & set(forbidden)
        assert np.isfinite(done.result.trajectory.log_p).all()
