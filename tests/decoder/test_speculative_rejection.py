"""`decoder=speculative_rejection`, verified by token and by block: exact law on the tabular engine; faults are detected."""

import pytest

from dflash_mcmc.decoder.speculative_rejection import SpeculativeRejection
from dflash_mcmc.engine.oracle.tabular import TabularEngine
from dflash_mcmc.engine.speculative import rules
from dflash_mcmc.errors import UserError
from dflash_mcmc.ops import Draw
from dflash_mcmc.testing import PROMPT, EnumeratedKey, Enumerator
from dflash_mcmc.types import Trajectory
from tests.cases import quick
from tests.speculation import DRAFTS, LAWS, MODEL, SMALL, combinations, speculative_error


def rule(draft, temperature=None, fault=None, verification="token"):
    decoder = SpeculativeRejection(draft_temperature=temperature, verification=verification, trace=False, fault=fault)
    return decoder.speculation(DRAFTS[draft])


@pytest.mark.parametrize("verification", ["token", "block"])
@pytest.mark.parametrize(("draft", "temperature", "law"), combinations((None, 0.0), slow=None))
def test_law_is_exact(draft, verification, temperature, law):
    assert speculative_error(rule(draft, temperature, verification=verification), LAWS[law], horizon=2) <= 1e-12


@pytest.mark.parametrize("law", quick(["temperature", "penalty", "counts", "prompt"], "penalty"))
@pytest.mark.parametrize("temperature", quick([None, 1.3], 1.3))
@pytest.mark.parametrize("verification", ["token", "block"])
@pytest.mark.parametrize("draft", quick(["small", "small_sequential"], "small_sequential"))
def test_law_is_exact_among_three_tokens(draft, verification, temperature, law):
    assert speculative_error(rule(draft, temperature, verification=verification), LAWS[law], 2, SMALL) <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("verification", ["token", "block"])
def test_law_is_exact_over_several_blocks(verification):
    assert speculative_error(rule("small", verification=verification), LAWS["temperature"], 3, SMALL) <= 1e-12


@pytest.mark.parametrize("name", ["argmax_proposal", "reject_then_p", "residual_by_draft_noise"])
@pytest.mark.parametrize("draft", quick(["small", "small_sequential"], "small_sequential"))
def test_faults_are_caught(draft, name):
    assert speculative_error(rule(draft, fault=name), LAWS["temperature"], 2, SMALL) > 0.005


def test_the_fault_of_block_verification_is_caught():
    """It is small, since both residuals are alike where a prefix is kept that the draft proposes too rarely."""
    wrong = rule("small_sequential", fault="block_residual", verification="block")
    assert speculative_error(wrong, LAWS["temperature"], 2, SMALL) > 1e-3
    assert list(rules.BLOCK) == ["block_residual"]


@pytest.mark.parametrize(("name", "law"), [("unprocessed_draft", "filters"), ("late_penalty", "penalty")])
def test_faults_of_processing_are_caught(name, law):
    assert speculative_error(rule("small_sequential", fault=name), LAWS[law], 2, SMALL) > 0.005
    assert len(rules.REJECTION) == 5  # all are tested


def kept(verification: str, draft: str) -> float:
    """Expected number of accepted tokens in the first block."""
    engine, enumerator, expected = TabularEngine(MODEL, None, rule(draft, verification=verification)), Enumerator(), 0.0
    law, path = LAWS["temperature"], Trajectory.start(PROMPT)
    while True:
        key = EnumeratedKey(enumerator)
        chance = engine._chance(key, 0)
        verdict = engine.speculation.rule(engine._block(Draw(path, 3, law, key), path, chance), chance)
        expected += enumerator.probability * int(verdict.accepted)
        if not enumerator.next_branch():
            return expected


@pytest.mark.parametrize("draft", ["parallel", "sequential"])
def test_block_verification_keeps_more_tokens(draft):
    assert kept("block", draft) > kept("token", draft) + 1e-3


@pytest.mark.slow
def test_block_verification_needs_new_random_numbers_after_each_anchor(monkeypatch):
    """The end of a block depends on the drafted tokens, so their random numbers must not be used for the next draft."""
    from dflash_mcmc.testing import EnumeratedChance

    law = LAWS["temperature"]
    monkeypatch.setattr(EnumeratedChance, "_drafting", lambda self, slot: self._enumerator.uniform(
        (*self._name, "draft", self._anchor + slot)))
    assert speculative_error(rule("small", verification="block"), law, 3, SMALL) > 1e-4
    assert speculative_error(rule("small"), law, 3, SMALL) <= 1e-12  # verification by token may use one number per position


def test_a_fault_requires_its_experiment(make_config):
    with pytest.raises(UserError, match=r"decoder.fault: given 'argmax_proposal'; allowed: null; a faulty"):
        make_config("decoder=speculative_rejection", "draft=ngram", "decoder.fault=argmax_proposal")
    with pytest.raises(UserError, match=r"decoder.verification: given 'block'; allowed: token with decoder.fault"):
        make_config("decoder=speculative_rejection", "draft=self", "decoder.fault=argmax_proposal", "name=faults",
                    "decoder.verification=block")
    with pytest.raises(UserError, match=r"given 'token'; allowed: block with decoder.fault=block_residual"):
        make_config("decoder=speculative_rejection", "draft=self", "decoder.fault=block_residual", "name=faults")
