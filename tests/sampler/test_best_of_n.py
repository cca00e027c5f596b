"""`sampler=best_of_n` on the tabular engine: its exact law, compared with a sum over all N-tuples."""

import itertools
import math

import numpy as np
import pytest

from dflash_mcmc.blend.layer import LayerBlend
from dflash_mcmc.chains import build
from dflash_mcmc.config.identity import identity_hash
from dflash_mcmc.engine.oracle.tabular import TabularEngine, TabularModel
from dflash_mcmc.rng import Key
from dflash_mcmc.sampler.best_of_n import BestOfN
from dflash_mcmc.testing import PROMPT, law_of, total_variation
from tests.laws import product_law

HORIZON, VOCAB, EXACT = 2, 3, 1e-12
SELECTS = ("log_p", "mean_log_p", "power")
MODEL = TabularModel(VOCAB, (0,), seed=4, scale=0.5)
SMALL = TabularModel(2, (0,), seed=4, scale=0.5)


def make(**changes) -> BestOfN:
    values = dict(num_candidates=3, select="power", alpha=4.0, temperature=0.8, top_k=0, top_p=1.0)
    return BestOfN(**{**values, **changes})


def drawn(sampler: BestOfN, engine: TabularEngine) -> dict:
    return law_of(lambda key: engine.run(sampler.chain(PROMPT, HORIZON, key)).trajectory)


def by_hand(q: dict, p: dict, select: str, num_candidates: int, alpha: float = 4.0, counts=lambda y: True) -> dict:
    """The law as a sum over all tuples of candidates: the probability of a tuple times that of each choice from it.

    A choice is among the candidates that count; a tuple without one adds nothing.
    """
    law = dict.fromkeys(q, 0.0)
    for candidates in itertools.product(q, repeat=num_candidates):
        kept = [y for y in candidates if counts(y)]
        if select == "power":
            weights = [p[y] ** alpha / q[y] for y in kept]
        else:
            keys = [math.log(p[y]) / (len(y) if select == "mean_log_p" else 1) for y in kept]
            weights = [float(place == keys.index(max(keys))) for place in range(len(kept))]
        for y, weight in zip(kept, weights, strict=True):
            law[y] += math.prod(q[x] for x in candidates) * weight / sum(weights)
    return law


def expected(select: str, num_candidates: int = 3, model=MODEL, blend=None, temperature=0.8, **options) -> dict:
    q = product_law(model, HORIZON, blend, temperature=temperature, **options)
    return by_hand(q, product_law(model, HORIZON, blend), select, num_candidates)


STOPS = {"one_stop": (0,), "two_stops": (0, 2), "no_stop": ()}
MIXED = {"none": None, "layer": (0.4, "none"), "layer_final": (0.4, "final")}


@pytest.mark.parametrize(("select", "stop_ids", "blend"), [
    pytest.param(select, STOPS[stops], MIXED[blend], id=f"{select}-{stops}-{blend}")
    for at, select in enumerate(SELECTS) for place, stops in enumerate(STOPS) for number, blend in enumerate(MIXED)
    if (at + place + number) % 3 == 0])
def test_exact_law(select, stop_ids, blend):
    model = TabularModel(VOCAB, stop_ids, seed=4, scale=0.5)
    mixed = None if blend is None else LayerBlend(beta=blend[0], layer=0, norm=blend[1])
    law = drawn(make(select=select), TabularEngine(model, mixed))
    assert total_variation(law, expected(select, model=model, blend=blend)) <= EXACT


@pytest.mark.parametrize("select", SELECTS)
@pytest.mark.parametrize("options", [{"temperature": 0.5}, {"temperature": 1.0}, {"top_k": 2}, {"top_p": 0.7}],
                         ids=["cold", "of_p", "top_k", "top_p"])
def test_exact_law_with_other_sampling_parameters(select, options):
    assert total_variation(drawn(make(select=select, **options), TabularEngine(MODEL)), expected(select, **options)) <= EXACT


ANSWERS = {"last_token": lambda y: y[-1], "some_have_none": lambda y: y[-1] if len(y) > 1 else None, "none": lambda y: None}


def voted_by_hand(q: dict, answer_of, most: int, confidence: float) -> dict:
    """The law and the expected number of draws of a vote, by all sequences of draws. Beta's tail is a binomial sum."""
    law, num_draws = dict.fromkeys(q, 0.0), 0.0

    def go_on(drawn: tuple, probability: float) -> None:
        nonlocal num_draws
        answers = [answer_of(y) for y in drawn]
        voted = [answer for answer in answers if answer is not None]
        counts = sorted((voted.count(answer) for answer in set(voted)), reverse=True)
        first, second = (*counts, 0, 0)[:2]
        above = sum(math.comb(first + second + 1, j) for j in range(first + 1)) / 2 ** (first + second + 1)
        if len(drawn) == most or above >= confidence:
            leaders = [answer for answer in voted if voted.count(answer) == first]
            law[drawn[answers.index(leaders[0]) if leaders else 0]] += probability
            num_draws += probability * len(drawn)
        else:
            for y in q:
                go_on((*drawn, y), probability * q[y])

    go_on((), 1.0)
    return law, num_draws


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize(("model", "most", "confidence"), [
    (MODEL, 1, 0.95), (MODEL, 3, 0.95), (MODEL, 4, 0.8), (SMALL, 5, 0.85)], ids=["one", "three", "four", "five"])
def test_exact_law_and_cost_of_a_vote_that_stops(answer, model, most, confidence):
    """Of the kept draw, and of the number of draws. Every order of answers is enumerated on both sides."""
    engine, numbers = TabularEngine(model), {}
    sampler = make(select="vote", num_candidates=most, confidence=confidence, temperature=1.0)

    def chain(key):
        result = engine.run(sampler.comparing(PROMPT, HORIZON, key, lambda tokens: ANSWERS[answer](tuple(tokens.tolist()))))
        numbers.setdefault(len(result.trace), 0)
        assert [entry["decision"] for entry in result.trace].count("keep") == 1
        return result.trajectory._replace(tokens=np.append(result.trajectory.tokens, 100 + len(result.trace)))

    found = law_of(chain)
    expected_law, expected_draws = voted_by_hand(product_law(model, HORIZON), ANSWERS[answer], most, confidence)
    law = dict.fromkeys(expected_law, 0.0)
    for tokens, probability in found.items():
        law[tokens[:-1]] += probability
    assert total_variation(law, expected_law) <= EXACT
    assert sum((tokens[-1] - 100) * p for tokens, p in found.items()) == pytest.approx(expected_draws)
    assert (len(numbers) > 1) is (confidence < 0.9 and answer != "none")


def test_a_vote_compares_whole_texts_without_a_grader_and_draws_one_after_another():
    sampler = make(select="vote", num_candidates=3, confidence=0.8)
    expected_law, _ = voted_by_hand(product_law(MODEL, HORIZON, temperature=0.8), lambda y: y, 3, 0.8)
    assert total_variation(drawn(sampler, TabularEngine(MODEL)), expected_law) <= EXACT
    assert (sampler.width(), make().width()) == (1, 3)


def test_a_run_votes_over_the_answers_that_its_grader_finds(make_config):
    """Three draws of one answer in different words end the vote; no other is drawn."""
    config = make_config("sampler=best_of_n", "sampler.select=vote", "sampler.num_candidates=8", "sampler.confidence=0.8")
    texts = [r"\boxed{36}", "It is hard.", r"so \boxed{ 37 }", r"\boxed{37}", r"or \boxed{37}", r"\boxed{37}"]

    class Model:
        tokenizer = type("Tokenizer", (), {"decode": staticmethod(lambda ids, skip_special_tokens: "")})

        def decode(self, tokens):
            return texts[tokens[0]]

    steps, path = build.begun(config, config.sampler, np.array([0]), Key(0), Model()), None
    for number in range(len(texts)):
        try:
            asked = steps.send(path)
        except StopIteration as end:
            result = end.value
            break
        path = asked.trajectory.extended(np.array([number]), np.zeros(1), np.zeros(1), np.zeros((1, 2)), True)
    assert [entry["decision"] for entry in result.trace] == ["leave"] * 2 + ["keep"] + ["leave"] * 2
    assert result.trajectory.tokens.tolist() == [2]


def test_temperature_is_one_over_alpha_unless_given():
    law = drawn(make(temperature=None), TabularEngine(MODEL))
    assert total_variation(law, expected("power", temperature=0.25)) <= EXACT


@pytest.mark.parametrize("select", SELECTS)
def test_the_trace_has_every_candidate_and_marks_the_kept_one(select):
    result = TabularEngine(MODEL).run(make(select=select, num_candidates=5).chain(PROMPT, 4, Key(3)))
    kept = [entry for entry in result.trace if entry["decision"] == "keep"]
    assert len(result.trace) == 5
    assert len(kept) == 1
    assert kept[0]["log_p"] == pytest.approx(result.trajectory.log_p.sum())
    assert kept[0]["length"] == result.trajectory.length
    if select == "log_p":
        assert kept[0]["log_p"] == max(entry["log_p"] for entry in result.trace)


def test_the_first_candidates_do_not_depend_on_their_number():
    """Runs with different N are therefore paired."""
    few, many = (TabularEngine(MODEL).run(make(num_candidates=n).chain(PROMPT, 4, Key(3))).trace for n in (2, 6))
    assert [entry["log_p"] for entry in few] == [entry["log_p"] for entry in many[:2]]


def test_options_without_effect_are_not_part_of_the_identity(make_config):
    def identity(*overrides: str) -> str:
        return identity_hash(make_config("sampler=best_of_n", *(f"sampler.{override}" for override in overrides)))

    assert identity("select=log_p", "temperature=0.5", "alpha=2") == identity("select=log_p", "temperature=0.5", "alpha=3")
    assert identity("select=power", "temperature=0.5", "alpha=2") != identity("select=power", "temperature=0.5", "alpha=3")
    assert identity("alpha=2") == identity("alpha=2", "temperature=0.5") != identity("alpha=2", "temperature=1")
    assert identity("num_candidates=1") == identity("num_candidates=1", "select=log_p") != identity("select=log_p")


@pytest.mark.parametrize("select", ["log_p", "mean_log_p"])
def test_the_first_of_equal_candidates_is_kept(select):
    path = TabularEngine(MODEL).run(make(num_candidates=1).chain(PROMPT, HORIZON, Key(1))).trajectory
    worse = path._replace(log_p=path.log_p - 1.0)
    sampler = make(select=select)
    assert sampler.choose([path, path, path], Key(0)) == 0
    assert sampler.choose([worse, path, worse, path], Key(0)) == 1
