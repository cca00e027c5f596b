"""The part of the benchmark at the shape of Qwen3-4B and its DFlash draft, with random weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from dflash_mcmc.draft import Draft
from dflash_mcmc.draft.network.checkpoint import default_target_layers
from dflash_mcmc.draft.network.dflash import DFlashShape
from dflash_mcmc.engine.batching.interface import Options
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.batching.plan import Workload, predict
from dflash_mcmc.engine.speculative.drafter import DFlashDrafter
from dflash_mcmc.sampler import Sampler
from tests.bench import decoders, random_weights
from tests.bench.measure import PLAIN, Decoding, Sizes, power_mh, run, temperature
from tests.bench.subject import Subject, random_prompts

_TARGET: dict[str, Any] = dict(
    vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
    max_position_embeddings=40960, rms_norm_eps=1e-6, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
    pad_token_id=None, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
"""config.json of Qwen3-4B, without stop ids: every answer has the full length."""
_LAYERS = 36
_BLOCK_SIZE, _MASK, _DRAFT_LAYERS = 16, 151669, 5


class RandomDraft(Draft):
    """A random draft at the shape of Qwen3-4B-DFlash-b16. No token of it is accepted: what it costs is what is measured.

    It is made once, because it has half a billion weights.
    """

    def __init__(self, target: LanguageModel):
        layers, config = len(target.layers), target.config
        shape = DFlashShape(
            hidden_size=config.hidden_size, num_layers=_DRAFT_LAYERS, num_heads=config.num_attention_heads,
            num_key_heads=config.num_key_value_heads, head_dim=config.head_dim, intermediate_size=config.intermediate_size,
            block_size=_BLOCK_SIZE, mask_token_id=min(_MASK, target.vocab_size - 1),
            target_layers=default_target_layers(layers, _DRAFT_LAYERS),
            num_target_layers=layers, rope=dict(config.rope_parameters), max_positions=config.max_position_embeddings,
            sliding=(None,) * _DRAFT_LAYERS, dtype=target.dtype)
        network = random_weights.draft(shape, target.dtype, str(target.device))
        self._drafter = DFlashDrafter(network, target, _BLOCK_SIZE)

    def load(self, target: LanguageModel) -> DFlashDrafter:
        """The drafter."""
        return self._drafter


def qwen3_4b(horizon: int, num_layers: int = _LAYERS) -> Subject:
    """Random weights at the shape of Qwen3-4B in bfloat16, on a GPU if there is one.

    Args:
        num_layers: fewer layers than the real model's need less memory.
    """
    from transformers import Qwen3Config

    device = "cuda" if torch.cuda.is_available() else "cpu"
    causal_lm = random_weights.target(Qwen3Config(**_TARGET, num_hidden_layers=num_layers), torch.bfloat16, device)
    prompts = random_prompts(causal_lm.config.vocab_size)
    return Subject("qwen3_4b", causal_lm, LanguageModel(causal_lm, head_copy=False), prompts, horizon)


def rates(subject: Subject, sizes: Sizes) -> list[dict]:
    """(n) Rates, milliseconds of a step, and on a GPU peak memory against its plan and the effect of CUDA graphs."""
    rows, draft = [], RandomDraft(subject.model)
    for slots in (1, 8, sizes.slots):
        for name, sampler, decoding in _cases(sizes, draft):
            row = {"slots": slots, "case": name, **_measured(subject, sampler, slots, sizes, decoding)}
            if subject.model.device.type == "cuda":
                without = _measured(subject, sampler, slots, sizes, decoding, Options(cuda_graphs=False))
                row["graphs off / on, ms a step"] = without["ms a step"] / row["ms a step"]
            rows.append(row)
    return rows


def _cases(sizes: Sizes, draft: Draft) -> Iterator[tuple[str, Sampler, Decoding]]:
    yield "temperature", temperature(1.0), PLAIN
    yield "power_mh", power_mh(num_blocks=sizes.blocks), PLAIN
    yield "temperature, DFlash, speculative_match", temperature(1.0), decoders.match("DFlash", draft, 0.0)


def _measured(subject: Subject, sampler: Sampler, slots: int, sizes: Sizes, decoding: Decoding,
              options: Options | None = None) -> dict:
    model, longest = subject.model, max(map(len, subject.prompts))
    on_gpu = model.device.type == "cuda"
    drafter = decoding.draft.load(model) if decoding.draft else None  # its weights are not part of the peak
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    got = run(subject, sampler, slots, slots * sizes.waves, options, decoding=decoding, label=f"{slots} slots")
    row = {"tokens/s": got.tokens_per_second, "token-forwards/s": got.mean_token_forwards * got.num_chains / got.seconds,
           "ms a step": 1e3 * got.counters.step_seconds / got.counters.steps}
    if on_gpu:
        planned = predict(Workload(model, longest + subject.horizon, longest, options or Options(), drafter), slots)
        row["peak / planned"] = (torch.cuda.max_memory_allocated() - before) / planned.total
    return row
