"""`blend=prompt`: its law by enumeration, the engine against the reference, and what is refused.

A sampler does not see which model gives the second logits: `test_model.py` has the laws of the other samplers.
"""

import functools
import json

import numpy as np
import pytest

from dflash_mcmc.blend.prompt import PromptBlend
from dflash_mcmc.chains import build
from dflash_mcmc.config.identity import identity_hash
from dflash_mcmc.config.schema import Job
from dflash_mcmc.dataset.inputs.conversations import Conversation
from dflash_mcmc.engine.batching.batched import BatchedEngine
from dflash_mcmc.engine.batching.interface import Options
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.batching.plan import TargetShape, Workload, predict
from dflash_mcmc.engine.oracle.tabular import TabularEngine, TabularModel
from dflash_mcmc.errors import ConfigError, UserError
from dflash_mcmc.runner import plan
from dflash_mcmc.testing import total_variation
from tests.cases import quick
from tests.engine.batching import test_batched as of_batched
from tests.engine.batching.test_batched import HORIZON, PROMPTS, SAMPLERS, STOPS, TOLERANCE, WAYS, all_same, chains
from tests.engine.speculative.test_speculator import drafter, match
from tests.laws import Beside, product_law
from tests.runs import execute, records_of
from tests.sampler import test_best_of_n as of_best_of_n, test_power_mh as of_power_mh, test_temperature as of_temperature
from tests.targets import RememberingReference, random_model, rows_do_not_depend_on_the_batch

EXACT, WRONG = 1e-12, 1e-3
SECOND = (2, 1)
BLENDS = {"guidance": (-0.5, 0.0), "towards": (0.6, 0.0), "masked": (-0.5, 0.4)}


def tables(name: str) -> tuple[TabularEngine, Beside]:
    """An engine whose target is a table, and its blend with the same table under another prompt."""
    (beta, mask), model = BLENDS[name], TabularModel(3, (0,), seed=3, scale=0.5)
    engine = TabularEngine(model, PromptBlend(beta=beta, alpha_mask=mask), companion=model, second=SECOND)
    return engine, Beside(beta, model, mask, SECOND)


@pytest.mark.parametrize("name", BLENDS)
def test_temperature_and_best_of_n_have_the_law_by_hand(name):
    engine, beside = tables(name)
    for options in ({"temperature": 0.7}, {"temperature": 1.3, "top_k": 2}):
        law = of_temperature.law_under(of_temperature.make(**options), engine)
        assert total_variation(law, product_law(engine.model, 3, beside, **options)) <= EXACT
    for wrong in (beside._replace(beta=-beside.beta), beside._replace(prompt=(0,)), beside._replace(prompt=SECOND[1:])):
        assert total_variation(law, product_law(engine.model, 3, wrong, **options)) > WRONG
    law = of_best_of_n.drawn(of_best_of_n.make(select="power"), engine)
    assert total_variation(law, of_best_of_n.expected("power", model=engine.model, blend=beside)) <= EXACT


@pytest.mark.parametrize("name", BLENDS)
@pytest.mark.parametrize("early", ["off", "exact"])
def test_power_mh_leaves_the_power_target_by_hand_invariant(name, early):
    engine, beside = tables(name)
    target = of_power_mh.target_by_hand(engine, 3, {}, beside, beside)
    of_power_mh.check_step(engine, of_power_mh.make(proposal="matched", early_reject=early), target, 3)
    if not beside.alpha_mask and early == "off":
        target = of_power_mh.target_by_hand(engine, 3, {}, beside, None)
        of_power_mh.check_step(engine, of_power_mh.make(proposal="base"), target, 3)


# The batched engine.

GUIDED = PromptBlend(beta=-0.6)
CUTS = (3, 1, 40, 2, 50)
"""Tokens of the second prompts: a part of the first one's tokens in another order, before its last token."""
SECONDS = {prompt.tobytes(): np.concatenate([prompt[::-1][: cut - 1], prompt[-1:]])[-cut:]
           for prompt, cut in zip(PROMPTS, CUTS, strict=True)}


def engine_of(model, slots=8, decoder=None, draft=None, **options) -> BatchedEngine:
    parts = LanguageModel(model, stop_ids=STOPS)
    speculation = decoder.speculation(drafter(draft, parts, model)) if decoder else None
    return BatchedEngine(parts, GUIDED, slots, max(map(len, PROMPTS)) + HORIZON, Options(**options), None, speculation,
                         companion=parts, second=SECONDS)


def run(model, sampler="power_mh", order=None, **options):
    todo = list(chains(SAMPLERS[sampler]))
    return {done.tag: done for done in engine_of(model, **options).run(todo if order is None else [todo[i] for i in order])}


@pytest.fixture(scope="module")
def qwen3():
    return random_model("qwen3")


@pytest.mark.parametrize(("family", "sampler"), quick(
    [*(("qwen3", sampler) for sampler in SAMPLERS), ("gpt2", "temperature"), ("llama", "power_mh")],
    ("qwen3", "power_mh_early"), ("gpt2", "temperature")))
def test_batched_is_reference(family, sampler):
    """The reference reads the second prompt from position 0: GPT-2 has learned positions, which do not count distances."""
    model = random_model(family)
    reference = RememberingReference(model, LanguageModel(model, stop_ids=STOPS), GUIDED, None, model, SECONDS)
    of_batched.same_as_reference(run(model, sampler), SAMPLERS[sampler], reference)


@pytest.fixture(scope="module")
def plain(qwen3):
    return functools.cache(lambda sampler: run(qwen3, sampler))


@pytest.mark.slow
@pytest.mark.parametrize(("sampler", "options"), [
    pytest.param(sampler, way, id=f"{sampler}-{way}") for sampler in ("power_mh", "power_smc") for way in WAYS])
def test_the_second_prompt_follows_the_rows(qwen3, plain, options, sampler):
    exact = rows_do_not_depend_on_the_batch() and options.keys() <= {"slots", "order"}
    found = run(qwen3, sampler, **options)
    all_same(found, plain(sampler), 0.0 if exact else TOLERANCE)
    assert all(done.cost.companion_forwards == done.cost.token_forwards for done in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["ngram", "self", "dflash"])
def test_a_decoder_changes_nothing(qwen3, plain, draft):
    all_same(run(qwen3, decoder=match(), draft=draft), plain("power_mh"))


def test_the_plan_has_a_second_cache_and_no_second_weights(qwen3):
    parts = LanguageModel(qwen3)
    shape = TargetShape(qwen3.config, parts.device, parts.dtype, 10_000)
    other = GUIDED.companion_shape(shape)
    assert other.weight_bytes() == 0
    one, two = (predict(Workload(shape, 150, 100, Options(), None, companion), 12) for companion in (None, other))
    rows = 12 * 150 * 8 * 8
    assert two.caches - rows > 1.5 * (one.caches - rows)


# The configuration.

GIVEN = ("blend=prompt", "sampler=temperature", "dataset.limit=3", "dataset.max_new_tokens=16")


@pytest.mark.slow
def test_a_run_under_another_prompt(make_config):
    found = {}
    for name, more in {"null": [], "same": ["blend.prompt='{question}'"], "other": ["blend.prompt='1+1='"]}.items():
        result = execute(make_config(*GIVEN, "blend.beta=-0.9", "sampler.temperature=1", *more))
        found[name] = [record["tokens"] for record in records_of(result.folder).values()]
        assert all(record["companion_forwards"] == record["token_forwards"] for record in records_of(result.folder).values())
    plain = execute(make_config(*GIVEN[1:], "sampler.temperature=1"))
    assert found["null"] != found["same"] != found["other"] != found["null"]
    prompt = json.dumps(make_config().dataset.prompt)
    whole = execute(make_config(*GIVEN, "blend.beta=-0.9", "sampler.temperature=1", f"blend.prompt={prompt}"))
    assert [record["tokens"] for record in records_of(whole.folder).values()] == [
        record["tokens"] for record in records_of(plain.folder).values()]


def test_the_prompt_is_part_of_the_identity(make_config):
    hashes = {identity_hash(make_config(*GIVEN, *more)) for more in ([], ["blend.prompt='{question}'"], ["blend.beta=-1"])}
    assert len(hashes) == 3


def test_a_longer_prompt_is_refused_before_anything_is_loaded(make_config):
    config = make_config(*GIVEN, "blend.prompt='{question}{question}{question}{question}'")
    with pytest.raises(ConfigError, match=r"blend.prompt: given '.*; allowed: null, or a text whose prompt is not longer than "
                       r"the problem's and ends in the same token \(that of problem .* has \d+ tokens, and the first \d+\)"):
        plan.check([Job(config)])


def test_another_last_token_is_refused(make_config):
    config = make_config(*GIVEN, "model.chat=false", "blend.prompt='{question} 7'", "dataset.prompt='Well, then: {question}'")
    with pytest.raises(ConfigError, match=r"has another last token than the first\)"):
        plan.check([Job(config)])


ROWS = [{"context": "Write 7 after =.", "ask": "1 + 1 =", "answer": "2"},
        {"context": "Write 9 after =.", "ask": "2 + {question} =", "answer": "4"}]
OF_ROWS = ("dataset.question_template='{{ context }} {{ ask }}'", "dataset.second_template='{{ ask }}'",
           "blend.prompt='{second}'", "dataset.prompt=plain")


@pytest.fixture
def rows(tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return (*GIVEN, "dataset=jsonl", f"dataset.path={tmp_path / 'rows.jsonl'}", *OF_ROWS)


@pytest.mark.slow
def test_the_second_prompt_of_a_row(make_config, rows):
    """Context-aware decoding: with the context, and without it. A text in braces of a row is a text."""
    config = make_config(*rows)
    model, problems = config.model.load("cpu"), config.dataset.problems()
    first = build.encoded(config, model, problems)
    found = config.blend.second_prompts(config, model, problems, first)
    for problem, row in zip(problems, ROWS, strict=True):
        text = config.model.render(model.tokenizer, Conversation.of(row["ask"]))
        assert found[first[problem.id].tobytes()].tolist() == model.encode(text).tolist()
    hashes = {identity_hash(make_config(*rows, *more)) for more in (
        [], ["dataset.second_template='{{ ask }} '"], ["dataset.second_template=null", "blend.prompt=null"])}
    assert len(hashes) == 3
    assert all(record["num_tokens"] for record in records_of(execute(config).folder).values())


def test_a_row_without_a_second_question_is_refused(make_config, rows):
    with pytest.raises(ConfigError, match=r"blend.prompt: given '\{second\}'; allowed: a text without \{second\}, or a "
                       r"dataset with dataset.second_template="):
        plan.check([Job(make_config(*rows, "dataset.second_template=null"))])
    with pytest.raises(UserError, match=r"rows.jsonl: line 1 lacks the field 'bare'"):
        plan.check([Job(make_config(*rows, "dataset.second_template='{{ bare }}'"))])


def test_equal_first_prompts_with_different_second_ones_are_refused(make_config, rows):
    """An engine knows a second prompt by the tokens of the first."""
    same = [*rows, "dataset.question_template='1 + 1 = 2, so what is 2 + 2?'"]
    with pytest.raises(ConfigError, match=r"the same second one \(problems 00000 and 00001 differ only in the second\)"):
        plan.check([Job(make_config(*same))])
    plan.check([Job(make_config(*same, "dataset.second_template=same"))])


def test_what_has_no_second_prompts_is_refused(make_config, qwen3):
    config = make_config(*GIVEN)
    with pytest.raises(UserError, match=r"blend: given 'prompt'; allowed: another blend here: only a run of samples"):
        config.engine.start(config, config.model.load("cpu"), 20, 1)
    with pytest.raises(UserError, match=r"blend: given 'prompt'; allowed: one without second logits with engine=vllm"):
        make_config(*GIVEN, "engine=vllm")
    with pytest.raises(UserError, match=r"blend: given 'prompt'; allowed: another blend for a model with recurrent layers"):
        GUIDED.companion(LanguageModel(random_model("qwen3_5")))
