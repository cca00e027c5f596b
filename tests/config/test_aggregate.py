"""`aggregate` and `vote`: which ways of combining chains a configuration allows, and what depends on them."""

from __future__ import annotations

import pytest

from dflash_mcmc.config.identity import identity_hash
from dflash_mcmc.config.sweep import objective_of
from dflash_mcmc.registry import components
from dflash_mcmc.statistics.rules import AnswerPower, PowerVote
from dflash_mcmc.statistics.summaries import NAMES
from tests.refusals import command_is_refused

CHAINS = ["condition=temp", "num_chains=4"]
MISTAKES = {
    "unknown": (["aggregate=median"], "aggregate: given 'median'", "'answer_power', 'adaptive', 'log_p'"),
    "one unknown": (["aggregate=[majority,median]"], "aggregate: given ['majority', 'median']", "a list of several"),
    "number": (["aggregate=3"], "aggregate: given 3", "or null"),
    "nested": (["aggregate=[[power]]"], "aggregate: given [['power']]", "or null"),
    "mapping": (["aggregate={power: 2}"], "aggregate: given {'power': 2}", "or null"),
    "empty": (["aggregate=[]"], "aggregate: given []", "or null"),
    "twice": (["aggregate=[power,power]"], "aggregate: given ['power', 'power']", "a list of several"),
    "one chain": (["num_chains=1", "aggregate=power"], "aggregate: given 'power'", "num_chains of 2 and more (given 1)"),
    "programs": (["grader=code", "aggregate=[log_p,softsat]"], "aggregate: given ['log_p', 'softsat']",
                 "null or log_p with grader=code: a vote over programs is not defined"),
    "chains of Metropolis-Hastings": (["condition=ps", "aggregate=power"], "aggregate: given 'power'",
                                      "adaptive, log_p with sampler=power_mh: power needs independent draws"),
    "best of N": (["condition=best_of_n", "aggregate=answer_power"], "aggregate: given 'answer_power'", "sampler=best_of_n"),
    "greedy": (["condition=greedy", "aggregate=power"], "aggregate: given 'power'", "sampler=greedy"),
    "top_k": (["sampler.top_k=5", "aggregate=[softsat,power]"], "aggregate: given 'power'", "sampler.top_k=5"),
    "top_p": (["sampler.top_p=0.9", "aggregate=answer_power"], "aggregate: given 'answer_power'", "without truncation"),
    "min_p": (["sampler.min_p=0.1", "aggregate=power"], "aggregate: given 'power'", "min_p=0.1"),
    "alpha": (["vote.power.alpha=0"], "vote.power.alpha: given 0.0", "a number > 0"),
    "gamma": (["vote.answer_power.gamma=-1"], "vote.answer_power.gamma: given -1.0", "a number > 0"),
    "beta": (["vote.softsat.beta=-1"], "vote.softsat.beta: given -1.0", "a number >= 0"),
    "saturation": (["vote.softsat.saturation=1.5"], "vote.softsat.saturation: given 1.5", "> 0 and <= 1"),
    "confidence": (["vote.adaptive.confidence=1"], "vote.adaptive.confidence: given 1.0", "> 0.5 and < 1"),
    "clip": (["vote.softsat.low=20"], "vote.softsat.low: given 20.0", "a number <= vote.softsat.high (given 17)"),
    "unknown parameter": (["vote.power.alpah=2"], "vote.power.alpah", "did you mean 'alpha'"),
    "parameter left out": (["~vote.power.alpha"], "vote.power.alpha", "allowed: a number > 0"),
}


@pytest.mark.parametrize(("arguments", "start", "allowed"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistake_is_one_line(arguments, start, allowed):
    command_is_refused([*CHAINS, *arguments], allowed, start=start)


def test_a_word_or_a_list_in_its_order(make_config):
    assert make_config(*CHAINS).aggregates() == []
    assert make_config(*CHAINS, "aggregate=softsat").aggregates() == ["softsat"]
    config = make_config(*CHAINS, "aggregate=[power,log_p,majority,answer_power,adaptive,softsat]", "vote.power.alpha=2.5")
    assert config.aggregates() == ["power", "log_p", "majority", "answer_power", "adaptive", "softsat"]
    assert set(config.aggregates()) == set(NAMES)
    assert config.vote.rules["power"] == PowerVote(alpha=2.5)
    assert config.vote.rules["answer_power"] == AnswerPower(alpha=2.0, gamma=2.0)


def test_penalties_and_any_sampler_s_softsat_are_allowed(make_config):
    """A penalty changes probabilities, and log q counts it. Softsat uses ranks, and no law of the chains."""
    assert make_config(*CHAINS, "sampler.presence_penalty=0.5", "aggregate=power").aggregates() == ["power"]
    assert make_config("condition=ps", "num_chains=4", "aggregate=[majority,softsat]").aggregates() == ["majority", "softsat"]
    assert [name for name, found in components("sampler").items() if found.cls.draws_once] == ["temperature"]


def test_nothing_of_it_is_identity(make_config):
    plain = identity_hash(make_config(*CHAINS))
    other = make_config(*CHAINS, "aggregate=[power,softsat]", "vote.power.alpha=2", "vote.softsat.beta=3")
    assert identity_hash(other) == plain


def test_a_search_maximises_the_first_way():
    summary = {"accuracy": 0.1, "correct": 1, "token_forwards": 10}
    for by, accuracy in (("softsat", 0.5), ("majority", 0.9)):
        values = {"num_samples": 2, "accuracy": accuracy, "correct": 2 * accuracy, "token_forwards": 10}
        summary |= {f"{by}/{key}": value for key, value in values.items()}
    assert objective_of("accuracy", summary) == 0.5
    assert objective_of("accuracy_per_cost", summary) == pytest.approx(1e6 * 1.0 / 10)
