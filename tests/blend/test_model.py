"""`blend=model`: the law with every sampler by enumeration, the engine against the reference, and what is refused."""

import functools
import itertools
import json
import shutil

import numpy as np
import pytest
import torch

from dflash_mcmc.blend.model import ModelBlend
from dflash_mcmc.chains import cost
from dflash_mcmc.config.identity import identity_hash, identity_of, label_of
from dflash_mcmc.engine.batching.batched import BatchedEngine
from dflash_mcmc.engine.batching.interface import Options
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.batching.plan import Workload, predict
from dflash_mcmc.engine.oracle.tabular import TabularDraft, TabularEngine, TabularModel
from dflash_mcmc.engine.speculative.rules import Speculation
from dflash_mcmc.errors import ConfigError, UserError
from dflash_mcmc.ops import SamplingParams
from dflash_mcmc.rng import Key
from dflash_mcmc.testing import power_target, total_variation
from tests.engine.batching.test_batched import (
    HORIZON,
    NUM_CHAINS,
    PROMPTS as ANY_PROMPTS,
    SAMPLERS,
    STOPS,
    TOLERANCE,
    WAYS,
    all_same,
    same,
)
from tests.engine.speculative.test_speculator import drafter, match
from tests.laws import Beside, power_law, product_law
from tests.runs import execute, records_of
from tests.sampler import (
    test_best_of_n as of_best_of_n,
    test_draft_mh as of_draft_mh,
    test_draft_refine as of_draft_refine,
    test_multiple_try as of_multiple_try,
    test_power_mh as of_power_mh,
    test_power_smc as of_power_smc,
    test_replica_exchange as of_replica_exchange,
    test_temperature as of_temperature,
)
from tests.sampler.stages import step_error
from tests.sampler.test_draft_mh_decoder import RULES
from tests.targets import RememberingReference, random_model, rows_do_not_depend_on_the_batch

EXACT, WRONG = 1e-12, 1e-3
BLENDS = {"ensemble": (0.4, 0.0), "contrastive": (-0.7, 0.0), "masked": (-0.7, 0.4), "masked_ensemble": (0.4, 0.5)}


def blend_of(name: str) -> ModelBlend:
    beta, alpha_mask = BLENDS[name]
    return ModelBlend(beta=beta, model="tiny", alpha_mask=alpha_mask)


def tables(name: str, size: int = 3, stop_ids=(0,), draft: TabularDraft | None = None,
           speculation=None) -> tuple[TabularEngine, Beside]:
    """An engine whose target and companion are tables, and its blend as the laws by hand take it.

    The masks leave 8 and 6 of 15 sequences of at most three tokens, and with two tokens 4 and 3 of 4.
    """
    seed, scale = {3: 3, 2: 7}[size], 0.5
    other = TabularModel(size, (), seed=seed + 90, scale=scale)
    engine = TabularEngine(TabularModel(size, stop_ids, seed=seed, scale=scale), blend_of(name), speculation, draft, other)
    return engine, Beside(BLENDS[name][0], other, BLENDS[name][1])


@pytest.mark.parametrize("array", [np.array, torch.tensor])
def test_mixture_and_mask_by_hand(array):
    """Token 3 has no row of its own in the target, and token 2 has less than a tenth of the largest probability."""
    last, other = array([3.0, 1.0, 0.5, -np.inf]), array([1.0, 3.0, 9.0, 5.0])
    mixed = [ModelBlend(beta=beta, model="x", alpha_mask=mask).mix(last, [other], None).tolist()
             for beta, mask in ((0.25, 0.0), (-0.5, 0.0), (1.0, 0.0), (2.0, 0.0), (-0.5, 0.1), (-0.5, 1.0))]
    assert mixed == [[2.5, 1.5, 2.625, -np.inf], [4.0, 0.0, -3.75, -np.inf], [1.0, 3.0, 9.0, -np.inf],
                     [-1.0, 5.0, 17.5, -np.inf], [4.0, 0.0, -np.inf, -np.inf], [4.0, -np.inf, -np.inf, -np.inf]]
    padded = ModelBlend(beta=-0.5, model="x").mix(last, [array([1.0, 3.0, 9.0, -np.inf])], None)
    assert padded.tolist() == mixed[1]  # and no NaN
    broken = ModelBlend(beta=-0.5, model="x").mix(array([np.nan, 1.0, 0.5, -np.inf]), [other], None)
    assert np.isnan(broken.tolist()[0])  # is not hidden as a token that cannot be drawn


@pytest.mark.parametrize("name", BLENDS)
@pytest.mark.parametrize("stop_ids", [(0,), (0, 2), ()])
def test_temperature_has_the_law_by_hand(name, stop_ids):
    engine, beside = tables(name, stop_ids=stop_ids)
    for options in ({"temperature": 0.7}, {"temperature": 1.3, "top_k": 2}, {"temperature": 0.9, "repetition_penalty": 1.4}):
        law = of_temperature.law_under(of_temperature.make(**options), engine)
        assert total_variation(law, product_law(engine.model, 3, beside, **options)) <= EXACT
    opposite = -beside.beta
    for wrong in (beside._replace(beta=opposite), beside._replace(beta=2 * beside.beta), beside._replace(alpha_mask=0.7),
                  beside._replace(other=engine.model)):
        assert total_variation(law, product_law(engine.model, 3, wrong, **options)) > WRONG
    if beside.alpha_mask:
        assert total_variation(law, product_law(engine.model, 3, beside._replace(alpha_mask=0.0), **options)) > WRONG


@pytest.mark.parametrize("name", BLENDS)
@pytest.mark.parametrize("early", ["off", "exact"])
def test_power_mh_leaves_the_power_target_by_hand_invariant(name, early):
    engine, beside = tables(name)
    target = of_power_mh.target_by_hand(engine, 3, {}, beside, beside)
    of_power_mh.check_step(engine, of_power_mh.make(proposal="matched", early_reject=early), target, 3)


@pytest.mark.parametrize("name", ["ensemble", "contrastive"])
def test_power_mh_may_propose_without_the_blend(name):
    engine, beside = tables(name)
    target = of_power_mh.target_by_hand(engine, 3, {"top_k": 2}, beside, None)
    of_power_mh.check_step(engine, of_power_mh.make(proposal="base", top_k=2), target, 3)
    law = of_power_mh.drawn(engine, of_power_mh.make(proposal="base"))
    assert total_variation(law, of_power_mh.q_by_hand(engine, 3, {})) <= EXACT


@pytest.mark.parametrize("name", BLENDS)
def test_the_weights_of_power_smc_are_unbiased(name):
    engine, beside = tables(name)
    p = product_law(engine.model, 2, beside)
    expected, found = {x: share**3.0 for x, share in p.items()}, of_power_smc.weights_of(of_power_smc.make(), engine)
    assert found.keys() == expected.keys()
    assert max(abs(found[x] - expected[x]) for x in expected) / sum(expected.values()) < 1e-11


@pytest.mark.parametrize("name", BLENDS)
def test_multiple_try_and_replica_exchange_are_exact(name):
    engine, beside = tables(name, size=2)
    for form in of_multiple_try.FORMS:
        assert step_error(engine, of_multiple_try.make(form=form), 3) < EXACT
    a_round = of_replica_exchange.round_of(engine, 2)
    assert of_replica_exchange.joint_error(engine, of_replica_exchange.make(), 2, a_round) < EXACT
    target = power_target(engine, 2, 3.0, SamplingParams(), "blended")
    power = power_law(engine.model, 2, 3.0, product_law(engine.model, 2, beside), beside)
    assert total_variation(dict(zip(target.states, target.probability, strict=True)), power) <= EXACT


@pytest.mark.parametrize(("name", "select"), list(zip(BLENDS, itertools.cycle(of_best_of_n.SELECTS))))
def test_best_of_n_has_the_law_by_hand(name, select):
    engine, beside = tables(name)
    law = of_best_of_n.drawn(of_best_of_n.make(select=select), engine)
    assert total_variation(law, of_best_of_n.expected(select, model=engine.model, blend=beside)) <= EXACT


@pytest.mark.parametrize("name", ["ensemble", "contrastive"])
def test_samplers_with_a_draft_are_exact(name):
    engine, beside = tables(name, draft=TabularDraft(3, 2, seed=7, scale=0.7))
    for sampler in (of_draft_mh.make(), of_draft_mh.make(proposal="mixture"), of_draft_refine.make(cut="confidence")):
        target = power_target(engine, 2, sampler.alpha, sampler.law(), sampler.source())
        power = power_law(engine.model, 2, sampler.alpha, product_law(engine.model, 2, beside), beside)
        assert total_variation(dict(zip(target.states, target.probability, strict=True)), power) <= EXACT
        assert step_error(engine, sampler, 2) <= EXACT


@pytest.mark.slow
@pytest.mark.parametrize(("name", "decoder"), [
    ("contrastive", "match"), ("ensemble", "match_sampled"), ("masked", "rejection"), ("masked_ensemble", "block")])
def test_a_decoder_changes_no_law(name, decoder):
    rule, options = RULES[decoder]
    engine, beside = tables(name, speculation=Speculation(rule, TabularDraft(3, 2, seed=7), noisy=True, **options))
    law = of_temperature.law_under(of_temperature.make(temperature=0.8), engine)
    assert total_variation(law, product_law(engine.model, 3, beside, temperature=0.8)) <= EXACT


# The batched engine, with a companion of another family, fewer layers and another number of rows in its head.

PROMPTS = [prompt % 53 for prompt in ANY_PROMPTS]
"""The smaller companion has 53 rows, so that the target has as many tokens."""
ENGINE_BLENDS = {"contrastive": ModelBlend(beta=-0.6, model="x"), "masked": ModelBlend(beta=-0.6, model="x", alpha_mask=0.05),
                 "ensemble": ModelBlend(beta=0.5, model="x")}


@pytest.fixture(scope="module")
def qwen3():
    return random_model("qwen3")


@pytest.fixture(scope="module", params=[53, 70], ids=["fewer_rows", "more_rows"])
def amateur(request):
    return random_model("llama", vocab_size=request.param, num_hidden_layers=2)


def engine_of(model, amateur, blend, slots=8, decoder=None, draft=None, **options) -> BatchedEngine:
    parts, other = LanguageModel(model, stop_ids=STOPS), LanguageModel(amateur)
    parts.forbid(range(amateur.config.vocab_size, 61))
    speculation = decoder.speculation(drafter(draft, parts, model)) if decoder else None
    return BatchedEngine(parts, blend, slots, max(map(len, PROMPTS)) + HORIZON, Options(**options), None, speculation,
                         companion=other)


def chains(sampler):
    return [(tag, sampler.chain(PROMPTS[tag % len(PROMPTS)], HORIZON, Key(7).fold_in(tag))) for tag in range(NUM_CHAINS)]


def run(*given, sampler="power_mh", order=None, **options):
    todo = chains(SAMPLERS[sampler])
    return {done.tag: done for done in engine_of(*given, **options).run(todo if order is None else [todo[i] for i in order])}


@pytest.mark.parametrize(("name", "sampler"), [
    ("masked", "power_mh_early"), *(pytest.param(name, sampler, marks=pytest.mark.slow) for name, sampler in [
        ("ensemble", "power_mh_early"), ("masked", "truncated"), *(("contrastive", sampler) for sampler in SAMPLERS)])])
def test_batched_is_reference(qwen3, amateur, name, sampler):
    blend, parts = ENGINE_BLENDS[name], LanguageModel(qwen3, stop_ids=STOPS)
    parts.forbid(range(amateur.config.vocab_size, 61))
    reference = RememberingReference(qwen3, parts, blend, None, amateur)
    found = run(qwen3, amateur, blend, sampler=sampler)
    for tag, chain in chains(SAMPLERS[sampler])[: len(PROMPTS)]:
        same(found[tag].result, reference.run(chain))


@pytest.fixture(scope="module")
def plain(qwen3, amateur):
    return functools.cache(lambda sampler: run(qwen3, amateur, ENGINE_BLENDS["contrastive"], sampler=sampler))


@pytest.mark.slow
@pytest.mark.parametrize("amateur", [53], indirect=True, ids=["fewer_rows"])
@pytest.mark.parametrize(("sampler", "options"), [
    pytest.param(sampler, way, id=f"{sampler}-{way}")
    for sampler in ("power_mh", "power_smc", "multiple_try") for way in WAYS])
def test_the_companion_follows_the_rows(qwen3, amateur, plain, options, sampler):
    """Rows move and fork: the companion's keys and values go with them."""
    exact = rows_do_not_depend_on_the_batch() and options.keys() <= {"slots", "order"}
    found = run(qwen3, amateur, ENGINE_BLENDS["contrastive"], sampler=sampler, **options)
    all_same(found, plain(sampler), 0.0 if exact else TOLERANCE)
    for tag, done in found.items():
        assert done.cost.companion_forwards == done.cost.token_forwards
        if options.keys() <= {"slots", "order"}:
            assert done.cost == plain(sampler)[tag].cost


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["ngram", "self", "dflash"])
def test_a_decoder_with_a_cache_of_its_own_changes_nothing(qwen3, amateur, plain, draft):
    """DFlash's keys and values and the companion's follow the same rows."""
    found = run(qwen3, amateur, ENGINE_BLENDS["contrastive"], decoder=match(), draft=draft)
    all_same(found, plain("power_mh"))
    assert all(done.cost.companion_forwards == done.cost.token_forwards for done in found.values())


def held_by(engine: BatchedEngine, num_traced: int) -> int:
    """Bytes of an engine's caches at their longest and of its rows, with so many values of each token of a chain."""
    memory, rows = engine._memory, engine._loop.rows
    memory.reserve(memory._longest)
    memory.spare.reserve(memory.cache.length)
    held = [each for cache in (memory.cache, memory.spare, memory.prompts._cache) for each in cache.chain()]
    total = sum(cache.keys.nbytes + cache.values.nbytes for cache in held)
    total += rows.tokens.nbytes + rows.uniforms.nbytes + rows.scores.nbytes
    return total + 2 * rows.num_rows * memory._longest * num_traced * 8


def test_the_plan_counts_the_companions_cache(qwen3, amateur):
    engine = engine_of(qwen3, amateur, ENGINE_BLENDS["ensemble"], slots=12, decoder=match(), draft="dflash")
    total, memory = held_by(engine, 4), engine._memory
    work = Workload(engine.model, max(map(len, PROMPTS)) + HORIZON, max(map(len, PROMPTS)) + HORIZON, Options(),
                    memory.runner.drafter, memory.runner.companion.model)
    found, without = predict(work, 12), predict(work._replace(companion=None), 12)
    assert found.caches == total
    assert found.caches > without.caches
    assert found.step > without.step


def test_numbers_that_are_not_finite_end_the_chain(qwen3):
    """Of the chains that the companion reads token 40 in, and of no others. Prompts are read ahead together."""
    amateur = random_model("llama")
    with torch.no_grad():
        amateur.model.embed_tokens.weight[40] = torch.nan
    done = run(qwen3, amateur, ENGINE_BLENDS["contrastive"], sampler="temperature")
    for tag, each in done.items():
        assert (each.result is None) == ("not numbers" in each.failure)
        sequence = PROMPTS[tag % len(PROMPTS)] if each.result is None else each.result.trajectory.sequence[:-1]
        assert each.result is None or 40 not in sequence
    assert [done[tag].result is None for tag in (1, 6, 0, 3)] == [True, True, False, False]


def test_a_companion_with_too_few_positions_is_refused(qwen3):
    with pytest.raises(UserError, match=r"prompt and generation need 162 positions; allowed: 100 \(those of blend.model\)"):
        engine_of(qwen3, random_model("llama", max_position_embeddings=100), ENGINE_BLENDS["ensemble"])


# The configuration.

GIVEN = ("blend=model", "blend.model=tiny")


def test_an_option_of_model_is_its_folder(make_config):
    config = make_config(*GIVEN)
    assert config.blend.model.endswith("assets/tiny")
    by_folder = make_config("blend=model", f"blend.model={config.blend.model}")
    assert identity_hash(by_folder) == identity_hash(config)
    assert identity_of(config)["blend.content"] == identity_of(config)["model.content"]
    assert "blend.model" not in identity_of(config)
    assert label_of(config) == "model_power_mh"


def test_the_precision_of_an_option_is_taken_unless_given(make_config, tmp_path, monkeypatch):
    folder = tmp_path / "models" / "smollm2"
    shutil.copytree(make_config(*GIVEN).blend.model, folder)
    assert make_config("blend=model", "blend.model=smollm2").blend.dtype == "float32"
    assert make_config("blend=model", "blend.model=smollm2").blend.model == str(folder)
    assert make_config("blend=model", "blend.model=smollm2", "blend.dtype=bfloat16").blend.dtype == "bfloat16"
    assert make_config("blend=model", f"blend.model={folder}").blend.dtype is None


def test_content_and_precision_are_the_identity(make_config, tmp_path):
    folder = tmp_path / "other"
    shutil.copytree(make_config(*GIVEN).blend.model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    changes = ([], [f"blend.model={folder}"], ["blend.dtype=bfloat16"], ["blend.beta=-0.5"], ["blend.alpha_mask=0.1"])
    hashes = {identity_hash(make_config(*GIVEN, "sampler.proposal=matched", *each)) for each in changes}
    assert len(hashes) == len(changes)


@pytest.mark.parametrize(("given", "line"), [
    (["blend=model"], r"blend.model: not given; allowed: a text \(the other model, as model= takes it"),
    ([*GIVEN, "blend.model=/nowhere/model"], r"blend.model: given '/nowhere/model'; allowed: a folder that exists, or a hub"),
    ([*GIVEN, "blend.model=smollm2"], r"blend.model: given '.*smollm2'; allowed: a folder that exists, .*fetch smollm2"),
    ([*GIVEN, "blend.beta=10.5"], r"blend.beta: given 10.5; allowed: a number >= -10 and <= 10"),
    ([*GIVEN, "blend.alpha_mask=0.1"],
     r"blend.alpha_mask: given 0.1; allowed: 0, or sampler.proposal=matched with sampler=power_mh, which here draws tokens "
     r"without the blend: a chain could begin where the target has probability zero"),
    *(([*GIVEN, "blend.alpha_mask=0.1", f"sampler={name}", "draft=tiny"],
       f"blend.alpha_mask: given 0.1; allowed: 0 with sampler={name}, which here draws")
      for name in ("draft_mh", "draft_refine")),
    ([*GIVEN, "engine=vllm"], r"blend: given 'model'; allowed: one without second logits with engine=vllm, or engine"),
])
def test_what_is_refused(make_config, given, line):
    with pytest.raises(UserError, match=line):
        make_config(*given)


def another_tokenizer(make_config, folder, change) -> str:
    shutil.copytree(make_config(*GIVEN).blend.model, folder)
    values = json.loads((folder / "tokenizer.json").read_text())
    change(values)
    (folder / "tokenizer.json").write_text(json.dumps(values))
    return str(folder)


def swap_two(values):
    vocabulary = values["model"]["vocab"]
    a, b = sorted(vocabulary, key=vocabulary.get)[30:32]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]


def drop_one(values):
    values["added_tokens"] = [each for each in values["added_tokens"] if each["content"] != "</think>"]


@pytest.mark.parametrize(("change", "said"), [
    (swap_two, r"30 is '.', and the target's is '.'; 2"), (drop_one, r"\d+ is none, and the target's is '</think>'; 1")])
def test_a_tokenizer_of_the_same_size_with_other_tokens_is_refused(make_config, tmp_path, change, said):
    folder = another_tokenizer(make_config, tmp_path / "other", change)
    config = make_config("blend=model", f"blend.model={folder}", "dataset.limit=1", "sampler=temperature")
    line = rf"blend.model: given '.*other'; allowed: a model with the target's tokenizer \(its token {said} of \d+ differ\)"
    for refuses in (lambda: config.blend.check_model(config.model), lambda: execute(config)):
        with pytest.raises(ConfigError, match=line):
            refuses()


def test_a_model_with_recurrent_layers_is_refused(make_config, monkeypatch):
    from dflash_mcmc.model.hf import HFModel

    config = make_config(*GIVEN)
    target, hybrid = config.model.load("cpu"), LanguageModel(random_model("qwen3_5", vocab_size=512))
    monkeypatch.setattr(HFModel, "load_beside", lambda self, device, use: hybrid)
    with pytest.raises(ConfigError, match=r"blend.model: given '.*'; allowed: a model without recurrent layers"):
        config.blend.companion(target)
    short = LanguageModel(random_model("qwen3", vocab_size=61))
    monkeypatch.setattr(HFModel, "load_beside", lambda self, device, use: short)
    with pytest.raises(ConfigError, match=r"allowed: a model whose head has a row for each of the target's tokens \(it h"):
        config.blend.companion(target)


@pytest.mark.slow
def test_a_run_counts_the_companions_forwards_apart(make_config):
    given = *GIVEN, "sampler=temperature", "dataset.limit=2", "dataset.max_new_tokens=8"
    result = execute(make_config(*given, "blend.beta=-0.5", "blend.alpha_mask=0.1"))
    records = records_of(result.folder)
    assert all(record["companion_forwards"] == record["token_forwards"] > 0 for record in records.values())
    summary = json.loads((result.folder / "summary.json").read_text())
    assert summary["companion_forwards"] == sum(record["companion_forwards"] for record in records.values())
    plain = execute(make_config("sampler=temperature", "dataset.limit=2", "dataset.max_new_tokens=8"))
    assert all("companion_forwards" not in record for record in records_of(plain.folder).values())
    line = "blend=model: counted for the target alone; its companion adds as many token-forwards"
    assert line in cost.assumptions(make_config(*given))
