"""Trees of drafted tokens on the batched engine: the tokens of plain decoding, the law of the target, and entries in place."""

from __future__ import annotations

import functools
import json

import pytest

from dflash_mcmc.decoder.speculative_match import SpeculativeMatch
from dflash_mcmc.decoder.speculative_rejection import SpeculativeRejection
from dflash_mcmc.engine.batching.model_runner import ModelRunner
from tests.engine.batching.test_batched import BLENDS, SAMPLERS, WAYS, run_batched, same
from tests.engine.speculative.test_speculator import run
from tests.targets import random_model

TREE = [3, 2, 1, 0, 1, 2]
"""Nine drafted tokens, at most three in a row."""


def match(temperature=0.0, candidates=TREE) -> SpeculativeMatch:
    return SpeculativeMatch(draft_temperature=temperature, candidates=candidates)


def reject(**changes) -> SpeculativeRejection:
    return SpeculativeRejection(candidates=TREE, **changes)


@pytest.mark.parametrize(("name", "blend", "draft", "temperature"), [
    ("temperature", "none", "dflash", 0.0), ("truncated", "none", "dspark_gated", 0.9),
    ("power_mh_early", "layer", "dflash2", 0.0),
    ("greedy", "none", "dflash_sliding", 0.0), ("power_smc", "none", "dspark", 1.0), ("temperature", "layer", "self", 0.8),
    ("truncated", "none", "ngram", 0.0)])
def test_match_is_plain(qwen3, plain, name, blend, draft, temperature):
    found = run(qwen3, SAMPLERS[name], BLENDS[blend], match(temperature), draft)
    for tag, done in plain(name, blend).items():
        same(found[tag].result, done.result)
        assert found[tag].cost.tokens_drafted == 9 * found[tag].cost.blocks_drafted
    assert sum(done.cost.tokens_kept for done in found.values()) > 0


@pytest.fixture(scope="module")
def found(qwen3):
    """Answers of power sampling with trees, drawn once by each rule."""
    return functools.cache(lambda rejects: run(qwen3, SAMPLERS["power_mh_early"], BLENDS["none"],
                                               reject() if rejects else match(0.8), "dflash"))


@pytest.mark.parametrize(("rejects", "options"), list(zip((True, False) * 2, WAYS[:4], strict=True)))
def test_pages_slots_and_order_change_nothing(qwen3, found, rejects, options):
    expected = found(rejects)
    other = run(qwen3, SAMPLERS["power_mh_early"], BLENDS["none"], reject() if rejects else match(0.8), "dflash", **options)
    for tag, done in expected.items():
        same(other[tag].result, done.result)


@pytest.mark.parametrize(("rejects", "draft"), [
    (False, "dflash"), (True, "ngram"),
    *(pytest.param(True, name, marks=pytest.mark.slow) for name in ("dspark_gated", "self"))])
def test_a_tree_of_one_branch_is_a_chain(qwen3, rejects, draft):
    """The draft has then read the same tokens: as many blocks are drafted, and as many tokens kept."""
    rule = SpeculativeRejection if rejects else SpeculativeMatch
    one, chain = (run(qwen3, SAMPLERS["power_mh_early"], BLENDS["none"], rule(candidates=counts), draft)
                  for counts in ([1] * {"self": 3, "ngram": 6}.get(draft, 4), None))
    for tag, done in chain.items():
        same(one[tag].result, done.result)
        assert one[tag].cost == done.cost


def test_a_tree_smaller_than_the_blocks_of_the_draft(qwen3, plain):
    """The draft writes the places of a whole block, also at the end of the longest sequence."""
    for tag, done in run(qwen3, SAMPLERS["temperature"], BLENDS["none"], match(candidates=[2]), "dspark").items():
        same(done.result, plain("temperature", "none")[tag].result)


def test_entries_of_the_path_must_be_moved(qwen3, plain, monkeypatch):
    """A mutant that leaves the target's entries where the tree had them continues another text."""
    monkeypatch.setattr(ModelRunner, "keep", lambda *arguments: None)
    moved = run(qwen3, SAMPLERS["temperature"], BLENDS["none"], match(), "dspark")
    assert any(moved[tag].result.trajectory.tokens.tolist() != done.result.trajectory.tokens.tolist()
               for tag, done in plain("temperature", "none").items())


@pytest.mark.parametrize(("decoder", "draft"), [(reject(trace=True), "self"), (reject(trace=True), "dspark_gated"),
                                                (SpeculativeMatch(candidates=TREE, trace=True), "ngram")])
def test_a_trace_has_the_nodes_and_the_path_that_is_kept(qwen3, decoder, draft):
    kept = 0
    for done in run(qwen3, SAMPLERS["truncated"], BLENDS["none"], decoder, draft).values():
        drawn = done.result.trajectory
        json.dumps(done.walk, allow_nan=False)
        assert (len(done.walk), sum(step["gained"] for step in done.walk)) == (done.cost.blocks_drafted, drawn.length)
        for step in done.walk:
            path, parents = step["path"], [0, *step["parents"]]
            assert (len(path), parents[1:]) == (step["accepted"], [0, 0, 0, 1, 1, 2, 4, 5, 5])
            assert [parents[node] for node in path] == [0, *path][: len(path)]
            assert [step["drafted"][node - 1] for node in path] == step["tokens"][:-1]
            for place, node in enumerate(path[: step["gained"]], step["anchor"] + 1):
                assert step["log_p"][node - 1] == pytest.approx(drawn.log_q[place], abs=1e-4)
            if draft == "dspark_gated":
                assert all(step["offered"][node - 1] for node in path)
            kept += len(path)
    assert kept > 0


def test_a_trace_has_the_law_from_which_a_candidate_is_drawn(qwen3):
    """The target drafts for itself: p is q, also for candidates that are drawn without those before them."""
    for done in run(qwen3, SAMPLERS["temperature"], BLENDS["none"], reject(trace=True), "self").values():
        for step in done.walk[:-1]:
            assert step["log_q"] == pytest.approx(step["log_p"], abs=1e-4)


@pytest.mark.parametrize(("family", "name", "draft", "temperature", "options"), [
    ("qwen3_5", "temperature", "self", 0.8, {"num_pages": 60, "slots": 4, "snapshot_every": 8}),
    *(pytest.param(*more, {}, marks=pytest.mark.slow) for more in (
        ("qwen3_5", "power_mh_early", "self", 1.0), ("qwen3_next", "truncated", "ngram", 0.0)))])
def test_the_states_of_recurrent_layers_are_those_of_the_path(family, name, draft, temperature, options):
    """A node begins with the state after its parent, and what follows with the state after the path."""
    model = random_model(family)
    found = run(model, SAMPLERS[name], BLENDS["none"], match(temperature), draft, **options)
    for tag, done in run_batched(model, SAMPLERS[name], BLENDS["none"]).items():
        same(found[tag].result, done.result)
    assert sum(done.cost.tokens_kept for done in found.values()) > 0


def test_rejection_on_recurrent_layers_judges_by_the_law_after_the_path():
    """The target drafts for itself: p is q in every node, and the last draw of each path goes on from it."""
    for done in run(random_model("qwen3_5"), SAMPLERS["temperature"], BLENDS["none"], reject(trace=True), "self").values():
        for step in done.walk[:-1]:
            assert step["log_q"] == pytest.approx(step["log_p"], abs=1e-4)
