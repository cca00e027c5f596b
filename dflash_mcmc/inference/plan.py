"""Predicts the memory of an engine before the engine is built."""

from __future__ import annotations

from typing import NamedTuple

import psutil
import torch

from dflash_mcmc.errors import ConfigError
from dflash_mcmc.inference import attention
from dflash_mcmc.inference.interface import Options
from dflash_mcmc.inference.ladder import cache_size
from dflash_mcmc.inference.language_model import LanguageModel
from dflash_mcmc.inference.speculative.drafter import Drafter
from dflash_mcmc.inference.target_shape import DraftSize, TargetShape
from dflash_mcmc.process import ranks

_SHARE = 0.9
"""Share of the free memory that a plan uses. The rest is left to other processes."""
_MOST_SLOTS = 256
"""Largest number of slots that a plan chooses by itself: more rows hardly increase the rate (LOG.md)."""
_GB = 1e9
_ROW_STATE_BYTES = 8 + 8 + 4 * 8
"""Bytes per position of a row: a token, a uniform and four scores."""
_LOGIT_COPIES = 5
"""Number of float32 arrays, each as large as the logits, that a step holds at the same time."""
_BLOCK_COPIES = 12
"""Like `_LOGIT_COPIES`, for a step that drafts a block. The number includes the arrays of the draft and of the rule."""


class MemoryPlan(NamedTuple):
    """Bytes, by use."""

    num_slots: int
    max_length: int
    caches: int
    """Keys and values of all slots, their spare rows and the prompts read ahead."""
    step: int
    """Working memory of a decode step, most of it for logits."""
    reading: int
    """Working memory of reading prompts."""
    growing: int
    """Additional memory of a cache while it grows."""

    @property
    def total(self) -> int:
        return self.caches + max(self.step, self.reading, self.growing)


def predict(model: LanguageModel | TargetShape, num_slots: int, max_length: int, prompt_length: int, options: Options,
            drafter: Drafter | DraftSize | None = None) -> MemoryPlan:
    """The memory of an engine, without the weights of model and draft."""
    num_drafted = drafter.num_drafted if drafter else 0
    implementation = attention.implementation(options.attention, model.device, model.dtype)
    padding = attention.padding(implementation, options.prefill_chunk, num_drafted)
    rows, length = cache_size(model.device, num_slots, max_length, padding)
    ahead = min(options.read_ahead, num_slots) if options.reuse_prefix else 0
    prompts = ahead * cache_size(model.device, 1, prompt_length, padding)[1]
    positions = rows * length * (2 if options.keep_current and options.reuse_prefix else 1) + prompts
    token_bytes = model.cache_shape.token_bytes()
    if drafter and drafter.companion:
        token_bytes += drafter.companion.token_bytes()
    row_bytes = _ROW_STATE_BYTES + 2 * num_drafted * 8
    caches = positions * token_bytes + rows * length * row_bytes
    copies = _BLOCK_COPIES if drafter else _LOGIT_COPIES
    step = rows * (1 + num_drafted) * (copies * 4 * model.vocab_size + _activation_bytes(model, 1, length))
    # Without `keep_current` all rows may have to read their sequences again at once.
    readers, keys = (ahead, prompt_length) if ahead and options.keep_current else (rows, length)
    chunk = min(options.prefill_chunk, keys)
    gathered = keys * model.cache_shape.token_bytes() // model.cache_shape.num_layers
    reading = max(readers, 1) * (_activation_bytes(model, chunk, keys) + gathered)
    # On a CPU a cache grows, and for a moment its keys or its values exist twice.
    growing = rows * length * token_bytes // 2 if model.device.type == "cpu" else 0
    return MemoryPlan(num_slots, max_length, caches, step, reading, growing)


def plan(model: LanguageModel | TargetShape, num_slots: int | None, num_draws: int, max_length: int, prompt_length: int,
         options: Options, memory_gb: float | None, drafter: Drafter | DraftSize | None = None,
         still_to_load: int = 0) -> MemoryPlan:
    """The plan for `num_slots` slots, or for as many as fit if it is None. Raises ConfigError if they do not fit.

    Args:
        still_to_load: bytes of weights that are not loaded yet. The free memory must hold them too.
    """
    limit = memory_gb * _GB if memory_gb is not None else _SHARE * max(0, free_bytes(model.device) - still_to_load)
    wanted = min(num_slots or _MOST_SLOTS, num_draws)

    def plan_of(slots: int) -> MemoryPlan:
        return predict(model, slots, max_length, prompt_length, options, drafter)

    if plan_of(wanted).total <= limit:
        return plan_of(wanted)
    most = max((slots for slots in range(1, wanted) if plan_of(slots).total <= limit), default=0)
    if num_slots is None and most:
        return plan_of(most)
    short = plan_of(wanted)
    allowed = f"at most {most}" if most else f"none: one slot takes {plan_of(1).total / _GB:.2f} GB"
    source = "hardware.memory_gb" if memory_gb is not None else f"{100 * _SHARE:.0f} % of what is free"
    raise ConfigError("hardware.num_slots", num_slots, f"{allowed} ({wanted} slots of {max_length} tokens take "
                      f"{short.total / _GB:.2f} GB, of which {short.caches / _GB:.2f} GB are keys and values; there are "
                      f"{limit / _GB:.2f} GB, {source})")


def free_bytes(device: torch.device) -> int:
    """Memory of a device that is available to this process."""
    if device.type == "cuda":
        # Unused memory in PyTorch's own pool, left by an earlier job of a sweep, is free too.
        pooled = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + pooled
    return psutil.virtual_memory().available // ranks.local_world_size()


def _activation_bytes(model: LanguageModel | TargetShape, queries: int, keys: int) -> int:
    """Bytes of one row in a forward: the widest activations of a layer and its attention scores."""
    config = model.config
    width = config.hidden_size
    inner = getattr(config, "intermediate_size", None) or 4 * width
    scores = 2 * config.num_attention_heads * queries * keys * 4
    return queries * (6 * width + 3 * inner) * model.dtype.itemsize + scores
