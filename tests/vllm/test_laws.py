"""The law of what vLLM draws, against the exact law of a random model with a vocabulary of a few tokens (chi-square)."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dflash_mcmc.engine.oracle import exact_law
from dflash_mcmc.ops import Draw, SamplingParams
from dflash_mcmc.rng import Key
from dflash_mcmc.types import ChainResult, Trajectory
from tests.engine.api.test_law import p_value
from tests.engine.batching.test_batched import power_mh
from tests.vllm.running import engine_of, target_of

VOCABULARY, PROMPT, STOP = 6, np.array([1, 4, 2]), 0
LAWS = {
    "plain": SamplingParams(),
    "temperature": SamplingParams(temperature=0.6),
    "top_k": SamplingParams(top_k=3),
    "top_p": SamplingParams(top_p=0.7),
    "min_p": SamplingParams(min_p=0.25),
    "repetition_penalty": SamplingParams(repetition_penalty=1.8),
    "frequency_penalty": SamplingParams(frequency_penalty=1.5),
    "presence_penalty": SamplingParams(presence_penalty=-1.2),
    "all": SamplingParams(0.8, 4, 0.9, 0.05, 1.3, 0.5, 0.4),
}
NUM_DRAWS, NUM_CHAINS = 1500, 600
ENOUGH, REFUSED = 1e-4, 1e-6
"""p-values: a right law is not below the first (with the fixed seed), and a wrong law is below the second."""


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """(model, target): two layers in float32. vLLM's attention on a CPU needs heads of 32."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=32, max_position_embeddings=64, tie_word_embeddings=False, eos_token_id=STOP,
            bos_token_id=None, pad_token_id=None)).eval()
        model.lm_head.weight.data.mul_(8.0)
    return model, target_of(model, tmp_path_factory.mktemp("small"), [STOP], 64)


def exact(model, params: SamplingParams, horizon: int) -> dict[tuple[int, ...], float]:
    """The probability of every complete sequence."""
    known, growing = {}, {(): 0.0}
    while growing:
        tokens, log_q = growing.popitem()
        if len(tokens) == horizon or (tokens and tokens[-1] == STOP):
            known[tokens] = float(np.exp(log_q))
            continue
        with torch.inference_mode():
            logits = model(torch.from_numpy(np.concatenate([PROMPT, np.array(tokens, np.int64)]))[None]).logits[0, -1].numpy()
        law = exact_law.process(logits, params, PROMPT, np.array(tokens, np.int64))
        growing |= {(*tokens, token): log_q + law[token] for token in range(VOCABULARY) if np.isfinite(law[token])}
    return known


def counted(results) -> dict[tuple[int, ...], int]:
    counts: dict[tuple[int, ...], int] = {}
    for done in results:
        tokens = tuple(done.result.trajectory.tokens.tolist())
        counts[tokens] = counts.get(tokens, 0) + 1
    return counts


def drawn(params: SamplingParams, seed: int):
    trajectory = yield Draw(Trajectory.start(PROMPT), 2, params, Key(seed))
    return ChainResult(trajectory)


@pytest.mark.parametrize("name", LAWS)
def test_draws_have_their_law_and_no_other(small, name):
    model, target = small
    engine = engine_of(target, 64, max_num_seqs=64)
    counts = counted(engine.run((seed, drawn(LAWS[name], seed)) for seed in range(NUM_DRAWS)))
    assert p_value(counts, exact(model, LAWS[name], 2)) > ENOUGH
    other = exact(model, SamplingParams(temperature=1.7) if name == "plain" else SamplingParams(), 2)
    if set(counts) <= set(other):
        assert p_value(counts, other) < REFUSED


@pytest.mark.parametrize("early_reject", ["off", "exact"])
def test_power_mh_draws_from_the_power_of_the_law(small, early_reject):
    model, target = small
    sampler = power_mh(alpha=2.0, num_blocks=1, num_steps=12, early_reject=early_reject, proposal_temperature=1.0)
    engine = engine_of(target, 64, max_num_seqs=64)
    results = list(engine.run((seed, sampler.chain(PROMPT, 2, Key(seed))) for seed in range(NUM_CHAINS)))
    law = exact(model, SamplingParams(), 2)
    norm = sum(p**2 for p in law.values())
    counts = counted(results)
    assert p_value(counts, {tokens: p**2 / norm for tokens, p in law.items()}) > ENOUGH
    assert p_value(counts, law) < REFUSED
    assert any(done.result.abandoned for done in results) == (early_reject == "exact")
