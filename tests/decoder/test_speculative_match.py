"""`decoder=speculative_match`: exact law on the tabular engine, and the tokens of plain decoding at every seed."""

import pytest

from dflash_mcmc.components import name_of
from dflash_mcmc.config.identity import identity_hash
from dflash_mcmc.decoder.speculative_match import SpeculativeMatch
from dflash_mcmc.engine.speculative import rules
from dflash_mcmc.errors import UserError, note
from tests.cases import quick
from tests.speculation import DRAFTS, LAWS, SMALL, combinations, differing, speculative_error


def rule(draft, temperature=0.0, fault=None):
    window = 1 if fault == "finite_window" else None
    decoder = SpeculativeMatch(draft_temperature=temperature, trace=False, fault=fault, fault_window=window)
    return decoder.speculation(DRAFTS[draft])


FAULTS = ["greedy_first", "greedy_bonus", "redraw_after_mismatch", "greedy_walk", "finite_window"]


@pytest.mark.parametrize(("draft", "temperature", "law"), combinations((0.0, 0.7), slow=0.7))
def test_law_is_exact(draft, temperature, law):
    assert speculative_error(rule(draft, temperature), LAWS[law]) <= 1e-12


@pytest.mark.parametrize("law", quick(["temperature", "penalty", "counts", "prompt"], "penalty"))
@pytest.mark.parametrize("draft", ["small", "small_sequential"])
def test_law_is_exact_among_three_tokens(draft, law):
    assert speculative_error(rule(draft, 0.7), LAWS[law], model=SMALL) <= 1e-12


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("draft", quick(["small", "small_sequential"], "small_sequential"))
def test_faults_are_caught(draft, name):
    assert speculative_error(rule(draft, fault=name), LAWS["temperature"], model=SMALL) > 0.02


def test_late_penalty_is_caught():
    assert speculative_error(rule("parallel", fault="late_penalty"), LAWS["penalty"]) > 0.02
    for law in ("counts", "prompt"):
        assert speculative_error(rule("small", fault="late_penalty"), LAWS[law], model=SMALL) > 1e-3
    assert set(rules.MATCH) == {"greedy_first", "greedy_bonus", "redraw_after_mismatch", "late_penalty",
                                 "greedy_walk", "finite_window"}  # all are tested


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("draft", quick(["parallel", "sequential", "long", "point"], "sequential"))
def test_tokens_equal_those_of_plain_decoding(draft, temperature):
    assert differing(rule(draft, temperature), LAWS["temperature"], num_seeds=100) == 0


def test_tokens_with_a_fault_differ():
    assert differing(rule("parallel", fault="greedy_bonus"), LAWS["temperature"], num_seeds=50) > 5


def test_a_fault_requires_its_experiment(make_config):
    with pytest.raises(UserError, match=r"decoder.fault: given 'greedy_first'; allowed: null; a faulty decoder runs un"):
        make_config("decoder=speculative_match", "draft=ngram", "decoder.fault=greedy_first")
    assert make_config("decoder=speculative_match", "draft=ngram", "decoder.fault=greedy_first", "name=faults")


def test_a_window_belongs_to_its_fault(make_config):
    faulty = ("name=faults", "sampler=temperature", "draft=ngram", "decoder=speculative_match")
    with pytest.raises(UserError, match=r"decoder.fault_window: given None; allowed: a whole number >= 1 with decoder.fault="):
        make_config(*faulty, "decoder.fault=finite_window")
    with pytest.raises(UserError, match=r"decoder.fault_window: given 8; allowed: null without decoder.fault=finite_window"):
        make_config(*faulty, "decoder.fault_window=8")


def test_a_fault_that_does_nothing_is_refused(make_config):
    faulty = ("name=faults", "sampler=temperature", "draft=ngram")
    with pytest.raises(UserError, match=r"decoder.fault: given 'argmax_proposal'; allowed: another, or a draft whose token"):
        make_config(*faulty, "decoder=speculative_rejection", "decoder.fault=argmax_proposal")
    with pytest.raises(UserError, match=r"decoder.fault: given 'late_penalty'; allowed: another, or a sampler.repetitio"):
        make_config(*faulty, "decoder=speculative_match", "decoder.fault=late_penalty")


def test_a_temperature_that_overflows_is_refused(make_config):
    with pytest.raises(UserError, match=r"decoder.draft_temperature: given 1e-39; allowed: 0, or a number from 1e-06 to"):
        make_config("decoder=speculative_match", "draft=ngram", "decoder.draft_temperature=1e-39")


def test_a_temperature_without_effect_is_not_part_of_the_identity(make_config):
    hashes = {identity_hash(make_config("decoder=speculative_match", "draft=ngram", f"decoder.draft_temperature={value}"))
              for value in (0.0, 1.0)}
    assert len(hashes) == 1


def test_an_unused_draft_is_left_out_and_a_sweep_says_it_once(make_config, capsys):
    note.cache_clear()
    for _ in range(2):
        assert name_of(make_config("draft=ngram", "sampler=greedy").draft) == "none"
    assert identity_hash(make_config("draft=ngram")) == identity_hash(make_config())
    messages = capsys.readouterr().err.splitlines()
    assert messages == ["draft=ngram is left out where no blend or sampler or decoder uses it"]
