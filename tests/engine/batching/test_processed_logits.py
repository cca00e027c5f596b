"""Logits that are not finite after temperature or penalty end a chain, as raw ones do, in every engine.

The bounds of a configuration keep them finite. A sampler that is made in Python has no bounds.
"""

import numpy as np
import pytest

from dflash_mcmc.blend.none import NoBlend
from dflash_mcmc.engine.batching.batched import BatchedEngine
from dflash_mcmc.engine.batching.interface import Options
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.oracle import exact_law
from dflash_mcmc.errors import UserError
from dflash_mcmc.ops import Draw, SamplingParams, Score
from dflash_mcmc.rng import Key
from dflash_mcmc.types import ChainResult, Trajectory
from tests.engine.batching.test_batched import STOPS
from tests.engine.speculative.test_speculator import drafter, match, reject
from tests.engine.vllm.test_session import engine_of

PROMPT, PLAIN = np.array([11, 5, 23, 9]), SamplingParams()
TOO_LARGE = {"temperature": SamplingParams(1e-39), "truncated": SamplingParams(1e-39, top_k=5, top_p=0.9, min_p=0.01),
             "repetition": SamplingParams(repetition_penalty=1e-39), "greedy": SamplingParams(0.0, repetition_penalty=1e-39)}


def drawn(params, source="blended", laws=()):
    """A chain whose second draw has these parameters."""
    path = yield Draw(Trajectory.start(PROMPT), 2, PLAIN, Key(1), laws=(PLAIN,) * len(laws))
    path = yield Draw(path.prefix(1), 8, params, Key(2), source, laws=laws)
    return ChainResult(path)


def scored(params, laws=()):
    path = yield Score(Trajectory.start(PROMPT), np.array([5, 6, 8]), params, laws=laws)
    return ChainResult(path)


def outcomes(engine, *chains) -> list[bool]:
    """Whether each chain has a result. The failures are of one line."""
    done = sorted(engine.run(enumerate(chains)), key=lambda one: one.tag)
    for one in done:
        assert one.result is not None or "not numbers" in one.failure
        assert one.result is None or not np.isnan(one.result.trajectory.log_q).any()
    return [one.result is not None for one in done]


def batched(model, decoder=None, draft=None) -> BatchedEngine:
    parts = LanguageModel(model, stop_ids=STOPS)
    speculation = None if decoder is None else decoder.speculation(drafter("dflash_short", parts, model))
    return BatchedEngine(parts, NoBlend(), 4, 16, Options(), None, speculation,
                         None if draft is None else drafter(draft, parts, model))


@pytest.mark.parametrize("params", TOO_LARGE.values(), ids=TOO_LARGE)
@pytest.mark.parametrize("decoder", [None, match(), reject()], ids=["plain", "match", "rejection"])
def test_draws_end_and_spoil_no_other(qwen3, decoder, params):
    """Alone, and in a batch with a draw of another law."""
    engine = batched(qwen3, decoder)
    assert outcomes(engine, drawn(params)) == [False]
    assert outcomes(engine, drawn(PLAIN), drawn(params), drawn(SamplingParams(0.0))) == [True, False, True]


def test_draws_from_the_draft_end_with_the_block(qwen3):
    engine = batched(qwen3, draft="dflash")
    for params in (SamplingParams(1e-39), SamplingParams(0.7, repetition_penalty=1e-39)):
        assert outcomes(engine, drawn(params, "draft"), drawn(SamplingParams(0.7), "draft")) == [False, True]


@pytest.mark.parametrize("decoder", [None, match()], ids=["plain", "match"])
def test_further_laws_and_scores_end_too(qwen3, decoder):
    engine = batched(qwen3, decoder)
    assert outcomes(engine, drawn(PLAIN, laws=(PLAIN, SamplingParams(1e-39))), drawn(PLAIN, laws=(PLAIN,))) == [False, True]
    assert outcomes(engine, scored(SamplingParams(1e-39)), scored(PLAIN, (SamplingParams(1e-39),)),
                    scored(SamplingParams(0.3, top_k=2))) == [False, False, True]


def test_vllm_ends_them_too(qwen3):
    engine, _ = engine_of(qwen3)
    assert outcomes(engine, *map(drawn, TOO_LARGE.values()), drawn(PLAIN)) == [False] * len(TOO_LARGE) + [True]
    assert outcomes(engine, scored(SamplingParams(1e-39)), scored(PLAIN, (SamplingParams(1e-39),)), scored(PLAIN)) == [
        False, False, True]


def test_the_oracle_says_so():
    with np.errstate(over="ignore"), pytest.raises(ValueError, match="no finite maximum"):
        exact_law.process(np.array([1.0, 2.0]), SamplingParams(1e-309), np.empty(0), np.empty(0))


@pytest.mark.parametrize(("overrides", "message"), [
    (["sampler=temperature", "sampler.temperature=1e-39"],
     "sampler.temperature: given 1e-39; allowed: a number >= 1e-06 and <= 1e+06 or null"),
    (["condition=ps", "sampler.alpha=1e39"], "sampler.alpha: given 1e+39; allowed: a number >= 1e-06 and <= 1e+06"),
    (["sampler=temperature", "sampler.repetition_penalty=1e-39"],
     "sampler.repetition_penalty: given 1e-39; allowed: a number >= 1e-06 and <= 1e+06"),
    (["sampler=temperature", "sampler.frequency_penalty=1e39"], "sampler.frequency_penalty: given 1e+39; allowed: a number"),
    (["decoder=speculative_rejection", "draft=ngram", "decoder.draft_temperature=1e-39"],
     "decoder.draft_temperature: given 1e-39; allowed: 0, or a number from 1e-06 to 1e+06"),
    (["sampler=replica_exchange", "sampler.alphas=[1,1e39]"], "sampler.alphas"),
    (["blend=layer", "blend.beta=-1e39"], "blend.beta: given -1e+39; allowed: a number"),
])
def test_a_configuration_has_bounds(make_config, overrides, message):
    with pytest.raises(UserError) as error:
        make_config(*overrides)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)
