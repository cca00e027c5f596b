"""`sampler.schedule=adaptive` on the tabular engine: its law, the invariance of its last stage, and schedules that lack it."""

import pytest

from dflash_mcmc.config.identity import identity_hash
from dflash_mcmc.engine.oracle.tabular import TabularEngine, TabularModel
from dflash_mcmc.rng import Key
from dflash_mcmc.sampler.power_mh import PowerMH
from dflash_mcmc.testing import PROMPT, law_of, power_target, score, total_variation
from tests.sampler.stages import extended, stepped

EXACT = 1e-12
HORIZON = 4
STOP = 0
ADAPTIVE = ("sampler=power_mh", "sampler.schedule=adaptive")


def make(**changes) -> PowerMH:
    return PowerMH(**{"num_blocks": 4, "num_steps": 1, "schedule": "adaptive", "early_reject": "off", **changes})


def engine_of(vocab_size=2) -> TabularEngine:
    return TabularEngine(TabularModel(vocab_size, (STOP,), seed=0, scale=0.5))


def enumerated(engine, sampler, horizon=HORIZON) -> dict:
    """The law of the answer of a chain, by enumeration of all its random choices."""
    return law_of(lambda key: engine.run(sampler.chain(PROMPT, horizon, key)).trajectory)


def by_hand(engine, sampler, horizons=(1, 2, 4)) -> dict:
    """The law of `schedule=adaptive` from its definition: answers that have ended wait for the last stage."""
    law, waiting = {(): 1.0}, dict[tuple, float]()
    for horizon in horizons:
        law = extended(engine, sampler, law, horizon)
        for tokens in [tokens for tokens in law if tokens[-1] == STOP]:
            waiting[tokens] = waiting.get(tokens, 0.0) + law.pop(tokens)
        if horizon < HORIZON:
            law = stepped(engine, sampler, law, horizon)
    for tokens, probability in law.items():
        waiting[tokens] = waiting.get(tokens, 0.0) + probability
    return stepped(engine, sampler, waiting, HORIZON)


@pytest.mark.parametrize("options", [
    {}, {"early_reject": "exact"}, {"proposal_temperature": 0.7}, {"num_steps": 0}], ids=str)
def test_the_law_of_a_chain_is_the_one_that_is_stated(options):
    engine, sampler = engine_of(), make(**options)
    law = enumerated(engine, sampler)
    assert abs(sum(law.values()) - 1.0) <= EXACT
    assert total_variation(law, by_hand(engine, sampler)) <= EXACT


def law_of_last_stage(engine, sampler, start: dict) -> dict:
    """The law after the sampler's last stage, for a state drawn from `start`."""
    found = dict[tuple, float]()
    for tokens, probability in start.items():
        path = score(engine, tokens, sampler.law(), sampler.source())

        def stage(key, path=path):
            steps = engine.run(sampler.stage(path, HORIZON, key))
            return steps[-1].trajectory if steps else path

        for state, share in law_of(stage).items():
            found[state] = found.get(state, 0.0) + probability * share
    return found


@pytest.mark.parametrize("num_steps", [1, 2])
def test_the_last_stage_leaves_the_power_target_invariant(num_steps):
    engine = engine_of()
    target = power_target(engine, HORIZON, 4.0, make().law(), "base")
    exact = dict(zip(target.states, target.probability.tolist(), strict=True))
    assert total_variation(law_of_last_stage(engine, make(num_steps=num_steps), exact), exact) <= EXACT


def test_steps_after_the_answer_has_ended_are_those_of_one_stage():
    engine = engine_of(3)
    for seed in range(20):
        result = engine.run(make(num_blocks=16, num_steps=3).chain(PROMPT, 64, Key(seed)))
        blocks = [entry["block"] for entry in result.trace]
        assert blocks == sorted(blocks)
        assert set(blocks) <= {1, 2, 4, 8, 16}
        assert blocks.count(16) == 3
        ended = [entry for entry in result.trace if entry["block"] < 16 and entry["length"] < entry["block"] * 4]
        assert len(ended) <= 2  # steps at which the answer ends leave the rest of their stage


def test_the_option_is_part_of_the_identity_and_the_default_is_not(make_config):
    plain, published = (identity_hash(make_config("sampler=power_mh", *more)) for more in
                        ((), ("sampler.schedule=published",)))
    assert plain == published != identity_hash(make_config(*ADAPTIVE))
