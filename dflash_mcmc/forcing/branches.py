"""Reads many continuations of one prefix in one forward.

Keys and values of the prefix exist once. Common beginnings of continuations are read once.

All continuations share a single row. A mask lets each token see the prefix and the earlier tokens of its own continuation
(the tree attention of SpecInfer, arXiv 2305.09781, section 4).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from dflash_mcmc.engine.batching import attention
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.errors import UserError

_ROWS_AT_ONCE = 512
"""Maximal number of tokens in one forward. It bounds the size of their attention scores."""
PREFIX = -1
"""The parent of a token that directly follows the prefix."""


class Tree:
    """Tokens after a prefix, numbered from 0 in the order in which they are read.

    Args:
        cache: the cache of a sequence, one row, whose first `length` tokens are the prefix. It is not changed.

    Raises UserError for a model that cannot read continuations together.
    """

    def __init__(self, model: LanguageModel, cache: Cache, length: int):
        if model.recurrent_nets:
            refuse()
        self._model, self._length = model, length
        self._attention = attention.implementation("auto", model.device, model.dtype, model.attention_needs)
        known: Any = cache.layers
        self._cache = Cache(layers=[_BranchLayer(layer.keys[:, :, :length], layer.values[:, :, :length]) for layer in known])
        self._paths: list[tuple[int, ...]] = []

    def __len__(self) -> int:
        """Tokens that have been read, without the prefix."""
        return len(self._paths)

    def read(self, parents: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        """Hidden states (tokens, hidden) of the next tokens, after the final norm.

        Args:
            parents: the number of the token before each token, or `PREFIX`.
        """
        before = len(self._paths)
        for number, parent in enumerate(parents, start=before):
            self._paths.append((number,) if parent == PREFIX else (*self._paths[parent], number))
        new, device = self._paths[before:], self._model.device
        depths = np.array([len(path) for path in new])
        seen = np.zeros((len(new), self._length + len(self._paths)), dtype=bool)
        seen[:, : self._length] = True
        seen[np.repeat(np.arange(len(new)), depths), self._length + np.concatenate(new)] = True
        every = np.concatenate([np.arange(self._length), self._length - 1 + np.array([len(path) for path in self._paths])])
        given, places, keys = (torch.from_numpy(row).to(device)[None]
                               for row in (np.array(tokens), self._length - 1 + depths, every))
        additive = self._model.dtype if self._attention in attention.ADDITIVE else None
        mask = self._model.masks.of(torch.from_numpy(seen).to(device)[None], places, keys, additive)
        with self._model.attending(self._attention):
            return self._model.hidden(given, self._cache, attention_mask=mask, position_ids=places)[0]


def refuse() -> NoReturn:
    """Raises UserError: recurrent states after a prefix cannot be shared by a mask."""
    raise UserError("probe: given one that reads many continuations of a text together; allowed with recurrent layers, whose "
                    "states a mask cannot share: another probe, or speculative_mcmc with probe.weights=reference and "
                    "probe.autoregressive=false")


class Predictors(NamedTuple):
    """The states that predict the tokens of continuations; equal beginnings share their states."""

    hidden: torch.Tensor
    """(states, hidden), after the final norm."""
    which: np.ndarray
    """int64 (count, n): the state that predicts each token."""


def predictors(model: LanguageModel, cache: Cache, last: torch.Tensor, length: int, tokens: np.ndarray,
               share: bool = True) -> Predictors:
    """Reads continuations, int64 (count, n), of a prefix.

    Args:
        cache: the cache of a sequence, one row; its first `length` tokens are the prefix.
        last: (hidden,), the state of the prefix's last token.
        share: read common beginnings once; False reads each continuation separately.
    """
    read = tokens[:, :-1]  # the last token predicts nothing
    order = np.lexsort(read.T[::-1]) if share and read.shape[1] else np.arange(len(read))
    hidden, which = [last[None]], np.zeros(tokens.shape, dtype=np.int64)
    # Attention scores between two continuations are wasted. After a long prefix this limit keeps them to at most half of all.
    limit = min(max(length, 256), _ROWS_AT_ONCE)
    count = 1
    for part in _parts(read[order], limit, share):
        nodes = _Nodes.of(read[order[part]], share)
        hidden.append(Tree(model, cache, length).read(nodes.parents, nodes.tokens))
        which[order[part], 1:] = count + nodes.which
        count += len(nodes.tokens)
    return Predictors(torch.cat(hidden), which)


class _Nodes(NamedTuple):
    """Rows of tokens as a tree, in which equal beginnings share nodes."""

    parents: list[int]
    tokens: list[int]
    which: np.ndarray
    """int64, in the shape of the rows: the node of each token."""

    @classmethod
    def of(cls, rows: np.ndarray, share: bool) -> _Nodes:
        known: dict[tuple[int, int], int] = {}
        nodes = cls([], [], np.empty(rows.shape, dtype=np.int64))
        for number, row in enumerate(rows.tolist()):
            node = PREFIX
            for place, token in enumerate(row):
                parent = node
                name = (parent, token) if share else (number, place)
                node = known.setdefault(name, len(known))
                if node == len(nodes.tokens):
                    nodes.parents.append(parent)
                    nodes.tokens.append(token)
                nodes.which[number, place] = node
        return nodes


def _parts(rows: np.ndarray, limit: int, share: bool) -> Iterator[slice]:
    """Consecutive slices of the rows. The tree of a slice has at most `limit` nodes, unless the slice is a single row."""
    width = rows.shape[1]
    if not width:
        return
    differs = rows[1:] != rows[:-1]
    new = np.where(differs.any(axis=1), width - differs.argmax(axis=1), 0) if share else np.full(len(rows) - 1, width)
    start, total = 0, width
    for number, more in enumerate(new.tolist(), start=1):
        total += more
        if total > limit:
            yield slice(start, number)
            start, total = number, width
    yield slice(start, len(rows))


class _BranchLayer(CacheLayerMixin):
    """Keys and values of a prefix and of the tokens after it. The tensors of the prefix are not changed."""

    is_sliding = False
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, keys: torch.Tensor, values: torch.Tensor):
        super().__init__()
        self.keys, self.values = keys, values
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Does nothing, because the prefix exists already."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args,
               **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends keys and values, each (1, heads, queries, dim). Returns all keys and all values."""
        self.keys = torch.cat([self.keys, key_states], dim=2)
        self.values = torch.cat([self.values, value_states], dim=2)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2] + query_length, 0

    def get_seq_length(self) -> int:
        return self.keys.shape[2]

    def get_max_length(self) -> int:
        return -1
