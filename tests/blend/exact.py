"""What the tests of several blends check on the tabular engine."""

from __future__ import annotations

from collections.abc import Iterable

from dflash_mcmc.engine.oracle.tabular import TabularDraft, TabularEngine
from dflash_mcmc.engine.speculative.speculation import Speculation
from dflash_mcmc.testing import balance_error, invariance_error, power_target, total_variation, transition_matrix
from tests.laws import power_law, product_law
from tests.sampler import test_best_of_n as of_best_of_n
from tests.sampler import test_multiple_try as of_multiple_try
from tests.sampler import test_power_mh as of_power_mh
from tests.sampler import test_power_smc as of_power_smc
from tests.sampler import test_replica_exchange as of_replica_exchange
from tests.sampler import test_temperature as of_temperature
from tests.sampler.test_draft_mh_decoder import RULES

EXACT = 1e-12
WRONG = 1e-3


def check_chain(engine: TabularEngine, blend, sampler, horizon: int = 2) -> None:
    """The target of a Metropolis-Hastings sampler is the power of the blend's law by hand, and its steps leave it as it is."""
    target = power_target(engine, horizon, sampler.alpha, sampler.law(), sampler.source())
    power = power_law(engine.model, horizon, sampler.alpha, product_law(engine.model, horizon, blend), blend)
    assert total_variation(dict(zip(target.states, target.probability, strict=True)), power) <= EXACT
    matrix = transition_matrix(engine, sampler, horizon, target)
    assert max(invariance_error(matrix, target), balance_error(matrix, target)) <= EXACT


def speculation(decoder: str) -> Speculation:
    """A decoder of `RULES` with a tabular draft."""
    rule, options = RULES[decoder]
    return Speculation(rule, TabularDraft(3, 2, seed=7), noisy=True, **options)


def check_draws(engine: TabularEngine, blend, wrongs: Iterable) -> None:
    """Temperature sampling and best of N have the blend's law by hand, and the law of none of the wrong blends."""
    for options in ({"temperature": 1.3, "top_k": 2}, {"temperature": 0.7}):
        law = of_temperature.law_under(of_temperature.make(**options), engine)
        assert total_variation(law, product_law(engine.model, 3, blend, **options)) <= EXACT
    for wrong in wrongs:
        assert total_variation(law, product_law(engine.model, 3, wrong, **options)) > WRONG
    law = of_best_of_n.drawn(of_best_of_n.make(select="power"), engine)
    assert total_variation(law, of_best_of_n.expected("power", model=engine.model, blend=blend)) <= EXACT


def check_decoder(engine: TabularEngine, blend) -> None:
    """Temperature sampling under an engine's decoder has the blend's law by hand."""
    law = of_temperature.law_under(of_temperature.make(temperature=0.8), engine)
    assert total_variation(law, product_law(engine.model, 3, blend, temperature=0.8)) <= EXACT


def check_power(engine: TabularEngine, small: TabularEngine, blend) -> None:
    """The samplers of p^alpha under a blend of logits. `small` has two tokens; a blend with a mask has no unblended draws."""
    target = of_power_mh.target_by_hand(engine, 3, {}, blend, blend)
    for early in ("off", "exact"):
        of_power_mh.check_step(engine, of_power_mh.make(proposal="matched", early_reject=early), target, 3)
    if not engine.blend.alpha_mask:
        target = of_power_mh.target_by_hand(engine, 3, {}, blend, None)
        of_power_mh.check_step(engine, of_power_mh.make(proposal="base"), target, 3)
    p, found = product_law(engine.model, 2, blend), of_power_smc.weights_of(of_power_smc.make(), engine)
    assert max(abs(found[x] - p[x] ** 3.0) for x in p) < 1e-11
    assert max(of_multiple_try.errors(of_multiple_try.make(), small)) < EXACT
    a_round = of_replica_exchange.round_of(small, 2)
    assert of_replica_exchange.joint_error(small, of_replica_exchange.make(), 2, a_round) < EXACT
