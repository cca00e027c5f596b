"""DSpark and DFlash 2: the rules keep the target's law with the sequential q."""

import itertools

import pytest

from dflash_mcmc.ops import SamplingParams
from tests.cases import quick
from tests.engine.speculative.slotwise_drafts import KINDS, NetworkDraft, random_network, shape_of, small_table
from tests.engine.speculative.test_speculator import match, reject
from tests.speculation import speculative_error

LAW = SamplingParams(0.8)
RULES = {"match": match(), "match_drawn": match(0.9), "token": reject(), "block": reject(verification="block"),
         "greedy_draft": reject(0.0)}


def draft(kind: str = "vanilla") -> NetworkDraft:
    table = small_table()
    return NetworkDraft(random_network(shape_of(kind, table.parts, 2 + (kind == "dflash2"), 2)), table)


def error(rule: str, drafted: NetworkDraft) -> float:
    """Of the law of two tokens."""
    return speculative_error(RULES[rule].speculation(drafted), LAW, 2, small_table())


@pytest.mark.parametrize(("kind", "rule"), quick(
    itertools.product((*KINDS, "independent"), RULES),
    ("vanilla", "block"), ("rnn", "token"), ("dflash2", "block"), ("dflash2", "match")))  # a second each
def test_law_is_exact(kind, rule):
    assert error(rule, draft(kind)) <= 1e-12
