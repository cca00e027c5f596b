"""Payments under the stated law have a mean of one for every bet, so that evidence is a martingale: by enumeration."""

import numpy as np
import pytest
import torch

from dflash_mcmc.engine.oracle import exact_law
from dflash_mcmc.ops import SamplingParams
from dflash_mcmc.verify import audit as evidence
from dflash_mcmc.verify.audit import Bet, Evidence, Repeats, Steps, bets_of, payments, shift_of

VOCABULARY = 9
LAWS = (SamplingParams(), SamplingParams(temperature=0.6), SamplingParams(top_p=0.7), SamplingParams(top_k=4),
        SamplingParams(min_p=0.2), SamplingParams(temperature=1.4, top_p=0.9, top_k=6),
        SamplingParams(temperature=0.6, top_p=0.8), SamplingParams(repetition_penalty=1.3),
        SamplingParams(frequency_penalty=0.5, presence_penalty=0.3),
        SamplingParams(frequency_penalty=0.5, presence_penalty=0.3, counts_prompt=True))


def logits_of(places: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(places, VOCABULARY)) * 2.0).float()


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("place", [0, 3])
def test_the_mean_payment_of_every_bet_is_one(law, place):
    """At a token of the answer, over all tokens that could stand there, with the law of the reference implementation."""
    logits, prompt, before = logits_of(place + 1, 3), np.array([2, 5]), np.array([1, 5, 1])[:place]
    p = np.exp(exact_law.process(logits[-1].double().numpy(), law, prompt, before))
    means = np.zeros(len(bets_of(law)))
    for token in range(VOCABULARY):
        tokens = np.append(before, token)
        pieces = [slice(0, 3), slice(3, len(tokens))] if place else [slice(0, 1)]
        paid = payments(lambda piece: logits[piece], prompt, tokens, law, pieces)
        means += p[token] * np.exp(paid.log[-1])
        assert (paid.outside[-1] > 0.0) == (p[token] == 0.0)
        of_first = [bet.group == "first token" for bet in bets_of(law)]
        assert not paid.log[-1][of_first].any() if place else paid.log[-1][of_first].all() or law.truncates
    assert means == pytest.approx(np.ones(len(means)), abs=2e-6)


@pytest.mark.parametrize("candidates", [1024, 24])
def test_a_truncation_pays_one_on_average_where_tokens_tie_at_the_cut(candidates, monkeypatch):
    """By enumeration of 40 tokens with few different values, with all of them as candidates and with some."""
    monkeypatch.setattr(evidence, "_CANDIDATES", candidates)
    law, paid = SamplingParams(), []
    logits = torch.from_numpy(np.random.default_rng(3).normal(size=(1, 40)).round()).float()
    for token in range(40):
        paid.append(payments(lambda piece: logits, np.array([0]), np.array([token]), law, [slice(0, 1)]).log[0])
    means = torch.softmax(logits[0].double(), dim=-1).numpy() @ np.exp(paid)
    assert means == pytest.approx(np.ones(len(means)), abs=2e-6)
    cuts = np.array(paid)[:, [bet.group == "truncation" for bet in bets_of(law)]]
    assert (np.abs(cuts).max(axis=0) > 0.1).any(), "some of them bet"


@pytest.mark.parametrize("temperature", [0.5, 1.8])
def test_a_truncation_before_the_temperature_is_seen(temperature):
    """llama.cpp's order keeps more tokens below temperature 1, all of them explained, and fewer above, where a bet wins."""
    rng, law = np.random.default_rng(1), SamplingParams(temperature=temperature, top_p=0.8)
    logits, ledger = logits_of(400, 1), Evidence(bets_of(law), 1e-3)
    p = torch.softmax(logits.double(), dim=-1)
    highest, order = p.sort(dim=-1, descending=True)
    kept = torch.zeros_like(p).scatter(1, order, (highest.cumsum(dim=-1) - highest < 0.8).double())
    q = (kept * p ** (1.0 / temperature)).numpy()
    tokens = np.array([rng.choice(VOCABULARY, p=row / row.sum()) for row in q])
    paid = payments(lambda piece: logits[piece], np.array([0]), tokens, law, [slice(0, 400)])
    ledger.add(paid.log)
    each = ledger.each()
    best = max(range(len(each)), key=lambda place: each[place].evidence)
    assert paid.kept_otherwise.all()
    if temperature < 1.0:
        assert (paid.outside > 0.1).sum() > 10
        assert each[-1].evidence == pytest.approx(0.0, abs=0.5)
    else:
        assert not paid.outside.any()
        assert ledger.bets[best].says == ("the truncation comes before the temperature, as in llama.cpp "
                                          "(sampler.order=temperature_last states it)")
        assert ledger.together().red_at is not None
    stated = law._replace(temperature_last=True)
    again, paid = Evidence(bets_of(stated), 1e-3), payments(lambda piece: logits[piece], np.array([0]), tokens, stated,
                                                            [slice(0, 400)])
    again.add(paid.log)
    assert not paid.outside.any()
    assert again.together().red_at is None
    assert "as in transformers and vLLM" in again.bets[-1].says
    wrong = payments(lambda piece: logits[piece], np.array([0]), np.argmin(q, axis=1), law, [slice(0, 400)])
    assert not wrong.kept_otherwise.all()


def test_pieces_of_texts_add_up():
    """Evidence, its largest value and the token of the first alarm do not depend on how the tokens are cut into texts."""
    paid = np.random.default_rng(2).normal(0.05, 0.4, size=(300, 4))
    bets = [Bet("a", "1"), Bet("a", "2"), Bet("b", "3"), Bet("c", "4")]
    whole, cut = Evidence(bets, 1e-2), Evidence(bets, 1e-2)
    whole.add(paid)
    for start in range(0, 300, 7):
        cut.add(paid[start : start + 7])
    assert cut.together() == pytest.approx(whole.together())
    assert cut.each() == [pytest.approx(each) for each in whole.each()]
    stakes = np.array([1 / 6, 1 / 6, 1 / 3, 1 / 3])
    path = np.log10(np.exp(paid.cumsum(axis=0)) @ stakes)
    assert whole.together().evidence == pytest.approx(path[-1])
    assert whole.together().red_at == (np.flatnonzero(path >= 2.0)[0] + 1)


@pytest.mark.parametrize("shift", [0.0, 0.05])
def test_the_interval_of_a_shift_covers_it_at_every_token(shift):
    """200 runs at a level of 0.1, each looked at after 50, 200 and 1,000 tokens."""
    rng, missed = np.random.default_rng(5), 0
    for _ in range(200):
        expected = rng.uniform(0.2, 0.7, 1_000)
        drawn = (rng.random(1_000) < expected + shift).astype(float)
        found = [shift_of(drawn[:n], expected[:n], 0.1) for n in (50, 200, 1_000)]
        missed += not all(one.low <= shift <= one.high for one in found)
        assert found[-1].high - found[-1].low < 0.2
    assert missed <= 20


P = np.array([0.4, 0.3, 0.2, 0.1, 0.0])
"""A stated law, whose last token it cannot draw."""


def answer_of(rng: np.random.Generator, law: np.ndarray) -> np.ndarray:
    return rng.choice(len(law), 6, p=law)


def paid_by(learned: Repeats, prompt: np.ndarray, answer: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return learned.payments(prompt, answer, np.log(P)[answer])


def test_what_is_learned_from_earlier_answers_pays_one_on_average():
    """At each place of an answer, for each token that could stand there, after answers of another law."""
    rng, prompt, means = np.random.default_rng(3), np.array([2, 5]), np.zeros((4, 5, 4))
    told = [answer_of(rng, np.array([0.7, 0.1, 0.1, 0.1, 0.0]))[: 6 - number % 5] for number in range(40)]
    start = told[0]
    for place in range(4):
        for token in range(len(P)):
            learned = Repeats()
            for answer in told:
                paid_by(learned, prompt, answer)
            paid = paid_by(learned, prompt, np.append(start[:place], token))
            means[place, token] = P[token] * np.exp(paid[-1])
            assert token == 4 or paid[-1].any(), "40 answers are known"
    assert means.sum(axis=1) == pytest.approx(np.ones((4, 4)), abs=1e-12)


def test_what_is_learned_is_of_one_prompt_and_of_earlier_answers_with_the_same_start():
    learned, rng = Repeats(), np.random.default_rng(4)
    one, other = np.array([2, 5]), np.array([2, 6])
    assert not paid_by(learned, one, np.array([0, 1, 2])).any(), "nothing is known"
    assert not paid_by(learned, other, np.array([0, 1, 2])).any()
    again = paid_by(learned, one, np.array([0, 2, 2]))
    priors = np.array([16.0, 256.0, 4096.0])
    assert np.exp(again[0]) == pytest.approx([*(1.0 / 0.4 + priors) / (1.0 + priors), 0.98 + 0.02 / 0.4])
    assert (again[1] < 0.0).all(), "another token followed"
    assert not again[2].any(), "no earlier answer starts so"
    long = [paid_by(learned, one, answer_of(rng, P)) for _ in range(50)]
    assert not np.array(long)[:, 4:, :3].any()


def test_copies_of_earlier_answers_are_red_and_independent_answers_are_green():
    """Of 20 answers every second is a copy of the one before. 100 right audits at a level of 0.1."""
    def audited(seed: int, copied: bool, level: float) -> int | None:
        rng, learned, ledger, answers = np.random.default_rng(seed), Repeats(), Evidence(Repeats.bets, level), []
        for number in range(20):
            answers.append(answers[-1] if copied and number % 2 else answer_of(rng, P))
            ledger.add(paid_by(learned, np.array([7]), answers[-1]))
        return ledger.together().red_at

    assert audited(1, True, 1e-3) is not None
    assert sum(audited(seed, False, 0.1) is not None for seed in range(100)) <= 10


def test_bets_on_a_place_need_stated_steps_and_are_of_three_places():
    assert not Steps().payments(None, np.ones(5), np.full(5, 0.5)).any()
    paid = Steps().payments([1, 2, 3], np.ones(6), np.full(6, 0.5)).reshape(6, 3, 6)
    assert paid.any(axis=2).tolist() == [[False, False, False], [True, False, False], [False, True, False],
                                         [False, False, False], [False, True, False], [False, False, True]]


def exclude_top_choices(logits: torch.Tensor, text: np.ndarray) -> torch.Tensor:
    """XTC: with a probability, every token above a threshold but the least likely of them is excluded. No fields state it."""
    threshold, probability = 0.15, 0.5
    p = logits.double().softmax(dim=-1)
    above = p >= threshold
    least = torch.where(above, p, 2.0).argmin() if above.any() else 0
    out = above & (torch.arange(len(p)) != least)
    cut = torch.where(out, 0.0, p)
    return ((1.0 - probability) * p + probability * cut / cut.sum()).log()


def test_any_law_is_a_function_of_logits_and_text():
    """For each bet the mean payment under the function's law is 1."""
    logits, text = logits_of(6, 12), np.array([1, 2])
    law = torch.stack([exclude_top_choices(row, text).exp() for row in logits]).numpy()
    before, means, seen = np.array([3, 0, 3, 7, 1]), np.zeros(len(bets_of(SamplingParams(function=exclude_top_choices)))), []

    def function(row: torch.Tensor, read: np.ndarray) -> torch.Tensor:
        seen.append(read.tolist())
        return exclude_top_choices(row, read)

    for token in range(VOCABULARY):
        paid = payments(lambda piece: logits[piece], text, np.append(before, token), SamplingParams(function=function),
                        [slice(0, 4), slice(4, 6)])
        means += law[-1, token] * np.exp(paid.log[-1])
        assert paid.log_p[-1] == pytest.approx(np.log(law[-1, token]), abs=1e-5)
    assert means == pytest.approx(np.ones_like(means), abs=1e-5)
    assert seen[:6] == [[1, 2, 3, 0, 3, 7, 1][: 2 + place] for place in range(6)]
