"""What an engine's memory depends on, how much it is, and the caches that take it.

All but the caches themselves is known before the weights are loaded.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from dflash_mcmc.engine.batching import attention
from dflash_mcmc.engine.batching.cache import (
    PIECE,
    CacheShape,
    ContiguousCache,
    SlotCache,
    num_recent,
    num_snapshots,
    recurrent_shape,
)
from dflash_mcmc.engine.batching.float32_head import keeps_copy
from dflash_mcmc.engine.batching.interface import Options
from dflash_mcmc.engine.batching.ladder import cache_size, ladder_of
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.batching.paged_cache import NUM_RESERVED, PAGE_SIZE, PagedCache, PagedMemory
from dflash_mcmc.engine.batching.prompt_encoder import max_positions
from dflash_mcmc.engine.batching.recurrent_state import HybridMemory, HybridPages, HybridRows
from dflash_mcmc.engine.batching.row_linear import is_small
from dflash_mcmc.engine.speculative.drafter import Drafter, ModelDrafter
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.process import machine, ranks


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
    def attention_needs(self) -> attention.Needs:
        return attention.needs_of(self.config, attention.masks_of(self.config).plain)

    @property
    def cache_shape(self) -> CacheShape:
        """Shape of the keys and values of a token. Latent attention (DeepSeek) has one latent and one rotated part."""
        heads, latent = self.config.num_attention_heads, getattr(self.config, "kv_lora_rank", None)
        if latent is not None:
            return CacheShape(self.num_layers, 1, latent, self.config.qk_rope_head_dim, self.dtype)
        dim = getattr(self.config, "head_dim", None) or self.config.hidden_size // heads
        recurrent = recurrent_shape(self.config, self.dtype)
        attending = self.num_layers - (len(recurrent.layers) if recurrent else 0)
        key_heads = getattr(self.config, "num_key_value_heads", None) or heads
        return CacheShape(attending, key_heads, dim, dim, self.dtype, recurrent)

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
    companion: CacheShape | None = None
    token_bytes: int = 0
    """Further bytes of each position of a row: keys and values that a draft keeps outside the cache."""
    model: TargetShape | None = None
    """The model that drafts; None for another kind of draft."""


class Workload(NamedTuple):
    """A model, a draft and lengths: what the memory depends on, beside the numbers of slots and pages.

    `companion` and `anti` are other models that read every token with the target, and `mixed_layers` counts those that a blend
    mixes in.
    """

    model: LanguageModel | TargetShape
    max_length: int
    prompt_length: int
    options: Options
    drafter: Drafter | DraftSize | None = None
    companion: LanguageModel | TargetShape | None = None
    mixed_layers: int = 0
    anti: LanguageModel | TargetShape | None = None

    @property
    def models(self) -> list[LanguageModel | TargetShape]:
        """The target, a model that drafts, and companions."""
        drafting = self.drafter.model if isinstance(self.drafter, DraftSize | ModelDrafter) else None
        return [self.model, *(each for each in (drafting, self.companion, self.anti) if each is not None)]

    @property
    def padding(self) -> int:
        """Positions after a sequence."""
        return max(attention.padding(self.implementation(model), self.options.prefill_chunk, self.num_drafted)
                   for model in self.models)

    def implementation(self, model: LanguageModel | TargetShape) -> str:
        """The implementation of a model's attention."""
        return attention.implementation(self.options.attention, model.device, model.dtype, model.attention_needs)

    @property
    def num_drafted(self) -> int:
        """Drafted tokens of a block."""
        return self.drafter.num_drafted if self.drafter else 0

    @property
    def keeps_current(self) -> bool:
        """Whether spare rows are kept."""
        return self.options.keep_current and self.options.reuse_prefix

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of a token, those of the draft and of a companion included."""
        return self.model.cache_shape.token_bytes() + sum(shape.token_bytes() for shape in self.companions)

    @property
    def companions(self) -> tuple[CacheShape, ...]:
        """Shapes of the caches that follow the target's: a draft's and another model's, as far as there are any."""
        drafted = self.drafter.companion if self.drafter else None
        others = [None if model is None else model.cache_shape for model in (self.companion, self.anti)]
        return tuple(shape for shape in (drafted, *others) if shape is not None)

    def state_bytes(self, num_rows: int, length: int, num_copies: int) -> int:
        """Bytes of the recurrent states and their inputs in `num_copies` caches of so many rows and positions."""
        shape = self.model.cache_shape.recurrent
        if shape is None:
            return 0
        states = num_recent(self.options, self.num_drafted) + length // self.options.snapshot_every + 1
        return num_copies * num_rows * (states * shape.state_bytes + length * shape.input_bytes)

    def state_bytes_of_pages(self, num_pages: int, num_rows: int) -> int:
        """Bytes of the recurrent states and their inputs in so many pages, and in caches of so many rows together."""
        shape = self.model.cache_shape.recurrent
        if shape is None:
            return 0
        states = num_rows * num_recent(self.options, self.num_drafted)
        states += 1 + num_snapshots(num_pages, PAGE_SIZE, self.options.snapshot_every)
        return states * shape.state_bytes + (num_pages + NUM_RESERVED) * PAGE_SIZE * shape.input_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, and of its share of the snapshots."""
        shape = self.model.cache_shape.recurrent
        states = 0 if shape is None else (PAGE_SIZE * shape.input_bytes
                                          - (-PAGE_SIZE * shape.state_bytes // self.options.snapshot_every))
        return PAGE_SIZE * self.token_bytes + states

    def prompts(self, num_slots: int) -> tuple[int, int]:
        """Rows and positions of the prompts that are read ahead."""
        ahead = min(self.options.read_ahead, num_slots) if self.options.reuse_prefix else 0
        return ahead, cache_size(self.model.device, 1, self.prompt_length, self.padding)[1]


_SHARE = 0.9
"""Share of the free memory that a plan uses. The rest is left to other processes."""
_MOST_SLOTS = 256
"""Largest number of slots that a plan chooses by itself: more rows hardly increase the rate (notebook, "The engine")."""
_GB = 1e9
_ENDS = 2
"""Pages of a draw that are not full: the ends of its row and of its spare row."""
_ROW_STATE_BYTES = 8 + 8 + 4 * 8
"""Bytes per position of a row: a token, a uniform and four scores."""
_LOGIT_COPIES = 5
"""Number of float32 arrays, each as large as the logits, that a step holds at the same time."""
_BLOCK_COPIES = 12
"""Like `_LOGIT_COPIES`, for a step that drafts a block. The number includes the arrays of the draft and of the rule."""
_OTHER_COPIES = 2
"""The arrays that a blend of logits adds to those that it mixes in: the target's and the mixture."""


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
    num_pages: int = 0
    """Pages of the cache; 0 for a contiguous cache."""
    limit: int | None = None
    """Memory for all of this. None if it is not known."""
    states: int = 0
    """The part of `caches` for the states and inputs of recurrent layers."""

    @property
    def total(self) -> int:
        """Bytes without which the engine cannot run."""
        return self.caches + max(self.step, self.reading, self.growing)

    @property
    def mean_length(self) -> int:
        """Tokens for which each slot has room if all slots have the same: the current sequence, and a draw besides it."""
        return self.num_pages * PAGE_SIZE // self.num_slots if self.num_pages else self.max_length

    def describe(self, weight_bytes: int | None = None) -> str:
        """The plan in a line.

        Args:
            weight_bytes: bytes of the target's weights, which are not part of the plan; None if they are not known.
        """
        lengths = f"{self.max_length:,} tokens"
        if self.num_pages and self.mean_length < 2 * self.max_length:  # else all can have the full length at once
            lengths = f"up to {self.max_length:,} tokens, {self.mean_length:,} on average for sequences and draws together"
        uses = [] if weight_bytes is None else [f"weights {_size(weight_bytes)}"]
        uses += [f"keys and values {_size(self.caches - self.states)} for {self.num_slots} slots of {lengths}"]
        uses += [f"recurrent states {_size(self.states)}"] if self.states else []
        uses += [f"work space {_size(self.total - self.caches)}"]
        uses += [] if self.limit is None else [f"free {_size(self.limit - self.total)} of {_size(self.limit)}"]
        return "memory: " + "; ".join(uses)


def predict(work: Workload, num_slots: int, num_pages: int = 0) -> MemoryPlan:
    """The memory of an engine, without the weights of model and draft.

    Args:
        num_pages: pages of the cache; 0 for a contiguous cache.
    """
    model = work.model
    rows, length = cache_size(model.device, num_slots, work.max_length, work.padding)
    ahead, longest_prompt = work.prompts(num_slots)
    kept = 2 if work.keeps_current else 1
    positions = rows * length * kept + ahead * longest_prompt
    if num_pages:
        positions = (num_pages + NUM_RESERVED) * PAGE_SIZE
        states = work.state_bytes_of_pages(num_pages, rows * kept + ahead)
    else:
        states = work.state_bytes(rows, length, kept) + work.state_bytes(ahead, longest_prompt, 1)
    row_bytes = _ROW_STATE_BYTES + 2 * work.num_drafted * 8 + (work.drafter.token_bytes if work.drafter else 0)
    caches = states + positions * work.token_bytes + rows * length * row_bytes
    others = work.mixed_layers + (work.companion is not None) + (work.anti is not None)
    copies = (_BLOCK_COPIES if work.drafter else _LOGIT_COPIES) + (_OTHER_COPIES + others if others else 0)
    widest = max(_activation_bytes(each, 1, length) for each in work.models)
    step = rows * (1 + work.num_drafted) * (copies * 4 * model.vocab_size + widest)
    layer_bytes = max(each.cache_shape.layer_bytes() for each in work.models)
    # In half precision `grouped_attention` may copy a layer's keys to float32.
    copied = max((4 * halved.num_heads * halved.key_dim for each in work.models if work.implementation(each) == "grouped"
                  and (halved := each.cache_shape).dtype.itemsize < 4), default=0)
    step += rows * length * copied
    if num_pages:  # the pages of all rows are gathered for each layer
        step += rows * length * layer_bytes
    # Without `keep_current` all rows may have to read their sequences again at once.
    readers, keys = (ahead, work.prompt_length) if ahead and work.options.keep_current else (rows, length)
    chunk = min(work.options.prefill_chunk, keys)
    widest = max(_activation_bytes(each, chunk, keys) for each in work.models)
    reading = max(readers, 1) * (widest + keys * (layer_bytes + copied))
    if recurrent := model.cache_shape.recurrent:
        step += rows * recurrent.work_bytes(1 + work.num_drafted)
        reading = max(reading + max(readers, 1) * recurrent.work_bytes(chunk), rows * recurrent.work_bytes(PIECE))
    # On a CPU a cache grows, and for a moment its keys or its values exist twice.
    growing = (states + rows * length * work.token_bytes) // 2 if model.device.type == "cpu" and not num_pages else 0
    return MemoryPlan(num_slots, work.max_length, caches, step, reading, growing, num_pages, states=states)


def plan(work: Workload, num_slots: int | None, num_draws: int, memory_gb: float | None, kv_cache: str = "auto",
         still_to_load: int = 0) -> MemoryPlan:
    """The plan for `num_slots` slots, or for as many as fit if it is None. Raises ConfigError if they do not fit.

    Args:
        num_draws: number of draws that can be in progress.
        kv_cache: auto, contiguous or paged. auto is contiguous if that fits, otherwise paged.
        still_to_load: bytes of weights that are not loaded yet. The free memory must hold them too.
    """
    if memory_gb is None:
        limit = int(_SHARE * max(0, free_bytes(work.model.device) - still_to_load))
        source = f"{100 * _SHARE:.0f} % of what is free"
    else:
        limit, source = int(memory_gb * _GB), "hardware.memory_gb"
    wanted = min(num_slots or _MOST_SLOTS, num_draws)
    paged = kv_cache == "paged" or (kv_cache == "auto" and predict(work, wanted).total > limit)
    return (_paged if paged else _contiguous)(work, num_slots, wanted, limit, source)._replace(limit=limit)


def _contiguous(work: Workload, num_slots: int | None, wanted: int, limit: int, source: str) -> MemoryPlan:
    """The plan of a cache with a row for each slot."""
    short = predict(work, wanted)
    if short.total <= limit:
        return short
    most = max((slots for slots in range(1, wanted) if predict(work, slots).total <= limit), default=0)
    if num_slots is None and most:
        return predict(work, most)
    suffix = " with hardware.kv_cache=contiguous"
    raise _refusal(work, num_slots, most, short, predict(work, 1), f"{_size(limit)}, {source}", suffix)


def _paged(work: Workload, num_slots: int | None, wanted: int, limit: int, source: str) -> MemoryPlan:
    """The plan of a cache of pages, as many as fit and can be used.

    If the number of slots is not given, each has at least half of the longest sequence.
    """
    fewest = wanted if num_slots is not None else 1
    for slots in range(wanted, fewest - 1, -1):
        pages = _pages_that_fit(work, slots, limit)
        enough = slots * work.max_length // 2 if num_slots is None and slots > 1 else 0
        if pages >= max(_fewest_pages(work, slots), enough // PAGE_SIZE):
            return predict(work, slots, pages)
    fitting = (slots for slots in range(1, fewest) if _pages_that_fit(work, slots, limit) >= _fewest_pages(work, slots))
    most = max(fitting, default=0)
    least, one = (predict(work, slots, _fewest_pages(work, slots)) for slots in (fewest, 1))
    raise _refusal(work, num_slots, most, least, one, f"{_size(limit)}, {source}")


def _refusal(work: Workload, num_slots: int | None, most: int, least: MemoryPlan, one: MemoryPlan, room: str,
             suffix: str = "") -> ConfigError:
    """The error of slots that do not fit.

    Args:
        most: the number of slots that fit.
        least, one: the smallest plans of the slots that are asked for, and of one slot.
        room: the memory that there is, and where the number is from.
    """
    if not most:
        return ConfigError("hardware.memory_gb", f"nothing that holds a slot: {room}", f"at least {_size(one.total)}{suffix}, "
                           f"for one slot of up to {work.max_length} tokens")
    return ConfigError("hardware.num_slots", num_slots, f"at most {most}{suffix} ({least.num_slots} slots of up to "
                       f"{work.max_length} tokens take at least {_size(least.total)}, of which {_size(least.caches)} are "
                       f"keys and values; there are {room})")


def _size(num_bytes: int) -> str:
    """Bytes in GB, or in MB if they are few."""
    return f"{num_bytes / _GB:.2f} GB" if num_bytes >= 0.1 * _GB or not num_bytes else f"{num_bytes / 1e6:.3g} MB"


def _pages_that_fit(work: Workload, slots: int, limit: int) -> int:
    """Number of pages that fit, at most those that can be used."""
    without = predict(work, slots, num_pages=1)
    rows, length = cache_size(work.model.device, slots, work.max_length, work.padding)
    ahead, longest_prompt = work.prompts(slots)
    useful = (rows * length * (2 if work.keeps_current else 1) + ahead * longest_prompt) // PAGE_SIZE
    return min(useful, 1 + (limit - without.total) // work.page_bytes)


def _fewest_pages(work: Workload, slots: int) -> int:
    """Pages of one draw and its current sequence at full length, of the prompts read ahead, and of the ends of all rows."""
    length = cache_size(work.model.device, 1, work.max_length, work.padding)[1]
    ahead, longest_prompt = work.prompts(slots)
    return (2 * length + ahead * longest_prompt) // PAGE_SIZE + _ENDS * slots


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


class Caches:
    """Makes caches.

    Args:
        model: gives the shape and the device.
        companions: shapes of the caches that follow the target's; see `Workload.companions`.
        num_rows, longest: rows and positions of the caches of all slots.
        padding: number of positions for padding after a sequence.
        num_pages: pages of all caches together; 0 for contiguous caches.
        every, num_recent: snapshots and recent states of recurrent layers; see `HybridCache`.
    """

    def __init__(self, model: LanguageModel, companions: tuple[CacheShape, ...], num_rows: int, longest: int, padding: int,
                 num_pages: int, every: int, num_recent: int):
        self._model, self._companions = model, companions
        self._num_rows, self._longest, self._padding = num_rows, longest, padding
        self._every, self._num_recent = every, num_recent
        sizes = model.cache_shape, num_pages, PAGE_SIZE, model.device, companions
        self._pages: PagedMemory | None = None
        if num_pages:
            self._pages = HybridMemory(*sizes, every) if model.cache_shape.recurrent else PagedMemory(*sizes)

    def rows(self) -> SlotCache:
        """A cache with a row for each slot."""
        if self._pages is not None:
            return self._paged(self._pages, self._num_rows, self._longest)
        # CUDA graphs refer to fixed memory, so on a GPU all of it is allocated at the start.
        length = self._longest if self._model.device.type == "cuda" else ladder_of(self._model.device).key_step
        return self._contiguous(self._num_rows, length)

    def prompts(self, num_rows: int, longest: int) -> SlotCache:
        """A cache of prompts of at most `longest` tokens."""
        length = cache_size(self._model.device, 1, longest, self._padding)[1]
        return self._contiguous(num_rows, length) if self._pages is None else self._paged(self._pages, num_rows, length)

    def _paged(self, pages: PagedMemory, num_rows: int, length: int) -> SlotCache:
        if isinstance(pages, HybridMemory):
            return HybridPages(pages, num_rows, length, self._num_recent)
        return PagedCache(pages, num_rows, length)

    def _contiguous(self, num_rows: int, length: int) -> SlotCache:
        sizes = self._model.cache_shape, num_rows, length, self._model.device, self._companions
        if self._model.cache_shape.recurrent:
            return HybridRows(*sizes, self._every, self._num_recent)
        return ContiguousCache(*sizes)
