"""Chains that wait for work outside of the engine: other chains go on, and answers are those without the wait."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

from dflash_mcmc.blend.none import NoBlend
from dflash_mcmc.engine.batching.batched import BatchedEngine
from dflash_mcmc.engine.batching.interface import DROPPED
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.ops import Draw, SamplingParams, Wait, drive, ended_only
from dflash_mcmc.rng import Key
from dflash_mcmc.types import ChainResult, Trajectory
from tests.engine.batching.test_batched import HORIZON, STOPS, same
from tests.engine.vllm.test_session import PROMPTS
from tests.targets import RememberingReference, random_model


@pytest.fixture(scope="module")
def model():
    return random_model("qwen3")


@pytest.fixture(scope="module")
def engine(model):
    return BatchedEngine(LanguageModel(model, stop_ids=STOPS), NoBlend(), 3, 16 + HORIZON)


def chain(tag: int, work: Future[int] | None = None, after: Future[int] | None = None):
    """Two draws with a wait between them; it does the work of another chain at its end."""
    path = yield Draw(Trajectory.start(PROMPTS[0]), 3, SamplingParams(), Key(tag).fold_in(0))
    if work is not None:
        assert (yield Wait(work)) == 5
    path = yield Draw(path.prefix(2), HORIZON, SamplingParams(), Key(tag).fold_in(1), along=path)
    if after is not None:
        after.set_result(5)
    return ChainResult(path)


def test_other_chains_go_on_while_one_waits(engine, model):
    work = Future[int]()
    chains = [(0, chain(0, work)), (1, chain(1)), (2, chain(2)), (3, chain(3)), (4, chain(4, after=work))]
    found = {done.tag: done for done in engine.run(chains)}
    assert list(found).index(0) > list(found).index(4)
    reference = RememberingReference(model, LanguageModel(model, stop_ids=STOPS), NoBlend())
    for tag in range(5):
        same(found[tag].result, reference.run(chain(tag)))


def test_an_engine_whose_chains_all_wait_is_woken(engine):
    works = [Future[int]() for _ in range(3)]
    timers = [threading.Timer(0.1 * number, work.set_result, [5]) for number, work in enumerate(works, start=1)]
    for timer in timers:
        timer.start()
    found = {done.tag: done for done in engine.run((tag, chain(tag, work)) for tag, work in enumerate(works))}
    assert all(found[tag].result.trajectory.complete(HORIZON) for tag in range(3))


def test_a_chain_is_dropped_while_it_waits(engine):
    never, steps, found = Future[int](), 0, {}
    for done in engine.steps([(0, chain(0, never)), (1, chain(1))]):
        if done is not None:
            found[done.tag] = done
        steps += done is None
        if steps == 30:
            engine.drop([0])
    assert found[0].failure == DROPPED
    assert found[1].result.trajectory.complete(HORIZON)


def test_what_replaces_operations_leaves_a_wait(model):
    done = Future[int]()
    done.set_result(5)
    reference = RememberingReference(model, LanguageModel(model, stop_ids=STOPS), NoBlend())
    found = drive(ended_only(chain(0, done), HORIZON), reference.answer)
    assert found.trajectory.tokens.tolist() == reference.run(chain(0)).trajectory.tokens.tolist()
