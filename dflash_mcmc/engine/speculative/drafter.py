"""Drafters propose the tokens of a block for the rows of a KV cache. `Drafter` lists what each of them has.

A `BlockGrid` has the draft's hidden states for every token, on a grid of blocks that depends only on the sequence
(`ops.grid_slot`). The hidden states of a block are computed once, when its anchor is fed, and kept for the row until the
block ends. A draw that starts inside a block computes the states of its block again.

A `SlotwiseDrafter` runs its network once per block, but the law of a drafted token x_j is q_j(. | anchor, x_0, ...,
x_(j-1)). It is known only when the tokens before it are drawn, so that the tokens are drawn slot by slot. Each slot's logits
are given to the engine, which draws from them and keeps them as the q of every rule. A marginal law, or the network's logits
without the correction, is another law: with it rejection is wrong.

An `EagleDrafter` runs an EAGLE-3 network, token by token. Its cache has an entry for each token x_j after the first: the keys
and values of the layer for x_j beside the fused features of x_(j-1). It also holds the features of x_j, which the entry of the
next token needs. An entry is a function of the tokens up to its own. It is written when the target reads the token, and
follows the target's rows.

Its block begins at the anchor, which is read beside the features of the token before it. Each later step reads its own state
in place of features that the target has not computed yet. These entries are temporary: the target reads the block afterwards.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch

from dflash_mcmc.draft.network.dflash import DraftLayer, SlotwiseNetwork, block_mask, block_range, target_ids
from dflash_mcmc.engine.batching import attention
from dflash_mcmc.engine.batching.cache import CacheShape, KVCache, round_up
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.batching.linear import Float32Head, soft_capped
from dflash_mcmc.engine.batching.rows import Rows, Status
from dflash_mcmc.ops import grid_slot

if TYPE_CHECKING:
    from dflash_mcmc.draft.network.eagle3 import Eagle3
    from dflash_mcmc.engine.batching.gpu import DraftLoop


DrawTokens: TypeAlias = Callable[[torch.Tensor, int], torch.Tensor]
"""Draws drafted tokens, int64 (rows, k), for the slots from a number on, from logits (rows, k, vocabulary) of the draft's law.
It keeps the law as the q of every rule."""


def _no_forward(*reading: Any) -> torch.Tensor:
    raise ValueError("this drafter reads tokens: it needs a forward")


class Anchors(NamedTuple):
    """The start of a block in each row.

    Attributes:
        rows: the first rows as a slice, or int64 (rows,).
        cache: the cache of the rows, which holds all tokens before the anchors.
        tokens: int64 (all rows, length), the rows' sequences up to the anchors. If the drafter does not read tokens, only
            the anchors are valid.
        position: int64 (rows,), positions of the anchors.
        key_length: larger than every position of the blocks.
        forward: forward(tokens (rows, k), positions (rows, k)) -> logits (rows, vocabulary) after the last token: of the
            target, or of a `ModelDrafter`'s model.
        live: bool (rows,), the rows that draw; None for all. Nothing before the anchors of the others may be written.
    """

    rows: slice | torch.Tensor
    cache: KVCache
    tokens: torch.Tensor
    position: torch.Tensor
    key_length: int
    forward: Callable[..., torch.Tensor] = _no_forward
    live: torch.Tensor | None = None

    def fed(self) -> torch.Tensor:
        """The anchors' tokens, int64 (rows,)."""
        return self.tokens[self.rows].gather(1, self.position[:, None])[:, 0]


class Drafter(Protocol):
    """Proposes blocks. The defaults are those of a drafter that reads the anchor alone, and keeps nothing of a token."""

    num_drafted: int
    """n, tokens of a block."""
    target_forwards: int = 0
    """Forwards of the target to draft a block, without the one that verifies it."""
    reads_tokens: bool = False
    """Whether it reads tokens before the anchor."""
    tapped_layers: tuple[int, ...] = ()
    """Decoder layers of the target whose outputs it needs for every token."""
    companion: CacheShape | None = None
    """Shape of its own cache, with an entry for every token; None without a cache."""

    def propose(self, anchors: Anchors, draw: DrawTokens) -> torch.Tensor:
        """Drafted tokens int64 (rows, n), each chosen by the drafter or drawn by `draw`."""

    def absorb(self, cache: KVCache, rows: slice | torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor,
               features: Sequence[torch.Tensor]) -> None:
        """Stores its entries for tokens that the target has read, int64 (rows, queries), at consecutive positions.

        Args:
            features: outputs of the tapped layers, each (rows, queries, width).
        """
        return  # a drafter without a cache stores nothing


class DFlashDrafter(Drafter):
    """Drafts all tokens of a block in one forward of the network, given the target's features of earlier tokens.

    Args:
        network: the network with its weights, on the target's device.
        target: the target; the network uses its embedding and head.
        block_size: number of tokens in a block, the anchor included; at most the network's block size.
    """

    is_parallel = True
    """Whether `hidden` depends on the anchor and the tokens before it alone, and not on those of the block."""

    def __init__(self, network: Any, target: LanguageModel, block_size: int):
        shape = network.shape
        self.network, self.target, self.num_drafted = network, target, block_size - 1
        self.dtype = network.fc.weight.dtype
        self._embedding = target.decoder.get_input_embeddings().weight
        self._own_head = Float32Head(network.lm_head) if hasattr(network, "lm_head") else None
        self.tapped_layers = shape.target_layers
        self.companion = CacheShape(shape.num_layers, shape.num_key_heads, shape.head_dim, shape.head_dim, self.dtype)
        self._loop: DraftLoop | None = None
        self._windows = sorted(set(shape.sliding), key=lambda window: window or 0)

    @property
    def num_rows(self) -> int:
        """Positions that the network reads for a block."""
        return self.network.shape.block_size

    @property
    def plain_head(self) -> bool:
        """Whether its logits are exactly the target's head applied to its hidden states."""
        shape = self.network.shape
        return shape.logit_scale == 1.0 and shape.logit_softcap is None and self._own_head is None

    def absorb(self, cache: KVCache, rows: slice | torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor,
               features: Sequence[torch.Tensor]) -> None:
        """Writes the keys and values of these tokens for all later blocks."""
        joined = torch.cat(list(features), dim=-1).to(self.dtype)
        if (loop := self._looped()) is not None:
            cache.aim(rows, positions, cache.length)
            loop.absorb(joined, cache, positions)
        else:
            cache.write(rows, positions, *self.network.keys_values(self.network.context(joined), positions))

    def _looped(self) -> "DraftLoop | None":
        """The loop of the layers, if they are DFlash's own, where the target's layers run in theirs on a GPU; else None."""
        if not (self.target.takes_ranges and self.network.layer_type is DraftLayer):
            return None
        if self._loop is None:
            from dflash_mcmc.engine.batching.gpu import DraftLoop

            with torch.inference_mode(False):  # its weights take the place of the modules'
                self._loop = DraftLoop(self.network)
        return self._loop

    def propose(self, anchors: Anchors, draw: DrawTokens) -> torch.Tensor:
        return draw(self.logits(self.hidden(anchors)), 0)

    def hidden_aside(self, anchors: Anchors) -> torch.Tensor:
        """Like `hidden`, but does not change the cache. It is for anchors after which the target has already read tokens."""
        cache = anchors.cache.drafts
        positions = anchors.position[:, None] + torch.arange(self.num_drafted + 1, device=anchors.position.device)
        before = cache.at(anchors.rows, positions)
        hidden = self.hidden(anchors)
        cache.write(anchors.rows, positions, *before)
        return hidden

    def hidden(self, anchors: Anchors) -> torch.Tensor:
        """Hidden states (rows, n, width) from which the head predicts the drafted tokens."""
        return self._rows(anchors, self.num_drafted + 1)[:, 1:]

    def _rows(self, anchors: Anchors, block: int) -> torch.Tensor:
        num_rows = len(anchors.position)
        tokens = torch.full((num_rows, block), self.network.shape.mask_token_id, device=anchors.position.device)
        tokens[:, 0] = anchors.fed()
        embeddings = torch.nn.functional.embedding(tokens, self._embedding) * self.network.shape.embedding_scale
        positions = anchors.position[:, None] + torch.arange(block, device=tokens.device)
        # The block's own keys temporarily occupy positions. Keys from the target's features overwrite them later.
        cache, causal = anchors.cache.drafts, self.network.shape.causal
        cache.aim(anchors.rows, positions, anchors.key_length)
        if (loop := self._looped()) is not None:
            ends = {window: block_range(anchors.position, block, window, causal) for window in self._windows}
            seen = [ends[window] for window in self.network.shape.sliding]
            return loop.hidden(embeddings.to(self.dtype), cache, seen, positions)
        keys = torch.arange(anchors.key_length, device=tokens.device).expand(num_rows, -1)
        masks = {window: block_mask(keys, anchors.position, block, window, causal)[:, None] for window in self._windows}

        def attend(layer: int, queries: torch.Tensor, block_keys: torch.Tensor, block_values: torch.Tensor) -> torch.Tensor:
            seen_keys, seen_values = cache.kv_layers[layer].update(block_keys, block_values)
            mask = masks[self.network.shape.sliding[layer]]
            return attention.grouped_attention(None, queries, seen_keys, seen_values, mask)[0].transpose(1, 2)

        return self.network(embeddings.to(self.dtype), positions, attend)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits (rows, n, vocabulary), through the target's head, or a head of its own: -inf for tokens it lacks."""
        head = self.target.head_logits if self._own_head is None else self._own_head.logits
        logits = head(hidden.contiguous())  # else PyTorch multiplies the head with each row's slots apart
        shape = self.network.shape
        if shape.logit_scale != 1.0:
            logits = logits * shape.logit_scale
        if self._own_head is None:
            return soft_capped(logits, shape.logit_softcap, self.target.forbidden)
        capped = soft_capped(logits, shape.logit_softcap, self._own_head.forbidden)
        if shape.draft_vocab_size is None:
            return capped.masked_fill(self.target.forbidden, -torch.inf)
        whole = torch.full((*capped.shape[:-1], self.target.vocab_size), -torch.inf, device=capped.device)
        return whole.index_copy_(-1, target_ids(self.network), capped).masked_fill_(self.target.forbidden, -torch.inf)


class SlotwiseDrafter(DFlashDrafter):
    """Drafts slot by slot with a `SlotwiseNetwork`. The network always gets a whole block, as in its training."""

    network: SlotwiseNetwork
    is_parallel = False

    def __init__(self, network: SlotwiseNetwork, target: LanguageModel):
        super().__init__(network, target, network.shape.block_size)
        self.num_drafted = network.shape.num_drafted

    def hidden(self, anchors: Anchors) -> torch.Tensor:
        return self._rows(anchors, self.network.shape.block_size)[:, self.network.shape.first_row :]

    def propose(self, anchors: Anchors, draw: DrawTokens) -> torch.Tensor:
        hidden = self.hidden(anchors)
        base, previous, state, drafted = self.logits(hidden), anchors.fed(), None, []
        for slot in range(self.num_drafted):
            logits, state = self.network.corrected(base[:, slot], hidden[:, slot], previous, state)
            previous = draw(logits[:, None], slot)[:, 0]
            drafted.append(previous)
        return torch.stack(drafted, dim=1)


def entry_shape(shape: Any, dtype: torch.dtype) -> CacheShape:
    """The entry of a token: keys and values, and the features beside the values, for an `Eagle3Shape`."""
    beside = -(-shape.hidden_size // shape.num_key_heads)
    return CacheShape(1, shape.num_key_heads, shape.head_dim, shape.head_dim + beside, dtype)


class EagleDrafter(DFlashDrafter):
    """Drafts token by token; see the module's docstring. The network uses the target's embedding, and no head of it."""

    network: "Eagle3"  # type: ignore[assignment]
    is_parallel = False

    def __init__(self, network: "Eagle3", target: LanguageModel, num_drafted: int):
        super().__init__(network, target, num_drafted + 1)
        self.tapped_layers = network.shape.layers_of(len(target.layers))
        self.companion = entry_shape(network.shape, self.dtype)
        self._value_dim = self.companion.value_dim

    @property
    def num_rows(self) -> int:
        """A step for each drafted token, and one position more, as a block of the grid has."""
        return self.num_drafted + 1

    def absorb(self, cache: KVCache, rows: slice | torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor,
               features: Sequence[torch.Tensor]) -> None:
        fused = self.network.fused([each.to(self.dtype) for each in features])
        states = torch.cat([self._before(cache, rows, positions[:, 0]), fused[:, :-1]], dim=1)
        keys, values = self.network.keys_values(self._embedded(tokens), states, positions)
        wide = keys.shape[1] * (self._value_dim - values.shape[-1])
        beside = torch.nn.functional.pad(fused, (0, wide - fused.shape[-1])).unflatten(-1, (keys.shape[1], -1))
        cache.write(rows, positions, keys[None], torch.cat([values, beside.transpose(1, 2)], dim=-1)[None])

    def propose(self, anchors: Anchors, draw: DrawTokens) -> torch.Tensor:
        drafted = list[torch.Tensor]()

        def choose(slot: int, hidden: torch.Tensor) -> torch.Tensor:
            drafted.append(draw(self.logits(hidden), slot)[:, 0])
            return drafted[-1]

        self._steps(anchors, choose)
        return torch.stack(drafted, dim=1)

    def hidden(self, anchors: Anchors) -> torch.Tensor:
        """Hidden states (rows, n, width) of a block's slots, each after the tokens of the row's sequence before it."""
        sequences, states = anchors.tokens[anchors.rows], list[torch.Tensor]()

        def choose(slot: int, hidden: torch.Tensor) -> torch.Tensor:
            states.append(hidden)
            at = (anchors.position + slot + 1).clamp(max=sequences.shape[1] - 1)  # later slots are not used
            return sequences.gather(1, at[:, None])[:, 0]

        self._steps(anchors, choose)
        return torch.cat(states, dim=1)

    def _steps(self, anchors: Anchors, choose: Callable[[int, torch.Tensor], torch.Tensor]) -> None:
        """All steps of a block. `choose` gives the token after a slot's hidden states (rows, 1, width), int64 (rows,)."""
        cache = anchors.cache.drafts
        state, fed = self._before(cache, anchors.rows, anchors.position), anchors.fed()
        for slot in range(self.num_drafted):
            hidden, state = self._step(anchors, fed[:, None], state, anchors.position[:, None] + slot)
            fed = choose(slot, hidden)

    def _step(self, anchors: Anchors, fed: torch.Tensor, state: torch.Tensor,
              positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(hidden states for the head, the next step's state) of a token of each row, int64 (rows, 1), at its position."""
        keys = torch.arange(anchors.key_length, device=fed.device)
        seen = keys <= positions[..., None]
        # The first token has no features before it, and therefore no entry, except for a block that it begins.
        seen = seen & ((keys > 0) | (positions == 0)[..., None])
        cache = anchors.cache.drafts
        cache.aim(anchors.rows, positions, anchors.key_length)

        def attend(queries: torch.Tensor, own_keys: torch.Tensor, own_values: torch.Tensor) -> torch.Tensor:
            size = own_values.shape[-1]
            padded = torch.nn.functional.pad(own_values, (0, self._value_dim - size))
            all_keys, all_values = cache.kv_layers[0].update(own_keys, padded)
            return attention.grouped_attention(None, queries, all_keys, all_values[..., :size], seen[:, None])[
                0].transpose(1, 2)

        return self.network(self._embedded(fed), state, positions, attend)

    def _before(self, cache: KVCache, rows: slice | torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        _, values = cache.at(rows, (first - 1).clamp(min=0)[:, None])
        shape = self.network.shape
        kept = values[0, ..., shape.head_dim :].transpose(1, 2).flatten(2)[..., : shape.hidden_size]
        return kept.masked_fill((first == 0)[:, None, None], 0.0)

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(tokens, self._embedding).to(self.dtype)


class SelfDrafter(Drafter):
    """The target as its own draft, token by token. It is no faster than plain decoding, but bounds the quality of a draft."""

    def __init__(self, num_drafted: int):
        self.num_drafted = self.target_forwards = num_drafted

    def propose(self, anchors: Anchors, draw: DrawTokens) -> torch.Tensor:
        drafted, fed = [], anchors.fed()
        for slot in range(self.num_drafted):
            fed = draw(anchors.forward(fed[:, None], (anchors.position + slot)[:, None])[:, None], slot)[:, 0]
            drafted.append(fed)
        return torch.stack(drafted, dim=1)


class ModelDrafter(Drafter):
    """Another causal language model as the draft, token by token; its law of a token is that after all tokens before it.

    It reads each token that the target reads, by the engine, except blocks: their tokens it has read when it drafted them, but
    for the last one. So it reads the token before an anchor again, together with the anchor.

    Args:
        model: the model, on the target's device.
        num_drafted: tokens of a block.
    """

    reads_tokens = True

    def __init__(self, model: LanguageModel, num_drafted: int):
        self.model, self.num_drafted, self.companion = model, num_drafted, model.cache_shape

    def propose(self, anchors: Anchors, draw: DrawTokens) -> torch.Tensor:
        before = (anchors.position - 1).clamp(min=0)
        if anchors.live is not None:
            before = torch.where(anchors.live, before, anchors.position)
        at = torch.stack([before, anchors.position], dim=1)
        fed, drafted = anchors.tokens[anchors.rows].gather(1, at), list[torch.Tensor]()
        for slot in range(self.num_drafted):
            fed = draw(anchors.forward(fed, at)[:, None], slot)
            drafted.append(fed[:, 0])
            at = anchors.position[:, None] + slot + 1
        return torch.stack(drafted, dim=1)


class NgramDrafter(Drafter):
    """Drafts the tokens that followed an earlier occurrence of the latest tokens (prompt lookup decoding).

    It uses the longest suffix of at most `longest` tokens that occurs earlier, at its last earlier occurrence. A continuation
    shorter than a block is repeated. Without an occurrence the anchor is repeated.
    """

    reads_tokens = True

    def __init__(self, num_drafted: int, longest: int):
        self.num_drafted, self.longest = num_drafted, longest

    def propose(self, anchors: Anchors, draw: DrawTokens) -> torch.Tensor:
        position = anchors.position[:, None]
        tokens = anchors.tokens[anchors.rows, : anchors.key_length]
        index = torch.arange(tokens.shape[1], device=tokens.device)[None]
        # The length of the common suffix of the tokens up to i and the tokens up to the anchor.
        length, unbroken = torch.zeros_like(tokens), index < position
        for back in range(self.longest):
            there, here = index - back, position - back
            same = tokens.gather(1, there.clamp(min=0).expand_as(tokens)) == tokens.gather(1, here.clamp(min=0))
            unbroken = unbroken & same & (there >= 0)
            length = length + unbroken
        # A longer occurrence has a higher score, and a later one among those of a length.
        best = (length * tokens.shape[1] + index).where(length > 0, -1).amax(dim=1, keepdim=True)
        last = torch.where(best >= 0, best % tokens.shape[1], position - 1)
        ahead = torch.arange(self.num_drafted, device=tokens.device)[None] % (position - last)
        return torch.where(best >= 0, tokens.gather(1, last + 1 + ahead), tokens.gather(1, position))


_NO_ANCHOR = -1


class DraftStates(NamedTuple):
    """The draft's hidden states (rows, width) for the next token; valid where `inside`, bool (rows,).

    None for a model that drafts: its states are those of the forward in which it reads the token before.
    """

    hidden: torch.Tensor | None
    inside: torch.Tensor


class BlockGrid:
    """The current blocks of all rows.

    Args:
        drafter: gives the block size of the grid.
        num_rows: rows of the engine's cache.
        row_step: the draft runs on a multiple of this number of rows, on which its numbers then do not depend (`cache.py`).
    """

    def __init__(self, drafter: DFlashDrafter | ModelDrafter, num_rows: int, row_step: int, device: torch.device):
        self.drafter, self.block_size, self._row_step = drafter, drafter.num_drafted + 1, row_step
        self._network = drafter if isinstance(drafter, DFlashDrafter) else None
        width, dtype = (self._network.network.shape.hidden_size, self._network.dtype) if self._network else (0, None)
        self._hidden = torch.zeros(num_rows, drafter.num_drafted, width, dtype=dtype, device=device)
        self._anchor = torch.full((num_rows,), _NO_ANCHOR, device=device)

    def forget(self, row: int) -> None:
        """Forgets the row's block, because the row has a new sequence."""
        self._anchor[row] = _NO_ANCHOR

    def swap(self, a: int, b: int) -> None:
        """Exchanges the blocks of two rows."""
        self._hidden[[a, b]], self._anchor[[a, b]] = self._hidden[[b, a]], self._anchor[[b, a]]

    def at_step(self, cache: KVCache, state: Rows, batch: int, key_length: int) -> DraftStates:
        """States for the next tokens of the first `batch` rows, before the rows are fed. Waits for the device."""
        position = state.position[:batch]
        slot = torch.remainder(position + 1 - state.origin[:batch], self.block_size)
        anchor, inside = position + 1 - slot, slot > 0
        drafting = inside & (state.status[:batch] == Status.LIVE)
        new = drafting & (anchor != self._anchor[:batch])
        self._anchor[:batch] = torch.where(new, anchor, self._anchor[:batch])
        state.blocks[:batch] += new
        if self._network is None:
            return DraftStates(None, inside)
        rows = (new if self._network.is_parallel else drafting).nonzero()[:, 0]
        if len(rows):
            padded = torch.cat([rows, rows[:1].expand(round_up(len(rows), self._row_step) - len(rows))])
            hidden = self._network.hidden_aside(Anchors(padded, cache, state.tokens, anchor[padded], key_length))
            self._hidden[rows] = hidden[: len(rows)]
        chosen = self._hidden[state.ids[:batch], (slot - 1).clamp(min=0)]
        return DraftStates(chosen, inside)

    def num_blocks(self, origin: int, first: int, stop: int) -> int:
        """Number of blocks that `along` drafts for the tokens at positions `first` to `stop - 1`."""
        return len({position - slot for position in range(first, stop)
                    if (slot := grid_slot(position - origin, self.block_size))})

    def along(self, cache: KVCache, row: int, sequence: np.ndarray, origin: int, first: int, count: int) -> DraftStates:
        """States for the `count` tokens after position `first` of a sequence that the row holds.

        `origin` is the position of the first generated token.
        """
        device = self._anchor.device
        slots = [grid_slot(first + 1 + index - origin, self.block_size) for index in range(count)]
        if self._network is None:
            return DraftStates(None, torch.tensor(slots, device=device) > 0)
        tokens, rows = torch.from_numpy(sequence).to(device)[None], torch.tensor([row], device=device)
        blocks: dict[int, torch.Tensor] = {}
        hidden = torch.zeros(count, self._hidden.shape[2], dtype=self._hidden.dtype, device=device)
        for index, slot in enumerate(slots):
            anchor = first + 1 + index - slot
            if slot and anchor not in blocks:
                # The tokens are taken from the sequence, not from the engine's rows.
                at = Anchors(rows, cache, tokens.expand(row + 1, -1), torch.tensor([anchor], device=device), cache.length)
                blocks[anchor] = self._network.hidden_aside(at)[0]
            if slot:
                hidden[index] = blocks[anchor][slot - 1]
        return DraftStates(hidden, torch.tensor(slots, device=device) > 0)
