"""A cache of pages for recurrent layers gives the numbers of a contiguous one, whatever was kept of the states."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from dflash_mcmc.blend.none import NoBlend
from dflash_mcmc.engine.batching import recurrent_state
from dflash_mcmc.engine.batching.batched import BatchedEngine
from dflash_mcmc.engine.batching.interface import Options
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.batching.plan import Workload, predict
from dflash_mcmc.engine.batching.recurrent_state import HybridMemory, HybridPages, HybridRows, StatePages
from dflash_mcmc.engine.batching.slot_memory import SlotMemory
from tests.engine.batching.test_batched import SAMPLERS, STOPS, chains, multiple_try, power_smc
from tests.engine.batching.test_paged_cache import LONGEST, assert_equal, run
from tests.engine.batching.test_recurrent_state import EVERY, TEXT, Feeder
from tests.engine.speculative.test_speculator import drafter, match
from tests.targets import random_model, rows_do_not_depend_on_the_batch

RUN = {"power_mh": SAMPLERS["power_mh"], "power_smc": power_smc(), "multiple_try": multiple_try("multiple_try")}

FEW = 20
"""Pages that do not hold all operations of a chain."""


@pytest.fixture(scope="module")
def model():
    return random_model("qwen3_5")


@pytest.fixture(scope="module")
def plain(model):
    """Results with a contiguous cache, drawn once: plain("power_mh")."""
    return functools.cache(lambda name: run(model, RUN[name], 0, snapshot_every=EVERY)[0])


@pytest.mark.parametrize(("name", "num_pages"), [
    ("power_mh", 500), ("power_mh", 25), ("power_smc", 500), ("multiple_try", 25),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (("power_smc", 25), ("multiple_try", 500)))])
def test_pages_change_nothing(model, plain, name, num_pages):
    """Not even the cost, if they are so few that draws wait."""
    paged, _ = run(model, RUN[name], num_pages, snapshot_every=EVERY)
    assert_equal(paged, plain(name))


def test_rows_that_move_to_the_host_come_back_with_their_states(model, plain, monkeypatch):
    moved = []
    offload = SlotMemory.move_out
    monkeypatch.setattr(SlotMemory, "move_out", lambda self, slot, to_host=False: (
        moved.extend([slot] * to_host), offload(self, slot, to_host)))
    paged, _ = run(model, RUN["power_smc"], FEW, slots=4, snapshot_every=EVERY)
    assert moved
    assert_equal(paged, plain("power_smc"))


@pytest.mark.parametrize("changes", [dict(snapshot_every=1), dict(snapshot_every=100), dict(keep_current=False)],
                         ids=lambda changes: "-".join(changes))
def test_no_switch_changes_a_number(model, changes):
    paged, _ = run(model, RUN["power_mh"], 500, **{"snapshot_every": EVERY, **changes})
    again, _ = run(model, RUN["power_mh"], 0, **{"snapshot_every": EVERY, **changes})
    for tag, done in again.items():
        np.testing.assert_allclose(paged[tag].result.trajectory.log_p, done.result.trajectory.log_p, rtol=0,
                                   atol=0.0 if rows_do_not_depend_on_the_batch() else 1e-4)


@pytest.mark.parametrize("count", [0, 3])
def test_states_that_were_not_kept_are_replayed_from_earlier_ones(model, plain, monkeypatch, count):
    monkeypatch.setattr(recurrent_state, "num_snapshots", lambda *given: count)
    paged, _ = run(model, RUN["power_smc"], 25, snapshot_every=EVERY)
    assert_equal(paged, plain("power_smc"))


def without_states(self, source, page, start, stop):
    self.inputs[:, page, start:stop] = self.inputs[:, source, start:stop]


def without_inputs(self, source, page, start, stop):
    self.forget(page, start, stop)


@pytest.mark.parametrize("wrong", [without_states, without_inputs])
def test_a_page_with_the_states_or_inputs_of_another_text_would_be_seen(model, plain, monkeypatch, wrong):
    """Mutants of a page's copy. In the first one pages also keep the states of their former rows."""
    monkeypatch.setattr(StatePages, "copy", wrong)
    monkeypatch.setattr(StatePages, "freed", lambda self, page: None)
    paged, _ = run(model, RUN["multiple_try"], 25, snapshot_every=EVERY)
    with pytest.raises(AssertionError):
        assert_equal(paged, plain("multiple_try"))


def test_speculation_on_pages_gives_the_tokens_of_rows(model):
    def speculate(num_pages: int):
        parts = LanguageModel(model, stop_ids=STOPS)
        rule = match(0.8).speculation(drafter("dflash", parts, model))
        engine = BatchedEngine(parts, NoBlend(), 8, LONGEST, Options(snapshot_every=EVERY), None, rule, num_pages=num_pages)
        return {done.tag: done for done in engine.run(chains(SAMPLERS["temperature"]))}

    assert_equal(speculate(200), speculate(0))


@torch.inference_mode()
def test_copies_between_pages_and_the_host_take_the_states_along(model):
    """Each row then goes on as the first one did, from every position."""
    feeder = Feeder(model)
    shape = feeder.parts.cache_shape
    pages = HybridPages(HybridMemory(shape, 40, 64, every=EVERY), 8, 64)
    for row in range(8):
        pages.open(row, 0, len(TEXT))
    feeder.cache, states = pages, []
    for position, token in enumerate(TEXT):
        states.append(feeder.state(3, position))
        feeder.step(np.full(8, token), np.full(8, position))
    pages.close(3)
    host, one = pages.on_host(64), pages.of_one_row(64)
    assert isinstance(host, HybridRows)
    host.copy(pages, 3, 0, 0, 19)
    one.copy(pages, 3, 0, 0, 19)
    for row, source in ((1, host), (2, one)):
        pages.clear(row)
        pages.copy(source, 0, row, 0, 19)
    for position in (19, 16, 11):
        feeder.roll_back(np.array([0, position, position, 0, 0, 0, 0, 0]))
        for row in (1, 2):
            assert all(map(torch.equal, feeder.state(row, position), states[position]))


@pytest.mark.parametrize("every", [20, 64, 256])
def test_caches_are_as_large_as_predicted(model, every):
    work = Workload(LanguageModel(model, stop_ids=STOPS), LONGEST, 100, Options(snapshot_every=every))
    engine = BatchedEngine(work.model, NoBlend(), 12, LONGEST, work.options, prompt_length=100, num_pages=60)
    memory, rows = engine._memory, engine._loop.rows
    shared = memory.cache.memory
    states = shared.states.inputs.nbytes
    states += sum(kept.windows.nbytes + kept.matrices.nbytes for kept in (
        shared.states.snapshots, *(cache.recent for cache in (memory.cache, memory.spare, memory.prompts._cache))))
    held = sum(pages.keys.nbytes + pages.values.nbytes for pages in shared.pages)
    held += rows.tokens.nbytes + rows.uniforms.nbytes + rows.scores.nbytes
    planned = predict(work, 12, 60)
    assert (planned.caches, planned.states) == (held + states, states)
    one = predict(work, 12, 1)
    assert one.total < planned.total <= one.total + 59 * work.page_bytes
