"""The decode step can be captured as a CUDA graph: it never waits for a value and makes no tensor from host data."""

import functools
import gc
import itertools
import weakref

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_mcmc.blend.layer import LayerBlend
from dflash_mcmc.blend.none import NoBlend
from dflash_mcmc.engine.batching import batched
from dflash_mcmc.engine.batching.batched import BatchedEngine
from dflash_mcmc.engine.batching.interface import Options
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.batching.rows import Group, Rows, Status
from dflash_mcmc.engine.batching.stop_strings import Endings, StopStrings
from dflash_mcmc.engine.speculative.steps import PlainSteps
from dflash_mcmc.errors import note
from dflash_mcmc.ops import Draw, SamplingParams
from dflash_mcmc.rng import Key
from dflash_mcmc.tokenizer import TokenTexts
from dflash_mcmc.types import ChainResult, Trajectory
from tests.cases import quick
from tests.targets import random_model

NOT_IN_A_GRAPH = ("_local_scalar_dense", "item", "nonzero", "masked_select", "unique", "equal", "lift_fresh")


class Refusing(TorchDispatchMode):
    """Records every operation that makes the host wait, and every operation whose shape depends on values."""

    def __init__(self):
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put_") and any(i is not None and i.dtype == torch.bool for i in args[1])
        if name in NOT_IN_A_GRAPH or by_mask:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def whole(number, law=SamplingParams(), source="blended", horizon=10):  # noqa: B008  (a law is a value)
    path = yield Draw(Trajectory.start(np.arange(20 + number) % 61), horizon, law, Key(number), source)
    return ChainResult(path)


def stepped(monkeypatch, replacement, blend, laws, speculation=None, horizon=10):
    """Results of an engine whose decode step is wrapped."""
    engine = BatchedEngine(LanguageModel(random_model(), stop_ids=(3,)), blend, 4, 64, speculation=speculation)
    monkeypatch.setattr(engine._loop, "stepper", replacement(engine._loop.stepper))
    return {d.tag: d.result.trajectory for d in engine.run((n, whole(n, *laws, horizon=horizon)) for n in range(6))}


LAWS = {"plain": (SamplingParams(),), "greedy": (SamplingParams(0.0),), "base": (SamplingParams(0.5), "base"),
        "filters": (SamplingParams(0.7, top_k=5, top_p=0.9, min_p=0.01),),
        "penalties": (SamplingParams(0.7, 0, 1.0, 0.0, 1.2, 0.5, 0.3),)}
DECODERS = ("plain", "match", "rejection", "block")


@pytest.mark.parametrize(("law", "decoder"), quick(
    itertools.product(LAWS, DECODERS), "plain", ("penalties", "plain"), ("filters", "block")))
def test_a_step_can_be_captured(monkeypatch, law, decoder):
    """Every law and every decoder is with a blend and without one."""
    found = []

    class Watched:
        def __init__(self, stepper):
            self.stepper, self.cost = stepper, stepper.cost
            self.tokens_a_step, self.reach = stepper.tokens_a_step, stepper.reach

        def step(self, *arguments):
            with Refusing() as mode:
                self.stepper.step(*arguments)
            found.extend(mode.found)

    mixed = (list(LAWS).index(law) + DECODERS.index(decoder)) % 2
    blend = LayerBlend(beta=0.3, layer=1, norm="final") if mixed else NoBlend()
    assert len(stepped(monkeypatch, Watched, blend, LAWS[law], speculation(decoder), horizon=6)) == 6
    assert not found


def speculation(decoder):
    from tests.engine.speculative.test_speculator import drafter, match, reject

    if decoder == "plain":
        return None
    rule, draft = {"match": (match(), "dflash"), "rejection": (reject(), "dflash_sliding"),
                   "block": (reject(verification="block"), "ngram")}[decoder]
    model = random_model()
    return rule.speculation(drafter(draft, LanguageModel(model, stop_ids=(3,)), model))


def test_the_watch_sees_what_it_should():
    with Refusing() as mode:
        values = torch.arange(3)
        values[values > 1] = 0
        bool((values > 0).any())
    assert {name.split(".")[1] for name in mode.found} >= {"index_put_", "_local_scalar_dense"}


def test_a_step_leaves_rows_that_are_not_live_as_they_are():
    """The warm-up of a graph relies on this."""
    engine = BatchedEngine(LanguageModel(random_model(), stop_ids=(3,)), NoBlend(), 8, 64)
    running = engine.steps((n, whole(n)) for n in range(8))
    for _ in range(3):
        next(running)
    rows = engine._loop.rows
    rows.status.fill_(Status.DONE)
    rows.has_floors = True

    def state():
        return [x.clone() for x in (rows.tokens[:, : rows.nowhere], rows.scores[:, : rows.nowhere], rows.position, rows.weight,
                                    rows.status)]

    before = state()
    with torch.inference_mode(), engine._memory.runner.ready():
        engine._loop.stepper.step(engine._memory.cache, rows, 8, 64, engine._loop.groups)
    for old, new in zip(before, state(), strict=True):
        assert torch.equal(old, new)


class FakeGraph:
    """A replacement for `torch.cuda.CUDAGraph`. It replays the calls that were made during the capture."""

    current = None

    def __init__(self):
        self.calls, self.replays = [], 0

    def pool(self):
        return "pool"

    def replay(self):
        self.replays += 1
        for call in self.calls:
            call()


def test_graphs_replay_what_the_step_does(monkeypatch):
    """CUDA is replaced. A step is captured once for each shape and law, its warm-up has no effect, and then it is replayed."""
    made, streams = [], []

    class Capturing:
        def __init__(self, graph, pool, stream):
            self.graph = graph
            streams.append(stream)
            made.append(graph)

        def __enter__(self):
            FakeGraph.current = self.graph

        def __exit__(self, *error):
            FakeGraph.current = None

    class Stream:
        def __init__(self, device=None):
            pass

        def wait_stream(self, other):
            pass

    class Recorded:
        """A stepper whose steps are recorded instead of run during the capture of a graph."""

        def __init__(self, stepper):
            self.stepper, self.cost = stepper, stepper.cost
            self.tokens_a_step, self.reach = stepper.tokens_a_step, stepper.reach

        def step(self, *arguments):
            if FakeGraph.current is None:
                self.stepper.step(*arguments)
            else:
                FakeGraph.current.calls.append(lambda: self.stepper.step(*arguments))

    from contextlib import nullcontext

    monkeypatch.setattr(batched, "_capture_stream", functools.cache(batched._capture_stream.__wrapped__))
    monkeypatch.setattr(batched.torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(batched.torch.cuda, "graph", Capturing)
    monkeypatch.setattr(batched.torch.cuda, "Stream", Stream)
    monkeypatch.setattr(batched.torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(batched.torch.cuda, "stream", lambda stream: nullcontext())
    plain = stepped(monkeypatch, lambda stepper: stepper, NoBlend(), (SamplingParams(),))
    endings = Endings((3,), None, torch.device("cpu"), None)
    graphed = stepped(monkeypatch, lambda stepper: batched.GraphedSteps(Recorded(stepper), endings), NoBlend(),
                      (SamplingParams(),))
    for tag, path in plain.items():
        assert path.tokens.tolist() == graphed[tag].tokens.tolist()
        assert path.log_p.tolist() == graphed[tag].log_p.tolist()
    assert len(made) == 1
    assert made[0].replays >= 10
    assert set(streams) == {batched._capture_stream(torch.device("cpu"))}  # cuBLAS keeps a work space for each stream


@pytest.mark.parametrize("whole_run", [True, False])
def test_an_engine_s_memory_is_freed_without_a_garbage_collection(whole_run):
    """Objects that refer to one another stay until a collection, and the next run of a sweep has no memory on a GPU."""
    engine = BatchedEngine(LanguageModel(random_model(), stop_ids=(3,)), NoBlend(), 4, 64)
    run = engine.run((n, whole(n)) for n in range(6))
    keys = weakref.ref(engine._memory.cache)
    gc.disable()
    try:
        next(run)
        if whole_run:
            list(run)
        del engine, run
        assert keys() is None
    finally:
        gc.enable()


def test_several_steps_between_checks_on_a_doubling_ladder(monkeypatch):
    """Uses a GPU's kind of shapes and its interval between checks, on a CPU."""
    from dflash_mcmc.engine.batching import batched
    from dflash_mcmc.engine.batching.cache import Ladder

    model = LanguageModel(random_model(), stop_ids=(3,))
    plain = BatchedEngine(model, NoBlend(), 8, 64)
    expected = {d.tag: d.result.trajectory for d in plain.run((n, whole(n)) for n in range(20))}
    monkeypatch.setattr(batched, "ladder_of", lambda device: Ladder(8, 48, True))  # 48, 96, 192: the cache has 64
    engine = BatchedEngine(model, NoBlend(), 12, 64, Options(steps_between_checks=4))
    for done in engine.run((n, whole(n)) for n in range(20)):
        assert done.result.trajectory.tokens.tolist() == expected[done.tag].tokens.tolist()
        np.testing.assert_allclose(done.result.trajectory.log_p, expected[done.tag].log_p, atol=1e-4)
    long = BatchedEngine(LanguageModel(random_model(), stop_ids=(3,)), NoBlend(), 8, 150)
    for engine in (long, BatchedEngine(model, NoBlend(), 8, 64)):
        before = engine._memory.cache.length
        list(engine.run((n, whole(n)) for n in range(3)))
        assert engine._memory.cache.length <= engine._loop.rows.tokens.shape[1], before
    assert [Ladder(8, 256, True).batch(n) for n in (1, 8, 9, 40)] == [8, 8, 16, 64]


# Steps without CUDA graphs say so once.


class Runner:
    grid = None


ENDINGS = Endings([1], None, torch.device("cpu"), None)


@pytest.fixture
def first_note():
    note.cache_clear()
    yield
    note.cache_clear()


@pytest.mark.usefixtures("first_note")
def test_a_reason_against_graphs_is_noted_once(capsys):
    steps = PlainSteps(Runner())
    for _ in range(2):
        assert batched.graphed(steps, "the model has recurrent layers", ENDINGS) is steps
    noted = capsys.readouterr().err.splitlines()
    assert noted == ["decode steps run without CUDA graphs, because the model has recurrent layers"]


def test_steps_are_captured_without_a_reason_against_it(capsys):
    assert isinstance(batched.graphed(PlainSteps(Runner()), None, ENDINGS), batched.GraphedSteps)
    assert not capsys.readouterr().err


def test_steps_are_captured_again_after_new_stop_strings(monkeypatch):
    """A graph holds the tensors of its capture, and new strings are in other tensors."""
    captured = []

    class Graph:
        def replay(self):
            captured[-1] += 1

    texts = TokenTexts((b"a", b"b"), {})
    endings = Endings([1], None, torch.device("cpu"), lambda stop: StopStrings(stop, texts))
    steps = batched.GraphedSteps(PlainSteps(Runner()), endings)
    monkeypatch.setattr(batched.GraphedSteps, "_capture", lambda *arguments: captured.append(0) or Graph())
    draw, state = Draw(Trajectory.start(np.array([1])), 9, SamplingParams(), Key(0)), Rows(1, 4, 2, torch.device("cpu"))
    for stop in ((), ("ab",), ("ab",), ("b",)):
        endings.begin(draw._replace(stop=stop), np.array([], np.int64))
        steps.step(None, state, 1, 4, (Group(SamplingParams(), "blended", None),))
    assert captured == [1, 2, 1]


@pytest.mark.parametrize(("family", "changes", "reason"), [
    ("qwen3", {}, None), ("qwen3_5", {}, "the model has recurrent layers"),
    ("qwen3_next", {}, "the model is a mixture of experts"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
     "the model's rotary embedding grows with the text")])
def test_models_say_why_they_are_not_captured(family, changes, reason):
    assert LanguageModel(random_model(family, **changes)).uncaptured == reason
