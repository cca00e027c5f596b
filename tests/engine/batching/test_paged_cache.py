"""A cache of pages gives the numbers of a contiguous cache, whatever the number of pages, and gives all pages back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dflash_mcmc.blend.none import NoBlend
from dflash_mcmc.engine.batching.batched import BatchedEngine
from dflash_mcmc.engine.batching.cache import CacheShape, ContiguousCache
from dflash_mcmc.engine.batching.chains import LiveChain, Slot
from dflash_mcmc.engine.batching.interface import Options
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.batching.paged_cache import NO_PAGE, WASTE, OutOfPages, PagedCache, PagedMemory, PagePool, PageTable
from dflash_mcmc.engine.batching.scheduler import PagePreemption
from dflash_mcmc.errors import UserError
from dflash_mcmc.ops import Draw, SamplingParams, Score
from dflash_mcmc.rng import Key
from dflash_mcmc.types import ChainResult, Trajectory
from tests.engine.batching.test_batched import HORIZON, PROMPTS, SAMPLERS, STOPS, chains, multiple_try, power_smc, temperature
from tests.targets import random_model, rows_do_not_depend_on_the_batch

SHAPE = CacheShape(num_layers=2, num_heads=3, key_dim=8, value_dim=4, dtype=torch.float32)
RUN = {"power_mh": SAMPLERS["power_mh"], "temperature": temperature(), "power_smc": power_smc(),
       "multiple_try": multiple_try("multiple_try")}
LONGEST = max(map(len, PROMPTS)) + HORIZON


@pytest.fixture(scope="module")
def model():
    return random_model("qwen3")


def run(model, sampler, num_pages: int, slots: int = 8, **options):
    engine = BatchedEngine(LanguageModel(model, stop_ids=STOPS), NoBlend(), slots, LONGEST, Options(**options),
                           num_pages=num_pages)
    done = {each.tag: each for each in engine.run(chains(sampler))}
    if num_pages and engine._memory.prompts:
        engine._memory.prompts.clear()
        assert engine._memory.cache.num_free_pages == num_pages
    return done, engine


def assert_equal(paged, plain):
    assert paged.keys() == plain.keys()
    tolerance = 0.0 if rows_do_not_depend_on_the_batch() else 1e-4
    for tag, done in plain.items():
        other = paged[tag]
        assert other.result.trajectory.tokens.tolist() == done.result.trajectory.tokens.tolist()
        np.testing.assert_allclose(other.result.trajectory.log_p, done.result.trajectory.log_p, atol=tolerance, rtol=0)
        assert (other.cost, other.result.accepted) == (done.cost, done.result.accepted)


@pytest.mark.parametrize(("name", "num_pages"), [("power_mh", 500), ("power_mh", 5), ("temperature", 5),
                                                 *((name, 25) for name in RUN)])
def test_pages_change_nothing(model, name, num_pages):
    """Not even the cost, if they are so few that draws wait, rows move to the host's memory and few prompts are read ahead."""
    plain, _ = run(model, RUN[name], 0)
    paged, engine = run(model, RUN[name], num_pages)
    assert_equal(paged, plain)
    assert engine.counters.read_tokens > 0


def test_draws_wait_where_pages_are_few(model, monkeypatch):
    from dflash_mcmc.engine.batching.slot_memory import SlotMemory

    stopped = []
    stop = SlotMemory.stop
    monkeypatch.setattr(SlotMemory, "stop", lambda self, slot: (stopped.append(slot), stop(self, slot)))
    few, _ = run(model, RUN["multiple_try"], 25)
    assert stopped
    stopped.clear()
    many, _ = run(model, RUN["multiple_try"], 500)
    assert not stopped
    assert_equal(few, many)


class PagesOf:
    """Stands for the rows and the memory of slots, each of which holds one page, and notes what the preemption does."""

    num_pages = page_size = 8

    def __init__(self):
        self.num_free_pages, self.done = 0, []
        self.cache = self

    def _free(self, what, slot):
        self.done.append((what, slot.chain.tag))
        self.num_free_pages += 1

    def stop(self, slot):
        self._free("stop", slot)

    def move_out(self, slot, to_host):
        self._free("move", slot)

    def holds_pages(self, slot):
        return ("move", slot.chain.tag) not in self.done

    def forget_prompts(self):
        return False

    def take(self, slot):
        slot.row = None

    release = take


@pytest.mark.parametrize(("pages", "pinned", "done"), [
    (1, None, [("stop", "new")]), (2, None, [("stop", "new"), ("stop", "mid")]),
    (3, None, [("stop", "new"), ("stop", "mid"), ("move", "rests late")]),
    (4, None, [("stop", "new"), ("stop", "mid"), ("move", "rests late"), ("move", "rests")]),
    (3, "new", [("stop", "mid"), ("stop", "old"), ("move", "rests late")])], ids=str)
def test_the_draws_that_began_last_lose_their_pages_first(pages, pinned, done):
    """The oldest goes on, so that the run does. Slots that rest lose their pages when no other draw is left."""
    slots, memory = {}, PagesOf()
    for row, (name, clock) in enumerate([("mid", 2.0), ("old", 1.0), ("new", 3.0), ("rests", 0.0), ("rests late", 0.5)]):
        slot = slots[name] = Slot(LiveChain(name, iter(())))
        slot.chain.slots.append(slot)
        slot.row, slot.clock = row, clock
        slot.operation = None if "rests" in name else Draw(Trajectory.start(PROMPTS[0]), 9, SamplingParams(), Key(0))
    stopped = PagePreemption(memory, memory).free(lambda: pages, lambda: list(slots.values()), slots.get(pinned))
    assert memory.done == done
    assert [slot.chain.tag for slot in stopped] == [name for what, name in done if what == "stop"]


def test_a_row_moves_to_the_host_where_no_page_is_left_for_its_end(model):
    memory = BatchedEngine(LanguageModel(model, stop_ids=STOPS), NoBlend(), 4, LONGEST, num_pages=8)._memory
    slot, cache = Slot(LiveChain("x", iter(()))), memory.cache
    slot.row = 0
    cache.open(0, 0, 10)
    cache.close(0)
    slot.contents.hold(np.arange(10))
    others = [cache.memory.pool.take() for _ in range(7)]
    memory.move_out(slot)
    assert cache.num_free_pages == 1
    memory.move_in(slot)
    assert (cache.num_free_pages, cache.has_pages(0), len(others)) == (0, True, 7)


def test_writing_to_shared_pages_would_be_seen(model, monkeypatch):
    """A wrong copy: pages are shared that are not full, and a page that another row uses too is written as it is."""
    plain, _ = run(model, RUN["power_mh"], 0)
    monkeypatch.setattr(PageTable, "covers", lambda self, page, start, stop: True)
    monkeypatch.setattr(PagePool, "is_shared", lambda self, page: False)
    wrong, _ = run(model, RUN["power_mh"], 500)
    with pytest.raises(AssertionError):
        assert_equal(wrong, plain)


def test_an_engine_goes_on_after_a_run_was_given_up(model):
    plain, _ = run(model, RUN["power_mh"], 0)
    engine = BatchedEngine(LanguageModel(model, stop_ids=STOPS), NoBlend(), 8, LONGEST, num_pages=60)
    given_up = engine.run(chains(RUN["power_mh"]))
    next(given_up)
    given_up.close()
    assert_equal({each.tag: each for each in engine.run(chains(RUN["power_mh"]))}, plain)


def test_one_chain_that_does_not_fit_is_an_error(model):
    with pytest.raises(UserError, match=r"hardware\.memory_gb: the cache has 3 pages of 64 tokens, and one chain needs more"):
        run(model, RUN["temperature"], 3, read_ahead=0, slots=4)


def test_numbers_that_are_not_finite_do_not_reach_another_row(model):
    spoilt = random_model("qwen3")
    with torch.no_grad():
        spoilt.model.embed_tokens.weight[40] = torch.nan

    def scored_with(token):
        path = yield Score(Trajectory.start(PROMPTS[0]), np.array([5, token, 6]), SamplingParams())
        return ChainResult(path)

    engine = BatchedEngine(LanguageModel(spoilt, stop_ids=STOPS), NoBlend(), 1, 170, num_pages=40)
    done = list(engine.run([(n, scored_with(40 if n % 2 else 41)) for n in range(12)]))
    assert [each.result is None for each in done] == [n % 2 == 1 for n in range(12)]


def test_pages_are_shared_copied_and_given_back():
    memory = PagedMemory(SHAPE, num_pages=10, page_size=4)
    paged, rows = PagedCache(memory, 3, 16), ContiguousCache(SHAPE, 3, 16)
    generator = torch.Generator().manual_seed(0)

    def feed(positions):
        keys = torch.randn(2, len(positions), 3, positions.shape[1], 8, generator=generator)
        for cache in (paged, rows):
            cache.aim(slice(0, len(positions)), positions, 8)
        return [[layer.update(keys[number], keys[number, ..., :4]) for number, layer in enumerate(cache.slot_layers)]
                for cache in (paged, rows)]

    for row in range(3):
        paged.open(row, 0, 6)
    feed(torch.arange(6).repeat(3, 1))
    for row in range(3):
        paged.close(row)
    for cache in (paged, rows):
        cache.copy(cache, 0, 1, 0, 5)
    assert paged.table.pages[0, 0] == paged.table.pages[1, 0]  # a whole page is shared
    assert paged.table.pages[0, 1] != paged.table.pages[1, 1]
    for row in range(2):
        paged.open(row, 5, 7)
    for ours, theirs in zip(*feed(torch.tensor([[5], [5]])), strict=True):
        assert all(torch.equal(a[:, :, :6], b[:, :, :6]) for a, b in zip(ours, theirs, strict=True))
    host = paged.on_host(8)
    host.copy(paged, 1, 0, 0, 6)
    paged.copy(host, 0, 2, 0, 6)
    for ours, theirs in zip(paged.span(2, 0, 6), rows.span(1, 0, 6), strict=True):
        assert torch.equal(ours, theirs)
    paged.keep(1, 4, 6)
    assert paged.table.pages[1].tolist()[0] == NO_PAGE
    for row in range(3):
        paged.keep(row, 0, 0)
    assert memory.pool.num_free == 10


def test_a_closed_row_is_not_written():
    memory = PagedMemory(SHAPE, num_pages=4, page_size=4)
    cache = PagedCache(memory, 2, 8)
    cache.open(0, 0, 4)
    cache.close(0)
    cache.aim(slice(0, 2), torch.tensor([[1], [1]]), 4)
    ones = torch.ones(2, 3, 1, 8)
    keys, _ = cache.slot_layers[0].update(ones, ones[..., :4])
    assert not keys.any()
    assert memory.pages[0].keys[0, :, WASTE].any()


def test_spoiled_pages_are_erased_before_they_are_used_again():
    erased: list[int] = []
    pool = PagePool(2, erased.extend)
    table = PageTable(pool, 4, 2, 8, "cpu")
    page = table.own(0, 0)[1]
    table.put(1, 0, pool.share(page))
    table.keep(0, range(0), spoiled=True)
    assert not erased
    table.keep(1, range(0))
    assert erased == [page]
    with pytest.raises(OutOfPages):
        [pool.take() for _ in range(3)]
