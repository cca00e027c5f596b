"""Chains that arrive while others are drawn, that are dropped and that wait: the others are drawn as alone."""

import itertools
import threading
from collections import deque
from concurrent.futures import Future

import numpy as np
import pytest

from dflash_mcmc.blend.none import NoBlend
from dflash_mcmc.engine.batching.batched import BatchedEngine
from dflash_mcmc.engine.batching.interface import DROPPED
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.ops import Draw, SamplingParams, Wait, drive, ended_only
from dflash_mcmc.rng import Key
from dflash_mcmc.types import ChainResult, Trajectory
from tests.cases import quick
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
    return request.getfixturevalue("slots")


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


@pytest.mark.parametrize("name", quick(["temperature", "power_mh", "power_smc"], "power_smc"))
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


@pytest.mark.slow
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


def ticking(engine, monkeypatch, seconds: float) -> None:
    """Gives the engine a clock that goes on by `seconds` each time that it is read."""
    ticks = itertools.count()
    monkeypatch.setattr(engine._meter, "now", lambda: seconds * next(ticks))


def test_a_chain_whose_steps_cost_no_forward_holds_up_no_other(engine, reference, monkeypatch):
    """Four of its steps fit into a turn of the injected clock. It waits for each next turn until the other has made a step."""
    ticking(engine, monkeypatch, 0.01)
    events, free_steps = list[str](), 400

    def free():
        drawn = yield Draw(Trajectory.start(PROMPTS[0]), HORIZON, SamplingParams(), Key(3))
        for _ in range(free_steps):  # the stored intervals answer each of these
            events.append("free")
            again = yield Draw(Trajectory.start(PROMPTS[0]), HORIZON, SamplingParams(), Key(3), along=drawn)
            assert np.array_equal(again.tokens, drawn.tokens)
        return ChainResult(drawn)

    for done in engine.steps([("free", free()), (1, chain("power_mh", 1))]):
        events.append("step" if done is None else f"end of {done.tag}")
        if done is not None and done.tag == 1:
            same(done.result, reference.run(chain("power_mh", 1)))
    assert "free" in events[events.index("end of 1") :], "the other chain ends first"
    turns = [len(list(group)) for name, group in itertools.groupby(events) if name == "free"]
    assert sum(turns) == free_steps
    assert max(turns) <= 2 * 5, "a turn when its draw ends, and one when it goes on"
    assert events[-1] == "step", "the caller has a word between turns, also when no other chain is left"
    assert len(turns) >= free_steps // 10


def test_a_paused_chain_can_be_dropped(engine, monkeypatch):
    ticking(engine, monkeypatch, 1.0)

    def free():
        drawn = yield Draw(Trajectory.start(PROMPTS[0]), HORIZON, SamplingParams(), Key(3))
        for _ in range(1000):
            yield Draw(Trajectory.start(PROMPTS[0]), HORIZON, SamplingParams(), Key(3), along=drawn)
        raise AssertionError("it is dropped before")

    found = []
    for step, done in enumerate(engine.steps([("free", free())])):
        if done is not None:
            found.append(done)
        elif step == 40:
            engine.drop(["free"])
    assert [(done.tag, done.failure) for done in found] == [("free", DROPPED)]


def test_paused_chains_keep_their_place_in_the_batch(engine, monkeypatch):
    """Three chains of three slots pause, and take turns. The fourth begins only when one of them has ended."""
    ticking(engine, monkeypatch, 1.0)
    events = list[tuple[int, str]]()

    def free(tag: int):
        drawn = yield Draw(Trajectory.start(PROMPTS[0]), HORIZON, SamplingParams(temperature=0.0), Key(3))
        for _ in range(20):
            yield Draw(Trajectory.start(PROMPTS[0]), HORIZON, SamplingParams(temperature=0.0), Key(3), along=drawn)
            events.append((tag, "step"))
        return ChainResult(drawn)

    for done in engine.steps((tag, free(tag)) for tag in range(5)):
        events.append((done.tag, "ended") if done is not None else (-1, "word"))
    assert min(events.index((tag, "step")) for tag in (3, 4)) > min(events.index((tag, "ended")) for tag in range(3))
    turns = events[events.index((0, "step")) :]
    turns = turns[turns.index((-1, "word")) :][:12]
    assert [tag for tag, _ in turns[::2]] == [-1] * 6, "the caller has a word after each turn"
    assert [tag for tag, _ in turns[1::2]] in ([0, 1, 2] * 2, [2, 1, 0] * 2)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "name"), [
    *(("slots", name) for name in SAMPLERS), *(("vllm", name) for name in ("power_mh", "power_smc", "replica_exchange"))],
    indirect=["engine"])
def test_pauses_change_no_result_and_no_cost(engine, monkeypatch, name):
    plain = {done.tag: done for done in engine.run([(tag, chain(name, tag)) for tag in range(4)])}
    ticking(engine, monkeypatch, 1.0)
    for done in engine.run([(tag, chain(name, tag)) for tag in range(4)]):
        same(done.result, plain[done.tag].result, 0.0)
        assert done.cost == plain[done.tag].cost


# Chains that wait for work outside of the engine: other chains go on, and answers are those without the wait.


@pytest.fixture(scope="module")
def slots(model):
    return BatchedEngine(LanguageModel(model, stop_ids=STOPS), NoBlend(), 3, 16 + HORIZON)


def waiting(tag: int, work: Future[int] | None = None, after: Future[int] | None = None):
    """Two draws with a wait between them; it does the work of another chain at its end."""
    path = yield Draw(Trajectory.start(PROMPTS[0]), 3, SamplingParams(), Key(tag).fold_in(0))
    if work is not None:
        assert (yield Wait(work)) == 5
    path = yield Draw(path.prefix(2), HORIZON, SamplingParams(), Key(tag).fold_in(1), along=path)
    if after is not None:
        after.set_result(5)
    return ChainResult(path)


def test_other_chains_go_on_while_one_waits(slots, reference):
    work = Future[int]()
    chains = [(0, waiting(0, work)), (1, waiting(1)), (2, waiting(2)), (3, waiting(3)), (4, waiting(4, after=work))]
    found = {done.tag: done for done in slots.run(chains)}
    assert list(found).index(0) > list(found).index(4)
    for tag in range(5):
        same(found[tag].result, reference.run(waiting(tag)))


def test_an_engine_whose_chains_all_wait_is_woken(slots):
    works = [Future[int]() for _ in range(3)]
    timers = [threading.Timer(0.1 * number, work.set_result, [5]) for number, work in enumerate(works, start=1)]
    for timer in timers:
        timer.start()
    found = {done.tag: done for done in slots.run((tag, waiting(tag, work)) for tag, work in enumerate(works))}
    assert all(found[tag].result.trajectory.complete(HORIZON) for tag in range(3))


def test_a_chain_is_dropped_while_it_waits(slots):
    never, steps, found = Future[int](), 0, {}
    for done in slots.steps([(0, waiting(0, never)), (1, waiting(1))]):
        if done is not None:
            found[done.tag] = done
        steps += done is None
        if steps == 30:
            slots.drop([0])
    assert found[0].failure == DROPPED
    assert found[1].result.trajectory.complete(HORIZON)


def test_what_replaces_operations_leaves_a_wait(reference):
    done = Future[int]()
    done.set_result(5)
    found = drive(ended_only(waiting(0, done), HORIZON), reference.answer)
    assert found.trajectory.tokens.tolist() == reference.run(waiting(0)).trajectory.tokens.tolist()
