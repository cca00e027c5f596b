"""Makes the caches of an engine: contiguous, or of pages that they share."""

from __future__ import annotations

from dflash_mcmc.engine.batching.cache import CacheShape, SlotCache
from dflash_mcmc.engine.batching.contiguous_cache import ContiguousCache
from dflash_mcmc.engine.batching.ladder import cache_size, ladder_of
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.batching.page_table import PAGE_SIZE
from dflash_mcmc.engine.batching.paged_cache import PagedCache, PagedMemory
from dflash_mcmc.engine.batching.recurrent_pages import HybridMemory, HybridPages
from dflash_mcmc.engine.batching.recurrent_rows import HybridRows


class Caches:
    """Makes caches.

    Args:
        model: gives the shape and the device.
        companion: shape of a draft's keys and values; None without a draft.
        num_rows, longest: rows and positions of the caches of all slots.
        padding: number of positions for padding after a sequence.
        num_pages: pages of all caches together; 0 for contiguous caches.
        every, num_recent: snapshots and recent states of recurrent layers; see `HybridCache`.
    """

    def __init__(self, model: LanguageModel, companion: CacheShape | None, num_rows: int, longest: int, padding: int,
                 num_pages: int, every: int, num_recent: int):
        self._model, self._companion = model, companion
        self._num_rows, self._longest, self._padding = num_rows, longest, padding
        self._every, self._num_recent = every, num_recent
        given = model.cache_shape, num_pages, PAGE_SIZE, model.device, companion
        self._pages: PagedMemory | None = None
        if num_pages:
            self._pages = HybridMemory(*given, every) if model.cache_shape.recurrent else PagedMemory(*given)

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
        given = self._model.cache_shape, num_rows, length, self._model.device, self._companion
        if self._model.cache_shape.recurrent:
            return HybridRows(*given, self._every, self._num_recent)
        return ContiguousCache(*given)
