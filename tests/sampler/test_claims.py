"""What samplers say about themselves: the power that a report compares, the expected cost, the width of their operations."""

import pytest

from dflash_mcmc.components import registered
from dflash_mcmc.engine.oracle.tabular import TabularDraft, TabularEngine, TabularModel
from dflash_mcmc.rng import Key
from dflash_mcmc.sampler.replica_exchange import ReplicaExchange
from dflash_mcmc.testing import PROMPT, EnumeratedKey, Enumerator
from dflash_mcmc.types import ExpectedCost
from tests.cases import quick

POWERS = [
    *(("temperature", options, power) for options, power in (
        ({"alpha": 1.0}, 1.0), ({"alpha": 2.0}, None), ({"alpha": 2.0, "temperature": 1.0}, 1.0),
        ({"alpha": 1.0, "top_p": 0.9}, None), ({"alpha": 1.0, "top_k": 3}, None), ({"alpha": 1.0, "min_p": 0.1}, None),
        ({"alpha": 1.0, "repetition_penalty": 1.1}, None), ({"alpha": 1.0, "frequency_penalty": 0.1}, None),
        ({"alpha": 1.0, "presence_penalty": 0.1}, None))),
    *(("power_mh", {"alpha": 3.0, **options}, power) for options, power in (
        ({}, 3.0), ({"proposal_temperature": 0.7}, 3.0), ({"schedule": "adaptive"}, 3.0), ({"rule": "published"}, None),
        ({"top_k": 3}, None), ({"top_p": 0.9}, None))),
    *(("power_smc", {"alpha": 3.0, **options}, power) for options, power in (
        ({"wrapper": "none"}, None), ({"wrapper": "pimh"}, 3.0), ({"wrapper": "csmc"}, 3.0),
        ({"wrapper": "csmc", "top_p": 0.9}, None))),
    *(("multiple_try", {"alpha": 3.0, **options}, power) for options, power in (
        ({}, 3.0), ({"top_k": 3}, None), ({"top_p": 0.9}, None))),
    ("replica_exchange", {"alphas": [1.0, 2.0, 5.0], "output": 2}, 2.0),
    ("replica_exchange", {"alphas": [1.0, 5.0], "output": -1}, 5.0),
    ("draft_mh", {"alpha": 3.0}, 3.0), ("draft_refine", {"alpha": 3.0}, 3.0),
    ("greedy", {}, None), ("best_of_n", {}, None), ("lookahead", {}, None),
]


@pytest.mark.parametrize(("name", "options", "power"), POWERS, ids=str)
def test_a_sampler_claims_a_power_only_where_its_chains_tend_to_it(name, options, power):
    """A report compares the samples of runs with one power, as runs of one law."""
    assert registered("sampler")[name].cls(**options).power() == power


MH, SMC = {"num_blocks": 1, "num_steps": 3}, {"num_particles": 3, "block_size": 2, "wrapper": "none"}
"""Answers have 6 of at most 8 tokens. A step that is cut anywhere draws 3.5 of them again, after 2.5."""
COSTS = [
    ("greedy", {}, ExpectedCost(6)), ("temperature", {}, ExpectedCost(6)),
    ("best_of_n", {"num_candidates": 5}, ExpectedCost(30, num_draws=5)),
    ("power_mh", MH, ExpectedCost(6, 10.5, 0, 4)),
    ("power_mh", {"num_blocks": 4, "num_steps": 1, "rule": "published"}, ExpectedCost(6, 7.5, 0, 6)),  # ends at stage 3
    ("power_mh", {"num_blocks": 8, "num_steps": 1, "schedule": "adaptive"}, ExpectedCost(6, 8.5, 0, 8)),
    ("multiple_try", {**MH, "num_tries": 4}, ExpectedCost(6, 42, 0, 13)),
    ("replica_exchange", {**MH, "alphas": [1.0, 2.0, 4.0]}, ExpectedCost(18, 31.5, 0, 12)),
    ("draft_mh", {"num_blocks": 2, "num_steps": 1}, ExpectedCost(6, 6, 0, 4, 4)),
    ("draft_mh", {"num_blocks": 2, "num_steps": 1, "proposal": "mixture"}, ExpectedCost(6, 6, 12, 8, 4)),
    ("draft_refine", {"num_blocks": 2, "num_steps": 1, "cut": "current"}, ExpectedCost(6, 6, 6, 6, 2, 6)),
    ("draft_refine", {"num_blocks": 4, "num_steps": 2, "cut": "current"}, ExpectedCost(6, 22, 6, 14, 3, 6)),
    ("draft_refine", {"cut": "confidence"}, None), ("power_mh", {**MH, "cut": "entropy"}, ExpectedCost(6, 10.5, 0, 4)),
    ("lookahead", {"num_candidates": 4, "num_rollouts": 2, "rollout_length": 3, "block_size": 2},
     ExpectedCost(4 * (6 + 2 * (3 + 2)), num_draws=3 * (4 + 8))),
    ("lookahead", {"num_candidates": 4, "num_rollouts": 2, "rollout_length": 3, "block_size": 4},  # the second ends the text
     ExpectedCost(4 * (6 + 2 * 2), num_draws=2 * (4 + 8))),
    ("lookahead", {"num_candidates": 4, "rollout_length": 0, "block_size": 2}, ExpectedCost(24, num_draws=12)),
    ("power_smc", SMC, ExpectedCost(18, num_draws=9)),
    ("power_smc", {**SMC, "proposal": "draft"}, ExpectedCost(18, num_draws=9, drafts=9)),
    ("power_smc", {**SMC, "wrapper": "pimh", "num_steps": 2}, ExpectedCost(54, num_draws=27)),
    ("power_smc", {**SMC, "wrapper": "csmc", "num_steps": 2}, ExpectedCost(18, 14, num_draws=19.5)),
    ("power_smc", {**SMC, "wrapper": "csmc", "num_steps": 2, "proposal": "draft"},
     ExpectedCost(18, 14, num_draws=19.5, drafts=19.5)),
]


@pytest.mark.parametrize(("name", "options", "cost"), COSTS, ids=str)
def test_the_expected_cost_by_hand(name, options, cost):
    assert registered("sampler")[name].cls(**options).expected_cost(6, 8) == (cost and pytest.approx(cost))


WIDTHS = [("power_mh", {}, 1), ("multiple_try", {"num_tries": 3}, 3), ("best_of_n", {"num_candidates": 5}, 5),
          ("replica_exchange", {"alphas": [1.0, 2.0, 4.0]}, 3), ("power_smc", {"num_particles": 7}, 7),
          ("lookahead", {"num_candidates": 4, "num_rollouts": 2, "rollout_length": 3}, 8),
          ("lookahead", {"num_candidates": 4, "num_rollouts": 2, "rollout_length": 0}, 4)]


@pytest.mark.parametrize(("name", "options", "width"), WIDTHS, ids=str)
def test_the_width_is_the_most_operations_at_once(name, options, width):
    assert registered("sampler")[name].cls(**options).width() == width


TWICE = {"num_blocks": 2, "num_steps": 2}
CHAINS = [("power_mh", {**TWICE, "early_reject": "off"}), ("power_mh", {**TWICE, "cut": "entropy"}),
          ("power_mh", {**TWICE, "rule": "published"}), ("power_mh", {**TWICE, "schedule": "adaptive"}),
          ("multiple_try", {**TWICE, "form": "multiple_try"}),
          ("multiple_try", {**TWICE, "form": "isir", "early_reject": "off"}),
          ("replica_exchange", TWICE), ("draft_mh", {**TWICE, "proposal": "draft"}),
          ("draft_mh", {**TWICE, "proposal": "mixture"}), ("draft_refine", TWICE),
          ("best_of_n", {"select": "power"}), ("lookahead", {"block_size": 1, "rollout_length": 2}), ("temperature", {}),
          ("power_smc", {"wrapper": "pimh", "num_steps": 2, "block_size": 1}),
          ("power_smc", {"wrapper": "csmc", "num_steps": 2, "block_size": 1})]


@pytest.mark.parametrize(("name", "options"), quick(
    CHAINS, "draft_refine", "best_of_n", "temperature", *CHAINS[:2]), ids=str)
def test_no_two_choices_of_a_chain_share_a_random_number(name, options):
    """The first 200 branches of the enumeration of a chain, which refuses a second use of a key."""
    engine = TabularEngine(TabularModel(3, (0,), seed=3), draft=TabularDraft(3, 1, seed=9))
    sampler, enumerator = registered("sampler")[name].cls(**options), Enumerator()
    for _ in range(200):
        engine.run(sampler.chain(PROMPT, 4, EnumeratedKey(enumerator)))
        if not enumerator.next_branch():
            break


@pytest.mark.parametrize(("name", "options"), [(name, options) for name, options in CHAINS if "num_steps" in options], ids=str)
def test_the_trace_follows_the_state(name, options, monkeypatch):
    """An entry has the length of the state that the entry before has left, within a stage and without swaps."""
    engine = TabularEngine(TabularModel(3, (0,), seed=3, scale=0.5), draft=TabularDraft(3, 1, seed=9))
    options, followed = {**options, "num_steps": 4}, 0
    monkeypatch.setattr(ReplicaExchange, "swap", lambda self, ladder, key: (ladder, (False,) * (len(self.alphas) - 1)))
    for seed in range(6):
        states = {}
        for entry in engine.run(registered("sampler")[name].cls(**options).chain(PROMPT, 8, Key(seed))).trace:
            state = entry["block"], entry.get("rung")
            assert entry["length"] == states.get(state, entry["length"])
            followed += state in states
            states[state] = entry["proposal_length"] if entry["decision"] in ("accept", "identical") else entry["length"]
    assert followed > 10
