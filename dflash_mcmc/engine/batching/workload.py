"""What an engine's memory depends on."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dflash_mcmc.engine.batching import attention, few_rows
from dflash_mcmc.engine.batching.interface import Options
from dflash_mcmc.engine.batching.ladder import cache_size
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.batching.page_table import NUM_RESERVED, PAGE_SIZE
from dflash_mcmc.engine.batching.recurrent_shape import num_recent, num_snapshots
from dflash_mcmc.engine.batching.target_shape import DraftSize, TargetShape
from dflash_mcmc.engine.speculative.drafter import Drafter


class Workload(NamedTuple):
    """A model, a draft and lengths: what the memory depends on, beside the numbers of slots and pages."""

    model: LanguageModel | TargetShape
    max_length: int
    prompt_length: int
    options: Options
    drafter: Drafter | DraftSize | None = None

    @property
    def padding(self) -> int:
        """Positions after a sequence."""
        return attention.padding(self.implementation, self.options.prefill_chunk, self.num_drafted)

    @property
    def implementation(self) -> str:
        """The implementation of attention."""
        model = self.model
        return attention.implementation(self.options.attention, model.device, model.dtype, model.attention_needs)

    @property
    def num_drafted(self) -> int:
        """Tokens of a draft's block."""
        return self.drafter.num_drafted if self.drafter else 0

    @property
    def keeps_current(self) -> bool:
        """Whether spare rows are kept."""
        return self.options.keep_current and self.options.reuse_prefix

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of a token, those of the draft included."""
        drafted = self.drafter.companion if self.drafter else None
        return self.model.cache_shape.token_bytes() + (drafted.token_bytes() if drafted else 0)

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

    def copied_bytes(self, num_slots: int) -> int:
        """Bytes of the copy of the weights that an engine of few slots makes (`few_rows.py`); 0 where it makes none."""
        model, drafter = self.model, self.drafter
        if not few_rows.asked_for(self.options, num_slots, self.implementation, drafter):
            return 0
        if isinstance(model, TargetShape) or isinstance(drafter, DraftSize):
            return self._copied_bytes_by_files(model)
        return few_rows.num_bytes(model, drafter) if few_rows.fits(model, drafter) else 0

    def _copied_bytes_by_files(self, model: LanguageModel | TargetShape) -> int:
        """`copied_bytes` before the weights are loaded."""
        cache, drafter = model.cache_shape, self.drafter
        drafted = drafter.companion if drafter else None
        plain = model.device.type == "cpu" and all(shape.dtype == torch.float32 for shape in (cache, drafted) if shape)
        weights = model.weight_bytes() if isinstance(model, TargetShape) else few_rows.num_bytes(model)
        if not (plain and weights) or cache.recurrent:
            return 0
        return weights + 4 * (drafter.num_weights or 0 if drafter else 0)

    def prompts(self, num_slots: int) -> tuple[int, int]:
        """Rows and positions of the prompts that are read ahead."""
        ahead = min(self.options.read_ahead, num_slots) if self.options.reuse_prefix else 0
        return ahead, cache_size(self.model.device, 1, self.prompt_length, self.padding)[1]
