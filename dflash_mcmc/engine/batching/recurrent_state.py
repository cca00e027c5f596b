"""The states of recurrent layers, by position, and the inputs that lead from one state to the next.

Keys and values of a token stay valid when later tokens are dropped. A recurrent state does not: it has to be known at the
position to which a row is rolled back. A row therefore keeps

    inputs      the input of each recurrent layer at every position, where an attention layer keeps keys and values
    snapshots   the states at positions 0, `every`, 2 `every`, ...
    recent      the states at the latest positions, at `position % num_recent`: those that the next steps can start from

The state at a position is the state before its token is fed. A state that is neither a snapshot nor recent is replayed: the
recurrence runs from the last snapshot over the kept inputs (`replay`), token by token in every forward, so that its bits do
not depend on how a text was split, nor on which snapshot it starts from.

The layers are those of the gated delta rule. `transformers` computes a prompt in chunks of 64 tokens and a decode step by the
recurrence. The results differ in their last bits, and a chunk ends in one state for all its tokens, padding included. Here
every forward goes token by token. A state then depends only on the inputs before it, and each token's state can be kept.

    S <- exp(g) S;  S <- S + k (beta (v - S^T k))^T;  o = S^T q

Source: Gated Delta Networks (arXiv 2412.06464), equation 10, as Qwen3-Next and Qwen3.5 compute it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import numpy as np
import torch
from transformers.activations import ACT2FN

from dflash_mcmc.engine.batching import cache as caches

_UNKNOWN = -1


class RecurrentLayer(caches.CacheLayer):
    """One recurrent layer of a `HybridCache`. `mix` reads and writes its states in each forward."""

    def __init__(self, cache: "HybridCache", number: int, shape: caches.RecurrentShape, device: torch.device):
        super().__init__(shape.dtype, device, cache.length)
        self._cache, self._number = cache, number

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Raises TypeError: the layer has no keys and values."""
        raise TypeError("a recurrent layer has no keys and values")

    def begin(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores inputs (rows, queries, width). Returns windows and matrices of the rows before the first query."""
        cache = self._cache
        cache.inputs[self._number][cache.row_ids[:, None], cache.positions] = inputs
        return cache.recent.get(self._number, cache.row_ids, cache.positions[:, 0] % cache.num_recent)

    def keep(self, query: int, windows: torch.Tensor, matrices: torch.Tensor) -> None:
        """Keeps the states after a query: windows (rows, window, channels), matrices (rows, heads, key_dim, value_dim)."""
        cache, number = self._cache, self._number
        if cache.spans is None:
            cache.recent.put(number, cache.row_ids, (cache.positions[:, query] + 1) % cache.num_recent, windows, matrices)
            return
        # After its last token a row reads padding, whose states are not kept.
        (rows, stop), reached = cache.spans[:, [0, 2]].T, cache.spans[:, 1] + query + 1
        for index in np.flatnonzero((reached <= stop) & (reached % cache.every == 0)).tolist():
            row, at = int(rows[index]), int(reached[index]) // cache.every
            cache.snapshots.put(number, row, at, windows[index], matrices[index])
        for index in np.flatnonzero(reached == stop).tolist():
            row, at = int(rows[index]), int(stop[index]) % cache.num_recent
            cache.recent.put(number, row, at, windows[index], matrices[index])


class HybridCache(caches.KVCache):
    """A cache for a model in which some layers are recurrent.

    Args:
        every: positions between two snapshots.
        num_recent: number of recent states of a row.

    Attributes:
        inputs: (layers, num_rows, length, width), the inputs of the recurrent layers.
        snapshots: the states of each row at multiples of `every`.
        recent: the latest states of each row.
        known: int64 (num_rows,) on the host, the position whose state is recent in each row beside those that the next steps
            write; -1 without such a position.
        spans: int64 (rows, 3): rows, and the positions that the next forward reads in them, without padding; None for a
            decode step.
        row_ids, positions: int64 (rows,) and (rows, queries), the next forward's.
    """

    recurrent = True

    def __init__(self, shape: caches.CacheShape, num_rows: int, length: int, device: torch.device | str = "cpu",
                 companions: tuple[caches.CacheShape, ...] = (), every: int = 1, num_recent: int = 2):
        super().__init__(shape, num_rows, length, device, companions)
        if shape.recurrent is None:
            raise ValueError("this model has no recurrent layers")
        recurrent = shape.recurrent
        sizes = len(recurrent.layers), num_rows, length, recurrent.width
        self.inputs = torch.zeros(sizes, dtype=recurrent.dtype, device=device)
        self.every, self.num_recent = every, num_recent
        self.snapshots = caches.RecurrentStates(recurrent, num_rows, length // every + 1, device)
        self.recent = caches.RecurrentStates(recurrent, num_rows, num_recent, device)
        self.known = np.zeros(num_rows, np.int64)
        self.spans: np.ndarray | None = None
        self.row_ids = self.positions = torch.empty(0)
        layers: list[caches.CacheLayer] = list(self.kv_layers)
        for index, layer in enumerate(recurrent.layers):  # in ascending order, so that each lands at its place
            layers.insert(layer, RecurrentLayer(self, index, recurrent, torch.device(device)))
        self.layers = [*layers]

    def on_host(self, length: int) -> "HybridCache":
        return HybridCache(self._shape, 1, length, "cpu", self._companions, self.every, self.num_recent)

    def reserve(self, length: int) -> None:
        if length > self.length:
            self.inputs = torch.nn.functional.pad(self.inputs, (0, 0, 0, length - self.length))
            self.snapshots.extend(length // self.every + 1)
        super().reserve(length)

    def aim(self, rows: slice | torch.Tensor, positions: torch.Tensor, key_length: int) -> None:
        super().aim(rows, positions, key_length)
        self.row_ids, self.positions = self._row_ids[rows][:, 0], positions

    @contextmanager
    def reading(self, spans: np.ndarray) -> Iterator[None]:
        self.spans = spans
        yield
        self.spans = None
        self.known[spans[:, 0]] = spans[:, 2]

    def passed(self, before: np.ndarray, after: np.ndarray) -> None:
        for row in np.flatnonzero(after // self.every > before // self.every).tolist():
            for number in range(int(before[row]) // self.every + 1, int(after[row]) // self.every + 1):
                self.snapshots.copy(row, number, self.recent, row, number * self.every % self.num_recent)
        self.known[: len(after)] = after

    def copy(self, source: caches.KVCache, source_row: int, row: int, start: int, stop: int) -> None:
        """See `KVCache`. States at positions `start + 1` to `stop` are copied too, as far as the source has them."""
        super().copy(source, source_row, row, start, stop)
        if not isinstance(source, HybridCache):
            raise TypeError(f"{type(source).__name__} has no recurrent states")
        self.inputs[:, row, start:stop] = source.inputs[:, source_row, start:stop]
        taken = slice(start // self.every + 1, stop // self.every + 1)
        self.snapshots.copy(row, taken, source.snapshots, source_row, taken)
        if source.known[source_row] == stop:
            self._copy_recent(source, source_row, row, stop)
        else:
            self.known[row] = _UNKNOWN

    def fork(self, leader: int, row: int, start: int, stop: int) -> None:
        """See `KVCache`. The state at `stop` is recent in the leader's row."""
        super().fork(leader, row, start, stop)
        self._copy_recent(self, leader, row, stop)

    def _copy_recent(self, source: "HybridCache", source_row: int, row: int, stop: int) -> None:
        at = stop % self.num_recent
        self.recent.copy(row, at, source.recent, source_row, at)
        self.known[row] = stop

    def swap(self, a: int, b: int, length_a: int, length_b: int) -> None:
        length, known = max(length_a, length_b), self.known[[b, a]]
        super().swap(a, b, length_a, length_b)
        if length_a and length_b:  # else one row has been copied over the other
            caches.exchange(self.inputs[:, a, :length], self.inputs[:, b, :length])
            self.snapshots.swap(a, b, length // self.every + 1)
        self.recent.swap(a, b, self.num_recent)
        self.known[[a, b]] = known

    def clear(self, row: int | slice = slice(None)) -> None:
        super().clear(row)
        self.inputs[:, row] = 0
        self.snapshots.clear(row)
        self.recent.clear(row)
        self.known[row] = 0


_ROW_STEP = 8
"""A projection has the same bits in every batch whose number of rows is a multiple of it (notebook, "Bits")."""


def install(nets: Sequence[Any]) -> None:
    """Lets these layers compute by `mix` on a `HybridCache`. Their other forwards stay those of `transformers`."""
    for net in nets:
        net.forward = MethodType(_forward, net)


def _forward(net: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    cache = kwargs.get("cache", kwargs.get("cache_params"))  # its name since transformers 5.24, and before
    if isinstance(cache, HybridCache):
        return mix(net, hidden_states, cache.layers[net.layer_idx])
    return type(net).forward(net, hidden_states, **kwargs)


def mix(net: Any, hidden: torch.Tensor, layer: RecurrentLayer) -> torch.Tensor:
    """The output of a layer, (rows, queries, width), for inputs of that shape. Keeps the states in `layer`."""
    rows, queries = hidden.shape[:2]
    (windows, matrices), (inputs, gate, rate, decay) = layer.begin(hidden), _project(net, hidden)
    mixed = torch.cat([windows, inputs], dim=1)
    query, key, value = _convolve(net, mixed)
    query, key = _normed(query) / net.head_k_dim**0.5, _normed(key)
    outputs = list[torch.Tensor]()
    for index in range(queries):
        matrices = _step(matrices, key[:, index], value[:, index], decay[:, index], rate[:, index])
        outputs.append((matrices * query[:, index, ..., None]).sum(dim=-2))
        layer.keep(index, mixed[:, index + 1 : index + 1 + windows.shape[1]], matrices)
    together = torch.stack(outputs, dim=1).to(hidden.dtype).view(-1, net.head_v_dim)
    normed = net.norm(together, gate.reshape(-1, net.head_v_dim))
    return net.out_proj(normed.view(rows, queries, -1))


def replay(nets: Sequence[Any], cache: HybridCache, rows: np.ndarray, positions: np.ndarray) -> None:
    """Makes the states of rows at these positions recent, each int64 (rows,), from the last snapshots and the inputs.

    The inputs before these positions are known. Rows whose state is recent already are left out.
    """
    missing = cache.known[rows] != positions
    rows, positions = rows[missing], positions[missing]
    if not len(rows):
        return
    device = cache.recent.matrices.device
    numbers = positions // cache.every
    start = numbers * cache.every
    row_ids, counts, kept = (torch.from_numpy(array).to(device) for array in (rows, positions - start, numbers))
    longest = caches.round_up(int((positions - start).max()), _ROW_STEP)
    at = torch.from_numpy(np.minimum(start[:, None] + np.arange(longest), cache.length - 1)).to(device)
    for layer, net in enumerate(nets):
        windows, matrices = cache.snapshots.get(layer, row_ids, kept)
        for first in range(0, longest, caches.PIECE):
            inputs = cache.inputs[layer][row_ids[:, None], at[:, first : first + caches.PIECE]]
            windows, matrices = _advance(net, inputs, windows, matrices, counts - first)
        cache.recent.put(layer, row_ids, torch.from_numpy(positions % cache.num_recent).to(device), windows, matrices)
    cache.known[rows] = positions


def _advance(net: Any, hidden: torch.Tensor, windows: torch.Tensor, matrices: torch.Tensor,
             counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The states after the first `counts` of the tokens of each row, int64 (rows,)."""
    inputs, _, rate, decay = _project(net, hidden)
    mixed = torch.cat([windows, inputs], dim=1)
    _, key, value = _convolve(net, mixed)
    key, queries = _normed(key), hidden.shape[1]
    for index in range(queries):
        after = _step(matrices, key[:, index], value[:, index], decay[:, index], rate[:, index])
        matrices = torch.where((index < counts)[:, None, None, None], after, matrices)
    last = counts.clamp(0, queries)[:, None] + torch.arange(windows.shape[1], device=counts.device)
    return mixed[torch.arange(len(mixed), device=counts.device)[:, None], last], matrices


def _step(matrices: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor,
          rate: torch.Tensor) -> torch.Tensor:
    """The recurrence over one token. Every number depends on its own row and head alone, in a fixed order of additions."""
    matrices = matrices * decay[..., None, None]
    change = (value - (matrices * key[..., None]).sum(dim=-2)) * rate[..., None]
    return matrices + key[..., None] * change[..., None, :]


def _project(net: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The projections of Qwen3.5, or of Qwen3-Next, which interleaves them.

    Inputs of the convolution (rows, queries, channels), the gate of the output (rows, queries, heads, value_dim), and beta and
    exp(g), each float32 (rows, queries, heads).
    """
    if hasattr(net, "in_proj_qkvz"):
        query, key, value, gate, rate, decay = net.fix_query_key_value_ordering(net.in_proj_qkvz(hidden),
                                                                                net.in_proj_ba(hidden))
        mixed = torch.cat([tensor.flatten(2) for tensor in (query, key, value)], dim=-1)
    else:
        mixed, gate = net.in_proj_qkv(hidden), net.in_proj_z(hidden).unflatten(-1, (-1, net.head_v_dim))
        rate, decay = net.in_proj_b(hidden), net.in_proj_a(hidden)
    log_decay = -net.A_log.float().exp() * torch.nn.functional.softplus(decay.float() + net.dt_bias)
    return mixed, gate, rate.sigmoid().float(), log_decay.exp()


def _convolve(net: Any, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values, float32 (rows, queries, heads, dim), of inputs that begin with a window."""
    weights = net.conv1d.weight.squeeze(1).float()
    taps, queries = weights.shape[1], mixed.shape[1] - weights.shape[1] + 1
    total = mixed[:, :queries].float() * weights[:, 0]
    for tap in range(1, taps):
        total = total + mixed[:, tap : tap + queries].float() * weights[:, tap]
    if net.conv1d.bias is not None:
        total = total + net.conv1d.bias.float()
    active = ACT2FN[net.activation](total.to(mixed.dtype)).float()
    query, key, value = active.split([net.key_dim, net.key_dim, net.value_dim], dim=-1)
    groups = net.num_v_heads // net.num_k_heads
    query, key = (tensor.unflatten(-1, (-1, net.head_k_dim)).repeat_interleave(groups, dim=2) for tensor in (query, key))
    return query, key, value.unflatten(-1, (-1, net.head_v_dim))


def _normed(heads: torch.Tensor) -> torch.Tensor:
    """Heads divided by their length."""
    return heads * torch.rsqrt(heads.square().sum(dim=-1, keepdim=True) + 1e-6)
