"""The DFlash draft that learns while it is used, from the prompt or from the blocks that the target has verified.

The cache of the draft holds the target's features instead of keys and values, because a change of the projections changes the
keys and values of all earlier tokens. The keys and values of a row are computed from its features: all of them when an
operation begins and after a step, and those of the latest tokens before each block. So the draft of a block depends only on
the row's tokens and on what its chain has learned, but not on when tokens were read or which rows have been copied.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad

from dflash_mcmc.draft.adaptation.learning import Adapter, AdaptSettings, LowRankDraft, Student, padded
from dflash_mcmc.draft.network.dflash import DFlash
from dflash_mcmc.engine.batching.cache import CacheShape, KVCache
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.speculative.drafter import Anchors, DFlashDrafter, Update

_PROMPTS = 64
"""Prompts whose adapters are kept. The chains of a problem are drawn one after another."""


class Verified(NamedTuple):
    """Blocks of the first rows that the target has verified.

    Attributes:
        anchors: int64 (rows,), positions.
        learned: int64 (rows,), slots whose earlier tokens are all kept; 0 for a row without a new block.
        states: what the target's laws are computed from, each (rows, slots, width).
    """

    anchors: torch.Tensor
    learned: torch.Tensor
    states: tuple[torch.Tensor, ...]


class Learned(NamedTuple):
    """The work of an operation: steps, steps that were dropped, and their seconds."""

    steps: int
    dropped: int
    seconds: float


Law = Callable[[tuple[torch.Tensor, ...]], torch.Tensor]
"""States of some slots, each (slots, width) -> the target's logits (slots, vocabulary)."""


@dataclass(slots=True)
class _Bound:
    """What a row works with: the prompt, the adapter, and the verified blocks since the last step (anchor, slots, states)."""

    prompt: np.ndarray
    adapter: Adapter
    stale: bool = True
    seconds: float = 0.0
    blocks: list[tuple[int, int, tuple[torch.Tensor, ...]]] = field(default_factory=list)


class AdaptiveDrafter(DFlashDrafter):
    """A DFlash drafter that learns.

    Args:
        network, target, block_size: see `DFlashDrafter`.
        settings: how it learns.
    """

    def __init__(self, network: DFlash, target: LanguageModel, block_size: int, settings: AdaptSettings):
        super().__init__(network, target, block_size)
        self.settings, self._draft = settings, LowRankDraft(network, settings.rank)
        self.network = self._draft.network
        self.token_bytes = self.companion.token_bytes() if self.companion else 0  # keys and values are kept here
        self.companion = features_shape(network.shape.target_layers, network.shape.hidden_size, self.dtype)
        self._student = Student(self._draft, self._embedding, self.logits, self.num_drafted, settings)
        self._bound: dict[int, _Bound] = {}
        self._prompts: OrderedDict[bytes, Adapter] = OrderedDict()
        self._changes = torch.zeros(0, self._draft.size)
        self._keys = self._values = torch.zeros(0)

    @property
    def learns_online(self) -> bool:
        """Whether it learns from verified blocks."""
        return self.settings.mode == "online"

    def reset(self) -> None:
        """Forgets the rows of an earlier run."""
        self._bound.clear()

    def begin(self, row: int, prompt: np.ndarray, known: Adapter | None) -> None:
        """Begins an operation in a row.

        Args:
            prompt: int64 token ids.
            known: what earlier operations have learned, for `online`; None for nothing. It is not changed.
        """
        if self.learns_online:
            adapter = Adapter.fresh(self._student.start) if known is None else known.again()
        else:
            adapter = self._adapter_of(prompt)
        self._bound[row] = _Bound(prompt, adapter)

    def end(self, row: int, pays: bool) -> tuple[Adapter, Learned]:
        """Ends the operation of a row. Returns what it has learned, and its work.

        Args:
            pays: whether the work includes the steps on the prompt. The chains of a problem share them, and each pays for them
                once, because its cost must not depend on other chains.
        """
        bound = self._bound.pop(row)
        steps, dropped = (bound.adapter.steps, bound.adapter.dropped) if self.learns_online or pays else (0, 0)
        return bound.adapter, Learned(steps, dropped, bound.seconds)

    def swap(self, a: int, b: int) -> None:
        """Exchanges two rows."""
        bound = {row: self._bound.pop(row) for row in (a, b) if row in self._bound}
        self._bound |= {b if row == a else a: mine for row, mine in bound.items()}
        for values in (self._changes, self._keys.transpose(0, 1), self._values.transpose(0, 1)) if len(self._changes) else ():
            values[[a, b]] = values[[b, a]]

    def absorb(self, cache: KVCache, rows: slice | torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor,
               features: Sequence[torch.Tensor]) -> None:
        """Writes the features of these tokens."""
        joined = torch.cat(list(features), dim=-1).to(self.dtype)[None, :, None]
        first = cache_parts(joined.shape[-1])[0]
        cache.write(rows, positions, joined[..., :first], joined[..., first:])

    def hidden_aside(self, anchors: Anchors) -> torch.Tensor:
        """Like `hidden`. The draft writes to no cache of the target's tokens."""
        return self.hidden(anchors)

    def hidden(self, anchors: Anchors) -> torch.Tensor:
        """See `DFlashDrafter.hidden`."""
        self._reserve(anchors.cache.num_rows, anchors.key_length)
        self._renew(anchors)
        with self._draft.changed(self._changes[anchors.rows]):
            self._extend(anchors)
            return super().hidden(anchors)

    def observe(self, cache: KVCache, tokens: torch.Tensor, verified: Verified, law: Law) -> None:
        """Learns from verified blocks: a row with enough of them makes a step. Waits for the device.

        Args:
            tokens: int64 (all rows, length), the rows' sequences.
        """
        anchors, counts = verified.anchors.tolist(), verified.learned.tolist()
        for row, bound in self._bound.items():
            if row < len(counts) and counts[row]:
                mine = tuple(state[row, : self.num_drafted].clone() for state in verified.states)
                bound.blocks.append((anchors[row], counts[row], mine))
                if len(bound.blocks) == self.settings.every_blocks:
                    self._learn_verified(cache.drafts, tokens[row], row, bound, law)

    def _update(self, anchors: Anchors, positions: torch.Tensor) -> Update:
        """See `DFlashDrafter._update`. The block's keys and values are overwritten before the next block."""
        ids = torch.arange(len(self._changes), device=positions.device)[anchors.rows][:, None]

        def update(layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            for held, new in ((self._keys[layer], keys), (self._values[layer], values)):
                held[ids, :, positions] = new.transpose(1, 2)
            seen = anchors.rows, slice(None), slice(0, anchors.key_length)
            return self._keys[layer][seen], self._values[layer][seen]

        return update

    def _adapter_of(self, prompt: np.ndarray) -> Adapter:
        """The adapter of a prompt, which may not have learned it yet."""
        name = prompt.tobytes()
        adapter = self._prompts.setdefault(name, Adapter.fresh(self._student.start))
        self._prompts.move_to_end(name)
        if len(self._prompts) > _PROMPTS:
            self._prompts.popitem(last=False)
        return adapter

    def _reserve(self, num_rows: int, length: int) -> None:
        """Makes room for keys and values of rows up to `length` positions."""
        shape, device = self.network.shape, self.target.device
        if len(self._changes) != num_rows:
            self._changes = torch.zeros(num_rows, self._draft.size, device=device)
            self._keys = torch.zeros(shape.num_layers, num_rows, shape.num_key_heads, 0, shape.head_dim, dtype=self.dtype,
                                     device=device)
            self._values = self._keys.clone()
        more = length + self.num_drafted + 1 - self._keys.shape[3]
        if more > 0:
            self._keys, self._values = (pad(held, (0, 0, 0, more)) for held in (self._keys, self._values))

    def _renew(self, anchors: Anchors) -> None:
        """Computes all keys and values of the rows whose operation has begun, or whose adapter has made a step."""
        rows = list(range(anchors.cache.num_rows))[anchors.rows] if isinstance(anchors.rows, slice) else anchors.rows.tolist()
        if not any(row in self._bound and self._bound[row].stale for row in rows):
            return
        for row, position in zip(rows, anchors.position.tolist(), strict=True):
            bound = self._bound.get(row)
            if bound is None or not bound.stale:
                continue
            if not (self.learns_online or bound.adapter.learned):
                self._learn_prompt(anchors.cache.drafts, row, bound)
            bound.stale, self._changes[row] = False, bound.adapter.values
            # An earlier sequence may have left NaN. A masked position has weight zero, but zero times NaN is NaN.
            self._keys[:, row], self._values[:, row] = 0.0, 0.0
            if position:
                features, positions = padded(self._features(anchors.cache.drafts, row, position))
                with self._draft.changed(self._changes[row : row + 1]) as network:
                    keys, values = network.keys_values(network.context(features), positions)
                self._keys[:, row, :, :position] = keys[:, 0, :, :position]
                self._values[:, row, :, :position] = values[:, 0, :, :position]

    def _extend(self, anchors: Anchors) -> None:
        """Computes the keys and values of the latest tokens before each anchor, as many as a block has."""
        back = torch.arange(self.num_drafted + 1, 0, -1, device=anchors.position.device)
        positions = (anchors.position[:, None] - back).clamp(min=0)
        features = torch.cat(anchors.cache.drafts.at(anchors.rows, positions), dim=-1)[0, :, 0]
        ids = torch.arange(len(self._changes), device=positions.device)[anchors.rows][:, None]
        new = self.network.keys_values(self.network.context(features), positions)
        for held, computed in zip((self._keys, self._values), new, strict=True):
            held.transpose(0, 1)[ids, :, :, positions] = computed.permute(1, 3, 0, 2, 4)

    def _features(self, cache: KVCache, row: int, length: int) -> torch.Tensor:
        """The features of a row's first tokens, (1, length, features)."""
        return torch.cat(cache.span(row, 0, length), dim=-1)[:, 0]

    def _learn_prompt(self, cache: KVCache, row: int, bound: _Bound) -> None:
        """Makes the steps on the row's prompt. Its last token has not been read."""
        started, bound.adapter.learned = time.perf_counter(), True
        if len(bound.prompt) == 1:
            return
        self._student.learn_prompt(bound.adapter, self._features(cache, row, len(bound.prompt) - 1), bound.prompt)
        bound.seconds += time.perf_counter() - started

    def _learn_verified(self, cache: KVCache, tokens: torch.Tensor, row: int, bound: _Bound, law: Law) -> None:
        """Makes a step on the target's laws in the blocks since the last step."""
        anchors, counts, every = (list(column) for column in zip(*bound.blocks, strict=True))
        started, bound.blocks, bound.stale = time.perf_counter(), [], True
        target = law(tuple(torch.cat(pieces) for pieces in zip(*every, strict=True)))
        self._student.learn_verified(bound.adapter, self._features(cache, row, max(anchors[-1], 1)), np.array(anchors),
                                     tokens[anchors].cpu().numpy(), np.array(counts),
                                     target.view(len(anchors), self.num_drafted, -1))
        bound.seconds += time.perf_counter() - started


def cache_parts(width: int) -> tuple[int, int]:
    """How a cache divides features between keys and values."""
    return width - width // 2, width // 2


def features_shape(layers: Sequence[int], hidden_size: int, dtype: torch.dtype) -> CacheShape:
    """Shape of a cache of the features of each token."""
    return CacheShape(1, 1, *cache_parts(len(layers) * hidden_size), dtype)
