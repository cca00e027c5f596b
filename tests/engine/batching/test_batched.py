"""Compares the batched engine with the reference engine, and with itself for other batches, orders and slot counts."""

import functools
import itertools

import numpy as np
import pytest
import torch

from dflash_mcmc.blend.layer import LayerBlend
from dflash_mcmc.blend.none import NoBlend
from dflash_mcmc.engine.batching.batched import BatchedEngine
from dflash_mcmc.engine.batching.interface import Options
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.errors import UserError
from dflash_mcmc.ops import Draw, SamplingParams, Score
from dflash_mcmc.rng import Key
from dflash_mcmc.sampler.best_of_n import BestOfN
from dflash_mcmc.sampler.greedy import Greedy
from dflash_mcmc.sampler.lookahead import Lookahead
from dflash_mcmc.sampler.multiple_try import MultipleTry
from dflash_mcmc.sampler.power_mh import PowerMH
from dflash_mcmc.sampler.power_smc import PowerSMC
from dflash_mcmc.sampler.replica_exchange import ReplicaExchange
from dflash_mcmc.sampler.temperature import Temperature
from dflash_mcmc.types import ChainResult, Trajectory
from tests.cases import quick
from tests.reference import ReferenceEngine
from tests.targets import FAMILIES, RememberingReference, random_model, rows_do_not_depend_on_the_batch

STOPS = (3, 7, 20, 33, 44, 50)
HORIZON = 12
TOLERANCE = 1e-4
WAYS = ({"slots": 3, "order": [5, 2, 9, 7, 0, 3, 6, 8, 1, 4]}, {"slots": 1},
        {"skip_identical": False, "read_ahead": 1}, {"steps_between_checks": 5}, {"attention": "sdpa"})
"""Ways to run the same chains, where a draft or a blend has a cache of its own. Rows move in the first two."""


def power_mh(**changes) -> PowerMH:
    values = dict(alpha=2.0, proposal_temperature=None, num_blocks=3, num_steps=2, cut="current", proposal="base",
                  rule="exact", schedule="published", early_reject="auto", top_k=0, top_p=1.0)
    return PowerMH(**{**values, **changes})


def temperature(**changes) -> Temperature:
    values = dict(alpha=1.0, temperature=None, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0,
                  frequency_penalty=0.0, presence_penalty=0.0)
    return Temperature(**{**values, **changes})


def power_smc(**changes) -> PowerSMC:
    values = dict(alpha=2.0, num_particles=3, block_size=3, ess_threshold=1.0, temperature=None,
                  top_k=0, top_p=1.0, proposal="target", wrapper="none", num_steps=0)
    return PowerSMC(**{**values, **changes})


def multiple_try(form: str) -> MultipleTry:
    return MultipleTry(alpha=2.0, form=form, num_tries=3, proposal_temperature=None, num_blocks=3, num_steps=2,
                       early_reject="auto", top_k=0, top_p=1.0)


SAMPLERS = {
    "greedy": Greedy(alpha=1.0),
    "temperature": temperature(),
    "truncated": temperature(sampling_mask=True, top_k=9, top_p=0.9, min_p=0.02, repetition_penalty=1.3, frequency_penalty=0.4,
                             presence_penalty=0.3, penalty_counts="prompt+answer"),
    "best_of_n": BestOfN(num_candidates=3, select="power", alpha=2.0, temperature=None, top_k=9, top_p=0.9),
    "power_smc": power_smc(),
    "pimh": power_smc(wrapper="pimh", num_steps=2),
    "csmc": power_smc(wrapper="csmc", num_steps=2),
    "replica_exchange": ReplicaExchange(alphas=[1.0, 3.0], temperatures=[1.0, 0.5], output=-1, num_blocks=3, num_steps=2,
                                        early_reject="auto"),
    "multiple_try": multiple_try(form="multiple_try"),
    "isir": multiple_try(form="isir"),
    "lookahead": Lookahead(alpha=2.0, num_candidates=3, num_rollouts=2, rollout_length=3, block_size=4, temperature=None,
                           top_k=0, top_p=1.0),
    "power_mh": power_mh(),
    "power_mh_hot": power_mh(proposal_temperature=0.8),
    "power_mh_entropy": power_mh(cut="entropy", entropy_power=2.0),
    "power_mh_matched": power_mh(proposal="matched"),
    "power_mh_published": power_mh(rule="published"),
    "power_mh_adaptive": power_mh(schedule="adaptive", num_blocks=6),
    "power_mh_early": power_mh(proposal="matched", early_reject="exact", num_steps=3),
}
BLENDS = {"none": NoBlend(), "layer": LayerBlend(beta=0.2, layer=-2, norm="none"),
          "layer_final": LayerBlend(beta=0.4, layer=0, norm="final"),
          "last_layer": LayerBlend(beta=0.3, layer=-1, norm="none"),
          "away": LayerBlend(beta=-0.4, layer=0, norm="final")}
PROMPTS = [np.array([11, 5, 23, 9]), np.array([40]), np.arange(150) * 7 % 61, np.array([3, 7, 3]), np.arange(8, 8 + 50)]
NUM_CHAINS = 2 * len(PROMPTS)


@pytest.fixture(scope="module")
def reference(qwen3):
    """The reference engine with a blend: reference("layer")."""
    parts = LanguageModel(qwen3, stop_ids=STOPS)
    return functools.cache(lambda blend: RememberingReference(qwen3, parts, BLENDS[blend]))


def chains(sampler):
    for index in range(NUM_CHAINS):
        prompt = PROMPTS[index % len(PROMPTS)]
        yield index, sampler.chain(prompt, HORIZON, Key(7).fold_in(index))


def run_batched(model, sampler, blend, slots=8, order=None, decoder=None, draft=None, uses_draft=False, **options):
    """The finished chains of a sampler by tag. `draft` makes the drafter for the parts of the model."""
    parts = LanguageModel(model, stop_ids=STOPS)
    made = None if draft is None else draft(parts)
    engine = BatchedEngine(parts, blend, slots, max(map(len, PROMPTS)) + HORIZON, Options(**options), None,
                           decoder.speculation(made) if decoder else None, made if uses_draft else None)
    todo = list(chains(sampler))
    return {done.tag: done for done in engine.run(todo if order is None else [todo[i] for i in order])}


def same(a: ChainResult, b: ChainResult, tolerance: float = TOLERANCE) -> None:
    assert a.trajectory.tokens.tolist() == b.trajectory.tokens.tolist()
    np.testing.assert_allclose(a.trajectory.log_p, b.trajectory.log_p, atol=tolerance, rtol=0)
    np.testing.assert_allclose(a.trajectory.log_q, b.trajectory.log_q, atol=tolerance, rtol=0)
    assert (a.proposals, a.accepted, a.moved, a.trajectory.ended) == (b.proposals, b.accepted, b.moved, b.trajectory.ended)
    assert (a.trajectory.kept is None) is (b.trajectory.kept is None)
    if a.trajectory.kept is not None:
        np.testing.assert_allclose(a.trajectory.kept, b.trajectory.kept, atol=tolerance, rtol=0)


def all_same(found: dict, expected: dict, tolerance: float = TOLERANCE) -> None:
    assert found.keys() == expected.keys()
    for tag, done in expected.items():
        same(found[tag].result, done.result, tolerance)


def same_as_reference(batched, sampler, reference: ReferenceEngine) -> None:
    """Compares one chain per prompt. The other chains only share the batch."""
    assert len(batched) == NUM_CHAINS
    for tag, chain in itertools.islice(chains(sampler), len(PROMPTS)):
        same(batched[tag].result, reference.run(chain))


@pytest.mark.parametrize(("name", "blend"), quick(itertools.product(SAMPLERS, BLENDS), *itertools.product(
    ("truncated", "power_mh", "power_mh_early"), ["layer"])))
def test_batched_is_reference(plain, reference, name, blend):
    same_as_reference(plain(name, blend), SAMPLERS[name], reference(blend))


def test_results_are_varied_enough_to_tell_errors_apart(plain):
    results = plain("power_mh", "none")
    tokens = {tuple(done.result.trajectory.tokens.tolist()) for done in results.values()}
    assert len(tokens) >= 6
    assert any(done.result.trajectory.ended for done in results.values())
    assert 0 < sum(done.result.moved for done in results.values()) < sum(done.result.proposals for done in results.values())


@pytest.mark.parametrize("slots", quick([1, 2, 3, 16], 3))
@pytest.mark.parametrize("name", ["power_mh", "truncated"])
def test_number_of_slots_and_order_change_nothing(qwen3, plain, slots, name):
    expected = plain(name, "layer")
    order = [5, 2, 9, 7, 0, 3, 6, 8, 1, 4]
    # The ladder of shapes makes results equal to the last bit, if the machine's arithmetic allows it.
    tolerance = 0.0 if rows_do_not_depend_on_the_batch() else TOLERANCE
    other = run_batched(qwen3, SAMPLERS[name], BLENDS["layer"], slots=slots, order=order)
    for tag, done in expected.items():
        same(other[tag].result, done.result, tolerance)
        assert other[tag].cost == done.cost


SWITCHED = {
    "skip_identical": dict(skip_identical=False),
    "read_ahead_1": dict(read_ahead=1),
    "read_ahead_3": dict(read_ahead=3),
    "checks": dict(steps_between_checks=5),
    "all": dict(skip_identical=False, read_ahead=1, steps_between_checks=3),
}
ROUNDED = {"attention": dict(attention="sdpa")}


@pytest.mark.parametrize("options", [
    pytest.param(options, id=name, marks=[pytest.mark.slow] * (name not in ("all", "attention")))
    for name, options in (SWITCHED | ROUNDED).items()])
@pytest.mark.parametrize("name", quick(["power_mh_early", "power_mh", "power_mh_published"], "power_mh_early"))
def test_switches_change_nothing(qwen3, plain, name, options):
    """Tokens and log-probabilities are equal to the last bit if a switch changes no arithmetic."""
    exact = options in SWITCHED.values() and rows_do_not_depend_on_the_batch()
    on, off = plain(name, "layer"), run_batched(qwen3, SAMPLERS[name], BLENDS["layer"], **options)
    assert on.keys() == off.keys()
    for tag, done in on.items():
        same(off[tag].result, done.result, 0.0 if exact else TOLERANCE)
        assert [step["decision"] for step in off[tag].result.trace] == [step["decision"] for step in done.result.trace]


def test_early_rejection_decides_the_same_with_and_without_skipping(qwen3):
    """A try can cross its floor on tokens that it shares with the state. It ends there even if they need no forward."""
    on, off = (run_batched(qwen3, SAMPLERS["isir"], BLENDS["layer"], skip_identical=skip) for skip in (True, False))
    assert sum(done.result.measures["abandoned_tries"] for done in on.values()) >= 1
    for tag, done in on.items():
        same(off[tag].result, done.result, 0.0 if rows_do_not_depend_on_the_batch() else TOLERANCE)
        assert done.result.measures == off[tag].result.measures
        assert [s["decision"] for s in done.result.trace] == [s["decision"] for s in off[tag].result.trace]
        assert [s["proposal_length"] for s in done.result.trace] == [s["proposal_length"] for s in off[tag].result.trace]


def test_a_draw_along_a_longer_path_ends_at_its_horizon(qwen3):
    def shorter(prompt):
        path = yield Draw(Trajectory.start(prompt), 10, SamplingParams(), Key(1))
        again = yield Draw(Trajectory.start(prompt), 6, SamplingParams(), Key(1), along=path)
        assert again.tokens.tolist() == path.tokens[:6].tolist()
        assert not again.ended
        other = yield Draw(Trajectory.start(prompt), 6, SamplingParams(), Key(2), along=path)
        return ChainResult(other)

    def plain(prompt):
        path = yield Draw(Trajectory.start(prompt), 6, SamplingParams(), Key(2))
        return ChainResult(path)

    engine = BatchedEngine(LanguageModel(qwen3), NoBlend(), 2, 170)
    for prompt in PROMPTS:
        one, other = (next(iter(engine.run([(0, f(prompt))]))).result for f in (shorter, plain))
        same(one, other)


def test_an_engine_can_be_used_again_after_a_run_was_given_up(qwen3, plain):
    engine = BatchedEngine(LanguageModel(qwen3, stop_ids=STOPS), NoBlend(), 8, 170)
    running = engine.steps(chains(SAMPLERS["power_mh"]))
    for _ in range(7):
        next(running)
    running.close()
    again = {done.tag: done for done in engine.run(chains(SAMPLERS["power_mh"]))}
    for tag, done in plain("power_mh", "none").items():
        same(again[tag].result, done.result)


@pytest.mark.slow
def test_identical_proposals_cost_nothing(qwen3):
    """An almost deterministic law repeats its first sequence. The model draws only the tokens of that sequence."""
    sampler = power_mh(alpha=400.0, num_blocks=1, num_steps=5)
    on, off = (run_batched(qwen3, sampler, NoBlend(), skip_identical=skip) for skip in (True, False))
    for tag, done in on.items():
        assert done.cost.tokens_drawn == done.result.trajectory.length
        assert done.result.moved == 0
        assert done.cost.tokens_drawn + done.cost.tokens_skipped == off[tag].cost.tokens_drawn


def test_a_rejected_proposal_costs_no_reading(plain):
    for tag, done in plain("power_mh_early", "none").items():
        prompt = len(PROMPTS[tag % len(PROMPTS)]) - 1
        assert done.cost.token_forwards == done.cost.tokens_drawn + prompt


def test_a_shared_prompt_is_read_once(qwen3):
    engine = BatchedEngine(LanguageModel(qwen3, stop_ids=STOPS), NoBlend(), 4, 170)
    prompt = PROMPTS[2]
    many = [(n, SAMPLERS["temperature"].chain(prompt, HORIZON, Key(n))) for n in range(12)]
    done = {d.tag: d for d in engine.run(many)}
    assert engine.counters.read_tokens == len(prompt) - 1
    alone = BatchedEngine(LanguageModel(qwen3, stop_ids=STOPS), NoBlend(), 4, 170)
    one = next(iter(alone.run([(7, SAMPLERS["temperature"].chain(prompt, HORIZON, Key(7)))])))
    same(done[7].result, one.result)
    assert done[7].cost == one.cost


@pytest.mark.slow
def test_slots_are_refilled_at_once(qwen3):
    for options in (Options(), Options(read_ahead=1), Options(steps_between_checks=4)):
        engine = BatchedEngine(LanguageModel(qwen3, stop_ids=STOPS), NoBlend(), 3, 170, options)
        assert len(list(engine.run(chains(SAMPLERS["power_mh"])))) == NUM_CHAINS
        assert 0 < engine.counters.busy_slot_steps <= 3 * engine.counters.steps
        assert (engine.counters.utilisation == 1.0) == (options.steps_between_checks is None)


def test_more_slots_than_positions(qwen3):
    engine = BatchedEngine(LanguageModel(qwen3, stop_ids=STOPS), NoBlend(), 100, 20)
    many = [(n, SAMPLERS["temperature"].chain(PROMPTS[0], 8, Key(n))) for n in range(120)]
    assert sorted(done.tag for done in engine.run(many)) == list(range(120))


def test_chains_that_ask_for_nothing_end(qwen3):
    def empty():
        return ChainResult(Trajectory.start(PROMPTS[0]))
        yield

    def mixed():
        for number in range(9):
            yield number, empty() if number % 2 else SAMPLERS["greedy"].chain(PROMPTS[0], HORIZON, Key(0))

    engine = BatchedEngine(LanguageModel(qwen3, stop_ids=STOPS), NoBlend(), 2, 170)
    assert sorted(done.tag for done in engine.run(mixed())) == list(range(9))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_position_of_the_model_can_be_used(family):
    """The padding of a chunk may reach beyond the last position."""
    model, blend = random_model(family), BLENDS["layer"]
    parts, prompt = LanguageModel(model, stop_ids=STOPS), np.arange(192 - HORIZON) % 61
    engine = BatchedEngine(parts, blend, 2, 192)
    chain = SAMPLERS["power_mh"].chain
    (done,) = engine.run([(0, chain(prompt, HORIZON, Key(1)))])
    same(done.result, ReferenceEngine(model, parts, blend).run(chain(prompt, HORIZON, Key(1))))


LAWS = [SamplingParams(), SamplingParams(0.7, top_k=5), SamplingParams(0.9, repetition_penalty=1.4), SamplingParams(0.0),
        SamplingParams(0.0, repetition_penalty=3.0), SamplingParams(0.9, frequency_penalty=0.7, presence_penalty=-0.5)]


@pytest.mark.parametrize(("source", "law"), quick(
    itertools.product(("blended", "base"), LAWS), ("blended", LAWS[-1]), ("base", LAWS[0]), ("blended", LAWS[1])))
def test_score_is_reference_and_is_what_draw_says(qwen3, reference, law, source):
    parts, blend = LanguageModel(qwen3, stop_ids=STOPS), BLENDS["layer"]
    given = np.arange(10, 40)

    def given_scored(prompt):
        path = yield Score(Trajectory.start(prompt), given, law, source)
        return ChainResult(path)

    def drawn(prompt):
        path = yield Draw(Trajectory.start(prompt), HORIZON, law, Key(1), source)
        again = yield Score(Trajectory.start(prompt), path.tokens, law, source)
        assert np.allclose(path.log_p, again.log_p, atol=TOLERANCE)
        assert np.allclose(path.log_q, again.log_q, atol=TOLERANCE)
        return ChainResult(again)

    for prompt in PROMPTS:
        engine = BatchedEngine(parts, blend, 2, 190)
        with np.errstate(invalid="ignore"):
            fast = next(iter(engine.run([(0, given_scored(prompt))]))).result
            slow = reference("layer").run(given_scored(prompt))
            same(fast, slow)
        next(iter(engine.run([(0, drawn(prompt))])))


@pytest.mark.slow
def test_chains_without_numbers_end_and_spoil_no_other():
    """The embedding of token 40 is NaN. A chain that reads it fails, and every other chain ends as with a sound model."""
    spoilt, sound = random_model("qwen3"), random_model("qwen3")
    with torch.no_grad():
        spoilt.model.embed_tokens.weight[40] = torch.nan
    todo = [0, 1, 2, 3, 4, 1, 1, 0, 2, 4]

    def results(model, blend, **options):
        engine = BatchedEngine(LanguageModel(model, stop_ids=STOPS), blend, 3, 170, Options(**options))
        sampler = SAMPLERS["power_mh"]
        return {d.tag: d for d in engine.run((n, sampler.chain(PROMPTS[p], HORIZON, Key(n))) for n, p in enumerate(todo))}

    for options in ({}, {"read_ahead": 1}, {"read_ahead": 2}, {"read_ahead": 1, "steps_between_checks": 4}):
        bad, good = results(spoilt, BLENDS["layer"], **options), results(sound, BLENDS["layer"], **options)
        assert len(bad) == len(todo)
        failed = {tag for tag, done in bad.items() if done.result is None}
        assert failed >= {n for n, p in enumerate(todo) if 40 in PROMPTS[p]}
        assert failed < set(range(len(todo)))
        for tag, done in bad.items():
            if tag in failed:
                assert "not numbers" in done.failure
            elif 40 not in good[tag].result.trajectory.tokens:
                same(done.result, good[tag].result)


def test_more_positions_than_the_model_has_are_refused(qwen3):
    with pytest.raises(UserError, match="192"):
        BatchedEngine(LanguageModel(qwen3, stop_ids=STOPS), NoBlend(), 4, 193)


def test_a_blend_that_gives_no_numbers_fails_every_chain(qwen3):
    """Proposals are drawn from the model without the blend. Only the target's log-probabilities are affected."""
    blend = LayerBlend(beta=0.5, layer=0, norm="none")
    blend.beta = torch.nan
    engine = BatchedEngine(LanguageModel(qwen3, stop_ids=STOPS), blend, 4, 170)
    done = list(engine.run(chains(SAMPLERS["power_mh"])))
    assert len(done) == NUM_CHAINS
    assert all(d.result is None and "not numbers" in d.failure for d in done)
