"""Chains that ask for several operations at once: the batched engine against the reference engine and against itself."""

import numpy as np
import pytest

from dflash_mcmc.blend.layer import LayerBlend
from dflash_mcmc.blend.none import NoBlend
from dflash_mcmc.engine.batching import scheduler
from dflash_mcmc.engine.batching.batched import BatchedEngine
from dflash_mcmc.engine.batching.interface import Options
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.ops import Draw, Floor, SamplingParams, Score, Together
from dflash_mcmc.rng import Key
from dflash_mcmc.types import ChainResult, Cost, Trajectory
from tests.targets import RememberingReference, random_model, rows_do_not_depend_on_the_batch

STOPS = (3, 7, 20, 33, 44, 50)
HORIZON = 12
TOLERANCE = 1e-4
COLD, WARM = SamplingParams(temperature=0.02), SamplingParams(temperature=0.5, top_k=20)
PENALISED = SamplingParams(temperature=0.3, repetition_penalty=1.2, presence_penalty=0.5)
LAWS = (SamplingParams(temperature=0.3), PENALISED)
PROMPTS = [np.array([11, 5, 23, 9]), np.arange(70) * 7 % 61, np.array([40]), np.array([11, 5, 23, 9]), np.arange(8, 28)]


def copies(prompt, key):
    """Particles that are cold, so that they stay equal for long, and are copied from each other every three tokens."""
    paths = [Trajectory.start(prompt)] * 5
    for horizon in range(3, HORIZON + 1, 3):
        live = [number for number, path in enumerate(paths) if not path.complete(horizon)]
        drawn = yield Together(tuple(Draw(paths[number], horizon, COLD if number % 2 else WARM,
                                          key.fold_in("particle", horizon, number)) for number in live))
        for number, path in zip(live, drawn, strict=True):
            paths[number] = path
        parents = [key.fold_in("parent", horizon, number).integer(5) for number in range(5)]
        paths = [paths[parent] for parent in parents]
    return paths


def tries(prompt, key):
    """Suffixes drawn along a state with floors, and scores, in one request."""
    path = yield Draw(Trajectory.start(prompt), HORIZON, WARM, key.fold_in("first"))
    paths = [path]
    for step in range(3):
        cut = key.fold_in("cut", step).integer(path.length)
        floor = Floor(-0.5, 1.5, 0.0, path.length, 0.0) if step == 1 else None
        operations = [Draw(path.prefix(cut), HORIZON, WARM, key.fold_in("try", step, number), along=path, floor=floor)
                      for number in range(3)]
        operations.insert(1, Score(path.prefix(cut), path.tokens[cut:], COLD._replace(temperature=0.7)))
        *answers, last = yield Together(tuple(operations))
        paths += answers if floor is None else []
        path = last if last.complete(HORIZON) else path
    return [*paths, path]


def measured(prompt, key):
    """Draws and scores with entropy and further laws, which read penalties."""
    drawn = yield Together(tuple(Draw(Trajectory.start(prompt), HORIZON, params, key.fold_in(number), laws=LAWS, entropy=True,
                                      kept=bool(params.top_k)) for number, params in enumerate((WARM, PENALISED, COLD))))
    other = yield Draw(Trajectory.start(prompt), HORIZON, PENALISED, key.fold_in("other"), laws=LAWS[:1])
    again = yield Together(tuple(Score(path.prefix(1), path.tokens[1:], WARM, laws=LAWS, entropy=True,
                                       kept=path.kept is not None) for path in drawn))
    along = yield Draw(drawn[0].prefix(2), HORIZON, WARM, key.fold_in(0), along=drawn[0], laws=LAWS, entropy=True,
                       kept=True)
    empty = yield Together(())
    assert empty == ()
    return [*drawn, other, *again, along]


CHAINS = {"copies": copies, "tries": tries, "measured": measured}


def chain(name, index):
    paths = yield from CHAINS[name](PROMPTS[index % len(PROMPTS)], Key(3).fold_in(index))
    return ChainResult(paths[0], trace=tuple(paths))


def batched(model, name, blend=None, slots=8, order=range(7), **options):
    engine = BatchedEngine(LanguageModel(model, stop_ids=STOPS), blend or NoBlend(), slots, 70 + HORIZON, Options(**options))
    return {done.tag: done for done in engine.run([(index, chain(name, index)) for index in order])}, engine


@pytest.fixture(scope="module")
def model():
    return random_model("qwen3")


@pytest.fixture(scope="module")
def expected(model):
    return {name: batched(model, name)[0] for name in CHAINS}


def same(a, b, tolerance):
    assert len(a.result.trace) == len(b.result.trace)
    for one, other in zip(a.result.trace, b.result.trace, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.ended == other.ended
        for name in ("log_p", "log_q", "interval", "laws", "entropy", "kept"):
            mine, theirs = getattr(one, name), getattr(other, name)
            assert (mine is None) == (theirs is None), name
            if mine is not None:
                np.testing.assert_allclose(mine, theirs, atol=tolerance, rtol=0, err_msg=name)


class Done:
    def __init__(self, result):
        self.result = result


@pytest.mark.parametrize("blend", [
    LayerBlend(beta=0.2, layer=-2, norm="none"), pytest.param(NoBlend(), marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CHAINS)
def test_batched_is_reference(model, name, blend):
    reference = RememberingReference(model, LanguageModel(model, stop_ids=STOPS), blend)
    results = batched(model, name, blend)[0]
    for index in range(3):
        if name == "tries":  # the reference engine has no floors, so an abandoned draw is longer there
            continue
        same(results[index], Done(reference.run(chain(name, index))), TOLERANCE / COLD.temperature)


CHANGES = ({"slots": 3}, {"slots": 4, "order": [4, 0, 2, 1]},
           {"slots": 5}, {"steps_between_checks": 5, "slots": 3}, {"skip_identical": False},
           {"read_ahead": 1}, {"slots": 1}, {"slots": 2}, {"slots": 16}, {"steps_between_checks": 3})


@pytest.mark.slow
@pytest.mark.parametrize(("name", "changes"), [
    pytest.param(name, changes, id=f"{name}-{changes}") for name in CHAINS for changes in CHANGES])
def test_slots_order_and_switches_change_nothing(model, expected, name, changes):
    results = batched(model, name, **changes)[0]
    tolerance = 0.0 if rows_do_not_depend_on_the_batch() else TOLERANCE
    for index, done in results.items():
        same(expected[name][index], done, TOLERANCE / COLD.temperature if "skip_identical" in changes else tolerance)
        assert expected[name][index].cost == done.cost or "skip_identical" in changes
    assert results


def test_copies_share_forwards(model, monkeypatch):
    """The cost has each position once. With a slot for each draw the engine feeds no more rows than that."""
    done, engine = batched(model, "copies", slots=5, order=[0])
    made = scheduler.Scheduler.__init__
    monkeypatch.setattr(scheduler.Scheduler, "__init__", lambda self, *parts: made(self, *parts[:-2], False, parts[-1]))
    apart, without = batched(model, "copies", slots=5, order=[0])
    cost, full = done[0].cost, apart[0].cost
    assert cost.tokens_shared > 10
    assert full.tokens_shared == 0
    assert cost.token_forwards + cost.tokens_shared == full.token_forwards
    assert cost.target_forwards == full.target_forwards
    assert engine.counters.row_steps == without.counters.row_steps  # riders draw, but are not fed
    paths = {path.tokens.tobytes() for path in done[0].result.trace}
    assert len(paths) > 1


def test_fewer_rows_are_fed_when_copies_share(model, monkeypatch):
    fed = {}
    arrange = scheduler.DecodeLoop.arrange

    def counting(loop, slots, num_fed):
        fed.setdefault(loop, []).append((num_fed, len(slots)))
        return arrange(loop, slots, num_fed)

    monkeypatch.setattr(scheduler.DecodeLoop, "arrange", counting)
    batched(model, "copies", slots=5, order=[0])
    (counts,) = fed.values()
    assert counts[0] == (1, 5)
    assert any(num_fed < num_live for num_fed, num_live in counts[1:])


def test_the_depth_is_that_of_the_longest_operation(model):
    def chain():
        paths = yield Together(tuple(Draw(Trajectory.start(PROMPTS[0]), horizon, SamplingParams(), Key(horizon))
                                     for horizon in (2, 9)))
        return ChainResult(paths[1])

    engine = BatchedEngine(LanguageModel(model, stop_ids=()), None, 2, 70 + HORIZON)
    (done,) = engine.run([("only", chain())])
    # one forward reads the prompt without its last token
    assert done.cost == Cost(tokens_drawn=11, target_forwards=1 + 9, token_forwards=3 + 11 - done.cost.tokens_shared,
                             tokens_shared=done.cost.tokens_shared, prompt_forwards=3)
    assert done.cost.tokens_shared >= 1  # both feed the prompt's last token


def test_a_failure_of_one_operation_ends_its_chain_alone(model):
    def chain(index):
        paths = yield Together(tuple(Draw(Trajectory.start(PROMPTS[index]), HORIZON, WARM, Key(index).fold_in(number))
                                     for number in range(4)))
        return ChainResult(paths[0])

    parts = LanguageModel(model, stop_ids=STOPS)
    whole = {done.tag: done for done in BatchedEngine(parts, None, 6, 82).run([(i, chain(i)) for i in range(5)])}
    kept = parts.decoder.get_input_embeddings().weight.data[40].clone()
    try:
        parts.decoder.get_input_embeddings().weight.data[40] = float("nan")
        results = {done.tag: done for done in BatchedEngine(parts, None, 6, 82).run([(i, chain(i)) for i in range(5)])}
    finally:
        parts.decoder.get_input_embeddings().weight.data[40] = kept
    assert results[1].failure  # the prompts have the token
    assert results[2].failure
    fine = [index for index, done in results.items() if not done.failure]
    assert fine
    for index in fine:
        assert results[index].result.trajectory.tokens.tolist() == whole[index].result.trajectory.tokens.tolist()
