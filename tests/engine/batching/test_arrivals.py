"""Chains that arrive while others are drawn, and chains that are dropped: the others are drawn as alone."""

from __future__ import annotations

from collections import deque

import pytest

from dflash_mcmc.blend.none import NoBlend
from dflash_mcmc.engine.batching.batched import BatchedEngine
from dflash_mcmc.engine.batching.interface import DROPPED
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.rng import Key
from tests.engine.batching.test_batched import HORIZON, SAMPLERS, STOPS, same
from tests.engine.vllm.test_session import PROMPTS, engine_of
from tests.targets import RememberingReference, random_model


@pytest.fixture(scope="module")
def model():
    return random_model("qwen3")


@pytest.fixture(scope="module", params=["slots", "vllm"])
def engine(request, model):
    if request.param == "vllm":
        return engine_of(model, num_chains=3)[0]
    return BatchedEngine(LanguageModel(model, stop_ids=STOPS), NoBlend(), 3, 16 + HORIZON)


@pytest.fixture(scope="module")
def reference(model):
    return RememberingReference(model, LanguageModel(model, stop_ids=STOPS), NoBlend())


def chain(name: str, tag: int):
    return SAMPLERS[name].chain(PROMPTS[tag % len(PROMPTS)], HORIZON, Key(7).fold_in(tag))


class Queue:
    """Chains that wait now, by their tags."""

    def __init__(self, name: str):
        self.name, self.tags, self.times_empty = name, deque[int](), 0

    def __iter__(self):
        return self

    def __next__(self):
        if not self.tags:
            self.times_empty += 1
            return None
        tag = self.tags.popleft()
        return tag, chain(self.name, tag)


def drawn(engine, queue: Queue, arrivals: dict[int, list[int]], drops: dict[int, list[int]]) -> dict[int, object]:
    """The finished chains. `arrivals` and `drops` are tags by the number of the step after which they happen."""
    queue.tags.extend(arrivals.get(0, []))
    found, step = {}, 0
    for done in engine.steps(queue):
        if done is not None:
            found[done.tag] = done
            continue
        step += 1
        queue.tags.extend(arrivals.get(step, []))
        engine.drop(drops.get(step, []))
    return found


@pytest.mark.parametrize("name", ["temperature", "power_mh", "power_smc"])
def test_chains_that_arrive_late_are_drawn_as_alone(engine, reference, name):
    queue = Queue(name)
    found = drawn(engine, queue, {0: [0], 2: [1, 2], 3: [3, 4, 5]}, {})
    assert queue.times_empty > 2, "the engine has asked again"
    assert len(found) == 6
    for tag, done in found.items():
        same(done.result, reference.run(chain(name, tag)))


def test_a_free_slot_takes_an_arrival_before_any_draw_has_ended(engine):
    """The chain that arrives after the first step has begun before the first one ends."""
    queue, begun = Queue("greedy"), []
    queue.tags.append(0)
    for done in engine.steps(queue):
        if done is not None:
            break
        if not begun:
            queue.tags.append(1)
        begun.append(len(queue.tags))
    assert begun[0] == 1
    assert 0 in begun[1:], "the arrival has left the queue while the first chain was drawn"


@pytest.mark.parametrize("name", ["power_mh", "power_smc", "replica_exchange"])
def test_dropped_chains_leave_and_the_others_are_drawn_as_alone(engine, reference, name):
    found = drawn(engine, Queue(name), {0: [0, 1, 2, 3, 4, 5]}, {1: [0, 99], 2: [3, 4], 3: [2]})
    dropped = {tag for tag, done in found.items() if done.failure == DROPPED}
    assert {0, 2} <= dropped <= {0, 2, 3, 4}, "3 and 4 may still be in the queue when they are named"
    assert len(found) == 6
    for tag in found.keys() - dropped:
        same(found[tag].result, reference.run(chain(name, tag)))


def test_dropping_all_ends_the_run(engine):
    found = drawn(engine, Queue("power_mh"), {0: [0, 1]}, {1: [0, 1]})
    assert [done.failure for done in found.values()] == [DROPPED, DROPPED]
