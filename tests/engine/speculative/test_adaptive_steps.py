"""Blocks of changing lengths on the batched engine: plain decoding's tokens, the lengths of `BlockLengths`, equal records."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_mcmc.engine.batching.batched import BatchedEngine
from dflash_mcmc.engine.batching.interface import Options
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.batching.slot_memory import SlotMemory
from dflash_mcmc.engine.speculative.drafter import ModelDrafter
from dflash_mcmc.engine.speculative.speculation import BlockLengths, block_lengths
from tests.engine.batching.test_batched import BLENDS, HORIZON, PROMPTS, SAMPLERS, STOPS, TOLERANCE, chains, run_batched, same
from tests.engine.speculative.test_speculator import drafter, match, reject
from tests.targets import random_model, rows_do_not_depend_on_the_batch


def quick(decoder, draft):
    """A rule whose lengths change within a few tokens."""
    return decoder.speculation(draft)._replace(lengths=block_lengths(draft.num_drafted, 1.6, top=8, memory=2))


def run(model, name, decoder, draft, slots=8, order=None, num_pages=0, **options):
    parts = LanguageModel(model, stop_ids=STOPS)
    used = ModelDrafter(parts, 3) if draft == "model" else drafter(draft, parts, model)
    engine = BatchedEngine(parts, BLENDS["none"], slots, max(map(len, PROMPTS)) + HORIZON, Options(**options), None,
                           quick(decoder, used), num_pages=num_pages)
    todo = list(chains(SAMPLERS[name]))
    return {done.tag: done for done in engine.run(todo if order is None else [todo[i] for i in order])}


def replayed(walk, lengths):
    """What the blocks of a draw should draft, by the blocks before each."""
    level = lengths.start
    for block in walk:
        if block["anchor"] == -1:
            level = lengths.start
        yield int(lengths.drafted[level])
        level = lengths.next(level, block["accepted"], block.get("offered", len(block["drafted"])))


@pytest.mark.parametrize(("name", "draft"), [
    ("greedy", "self"), ("truncated", "dflash"), ("power_mh_early", "dflash"), ("temperature", "ngram"),
    ("truncated", "model"), ("power_mh_early", "self"), ("temperature", "dspark_gated"),
    pytest.param("greedy", "dflash2", marks=pytest.mark.slow)])
def test_matched_tokens_are_those_of_plain_decoding(qwen3, plain, name, draft):
    adaptive = run(qwen3, name, match(), draft)
    for tag, done in plain(name).items():
        same(adaptive[tag].result, done.result)
        assert adaptive[tag].cost.tokens_drawn == done.cost.tokens_drawn
    costs = [done.cost for done in adaptive.values()]
    assert 0 < sum(cost.blocks_drafted for cost in costs) < sum(cost.target_forwards for cost in costs)


@pytest.mark.parametrize(("decoder", "draft"), [
    (match(trace=True), "dflash"), (reject(2.0, trace=True), "self"),
    (reject(trace=True, verification="block"), "dspark_gated")])
def test_a_block_drafts_as_many_tokens_as_the_blocks_before_it_say(qwen3, decoder, draft):
    done = run(qwen3, "temperature", decoder, draft)
    lengths = block_lengths(3 if draft == "self" else 4, 1.6, top=8, memory=2)
    seen = set()
    for each in done.values():
        drafted = [len(block["drafted"]) for block in each.walk]
        assert drafted == list(replayed(each.walk, lengths))
        assert sum(block["gained"] for block in each.walk) == each.result.trajectory.length
        assert each.cost.tokens_drafted == sum(drafted)
        assert each.cost.blocks_drafted == each.cost.blocks_verified == sum(count > 0 for count in drafted)
        assert each.cost.tokens_kept == sum(min(block["accepted"], block["gained"]) for block in each.walk)
        assert each.cost.tokens_verified == sum(block["gained"] for block in each.walk if block["drafted"])
        seen.update(drafted)
    assert len(seen) > 1


@pytest.mark.parametrize(("name", "decoder", "draft"), [
    ("best_of_n", match(), "dflash"), ("power_mh_early", reject(2.0), "self"),
    ("best_of_n", reject(2.0, verification="block"), "model")])
def test_slots_order_and_stopped_draws_change_nothing(qwen3, decoder, draft, name, monkeypatch):
    """A stopped draw is drawn again from its start, where its level begins anew."""
    stopped, stop = [], SlotMemory.stop
    monkeypatch.setattr(SlotMemory, "stop", lambda self, slot: (stopped.append(slot), stop(self, slot)))
    expected = run(qwen3, name, decoder, draft)
    tolerance = 0.0 if rows_do_not_depend_on_the_batch() else TOLERANCE
    for ways in ({"slots": 3, "order": [5, 2, 9, 7, 0, 3, 6, 8, 1, 4]}, {"slots": 1, "order": [1, 3]}, {"num_pages": 20}):
        other = run(qwen3, name, decoder, draft, **ways)
        assert len(other) == len(ways.get("order", expected))
        for tag, done in other.items():
            same(done.result, expected[tag].result, tolerance)
            assert done.cost == expected[tag].cost
    assert bool(stopped) == (name == "best_of_n")


def test_tokens_of_plain_steps_claim_no_interval_under_rejection(qwen3):
    """A proposal would else repeat a token that it draws in a block."""
    for done in run(qwen3, "temperature", reject(), "dflash").values():
        assert not done.result.trajectory.interval.any()


def test_a_model_that_drafts_reads_on_in_plain_steps(qwen3):
    """The target's own weights draft, in every second step: their laws stay the target's."""
    parts = LanguageModel(qwen3, stop_ids=STOPS)
    speculation = reject(trace=True).speculation(ModelDrafter(parts, 3))
    turns = BlockLengths(np.array([3, 0]), np.stack([np.ones((2, 4), np.int64), np.zeros((2, 4), np.int64)]), 0)
    engine = BatchedEngine(parts, BLENDS["none"], 3, max(map(len, PROMPTS)) + HORIZON, Options(), None,
                           speculation._replace(lengths=turns))
    counts = []
    for done in engine.run(chains(SAMPLERS["temperature"])):
        counts += [len(block["drafted"]) for block in done.walk]
        for block in done.walk:
            np.testing.assert_allclose(block["log_q"] or [], block["log_p"], atol=TOLERANCE, rtol=0)
    assert {0, 3} == set(counts)


def test_recurrent_layers_keep_the_state_after_the_kept_tokens():
    model = random_model("qwen3_5")
    expected = run_batched(model, SAMPLERS["temperature"], BLENDS["none"], snapshot_every=8)
    for tag, done in run(model, "temperature", match(), "dflash", snapshot_every=8).items():
        assert done.result.trajectory.tokens.tolist() == expected[tag].result.trajectory.tokens.tolist()
