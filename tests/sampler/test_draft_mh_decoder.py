"""`sampler=draft_mh` with `proposal=mixture` under speculative decoders: its law on the tabular engine."""

import numpy as np
import pytest

from dflash_mcmc.blend.layer import LayerBlend
from dflash_mcmc.chains import cost
from dflash_mcmc.engine.oracle.tabular import TabularDraft, TabularEngine, TabularModel
from dflash_mcmc.engine.speculative import rules
from dflash_mcmc.engine.speculative.rules import Speculation
from dflash_mcmc.errors import UserError
from dflash_mcmc.testing import power_target, transition_matrix
from tests.sampler.stages import matrix_error
from tests.sampler.test_draft_mh import EXACT, make

HORIZON = 2
LAYER = LayerBlend(beta=0.4, layer=0, norm="final")
RULES = {"match": (rules.match, {"shared_noise": True, "temperature": 0.0}),
         "match_sampled": (rules.match, {"shared_noise": True, "temperature": 1.0}),
         "rejection": (rules.reject, {"shared_noise": False, "temperature": None}),
         "block": (rules.reject_block, {"shared_noise": False, "temperature": None})}
MIXTURES = {"default": {}, "warm": {"proposal_temperature": 0.8, "draft_temperature": 0.6}}


def engine(rule=None, blend=None, size=3, **options) -> TabularEngine:
    draft = TabularDraft(size, 2, seed=7, scale=0.7)
    speculation = rule and Speculation(rule, draft, noisy=True, **options)
    return TabularEngine(TabularModel(size, (0,), seed=0, scale=0.5), blend, speculation, draft)


def matrix_and_target(tabular, sampler) -> tuple:
    plain = engine(blend=tabular.blend, size=tabular.model.vocab_size)
    target = power_target(plain, HORIZON, sampler.alpha, sampler.law(), sampler.source())
    return transition_matrix(tabular, sampler, HORIZON, target), target


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options", "blend", "size"), [
    pytest.param("match_sampled", "warm", None, 2, id="match_sampled-two-tokens"),
    pytest.param("rejection", "default", LAYER, 2, id="rejection-two-tokens"),
    pytest.param("block", "default", None, 2, id="block-two-tokens"),
    pytest.param("match", "default", LAYER, 3, id="match-layer")])
def test_a_decoder_changes_no_transition(name, options, blend, size):
    """The same transition matrix as with plain decoding, not only the same invariant law."""
    rule, settings = RULES[name]
    sampler = make(proposal="mixture", **MIXTURES[options])
    matrix, target = matrix_and_target(engine(rule, blend, size, **settings), sampler)
    plain, _ = matrix_and_target(engine(blend=blend, size=size), sampler)
    assert np.abs(matrix - plain).max() <= EXACT
    assert matrix_error(matrix, target) <= EXACT


def test_draws_from_the_draft_do_not_use_the_decoder():
    """A faulty decoder changes nothing where all draws are the draft's."""
    faulty = engine(rules.reject_then_p, **RULES["rejection"][1])
    matrices = [matrix_and_target(each, make())[0] for each in (faulty, engine())]
    assert np.abs(matrices[0] - matrices[1]).max() <= EXACT


@pytest.mark.parametrize("decoder", ["speculative_match", "speculative_rejection"])
def test_decoders_are_allowed_with_the_mixture_alone(make_config, decoder):
    config = make_config("sampler=draft_mh", "draft=tiny", "sampler.proposal=mixture", f"decoder={decoder}")
    assert not config.decoder.is_null
    for given in (["sampler.proposal=draft"], ["sampler.proposal=mixture", "blend=draft"]):
        with pytest.raises(UserError) as error:
            make_config("sampler=draft_mh", "draft=tiny", f"decoder={decoder}", *given)
        user = "blend=draft, because" if "blend=draft" in given else "sampler.proposal=draft, whose draws are the draft's"
        assert str(error.value).startswith(f"decoder: given '{decoder}'; allowed: plain with {user}")


def test_the_estimate_is_that_of_plain_decoding(make_config):
    """As for every decoder: blocks and tokens of the decoder that are not kept are not part of it, and a line says so."""
    given = "sampler=draft_mh", "draft=tiny", "sampler.proposal=mixture"
    plain, decoded = make_config(*given), make_config(*given, "decoder=speculative_match")
    assert cost.estimate(decoded) == cost.estimate(plain)
    assert cost.draft_blocks(plain) > 0
    line = "decoder=speculative_match: counted as decoder=plain; rejected drafted tokens add to this"
    assert line in cost.assumptions(decoded)
    assert line not in cost.assumptions(plain)
