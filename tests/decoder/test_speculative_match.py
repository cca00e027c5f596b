"""Sample and match: exact on tables, and the tokens of plain decoding at every seed."""

from __future__ import annotations

import pytest

from dflash_mcmc.decoder.speculative_match import SpeculativeMatch
from dflash_mcmc.engine import faults
from dflash_mcmc.errors import UserError
from tests.speculation import DRAFTS, LAWS, differing, speculative_error


def rule(draft, temperature=0.0, fault=None):
    return SpeculativeMatch(draft_temperature=temperature, trace=False, fault=fault).speculation(DRAFTS[draft])


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("draft", ["parallel", "sequential", "point"])
def test_law_is_exact(draft, temperature, law):
    assert speculative_error(rule(draft, temperature), law) <= 1e-12


@pytest.mark.parametrize("name", ["greedy_first", "greedy_bonus", "redraw_after_mismatch"])
@pytest.mark.parametrize("draft", ["parallel", "sequential"])
def test_faults_are_caught(draft, name):
    assert speculative_error(rule(draft, fault=name), LAWS["temperature"]) > 0.02


def test_late_penalty_is_caught():
    assert speculative_error(rule("parallel", fault="late_penalty"), LAWS["penalty"]) > 0.02
    assert set(faults.MATCH) == {"greedy_first", "greedy_bonus", "redraw_after_mismatch", "late_penalty"}  # none untested


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("draft", ["parallel", "sequential", "long", "point"])
def test_tokens_are_those_of_plain_decoding(draft, temperature):
    assert differing(rule(draft, temperature), LAWS["temperature"], num_seeds=1000) == 0


def test_faulty_tokens_are_not():
    assert differing(rule("parallel", fault="greedy_bonus"), LAWS["temperature"], num_seeds=50) > 5


def test_a_fault_needs_its_experiment(make_config):
    with pytest.raises(UserError, match=r"decoder.fault: given 'greedy_first'; allowed: null; a faulty decoder runs in"):
        make_config("decoder=speculative_match", "draft=ngram", "decoder.fault=greedy_first")
    assert make_config("decoder=speculative_match", "draft=ngram", "decoder.fault=greedy_first", "name=faults")


def test_a_decoder_and_its_draft_come_together(make_config):
    with pytest.raises(UserError, match=r"draft: given 'none'; allowed: a draft, such as tiny .* with decoder=specul"):
        make_config("decoder=speculative_match")
    with pytest.raises(UserError, match=r"draft: given 'ngram'; allowed: none, since nothing uses it"):
        make_config("draft=ngram")
