"""The DFlash draft network. One forward drafts a block of tokens, given the target's features of the tokens before it.

The weights have the names and shapes of the published checkpoints. A call takes the embeddings of
[anchor, mask, mask, ...], at the positions that the tokens will have. It returns hidden states from which the target's head
predicts the token at the *same* position. The context consists of keys and values that are computed from the target's
features alone. It does not depend on any block, so it is computed once for each position and kept. The caller applies the
target's embedding and head.

Source: DFlash (arXiv 2602.06036).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch.nn.functional import scaled_dot_product_attention

from dflash_mcmc.draft.network.dflash.layers import DraftLayer, RMSNorm, Rotation
from dflash_mcmc.draft.network.dflash.shape import DFlashShape

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, queries, keys, values) -> attention output; see `DFlash.forward`."""


class DFlash(torch.nn.Module):
    """The network. Its state dict is the published one: 3 tensors, and 11 per layer (15 with biases)."""

    layer_type: type[DraftLayer] = DraftLayer
    """Class of the layers."""

    def __init__(self, shape: DFlashShape):
        super().__init__()
        self.shape = shape
        self.rotation = Rotation(shape)
        self.layers = torch.nn.ModuleList(self.layer_type(shape) for _ in range(shape.num_layers))
        self.fc = torch.nn.Linear(len(shape.target_layers) * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)

    def context(self, features: torch.Tensor) -> torch.Tensor:
        """Context states (rows, m, hidden) from features (rows, m, features · hidden). All layers use the same states."""
        return self.hidden_norm(self.fc(features))

    def keys_values(self, context: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The cache entries of context states.

        Args:
            context: (rows, m, hidden), from `context`.
            positions: int64 (rows, m).

        Returns:
            Keys, normed and rotated, and values: each (layers, rows, key heads, m, head_dim).
        """
        rotation = self.rotation(positions, context.dtype)
        layers = cast("list[DraftLayer]", list(self.layers))
        pairs = [layer.self_attn.keys_values(context, rotation) for layer in layers]
        keys, values = zip(*pairs, strict=True)
        return torch.stack(keys), torch.stack(values)

    def forward(self, embeddings: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Hidden states after the final norm, (rows, n, hidden); row k predicts the token at its own position.

        Args:
            embeddings: (rows, n, hidden), the embeddings of [anchor, mask, ...] for each block.
            positions: int64 (rows, n).
            attend: attend(layer, queries, keys, values) computes softmax attention over the context, which the caller
                knows, and over the block's own keys and values. Queries and result have the shape
                (rows, heads, n, head_dim), keys and values (rows, key heads, n, head_dim).
        """
        rotation, hidden = self.rotation(positions, embeddings.dtype), embeddings
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden, rotation, lambda *qkv, number=number: attend(number, *qkv))
        return self.norm(hidden)

    def along(self, base: torch.Tensor, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Logits of all slots of given blocks, float32 (blocks, n, vocabulary). DFlash's are the head's.

        Args:
            base: float32 (blocks, n, vocabulary), the head's logits of hidden states (blocks, n, hidden).
            previous: int64 (blocks, n), the token before each slot; the first one is the anchor.
        """
        return base


def block_pass(
    draft: DFlash, context_keys: torch.Tensor, context_values: torch.Tensor, context_positions: torch.Tensor,
    anchors: torch.Tensor, embeddings: torch.Tensor, seen: torch.Tensor | None = None,
) -> torch.Tensor:
    """Drafts many blocks of each row in one differentiable forward. Each block has the result of a separate forward.

    A block sees itself and the context strictly before its anchor. The anchor's own features do not exist yet when the block
    is drafted.

    Args:
        context_keys, context_values: (layers, rows, key heads, m, head_dim), from `keys_values`; finite at padding too.
        context_positions: int64 (rows, m); -1 for padding, which no block sees.
        anchors: int64 (rows, blocks), positions of the anchors; -1 for an unused block, whose output is finite and arbitrary.
        embeddings: (rows, blocks, n, hidden), n <= block_size.
        seen: bool (rows, blocks, m), context before the anchor that a block may see; None for all of it.

    Returns:
        (rows, blocks, n, hidden).
    """
    num_rows, num_blocks, n, _ = embeddings.shape
    anchors = anchors.clamp(min=0)  # an unused block sees itself, because a softmax over no key is undefined
    positions = _block_positions(anchors, n).flatten(1)
    masks = {window: _pass_mask(context_positions, anchors, n, window, draft.shape.causal, seen)
             for window in set(draft.shape.sliding)}

    def attend(layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        keys, values = torch.cat((context_keys[layer], keys), dim=2), torch.cat((context_values[layer], values), dim=2)
        return masked_attention(queries, keys, values, masks[draft.shape.sliding[layer]])

    hidden = draft(embeddings.flatten(1, 2), positions, attend)
    return hidden.view(num_rows, num_blocks, n, -1)


def block_mask(key_positions: torch.Tensor, anchors: torch.Tensor, n: int, window: int | None,
               causal: bool | None = None) -> torch.Tensor:
    """The mask of the keys that the tokens of blocks see.

    Keys before the anchor are context, keys from the anchor on belong to the block, and keys after the block are not seen. In
    a layer with a window a token sees positions less than `window` away from its own. In a causal layer it sees no position
    after its own; otherwise the tokens of a block see one another in both directions.

    Args:
        key_positions: int64 (rows, keys); negative ones are never seen.
        anchors: int64 (rows, ...), one for each block.
        causal: None for a causal layer if it has a window.

    Returns:
        bool (rows, ..., n, keys).
    """
    rows, keys = key_positions.shape
    key = key_positions.view(rows, *[1] * anchors.dim(), keys)
    query = _block_positions(anchors, n)[..., None]
    seen = (key >= 0) & (key < anchors[..., None, None] + n)
    if window is not None if causal is None else causal:
        seen = seen & (key <= query)
    if window is not None:
        seen = seen & (key > query - window) & (key < query + window)
    return seen.expand(*query.shape[:-1], keys)


def masked_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Softmax attention (rows, heads, n, head_dim) of queries of that shape.

    Args:
        keys, values: (rows, key heads, keys, head_dim).
        mask: bool (rows, 1, n, keys), True where a query may look.
    """
    # Kernels that accept a mask and share key heads materialise the weights of all heads. Repeated keys take less memory.
    groups = queries.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (keys, values))
    return scaled_dot_product_attention(queries, keys, values, attn_mask=mask)


def _block_positions(anchors: torch.Tensor, n: int) -> torch.Tensor:
    """Positions int64 (..., n) of the blocks of anchors (...)."""
    return anchors[..., None] + torch.arange(n, device=anchors.device)


def _pass_mask(context_positions: torch.Tensor, anchors: torch.Tensor, n: int, window: int | None,
               causal: bool | None, seen: torch.Tensor | None) -> torch.Tensor:
    """bool (rows, 1, blocks · n, m + blocks · n): context strictly before the anchor, and the block itself."""
    num_blocks = anchors.shape[1]
    before = (context_positions[:, None] < anchors[..., None])[:, :, None]
    if seen is not None:
        before = before & seen[:, :, None]
    context = block_mask(context_positions, anchors, n, window, causal) & before
    blocks = torch.arange(num_blocks, device=anchors.device).repeat_interleave(n)
    own = blocks == torch.arange(num_blocks, device=anchors.device)[:, None]
    block = block_mask(_block_positions(anchors, n).flatten(1), anchors, n, window, causal) & own[:, None]
    return torch.cat((context, block), dim=-1).flatten(1, 2)[:, None]
