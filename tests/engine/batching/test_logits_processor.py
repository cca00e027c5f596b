"""Compares the batched sampling parameters with those in float64 and with transformers' logits processors."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from dflash_mcmc.engine.batching import logits_processor as laws, rows
from dflash_mcmc.engine.oracle import exact_law
from dflash_mcmc.ops import SamplingParams

VOCAB, PROMPT_LENGTH = 40, 2

random_laws = st.builds(
    SamplingParams, temperature=st.sampled_from([0.25, 0.7, 1.0, 2.5]), top_k=st.sampled_from([0, 1, 3, 20, 40, 99]),
    top_p=st.sampled_from([1.0, 0.95, 0.6, 0.05]), min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -0.6]), presence_penalty=st.sampled_from([0.0, 0.9, -0.2]),
    counts_prompt=st.booleans(), temperature_last=st.booleans(), function=st.none(),
    top_n_sigma=st.sampled_from([0.0, 1.0, 0.3]), typical_p=st.sampled_from([1.0, 0.9, 0.2]),
)


def example(seed: int, counts_prompt: bool = False) -> tuple[torch.Tensor, laws.History, np.ndarray]:
    generator = np.random.Generator(np.random.Philox(seed))
    logits = torch.tensor(generator.normal(size=(3, VOCAB)) * 3, dtype=torch.float32)
    logits[1, 7:] = -torch.inf
    tokens = generator.integers(0, VOCAB, size=(3, 5))
    tokens[:, 4] = tokens[:, 3]  # a token that is counted twice
    seen = torch.zeros(3, VOCAB, dtype=torch.bool)
    for row in range(3):
        seen[row, tokens[row]] = True
    counted = tokens if counts_prompt else tokens[:, PROMPT_LENGTH:]
    counts = torch.stack([laws.counts_of(row, torch.zeros(VOCAB)) for row in counted])
    return logits, laws.History(seen, counts), tokens


@settings(deadline=None, max_examples=80, derandomize=True)
@given(law=random_laws, seed=st.integers(0, 1000))
def test_batched_is_exact(law, seed):
    logits, history, tokens = example(seed, law.counts_prompt)
    batched = torch.log_softmax(laws.process(logits, law, history), dim=-1).numpy()
    for row in range(3):
        expected = exact_law.process(logits[row].numpy(), law, tokens[row, :PROMPT_LENGTH], tokens[row, PROMPT_LENGTH:])
        assert np.array_equal(np.isfinite(batched[row]), np.isfinite(expected))
        kept = np.isfinite(expected)
        np.testing.assert_allclose(batched[row][kept], expected[kept], atol=2e-5)


@pytest.mark.parametrize("seed", range(10))
def test_exact_is_transformers(seed):
    logits, _, tokens = example(seed)
    ids = torch.from_numpy(tokens)
    for law, processors in [
        (SamplingParams(0.7), [TemperatureLogitsWarper(0.7)]),
        (SamplingParams(1.0, top_k=5), [TopKLogitsWarper(5)]),
        (SamplingParams(1.0, top_p=0.8), [TopPLogitsWarper(0.8)]),
        (SamplingParams(1.0, min_p=0.1), [MinPLogitsWarper(0.1)]),
        (SamplingParams(1.0, typical_p=0.6), [TypicalLogitsWarper(0.6)]),
        (SamplingParams(0.5, top_p=0.8, temperature_last=True), [TopPLogitsWarper(0.8), TemperatureLogitsWarper(0.5)]),
        (SamplingParams(1.0, repetition_penalty=1.4), [RepetitionPenaltyLogitsProcessor(1.4)]),
        (SamplingParams(0.6, 8, 0.9, 0.05, 1.2), [RepetitionPenaltyLogitsProcessor(1.2), TemperatureLogitsWarper(0.6),
                                       TopKLogitsWarper(8), TopPLogitsWarper(0.9), MinPLogitsWarper(0.05)]),
    ]:
        theirs = logits.clone()
        for processor in processors:
            theirs = processor(ids, theirs)
        theirs = torch.log_softmax(theirs, dim=-1).numpy()
        for row in range(3):
            ours = exact_law.process(logits[row].numpy(), law, tokens[row], np.empty(0))
            np.testing.assert_allclose(np.exp(ours), np.exp(theirs[row]), atol=1e-6)


@settings(deadline=None, max_examples=50, derandomize=True)
@given(uniform=st.floats(1e-300, 1.0, exclude_max=True), seed=st.integers(0, 100))
def test_draws_agree_and_never_take_an_impossible_token(uniform, seed):
    logits, _, _ = example(seed)
    processed = laws.process(logits, SamplingParams(top_k=4), laws.NO_HISTORY)
    log_q = torch.log_softmax(processed.double(), dim=-1)
    weights, uniforms = laws.weigh(processed), torch.full((3,), uniform, dtype=torch.float64)
    tokens, intervals = laws.draw(weights, uniforms)
    np.testing.assert_allclose(weights.log_probability(tokens), log_q.gather(1, tokens[:, None])[:, 0], atol=1e-6)
    for row in range(3):
        assert torch.isfinite(log_q[row, tokens[row]])
        cumulative = np.cumsum(np.exp(log_q[row].numpy()))
        if np.abs(cumulative - uniform * cumulative[-1]).min() > 1e-6:
            token = exact_law.draw(log_q[row].numpy(), uniform)
            assert int(tokens[row]) == token
            np.testing.assert_allclose(intervals[row], exact_law.intervals(log_q[row].numpy())[token], atol=1e-6)


@pytest.mark.parametrize("uniform", [2.0**-54, 1 - 2.0**-53])
def test_draw_at_the_ends_of_the_interval(uniform):
    logits = torch.full((1, 6), -torch.inf)
    logits[0, 2] = logits[0, 4] = np.log(0.5)
    token, interval = laws.draw(laws.weigh(logits), torch.tensor([uniform], dtype=torch.float64))
    assert int(token) == (2 if uniform < 0.5 else 4)
    assert interval[0].tolist() == ([0.0, 0.5] if uniform < 0.5 else [0.5, 1.0])


@pytest.mark.parametrize("vocabulary", [1, 61, 512, 513, 1700])
def test_intervals_tile_the_unit_interval_over_blocks(vocabulary):
    """The interval of each token begins at the end of the previous one, and a uniform inside an interval draws its token."""
    logits = torch.tensor(np.random.Generator(np.random.Philox(0)).normal(size=(1, vocabulary)) * 2, dtype=torch.float32)
    tokens = torch.arange(vocabulary)
    weights = laws.weigh(logits.expand(vocabulary, -1).contiguous())
    intervals = laws.intervals(weights, tokens)
    assert intervals[0, 0] == 0.0
    assert intervals[-1, 1] == pytest.approx(1.0, abs=1e-15)
    np.testing.assert_allclose(intervals[1:, 0], intervals[:-1, 1], atol=1e-15)
    np.testing.assert_allclose(intervals[:, 1] - intervals[:, 0], torch.softmax(logits[0].double(), dim=-1), atol=1e-7)
    drawn, again = laws.draw(weights, intervals.mean(dim=-1))
    assert torch.equal(drawn, tokens)
    assert torch.equal(again, intervals)


def test_rows_that_are_not_numbers_spoil_no_other_row():
    logits = torch.randn(4, 700, generator=torch.Generator().manual_seed(0))
    spoilt = logits.clone()
    spoilt[1], spoilt[2, 5], spoilt[3] = torch.nan, torch.inf, -torch.inf
    uniforms = torch.full((4,), 0.4, dtype=torch.float64)
    for law in (SamplingParams(), SamplingParams(0.0), SamplingParams(0.7, top_k=5, top_p=0.9, min_p=0.1)):
        good, bad = (laws.draw(laws.weigh(laws.process(x, law, laws.NO_HISTORY)), uniforms)[0] for x in (logits, spoilt))
        assert good[0] == bad[0]
        assert ((bad >= 0) & (bad < 700)).all()


def test_the_entropy_is_that_of_the_definition():
    logits = torch.randn(4, 700, generator=torch.Generator().manual_seed(1)) * 3.0
    logits[2, 5:] = -torch.inf
    found = rows.entropy(laws.weigh(logits))
    expected = [exact_law.entropy(exact_law.log_softmax(row)) for row in logits.numpy()]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert rows.entropy(laws.weigh(torch.zeros(1, 8)))[0] == pytest.approx(math.log(8.0))


def test_the_smallest_id_wins_a_tie():
    logits = torch.tensor([[0.0, 3.0, 3.0], [1.0, 1.0, 1.0]])
    law = laws.process(logits, SamplingParams(temperature=0.0), laws.NO_HISTORY)
    assert law.tolist() == [[-math.inf, 0.0, -math.inf], [0.0, -math.inf, -math.inf]]


def kept(logits: list[float], **options) -> list[int]:
    """The ids that can be drawn. The batched and the exact law agree on them."""
    law = SamplingParams(**options)
    batched = laws.process(torch.tensor([logits]), law, laws.NO_HISTORY)[0]
    exact = exact_law.process(np.array(logits), law, np.empty(0), np.empty(0))
    assert torch.isfinite(batched).tolist() == np.isfinite(exact).tolist()
    return torch.isfinite(batched).nonzero()[:, 0].tolist()


def test_ties_at_a_cut_off_are_kept_in_the_order_of_token_ids():
    assert kept([1.0, 2.0, 1.0, 1.0], top_k=2) == [0, 1]
    assert kept([0.0, 0.0, 0.0, 0.0], top_k=3) == [0, 1, 2]
    assert kept([0.0, 0.0, 0.0, 0.0], top_p=0.5) == [0, 1]
    assert kept([0.0, 1.0, 1.0, 0.0], temperature=0.0) == [1]


def test_kept_sets_of_several_blocks_have_the_log_q_of_the_whole_vocabulary():
    logits = torch.tensor(np.random.default_rng(0).normal(size=(2, 1200)), dtype=torch.float32)
    weights = laws.weigh(laws.process(logits, SamplingParams(top_k=700), laws.NO_HISTORY))
    ids, log_q = laws.kept(weights, 700).view(2, 700, 2).unbind(-1)
    assert int(ids.max()) >= 1024
    torch.testing.assert_close(log_q.exp().sum(-1), torch.ones(2, dtype=torch.float64))
    torch.testing.assert_close(log_q, torch.log_softmax(logits.double().gather(1, ids.long()), -1), atol=1e-5, rtol=0)


def test_cut_offs_apply_in_the_documented_order():
    """Top-k, then top-p of what is left, then min-p of what is left, all after the temperature."""
    logits = [math.log(share) for share in (0.4, 0.3, 0.2, 0.1)]
    assert kept(logits, top_p=0.69) == [0, 1]
    assert kept(logits, top_p=0.71) == [0, 1, 2]
    assert kept(logits, top_k=2, top_p=0.57) == [0]  # 4/7 of what top-k leaves, and 0.4 of all
    assert kept(logits, min_p=0.49) == [0, 1, 2]
    assert kept(logits, min_p=0.5, temperature=0.5) == [0, 1]  # shares 1, 9/16, 1/4
    assert kept(logits, top_p=0.6, temperature=0.5) == [0, 1]  # masses 16/30, 25/30


@pytest.mark.parametrize("temperature", [1.0, 0.25, 0.02])
def test_weights_that_no_sum_can_hold_change_no_draw(temperature):
    """The first tokens have weights that float32 cannot hold normally: 2**-126 and less of the largest one."""
    values = np.random.Generator(np.random.Philox(1)).normal(size=(8, 1500)) * 6
    values[:, :600] -= 22
    logits = torch.tensor(values, dtype=torch.float32) / temperature
    some = laws.weigh(logits)
    every = laws.of_values((logits - some.maximum).exp())._replace(logits=logits, maximum=some.maximum)
    gone = some.values.flatten(1)[:, :1500] == 0
    assert gone.any() == (temperature < 1)
    assert torch.equal(every.values.flatten(1)[:, :1500][~gone], some.values.flatten(1)[:, :1500][~gone])
    assert float(every.values.flatten(1)[:, :1500][gone].amax() if gone.any() else 0) <= 2.0**-125
    for uniform in (2.0**-54, 1e-9, 0.3, 0.9, 1 - 2.0**-53):
        uniforms = torch.full((8,), uniform, dtype=torch.float64)
        (tokens, interval), (expected, whole) = laws.draw(some, uniforms), laws.draw(every, uniforms)
        assert torch.equal(tokens, expected)
        torch.testing.assert_close(interval, whole, rtol=0, atol=1e-37)
        assert torch.equal(some.log_probability(tokens), every.log_probability(tokens))


@pytest.mark.parametrize("num_rows", [1, 2, 5])
def test_weights_do_not_depend_on_how_many_rows_are_computed_at_once(num_rows, monkeypatch):
    """Two rows at once, and the whole batch. The last rows may be fewer."""
    logits = torch.randn(num_rows, 700, generator=torch.Generator().manual_seed(0)) * 9
    whole = laws.weigh(logits)
    monkeypatch.setattr(laws, "_CACHED", 2 * 700)
    assert all(map(torch.equal, laws.weigh(logits), whole))
    assert all(each.is_contiguous() for each in laws.weigh(logits))
