"""`sampler=temperature` on the tabular engine: its exact law with every truncation."""

import numpy as np
import pytest

from dflash_mcmc.blend.layer import LayerBlend
from dflash_mcmc.config.identity import identity_hash
from dflash_mcmc.engine.oracle.tabular import TabularEngine, TabularModel
from dflash_mcmc.ops import SamplingParams, counted_from
from dflash_mcmc.sampler.temperature import Temperature
from dflash_mcmc.testing import PROMPT, law_of, total_variation
from tests.laws import conditional, logits_of, product_law

HORIZON, VOCAB, EXACT, WRONG = 3, 4, 1e-12, 1e-3


def make(**changes) -> Temperature:
    return Temperature(**{"alpha": 2.0, **changes})


OPTIONS = {
    "from_alpha": {"temperature": 0.25}, "given": {"temperature": 0.7}, "top_k": {"top_k": 2}, "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.3}, "sigma": {"top_n_sigma": 0.8}, "typical": {"typical_p": 0.5},
    "last": {"top_p": 0.6, "order": "temperature_last"},
    "last, all": {"temperature": 0.8, "top_k": 3, "typical_p": 0.9, "top_p": 0.9, "min_p": 0.1, "order": "temperature_last"},
    "penalty": {"repetition_penalty": 1.7},
    "frequency": {"frequency_penalty": 0.6}, "presence": {"presence_penalty": 0.8},
    "prompt": {"frequency_penalty": 0.6, "presence_penalty": -0.4, "penalty_counts": "prompt+answer"},
    "all": {"temperature": 1.3, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2,
            "frequency_penalty": -0.3, "presence_penalty": 0.5},
}


def law_under(sampler: Temperature, engine: TabularEngine) -> dict:
    return law_of(lambda key: engine.run(sampler.chain(PROMPT, HORIZON, key)).trajectory)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize(("stop_ids", "blend"), [((0,), None), ((1, 3), (0.4, "none")), ((), (0.4, "final"))])
def test_exact_law(options, stop_ids, blend):
    model = TabularModel(VOCAB, stop_ids, seed=4)
    mixed = None if blend is None else LayerBlend(beta=blend[0], layer=0, norm=blend[1])
    expected = product_law(model, HORIZON, blend, **{"temperature": 0.5, **options})
    assert total_variation(law_under(make(**options), TabularEngine(model, mixed)), expected) <= EXACT


@pytest.mark.parametrize("options", [{"top_k": 2}, {"temperature": 1.3, "top_k": 3, "min_p": 0.3}, OPTIONS["all"]])
def test_every_kept_set_is_the_support_of_its_token(options):
    """Of each sequence that can be drawn: ids and probabilities are those by hand, and log q of the token is among them."""
    seen = set()

    def check(key):
        path = engine.run(sampler.chain(PROMPT, HORIZON, key)).trajectory
        said = path.sampling_mask()
        for t, (ids, log_q) in enumerate(zip(said["sampling_mask"], said["sampling_mask_logprobs"], strict=True)):
            prefix = (*PROMPT, *path.tokens[:t].tolist())
            expected = conditional(logits_of(engine.model, prefix, None), prefix, **{"temperature": 0.5, **options})
            assert dict(zip(ids, np.exp(log_q), strict=True)) == pytest.approx(expected, abs=EXACT)
            assert log_q[ids.index(path.tokens[t])] == path.log_q[t]
            seen.add(len(ids))
        return path

    engine, sampler = TabularEngine(TabularModel(VOCAB, (0,), seed=4)), make(**options, sampling_mask=True)
    assert total_variation(law_of(check), law_under(make(**options), engine)) <= EXACT  # recording changes no law
    assert len(seen) > (options != {"top_k": 2})


def test_temperature_is_one_over_alpha_unless_given():
    model = TabularModel(VOCAB, (0,), seed=4)
    expected = product_law(model, HORIZON, temperature=0.25)
    assert total_variation(law_under(make(alpha=4.0), TabularEngine(model)), expected) <= EXACT
    assert total_variation(law_under(make(alpha=9.0, temperature=0.25), TabularEngine(model)), expected) <= EXACT


@pytest.mark.slow
def test_sampling_with_real_keys_has_the_same_law():
    """A chi-square test of 5,000 draws. The seed is fixed, so the p-value is a constant."""
    from scipy import stats

    from dflash_mcmc.rng import Key

    engine, sampler = TabularEngine(TabularModel(VOCAB, (0,), seed=4)), make()
    exact = product_law(engine.model, HORIZON, temperature=0.5)
    states = sorted(exact)
    counts = dict.fromkeys(states, 0)
    for number in range(5_000):
        counts[tuple(engine.run(sampler.chain(PROMPT, HORIZON, Key(number))).trajectory.tokens.tolist())] += 1
    expected = np.array([exact[s] for s in states]) * 5_000
    common = expected > 5
    observed = np.array([counts[s] for s in states])
    statistic = ((observed - expected) ** 2 / expected)[common].sum()
    assert stats.chi2.sf(statistic, common.sum() - 1) > 0.001


def test_what_penalties_count_is_part_of_the_identity_where_they_count(make_config):
    hashes = [identity_hash(make_config("sampler=temperature", f"sampler.frequency_penalty={penalty}",
                                        f"sampler.penalty_counts={counts}"))
              for penalty in (0.0, 0.5) for counts in ("answer", "prompt+answer")]
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3


def test_laws_of_a_draw_agree_about_the_prompt():
    ours, theirs = (SamplingParams(frequency_penalty=0.5, counts_prompt=counts) for counts in (True, False))
    assert [counted_from(laws, 7) for laws in ([ours, SamplingParams()], [theirs], [])] == [0, 7, 7]
    with pytest.raises(ValueError, match="laws that agree"):
        counted_from([ours, theirs], 7)
