"""The memory of the probes is bounded for long answers, at the real target's vocabulary size."""

from __future__ import annotations

import subprocess
import sys

import pytest

MEASURE = """
import resource, sys
import numpy as np, torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from dflash_mcmc.forcing.answers import Answer
from dflash_mcmc.draft.network.dflash import DFlash
from dflash_mcmc.draft.network.dflash import DFlashShape
from dflash_mcmc.engine.speculative.drafter import DFlashDrafter
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.probe.speculative_mcmc import SpeculativeMCMC
from dflash_mcmc.rng import Key

shape = dict(hidden_size=32, num_attention_heads=32, num_key_value_heads=8, head_dim=16, intermediate_size=32)
model = LanguageModel(Qwen3ForCausalLM(Qwen3Config(vocab_size=151_936, num_hidden_layers=2, max_position_embeddings=4096,
                                                   tie_word_embeddings=True, **shape)).eval())
draft = DFlash(DFlashShape(hidden_size=32, num_layers=1, num_heads=32, num_key_heads=8, head_dim=16, intermediate_size=32,
                           block_size=16, mask_token_id=7, target_layers=(0, 1), rope={"rope_type": "default",
                           "rope_theta": 1e4}, max_positions=4096, sliding=(None,)))
drafter = DFlashDrafter(draft.eval(), model, 16)
probe = SpeculativeMCMC(alpha=4.0, draft_temperatures=[0.25], num_samples=2, weights="joint", autoregressive=True,
                        timed_rows=0, position_edges=[10, 30])
tokens = np.random.default_rng(0).integers(0, 151_000, 200 + int(sys.argv[1]))
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
before = peak()
record = probe.record(model, drafter, Answer(tokens[:200], tokens[200:]), Key(0))
print(record["blocks"], peak() - before)
"""


@pytest.mark.slow
def test_a_long_answer_takes_less_than_two_gigabytes():
    """3,072 tokens x 151,936 ids: the logits alone would be 1.9 GB, and a probe has several such tables."""
    done = subprocess.run([sys.executable, "-c", MEASURE, "3072"], capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    blocks, gigabytes = map(float, done.stdout.split())
    assert blocks == 192
    assert gigabytes < 2.0
