"""What the tests of several blends check on the tabular engine."""

from dflash_mcmc.engine.oracle.tabular import TabularDraft, TabularEngine
from dflash_mcmc.engine.speculative.rules import Speculation
from dflash_mcmc.testing import power_target, total_variation
from tests.laws import power_law, product_law
from tests.sampler import test_temperature as of_temperature
from tests.sampler.stages import step_error
from tests.sampler.test_draft_mh_decoder import RULES

EXACT = 1e-12


def check_chain(engine: TabularEngine, blend, sampler, horizon: int = 2) -> None:
    """The target of a Metropolis-Hastings sampler is the power of the blend's law by hand, and its steps leave it as it is."""
    target = power_target(engine, horizon, sampler.alpha, sampler.law(), sampler.source())
    power = power_law(engine.model, horizon, sampler.alpha, product_law(engine.model, horizon, blend), blend)
    assert total_variation(dict(zip(target.states, target.probability, strict=True)), power) <= EXACT
    assert step_error(engine, sampler, horizon) <= EXACT


def speculation(decoder: str) -> Speculation:
    """A decoder of `RULES` with a tabular draft."""
    rule, options = RULES[decoder]
    return Speculation(rule, TabularDraft(3, 2, seed=7), noisy=True, **options)


def check_decoder(engine: TabularEngine, blend) -> None:
    """Temperature sampling under an engine's decoder has the blend's law by hand."""
    law = of_temperature.law_under(of_temperature.make(temperature=0.8), engine)
    assert total_variation(law, product_law(engine.model, 3, blend, temperature=0.8)) <= EXACT
