"""What an engine's memory depends on, how much it is, and the caches that take it.

All but the caches themselves is known before the weights are loaded.
"""

from typing import Any, NamedTuple

import torch

from dflash_mcmc.engine.batching import attention, cache
from dflash_mcmc.engine.batching.interface import Options
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.batching.linear import is_looped, is_small, keeps_copy
from dflash_mcmc.engine.batching.recurrent_state import HybridCache
from dflash_mcmc.engine.speculative.drafter import Drafter, ModelDrafter
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.process import machine, ranks
from dflash_mcmc.tokenizer import max_positions


class TargetShape(NamedTuple):
    """The attributes of `LanguageModel` that the checks before a start need, under the same names."""

    config: Any
    """The configuration of `transformers`."""
    device: torch.device
    dtype: torch.dtype
    num_parameters: int | None
    """Parameters in the files of the checkpoint, or of the architecture if they are not here; None if neither is known."""
    head_copy: bool | None = None
    """See `Float32Head`."""

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def num_layers(self) -> int:
        return self.config.num_hidden_layers

    @property
    def max_positions(self) -> int | None:
        return max_positions(self.config)

    @property
    def changes_scores(self) -> bool:
        return attention.changes_scores(self.config)

    @property
    def cache_shape(self) -> cache.CacheShape:
        """Shape of the keys and values of a token. Latent attention (DeepSeek) has one latent and one rotated part."""
        heads, latent = self.config.num_attention_heads, getattr(self.config, "kv_lora_rank", None)
        if latent is not None:
            return cache.CacheShape(self.num_layers, 1, latent, self.config.qk_rope_head_dim, self.dtype)
        dim = getattr(self.config, "head_dim", None) or self.config.hidden_size // heads
        recurrent = cache.recurrent_shape(self.config, self.dtype)
        attending = self.num_layers - (len(recurrent.layers) if recurrent else 0)
        key_heads = getattr(self.config, "num_key_value_heads", None) or heads
        return cache.CacheShape(attending, key_heads, dim, dim, self.dtype, recurrent)

    def weight_bytes(self) -> int | None:
        """Bytes of the weights and of the float32 copy of the head (`Float32Head`); None if not known."""
        if self.num_parameters is None:
            return None
        size = self.vocab_size * self.config.hidden_size
        packed = self.device.type == "cpu" and not is_small(size)
        copied = keeps_copy(self.head_copy, self.device) and (packed or self.dtype != torch.float32)
        return self.num_parameters * self.dtype.itemsize + (4 * size if copied else 0)


class DraftSize(NamedTuple):
    """The sizes of a draft that an engine's memory depends on. A `Drafter` has attributes of the same names."""

    num_drafted: int
    companion: cache.CacheShape | None = None
    model: TargetShape | None = None
    """The model that drafts; None for another kind of draft."""


class Workload(NamedTuple):
    """A model, a draft and lengths: what the memory depends on, beside the number of slots.

    `companion` is another model that reads every token with the target.
    """

    model: LanguageModel | TargetShape
    max_length: int
    prompt_length: int
    options: Options
    drafter: Drafter | DraftSize | None = None
    companion: LanguageModel | TargetShape | None = None

    @property
    def drafting(self) -> LanguageModel | TargetShape | None:
        """A model that drafts; None for another draft, or without one."""
        return self.drafter.model if isinstance(self.drafter, DraftSize | ModelDrafter) else None

    @property
    def models(self) -> list[LanguageModel | TargetShape]:
        """The target, a model that drafts, and a companion."""
        return [self.model, *(each for each in (self.drafting, self.companion) if each is not None)]

    @property
    def padding(self) -> int:
        """Positions after a sequence, for a block drafted beyond the end; all padding can share one of them."""
        return self.num_drafted + 1

    def implementation(self, model: LanguageModel | TargetShape) -> str:
        """The implementation of a model's attention."""
        return attention.implementation(self.options.attention, model.device, model.changes_scores)

    @property
    def layers(self) -> str:
        """What runs the target's layers: as it is loaded, or else as its configuration says."""
        model, on_cpu = self.model, self.model.device.type == "cpu"
        if isinstance(model, LanguageModel):
            own, where = model.loop_under(self.implementation(model)) is not None, ""
        else:
            own = is_looped(model.config) and (on_cpu or self.options.attention == "auto")
            where = "" if on_cpu else ", where Triton is installed"
        if own:
            return f"the loop of this package{where}"
        return ("modules of transformers (the loop of this package has those of Llama, Qwen2 and Qwen3, and takes Triton and "
                "hardware.attention=auto on a GPU)")

    @property
    def num_drafted(self) -> int:
        """Drafted tokens of a block."""
        return self.drafter.num_drafted if self.drafter else 0

    @property
    def num_recent(self) -> int:
        """States that a row keeps beside its snapshots: one for each position that it can reach between two checks."""
        return (self.options.steps_between_checks or 1) * (1 + self.num_drafted) + 1

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of a token, those of the draft and of a companion included."""
        return self.model.cache_shape.token_bytes() + sum(shape.token_bytes() for shape in self.companions)

    @property
    def companions(self) -> tuple[cache.CacheShape, ...]:
        """Shapes of the caches that follow the target's: a draft's and another model's, as far as there are any."""
        drafted = self.drafter.companion if self.drafter else None
        other = self.companion.cache_shape if self.companion else None
        return tuple(shape for shape in (drafted, other) if shape is not None)

    def state_bytes(self, num_rows: int, length: int, num_copies: int) -> int:
        """Bytes of the recurrent states and their inputs in `num_copies` caches of so many rows and positions."""
        shape = self.model.cache_shape.recurrent
        if shape is None:
            return 0
        states = self.num_recent + length // self.options.snapshot_every + 1
        return num_copies * num_rows * (states * shape.state_bytes + length * shape.input_bytes)

    def prompts(self, num_slots: int) -> tuple[int, int]:
        """Rows and positions of the prompts that are read ahead."""
        _, positions = cache.cache_size(self.model.device, 1, self.prompt_length, self.padding)
        return min(self.options.read_ahead, num_slots), positions


_SHARE = 0.9
"""Share of the free memory that a plan uses. The rest is left to other processes."""
_MOST_SLOTS = 256
"""Largest number of slots that a plan chooses by itself: more rows hardly increase the rate (notebook, "The engine")."""
_GB = 1e9
_ROW_STATE_BYTES = 8 + 8 + 4 * 8
"""Bytes per position of a row: a token, a uniform and four scores."""
_LOGIT_COPIES = 5
"""Number of float32 arrays, each as large as the logits, that a step holds at the same time."""
_BLOCK_COPIES = 12
"""Like `_LOGIT_COPIES`, for a step that drafts a block. The number includes the arrays of the draft and of the rule."""
_OTHER_COPIES = 3
"""The arrays of a blend of logits: the target's, the companion's and the mixture."""


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
    limit: int | None = None
    """Memory for all of this. None if it is not known."""
    states: int = 0
    """The part of `caches` for the states and inputs of recurrent layers."""
    layers: str = ""
    """See `Workload.layers`."""

    @property
    def total(self) -> int:
        """Bytes without which the engine cannot run."""
        return self.caches + max(self.step, self.reading, self.growing)

    def describe(self, weight_bytes: int | None = None) -> str:
        """The plan in a line, and what runs the layers in another one.

        Args:
            weight_bytes: bytes of the target's weights, which are not part of the plan; None if they are not known.
        """
        uses = [] if weight_bytes is None else [f"weights {_size(weight_bytes)}"]
        keys = _size(self.caches - self.states)
        uses += [f"keys and values {keys} for {self.num_slots} slots of {self.max_length:,} tokens"]
        uses += [f"recurrent states {_size(self.states)}"] if self.states else []
        uses += [f"work space {_size(self.total - self.caches)}"]
        uses += [] if self.limit is None else [f"free {_size(self.limit - self.total)} of {_size(self.limit)}"]
        return "memory: " + "; ".join(uses) + f"\nlayers: {self.layers}"


def predict(work: Workload, num_slots: int) -> MemoryPlan:
    """The memory of an engine, without the weights of model and draft."""
    model = work.model
    rows, length = cache.cache_size(model.device, num_slots, work.max_length, work.padding)
    ahead, longest_prompt = work.prompts(num_slots)
    positions = 2 * rows * length + ahead * longest_prompt  # each row has a spare row
    states = work.state_bytes(rows, length, 2) + work.state_bytes(ahead, longest_prompt, 1)
    row_bytes = _ROW_STATE_BYTES + 2 * work.num_drafted * 8
    caches = states + positions * work.token_bytes + rows * length * row_bytes
    copies = (_BLOCK_COPIES if work.drafter else _LOGIT_COPIES) + (_OTHER_COPIES if work.companion else 0)
    widest = max(_activation_bytes(each, 1, length) for each in work.models)
    step = rows * (1 + work.num_drafted) * (copies * 4 * model.vocab_size + widest)
    layer_bytes = max(each.cache_shape.layer_bytes() for each in work.models)
    # In half precision `grouped_attention` may copy a layer's keys to float32.
    copied = max((4 * halved.num_heads * halved.key_dim for each in work.models if work.implementation(each) == "grouped"
                  and (halved := each.cache_shape).dtype.itemsize < 4), default=0)
    step += rows * length * copied
    keys = work.prompt_length
    chunk = min(work.options.prefill_chunk, keys)
    widest = max(_activation_bytes(each, chunk, keys) for each in work.models)
    reading = ahead * (widest + keys * (layer_bytes + copied))
    if recurrent := model.cache_shape.recurrent:
        step += rows * recurrent.work_bytes(1 + work.num_drafted)
        reading = max(reading + ahead * recurrent.work_bytes(chunk), rows * recurrent.work_bytes(cache.PIECE))
    # On a CPU a cache grows, and for a moment its keys or its values exist twice.
    growing = (states + rows * length * work.token_bytes) // 2 if model.device.type == "cpu" else 0
    return MemoryPlan(num_slots, work.max_length, caches, step, reading, growing, states=states, layers=work.layers)


def plan(work: Workload, num_slots: int | None, num_draws: int, memory_gb: float | None,
         still_to_load: int = 0) -> MemoryPlan:
    """The plan for `num_slots` slots, or for as many as fit if it is None. Raises ConfigError if they do not fit.

    Args:
        num_draws: number of draws that can be in progress.
        still_to_load: bytes of weights that are not loaded yet. The free memory must hold them too.
    """
    if memory_gb is None:
        limit = int(_SHARE * max(0, free_bytes(work.model.device) - still_to_load))
        source = f"{_size(limit)}, {100 * _SHARE:.0f} % of what is free"
    else:
        limit = int(memory_gb * _GB)
        source = f"{_size(limit)}, hardware.memory_gb={memory_gb:g}"
    wanted = min(num_slots or _MOST_SLOTS, num_draws)
    whole = predict(work, wanted)
    if whole.total <= limit:
        return whole._replace(limit=limit)
    most = max((slots for slots in range(1, wanted) if predict(work, slots).total <= limit), default=0)
    if not most:
        least = predict(work, 1).total
        raise ConfigError("hardware.memory_gb", memory_gb or source, f"at least {least / _GB:.3g} ({_size(least)}), for one "
                          f"slot of up to {work.max_length} tokens; or engine=vllm, whose memory follows the text, or "
                          "engine=api, with a server's memory")
    if num_slots is None:
        return predict(work, most)._replace(limit=limit)
    raise ConfigError("hardware.num_slots", num_slots, f"at most {most} ({wanted} slots of up to {work.max_length} tokens "
                      f"take at least {_size(whole.total)}, of which {_size(whole.caches)} are keys and values; there are "
                      f"{source})")


def _size(num_bytes: int) -> str:
    """Bytes in GB, or in MB if they are few."""
    return f"{num_bytes / _GB:.2f} GB" if num_bytes >= 0.1 * _GB or not num_bytes else f"{num_bytes / 1e6:.3g} MB"


def free_bytes(device: torch.device) -> int:
    """Memory of a device that is available to this process."""
    if device.type == "cuda":
        # Unused memory in PyTorch's own pool, left by an earlier job of a sweep, is free too.
        pooled = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + pooled
    return machine.free_memory() // ranks.local_world_size()


def _activation_bytes(model: LanguageModel | TargetShape, queries: int, keys: int) -> int:
    """Bytes of one row in a forward: the widest activations of a layer and its attention scores."""
    config = model.config
    width = config.hidden_size
    inner = getattr(config, "intermediate_size", None) or 4 * width
    scores = 2 * config.num_attention_heads * queries * keys * 4
    return queries * (6 * width + 3 * inner) * model.dtype.itemsize + scores


def cache_of(work: Workload, model: LanguageModel, num_rows: int, length: int) -> cache.KVCache:
    """A cache of so many rows and positions for a model and its companions."""
    sizes = model.cache_shape, num_rows, length, model.device, work.companions
    if model.cache_shape.recurrent is None:
        return cache.KVCache(*sizes)
    return HybridCache(*sizes, work.options.snapshot_every, work.num_recent)
