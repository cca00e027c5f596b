"""The law of samplers through a server: 10,000 chains against the law by enumeration, on a toy and on our own server."""

import math
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import dflash_mcmc as dm
from dflash_mcmc.engine.api import endpoint
from dflash_mcmc.engine.api.session import ApiEngine
from dflash_mcmc.engine.delegated.elsewhere import UnloadedTarget
from dflash_mcmc.engine.oracle.tabular import TabularEngine, TabularModel
from dflash_mcmc.rng import Key
from dflash_mcmc.testing import law_of
from tests import laws
from tests.cases import quick
from tests.engine.api.standing import Standing

TOY, HORIZON, CHAINS = TabularModel(3, (2,), seed=9, scale=0.8), 3, 10_000
TARGET = UnloadedTarget(Path("nowhere"), "float32", "cpu", None, None, 64, 3, (2,), ())


def engine_on(monkeypatch, server: Standing, **fields) -> ApiEngine:
    """An engine whose requests go to a stand-in in this process."""
    monkeypatch.setattr(endpoint, "fetch_json", server.fetch)
    engine = dm.Api(url="http://127.0.0.1:1/v1", patience_seconds=0.1, **fields)
    return ApiEngine(TARGET, endpoint.Endpoint(engine), engine.logprobs, 2, 64)


def p_value(found: dict[tuple[int, ...], int], law: dict[tuple[int, ...], float]) -> float:
    """Of the chi-square test; sequences that are expected less than five times are one class. 0 for an impossible one."""
    total = sum(found.values())
    assert math.isclose(sum(law.values()), 1.0, abs_tol=1e-9)
    if not found.keys() <= law.keys():
        return 0.0
    often = [tokens for tokens in law if law[tokens] * total >= 5]
    seen, expected = [found.get(tokens, 0) for tokens in often], [law[tokens] * total for tokens in often]
    if len(often) < len(law):
        seen, expected = [*seen, total - sum(seen)], [*expected, total - sum(expected)]
    return float(stats.chisquare(seen, expected, sum_check=False).pvalue)


def drawn(engine: ApiEngine, sampler, prompt=laws.PROMPT, horizon: int = HORIZON, chains: int = CHAINS) -> dict:
    """How often each sequence is the result of a chain."""
    found: dict[tuple[int, ...], int] = {}
    keys = ((number, sampler.chain(np.array(prompt), horizon, Key(11).fold_in(number))) for number in range(chains))
    with closing(engine):
        for done in engine.run(keys):
            assert done.result is not None, done.failure
            tokens = tuple(done.result.trajectory.tokens.tolist())
            found[tokens] = found.get(tokens, 0) + 1
    return found


def on_toy(alpha: float, **law) -> dict[tuple[int, ...], float]:
    return moved(laws.product_law(TOY, HORIZON), laws.product_law(TOY, HORIZON, **law), alpha, 2)


def moved(p: dict, q: dict, alpha: float, steps: int) -> dict[tuple[int, ...], float]:
    """The law after Metropolis-Hastings steps on p^alpha that draw the tokens after a uniform cut again, by definition."""
    state, weight = dict(q), {x: p[x] ** alpha / q[x] for x in q}
    for _ in range(steps):
        after = dict.fromkeys(q, 0.0)
        for x, probability in state.items():
            for cut in range(len(x)):
                among = {y: q[y] for y in q if y[:cut] == x[:cut] and len(y) > cut}
                for y, share in among.items():
                    move = probability / len(x) * share / sum(among.values())
                    taken = min(1.0, weight[y] / weight[x] * len(x) / len(y))
                    after[y] += move * taken
                    after[x] += move * (1.0 - taken)
        state = after
    return state


def enumerated(sampler) -> dict[tuple[int, ...], float]:
    """The exact law of a sampler on the toy."""
    engine = TabularEngine(TOY)
    return law_of(lambda key: engine.run(sampler.chain(np.array(laws.PROMPT), HORIZON, key)).trajectory)


def mh(**fields) -> dm.PowerMH:
    return dm.PowerMH(alpha=3.0, num_blocks=1, num_steps=2, early_reject="off", **fields)


TRIES = dict(alpha=2.0, proposal_temperature=1.0, num_tries=2, num_blocks=1, num_steps=1, early_reject="off")
PROCESSED = ({"processed": True}, {"logprobs": "processed"})
CASES = {  # None: enumerated by the test, which takes seconds
    "raw log p": (mh(proposal_temperature=1.0), {}, {}, on_toy(3.0)),
    "processed log p": (mh(proposal_temperature=0.5), *PROCESSED, on_toy(3.0, temperature=0.5)),
    "lists, as of llama.cpp": (mh(proposal_temperature=0.5, top_k=2), {"kind": "llamacpp", "echoes": False},
                               {"logprobs": "top"}, on_toy(3.0, temperature=0.5, top_k=2)),
    "a temperature": (dm.Temperature(temperature=0.7), *PROCESSED, laws.product_law(TOY, HORIZON, temperature=0.7)),
    **{name: (sampler, {}, {}, None) for name, sampler in {
        "isir": dm.MultipleTry(form="isir", **TRIES), "mtm": dm.MultipleTry(form="multiple_try", **TRIES),
        "power_smc": dm.PowerSMC(alpha=2.0, temperature=1.0, num_particles=2, block_size=2),
        "best_of_n": dm.BestOfN(alpha=2.0, temperature=1.0, num_candidates=2, select="power")}.items()}}


@pytest.mark.parametrize("chains", [500, pytest.param(CHAINS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", quick(CASES, "raw log p"))
def test_the_law_of_many_chains(monkeypatch, case, chains):
    sampler, server, fields, law = CASES[case]
    law = law or enumerated(sampler)
    found = drawn(engine_on(monkeypatch, Standing(TOY, **server), **fields), sampler, chains=chains)
    assert sum(found.values()) == chains
    assert p_value(found, law) > 1e-4


@pytest.mark.slow
def test_greedy_is_the_most_likely_token_every_time(monkeypatch):
    assert drawn(engine_on(monkeypatch, Standing(TOY)), dm.Greedy(), chains=3) == {max_of(TOY): 3}


def max_of(model: TabularModel) -> tuple[int, ...]:
    tokens: tuple[int, ...] = ()
    while len(tokens) < HORIZON and tokens[-1:] != (2,):
        tokens = (*tokens, int(np.argmax(laws.logits_of(model, (*laws.PROMPT, *tokens), None))))
    return tokens
