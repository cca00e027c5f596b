"""A layer blend as a model class of vLLM: log p and log q are those of the engine of slots."""

import dataclasses

import pytest

from dflash_mcmc.components import name_of
from dflash_mcmc.engine.batching.batched import BatchedEngine
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.vllm.drawing import BLENDED
from dflash_mcmc.ops import Draw, SamplingParams, Score
from dflash_mcmc.rng import Key
from dflash_mcmc.types import ChainResult, Trajectory
from tests.engine.batching.test_batched import BLENDS, PROMPTS, STOPS
from tests.targets import random_model
from tests.vllm.running import TOLERANCE, Comparison, engine_of, target_of

WIDE = dict(hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
"""vLLM's attention on a CPU needs heads of 32."""


def drawn_and_scored(prompt, key):
    drawn = yield Draw(Trajectory.start(prompt), 12, SamplingParams(0.9), key)
    scored = yield Score(Trajectory.start(prompt), drawn.tokens, SamplingParams(0.5))
    return ChainResult(scored)


@pytest.mark.parametrize("blend", [name for name in BLENDS if name != "none"])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_logits_are_those_of_slots(tmp_path, family, blend):
    model = random_model(family, **WIDE)
    target, chosen = target_of(model, tmp_path, STOPS), BLENDS[blend]
    chains = [(index, drawn_and_scored(prompt, Key(index))) for index, prompt in enumerate(PROMPTS)]
    again = [(index, drawn_and_scored(prompt, Key(index))) for index, prompt in enumerate(PROMPTS)]
    expected = {done.tag: done for done in BatchedEngine(LanguageModel(model, stop_ids=STOPS), chosen, 4, 170).run(chains)}
    fields = {**dataclasses.asdict(chosen), "name": name_of(chosen)}
    engine = engine_of(target, blend=fields, architecture=BLENDED[model.config.architectures[0]])
    found = Comparison.of({done.tag: done for done in engine.run(again)}, lambda tag: expected[tag].result)
    assert (found.equal, found.chains) == (len(PROMPTS), len(PROMPTS))
    assert max(found.log_p, found.log_q) < TOLERANCE
