"""A DFlash draft that learns while it is used: low-rank changes of its projections, steps that train them, and the drafter.

The changes are those of LoRA (Hu et al. 2021, arXiv 2106.09685), one vector for each row: a projection W becomes W + A B, with
A (inputs, rank) and B (rank, outputs), zero at first. A draft learns the tokens of a prompt (cross-entropy), or the target's
distributions in verified blocks (KL divergence). Slot k of a block has the weight exp(-(k - 1) / gamma), as in training
(DFlash, arXiv 2602.06036), with gamma half of the block size, as published for blocks of 8 and 10. Each update is one step of
Adam (Kingma & Ba 2015, arXiv 1412.6980), as in Test-Time Speculation (arXiv 2605.09329).

The cache of the draft holds the target's features instead of keys and values, because a change of the projections changes
those of all earlier tokens. They are computed from the features when an operation begins and after a step, and for the latest
tokens before each block. So the draft of a block depends only on the row's tokens and on what its chain has learned.
"""

from __future__ import annotations

import copy
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import embedding, log_softmax, pad

from dflash_mcmc.draft.network.dflash import DFlash, block_pass
from dflash_mcmc.engine.batching.cache import CacheShape, KVCache, round_up
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.batching.linear import has_row_layers
from dflash_mcmc.engine.speculative.drafter import Anchors, DFlashDrafter, Update
from dflash_mcmc.rng import Key


class ChangedLinear(torch.nn.Module):
    """A linear map of the checkpoint with a low-rank change: A (rows, inputs, rank) and B (rows, rank, outputs), or None."""

    def __init__(self, base: torch.nn.Linear):
        super().__init__()
        self.base = base
        self.factors: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def weight(self) -> torch.Tensor:
        """The checkpoint's weights."""
        return self.base.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The outputs (rows, m, outputs) of (rows, m, inputs)."""
        mapped = self.base(hidden)
        if self.factors is None:
            return mapped
        down, up = self.factors
        return mapped + (hidden.to(down.dtype) @ down @ up).to(mapped.dtype)


class LowRankDraft:
    """A draft's network whose projection of the target's features can be changed.

    Attention's projections stay: with changes of them too, tau fell more (notebook, "Drafts that learn at test time").

    Args:
        network: the network of the checkpoint. Its weights are shared and never changed.
        rank: rank of the changes.

    Attributes:
        size: numbers in the vector of a row.
    """

    def __init__(self, network: DFlash, rank: int):
        if has_row_layers(network):
            raise ValueError("given a network without gradients; allowed: one that is loaded with packs=False")
        self.network = copy.deepcopy(network, {id(weight): weight for weight in network.parameters()})
        self._linear, self._rank = ChangedLinear(self.network.fc), rank
        self._inputs, self._outputs = self.network.fc.in_features, self.network.fc.out_features
        self.network.fc = self._linear  # type: ignore[assignment]  # it has the weight and the call of a Linear
        self.size = rank * (self._inputs + self._outputs)

    def start(self) -> torch.Tensor:
        """The vector of a row that has learned nothing, float32 (size,): A uniform with deviation 1 / sqrt(inputs), B zero."""
        uniforms = torch.from_numpy(Key(0).fold_in("draft", "low rank", "fc").uniforms(0, self._inputs * self._rank))
        down = ((2.0 * uniforms - 1.0) * (3.0 / self._inputs) ** 0.5).float()
        return torch.cat([down, torch.zeros(self.size - len(down))])

    @contextmanager
    def changed(self, values: torch.Tensor) -> Iterator[DFlash]:
        """A context in which the network has the changes of some rows, (rows, size)."""
        down, up = values.split([self._inputs * self._rank, self._rank * self._outputs], dim=1)
        self._linear.factors = down.unflatten(1, (self._inputs, self._rank)), up.unflatten(1, (self._rank, self._outputs))
        try:
            yield self.network
        finally:
            self._linear.factors = None


_BETAS, _EPSILON = (0.9, 0.95), 1e-8
LENGTH_STEP = 64
"""Lengths of features are multiples of it, so that the numbers of a row do not depend on the batch (`batching/cache.py`)."""


class AdaptSettings(NamedTuple):
    """How a draft learns; see the fields of `draft=dflash`."""

    mode: str
    """`context` or `online`."""
    rank: int
    rate: float
    steps: int = 10
    """Steps on a prompt, for `context`: 3 and 10 changed nothing, and 30 of rank 16 cost 0.8 tokens a forward."""
    blocks: int = 16
    """Random blocks of a prompt in a step, for `context`. A prompt that has fewer tokens gives all of them."""
    every_blocks: int = 4
    """Verified blocks between two steps, for `online`: a step after each gains no more, and costs three times as much."""


@dataclass(slots=True)
class Adapter:
    """What a draft has learned, and the state of Adam.

    Attributes:
        values, mean, square: float32 (size,), the changes and the running moments of their gradient, which have seen `number`.
        steps, dropped: steps that were made, and left out because their gradient was not finite.
        learned: whether a prompt has been learned, for `context`.
    """

    values: torch.Tensor
    mean: torch.Tensor
    square: torch.Tensor
    number: int = 0
    steps: int = 0
    dropped: int = 0
    learned: bool = False

    @staticmethod
    def fresh(values: torch.Tensor) -> Adapter:
        """An adapter that has made no steps."""
        return Adapter(values, torch.zeros_like(values), torch.zeros_like(values))

    def again(self) -> Adapter:
        """A copy whose steps do not change this one. Its counts are zero."""
        return Adapter(self.values, self.mean, self.square, self.number)

    def step(self, loss_of: Callable[[torch.Tensor], torch.Tensor], rate: float) -> None:
        """Makes one step of Adam on `loss_of(values)`, or counts it as dropped if its gradient is not finite."""
        with torch.inference_mode(False), torch.enable_grad():
            values = self.values.clone().requires_grad_()
            gradient = torch.autograd.grad(loss_of(values), values)[0]
        if bool(torch.isfinite(gradient).all()):
            first, second = _BETAS
            self.number, self.steps = self.number + 1, self.steps + 1
            self.mean = first * self.mean + (1.0 - first) * gradient
            self.square = second * self.square + (1.0 - second) * gradient**2
            scale = (self.square / (1.0 - second**self.number)).sqrt() + _EPSILON
            self.values = self.values - rate * self.mean / (1.0 - first**self.number) / scale
        else:
            self.dropped += 1


class Blocks(NamedTuple):
    """Blocks of one sequence.

    Attributes:
        features: (1, length, features), the target's features; padded.
        positions: int64 (1, length), -1 for padding.
        anchors: int64 (blocks,), their positions.
        tokens: int64 (blocks,), the tokens at the anchors.
        weights: float32 (blocks, n), 0 for slots that are not learned.
    """

    features: torch.Tensor
    positions: torch.Tensor
    anchors: torch.Tensor
    tokens: torch.Tensor
    weights: torch.Tensor


def slot_weights(counts: torch.Tensor, num_drafted: int, gamma: float) -> torch.Tensor:
    """Weights float32 (..., num_drafted): exp(-(k - 1) / gamma) of the first `counts` slots k of a block, 0 of the others."""
    slots = torch.arange(num_drafted, device=counts.device)
    return (slots < counts[..., None]) * torch.exp(-slots / gamma)


class Student:
    """A draft that learns: the network with its changes, and the steps that train them.

    Args:
        draft: the network.
        table: the target's embedding, (vocabulary, hidden).
        head: hidden states -> the draft's logits.
        num_drafted: tokens of a block.
        settings: how it learns.

    Attributes:
        start: the changes before the first step, float32 (size,).
    """

    def __init__(self, draft: LowRankDraft, table: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor],
                 num_drafted: int, settings: AdaptSettings):
        self.draft, self.settings, self.num_drafted = draft, settings, num_drafted
        self._table, self._head = table, head
        self.start = draft.start().to(table.device)

    def logits(self, blocks: Blocks, values: torch.Tensor) -> torch.Tensor:
        """The draft's logits in blocks, float32 (blocks, n, vocabulary). Differentiable in `values`, (size,)."""
        shape = self.draft.network.shape
        input_ids = torch.full((len(blocks.anchors), self.num_drafted + 1), shape.mask_token_id, device=blocks.tokens.device)
        input_ids[:, 0] = blocks.tokens
        embeddings = (embedding(input_ids, self._table) * shape.embedding_scale).to(blocks.features.dtype)
        with self.draft.changed(values[None]) as network:
            keys, kept = network.keys_values(network.context(blocks.features), blocks.positions)
            hidden = block_pass(network, keys, kept, blocks.positions, blocks.anchors[None], embeddings[None])[0, :, 1:]
        return self._head(hidden)

    def learn_prompt(self, adapter: Adapter, features: torch.Tensor, prompt: np.ndarray) -> None:
        """Makes the steps on the prompt's own tokens, from random blocks of it. The last token is a label only.

        Args:
            features: (1, tokens - 1, features).
            prompt: int64 (tokens,), at least two.
        """
        last = len(prompt) - 1
        for step in range(1, self.settings.steps + 1):
            chosen = Key(0).fold_in("draft", "prompt", step).uniforms(0, last).argsort()[: self.settings.blocks]
            at = np.sort(chosen)
            labels = prompt[np.minimum(at[:, None] + np.arange(1, self.num_drafted + 1), last)]
            self._step(adapter, features, at, prompt[at], last - at, token_loss, torch.from_numpy(labels))

    def learn_verified(self, adapter: Adapter, features: torch.Tensor, anchors: np.ndarray, tokens: np.ndarray,
                       counts: np.ndarray, target: torch.Tensor) -> None:
        """Makes a step on the target's laws in verified blocks.

        Args:
            features: (1, length, features), at least up to the last anchor.
            anchors, tokens: int64 (blocks,), positions of the anchors and their tokens.
            counts: int64 (blocks,), slots that are learned.
            target: the target's logits, (blocks, n, vocabulary).
        """
        self._step(adapter, features[:, : max(int(anchors[-1]), 1)], anchors, tokens, counts, law_loss, target)

    def _step(self, adapter: Adapter, features: torch.Tensor, anchors: np.ndarray, tokens: np.ndarray, counts: np.ndarray,
              loss_of: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor], truth: torch.Tensor) -> None:
        with torch.inference_mode(False):  # tensors that gradients need must not be made in inference mode
            device = features.device
            weights = slot_weights(torch.from_numpy(counts).to(device), self.num_drafted, (self.num_drafted + 1) / 2)
            blocks = Blocks(*padded(features.clone()), torch.from_numpy(anchors).to(device),
                            torch.from_numpy(tokens).to(device), weights)
            truth = truth.to(device).clone()
        adapter.step(lambda values: loss_of(self.logits(blocks, values), truth, weights), self.settings.rate)


def padded(features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Features (1, length, width) and their positions, padded to a multiple of `LENGTH_STEP`."""
    length = features.shape[1]
    more = round_up(length, LENGTH_STEP) - length
    positions = pad(torch.arange(length, device=features.device), (0, more), value=-1)
    return pad(features, (0, 0, 0, more)), positions[None]


def token_loss(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weighted mean cross-entropy in nats of logits (blocks, n, vocabulary) for labels int64 (blocks, n)."""
    losses = -log_softmax(logits, dim=-1).gather(2, labels[..., None])[..., 0]
    return torch.where(weights > 0, weights * losses, 0.0).sum() / weights.sum()


def law_loss(logits: torch.Tensor, target: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weighted mean of KL(p | q) in nats, for logits and the target's logits, each (blocks, n, vocabulary)."""
    return torch.where(weights > 0, weights * kl_divergences(logits, target), 0.0).sum() / weights.sum()


def kl_divergences(logits: torch.Tensor, target: torch.Tensor, alpha: float = 1.0) -> torch.Tensor:
    """KL(p_alpha | q) in nats, shape (...), with q = softmax(logits) and p_alpha = softmax(alpha · target).

    `logits` and `target` have the shape (..., ids). p_alpha is the target's next-token distribution to the power alpha,
    normalised. The minimum is 0, at q = p_alpha.
    """
    log_p = log_softmax(alpha * target, dim=-1)
    # Ids without a token have probability 0 in both distributions and would give 0 · (-inf + inf).
    ratio = torch.where(torch.isneginf(target), 0.0, log_p - log_softmax(logits, dim=-1))
    return (log_p.exp() * ratio).sum(dim=-1)


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
        """Begins an operation in a row, with what earlier ones have learned, for `online`, which is not changed."""
        if self.learns_online:
            adapter = Adapter.fresh(self._student.start) if known is None else known.again()
        else:  # the adapter of the prompt, which may not have learned it yet
            name = prompt.tobytes()
            adapter = self._prompts.setdefault(name, Adapter.fresh(self._student.start))
            self._prompts.move_to_end(name)
            if len(self._prompts) > _PROMPTS:
                self._prompts.popitem(last=False)
        self._bound[row] = _Bound(prompt, adapter)

    def end(self, row: int, pays: bool) -> tuple[Adapter, Learned]:
        """Ends the operation of a row. Returns what it has learned, and its work.

        The chains of a problem share the steps on the prompt, and each pays for them once: its cost must not depend on others.
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
        self._reserve(anchors.cache.num_rows, anchors.key_length)
        self._renew(anchors)
        with self._draft.changed(self._changes[anchors.rows]):
            # Computes the keys and values of the latest tokens before each anchor, as many as a block has
            back = torch.arange(self.num_drafted + 1, 0, -1, device=anchors.position.device)
            positions = (anchors.position[:, None] - back).clamp(min=0)
            features = torch.cat(anchors.cache.drafts.at(anchors.rows, positions), dim=-1)[0, :, 0]
            ids = torch.arange(len(self._changes), device=positions.device)[anchors.rows][:, None]
            new = self.network.keys_values(self.network.context(features), positions)
            for held, computed in zip((self._keys, self._values), new, strict=True):
                held.transpose(0, 1)[ids, :, :, positions] = computed.permute(1, 3, 0, 2, 4)
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
                if len(bound.blocks) < self.settings.every_blocks:
                    continue
                at, learned, every = (list(column) for column in zip(*bound.blocks, strict=True))
                started, bound.blocks, bound.stale = time.perf_counter(), [], True
                target = law(tuple(torch.cat(pieces) for pieces in zip(*every, strict=True)))
                self._student.learn_verified(bound.adapter, self._features(cache.drafts, row, max(at[-1], 1)), np.array(at),
                                             tokens[row][at].cpu().numpy(), np.array(learned),
                                             target.view(len(at), self.num_drafted, -1))
                bound.seconds += time.perf_counter() - started

    def _update(self, anchors: Anchors, positions: torch.Tensor) -> Update:
        """See `DFlashDrafter._update`. The block's keys and values are overwritten before the next block."""
        ids = torch.arange(len(self._changes), device=positions.device)[anchors.rows][:, None]

        def update(layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            for held, new in ((self._keys[layer], keys), (self._values[layer], values)):
                held[ids, :, positions] = new.transpose(1, 2)
            seen = anchors.rows, slice(None), slice(0, anchors.key_length)
            return self._keys[layer][seen], self._values[layer][seen]

        return update

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
                started, bound.adapter.learned = time.perf_counter(), True
                if (read := len(bound.prompt) - 1):  # the last token of the prompt has not been read
                    self._student.learn_prompt(bound.adapter, self._features(anchors.cache.drafts, row, read), bound.prompt)
                    bound.seconds += time.perf_counter() - started
            bound.stale, self._changes[row] = False, bound.adapter.values
            # An earlier sequence may have left NaN. A masked position has weight zero, but zero times NaN is NaN.
            self._keys[:, row], self._values[:, row] = 0.0, 0.0
            if position:
                features, positions = padded(self._features(anchors.cache.drafts, row, position))
                with self._draft.changed(self._changes[row : row + 1]) as network:
                    keys, values = network.keys_values(network.context(features), positions)
                self._keys[:, row, :, :position] = keys[:, 0, :, :position]
                self._values[:, row, :, :position] = values[:, 0, :, :position]

    def _features(self, cache: KVCache, row: int, length: int) -> torch.Tensor:
        """The features of a row's first tokens, (1, length, features)."""
        return torch.cat(cache.span(row, 0, length), dim=-1)[:, 0]


def cache_parts(width: int) -> tuple[int, int]:
    """How a cache divides features between keys and values."""
    return width - width // 2, width // 2


def features_shape(layers: Sequence[int], hidden_size: int, dtype: torch.dtype) -> CacheShape:
    """Shape of a cache of the features of each token."""
    return CacheShape(1, 1, *cache_parts(len(layers) * hidden_size), dtype)
