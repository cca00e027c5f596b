"""Drafts slot by slot: each law depends on the tokens drafted before it in the block.

The slots of a `SlotwiseDrafter` depend on the tokens drafted before them in the block, although the network runs once per
block. The law of a drafted token x_j is q_j(. | anchor, x_0, ..., x_(j-1)). It is known only when the tokens before it are
drawn, so that the tokens are drawn slot by slot. Each slot's logits are given to the engine, which draws from them and
keeps them as the q of every rule. A marginal law, or the network's logits without the correction, is another law: with it
rejection is wrong.

An `EagleDrafter` runs an EAGLE-3 network, token by token. Its cache has an entry for each token x_j after the first: the keys
and values of the layer for x_j beside the fused features of x_(j-1). It also holds the features of x_j, which the entry of the
next token needs. An entry is a function of the tokens up to its own. It is written when the target reads the token, and
follows the target's rows.

Its block begins at the anchor, which is read beside the features of the token before it. Each later step reads its own state
in place of features that the target has not computed yet. These entries are temporary: the target reads the block afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dflash_mcmc.draft.network.dflash import SlotwiseNetwork
from dflash_mcmc.draft.network.eagle3 import Eagle3
from dflash_mcmc.engine.batching import attention
from dflash_mcmc.engine.batching.cache import CacheShape, KVCache
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.speculative.drafter import Anchors, DFlashDrafter, DrawTokens


class SlotwiseDrafter(DFlashDrafter):
    """Drafts slot by slot with a `SlotwiseNetwork`. The network always gets a whole block, as in its training.

    Args:
        network: the network with its weights, on the target's device.
        target: the target; the network uses its embedding and head.
    """

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
    """Drafts token by token; see the module's docstring.

    Args:
        network: the network with its weights, on the target's device.
        target: the target; the network uses its embedding.
        num_drafted: tokens of a block.
    """

    network: Eagle3  # type: ignore[assignment]
    is_parallel = False

    def __init__(self, network: Eagle3, target: LanguageModel, num_drafted: int):
        super().__init__(network, target, num_drafted + 1)
        self.tapped_layers = network.shape.layers_of(len(target.layers))
        self.companion = entry_shape(network.shape, self.dtype)

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

    @property
    def _value_dim(self) -> int:
        return entry_shape(self.network.shape, self.dtype).value_dim
