"""Chains on vLLM against the reference engine: tokens, decisions, log p and log q."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from dflash_mcmc.blend.none import NoBlend
from dflash_mcmc.config.schema import PACKAGE
from dflash_mcmc.model.hf import HFModel
from dflash_mcmc.ops import Draw, SamplingParams, Score, Together
from dflash_mcmc.rng import Key
from dflash_mcmc.types import ChainResult, Trajectory
from tests.engine.batching.test_batched import SAMPLERS
from tests.reference import ReferenceEngine
from tests.vllm.running import TOLERANCE, Comparison, engine_of, saved


def component(folder: Path) -> HFModel:
    return HFModel(path=str(folder), revision=None, dtype="float32", chat=True, enable_thinking=False, rope_scaling=None,
                   head_copy=None)


def load(folder: Path):
    chosen = component(folder)
    model = chosen.load("cpu")
    prompts = [model.encode(chosen.prompt(model.tokenizer, f"What is {7 + 3 * i} * {2 + i} + {11 * i}?")) for i in range(10)]
    return model, saved(model, folder), prompts


@pytest.fixture(scope="module")
def embedded():
    return load(PACKAGE / "assets" / "tiny")


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_is_reference(embedded, name):
    model, target, prompts = embedded
    reference = ReferenceEngine(model_of(model), model, NoBlend())
    sampler = SAMPLERS[name]
    results = {done.tag: done for done in engine_of(target).run(chains(sampler, prompts[:3], 1, 12))}
    found = Comparison.of(results, lambda tag: reference.run(dict(chains(sampler, prompts[:3], 1, 12))[tag]))
    assert (found.equal, found.chains) == (3, 3)
    assert max(found.log_p, found.log_q) < TOLERANCE


@pytest.mark.parametrize("name", ["temperature", "power_mh_early"])
def test_stop_strings_end_as_in_the_reference(embedded, name):
    model, target, prompts = embedded
    strings, ends = ["= ", "0", "apples"], set()
    reference = ReferenceEngine(model_of(model), model.stopping_at(strings), NoBlend())
    chosen = [(tag, chain) for tag, chain in chains(SAMPLERS[name], prompts[:4], 2, 24)]
    results = {done.tag: done for done in engine_of(target.stopping_at(strings)).run(chosen)}
    found = Comparison.of(results, lambda tag: reference.run(dict(chains(SAMPLERS[name], prompts[:4], 2, 24))[tag]))
    assert (found.equal, found.chains) == (8, 8)
    assert max(found.log_p, found.log_q) < TOLERANCE
    for done in results.values():
        drawn = done.result.trajectory
        ends.add(drawn.ended and int(drawn.tokens[-1]) not in target.stop_ids)
    assert True in ends  # some end at a string


def model_of(model, folder: Path = PACKAGE / "assets" / "tiny"):
    """The model of transformers, which a LanguageModel has in parts."""
    import transformers

    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    assert loaded.config.vocab_size == model.vocab_size
    return loaded


def chains(sampler, prompts, number: int, horizon: int):
    return [((index, chain), sampler.chain(prompt, horizon, Key(7).fold_in(str(index), chain)))
            for index, prompt in enumerate(prompts) for chain in range(number)]


def test_skipping_identical_tokens_changes_nothing_but_the_cost(embedded):
    _, target, prompts = embedded
    sampler = SAMPLERS["power_mh_early"]
    on, off = ({done.tag: done for done in engine_of(target, skip_identical=skip).run(chains(sampler, prompts[:4], 2, 16))}
               for skip in (True, False))
    found = Comparison.of(on, lambda tag: off[tag].result)
    assert (found.equal, found.chains) == (8, 8)
    assert sum(done.cost.tokens_drawn for done in on.values()) < sum(done.cost.tokens_drawn for done in off.values())


def test_scores_and_further_laws_are_those_of_the_draws(embedded):
    """Teacher forcing gives the columns with which the same tokens were drawn, also of operations asked for together."""
    _, target, prompts = embedded
    params = SamplingParams(0.7, top_k=40, repetition_penalty=1.2, frequency_penalty=0.3)
    laws = (SamplingParams(), SamplingParams(0.5, min_p=0.01, presence_penalty=0.5))

    def both(prompt):
        start = Trajectory.start(prompt)
        drawn = yield Together(tuple(Draw(start, 10, params, Key(number), laws=laws, entropy=True) for number in range(3)))
        scored = yield Together(tuple(Score(start, draw.tokens, params, laws=laws, entropy=True) for draw in drawn))
        for a, b in itertools.chain(zip(drawn, scored, strict=True)):
            for name in ("tokens", "log_p", "log_q", "interval", "laws", "entropy"):
                np.testing.assert_allclose(getattr(a, name), getattr(b, name), atol=TOLERANCE)
            assert a.ended == b.ended
        assert len({draw.tokens.tobytes() for draw in drawn}) > 1
        return ChainResult(scored[0])

    done, = engine_of(target).run([("", both(prompts[0]))])
    assert done.result.trajectory.length > 0
