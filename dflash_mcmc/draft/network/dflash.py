"""The DFlash draft network. One forward drafts a block of tokens, given the target's features of the tokens before it.

The weights have the names and shapes of the published checkpoints. A call takes the embeddings of
[anchor, mask, mask, ...], at the positions that the tokens will have. It returns hidden states from which the target's head
predicts the token at the *same* position. The context consists of keys and values that are computed from the target's
features alone. It does not depend on any block, so it is computed once for each position and kept. The caller applies the
target's embedding and head.

Source: DFlash (arXiv 2602.06036).
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding, rotate_half


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkShape:
    """What the shapes of all draft networks have, as `Family.read_shape` returns them."""

    hidden_size: int
    """Hidden size of the draft and of the target."""
    num_layers: int
    num_heads: int
    num_key_heads: int
    head_dim: int
    intermediate_size: int
    target_layers: tuple[int, ...]
    """0-based layers of the target whose outputs are the features, in the order in which they are concatenated."""
    num_target_layers: int | None = None
    unnormed: bool = False
    """Whether no feature has passed the target's final norm, so that its last layer gives none."""
    norm_eps: float = 1e-6
    rope: dict
    """As `rope_parameters` of transformers: rope_type, rope_theta, and the fields of the type."""
    max_positions: int
    bias: bool = False
    """Whether the four projections of attention have a bias."""
    sliding: tuple[int | None, ...]
    """Window of each layer in positions, the token's own included; None for full attention."""
    logit_scale: float = 1.0
    """Factor for the head's logits, applied by the caller."""
    logit_softcap: float | None = None
    """c of c·tanh(logit / c), which the caller applies after `logit_scale`."""
    vocab_size: int | None = None
    """Tokens of the target's head, if the network has tensors that depend on it."""
    draft_vocab_size: int | None = None
    """Tokens of a head of its own, which are some of the target's (`DraftHead`); None for all tokens."""
    activation: str = "silu"
    dtype: torch.dtype = torch.float32
    """Dtype of the weights in the checkpoint."""

    def layers_of(self, num_layers: int) -> tuple[int, ...]:
        """The layers of a target with `num_layers` layers that give the features. Raises UserError for too few layers."""
        return self.target_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashShape(NetworkShape):
    """The shape of a DFlash draft."""

    block_size: int
    """Positions of a block: the anchor and the drafted tokens."""
    mask_token_id: int
    causal: bool | None = None
    """Whether a token of a block sees no later one of its block; None: in layers with a window alone."""
    embedding_scale: float = 1.0
    """Factor for rows of the target's embedding table, applied by the caller instead of the target's own scale."""

    @property
    def first_row(self) -> int:
        """The first row of a block that predicts a drafted token. DFlash does not use the anchor's row."""
        return 1

    @property
    def num_drafted(self) -> int:
        """Drafted tokens of a block."""
        return self.block_size - self.first_row


class DraftLayer(torch.nn.Module):
    """A decoder layer. It computes outputs only for the tokens of blocks, not for the context."""

    def __init__(self, shape: DFlashShape):
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = feed_forward(shape)
        self.input_layernorm = Qwen3RMSNorm(shape.hidden_size, shape.norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(shape.hidden_size, shape.norm_eps)

    def forward(self, hidden: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], attend: Callable) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Attention(torch.nn.Module):
    """Attention of a block's tokens to the context and to the block. One set of projections serves context and block.

    Args:
        width: size of its input; None for the hidden size.
        normed: whether queries and keys are normed.
    """

    def __init__(self, shape: NetworkShape, width: int | None = None, normed: bool = True):
        super().__init__()
        queries, keys = shape.num_heads * shape.head_dim, shape.num_key_heads * shape.head_dim
        self.head_dim, self.scaling = shape.head_dim, shape.head_dim**-0.5
        width = width or shape.hidden_size
        self.q_proj = torch.nn.Linear(width, queries, bias=shape.bias)
        self.k_proj = torch.nn.Linear(width, keys, bias=shape.bias)
        self.v_proj = torch.nn.Linear(width, keys, bias=shape.bias)
        self.o_proj = torch.nn.Linear(queries, shape.hidden_size, bias=shape.bias)
        self.q_norm, self.k_norm = (
            Qwen3RMSNorm(shape.head_dim, shape.norm_eps) if normed else torch.nn.Identity() for _ in range(2))

    def keys_values(
        self, hidden: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys, normed and rotated, and values, each (rows, key heads, m, head_dim). The input norm skips context states."""
        values = self._split(self.v_proj(hidden))
        # Under autocast a norm's product is in float32. Keys get the dtype of the values: both go into one cache.
        return _rotate(self.k_norm(self._split(self.k_proj(hidden))), rotation).to(values.dtype), values

    def forward(self, hidden: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], attend: Callable) -> torch.Tensor:
        keys, values = self.keys_values(hidden, rotation)
        queries = _rotate(self.q_norm(self._split(self.q_proj(hidden))), rotation).to(values.dtype)
        return self.o_proj(attend(queries, keys, values).transpose(1, 2).flatten(2))

    def _split(self, projected: torch.Tensor) -> torch.Tensor:
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def feed_forward(shape: NetworkShape) -> torch.nn.Module:
    """The gated feed-forward part of a layer."""
    return Qwen3MLP(SimpleNamespace(hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size,
                                    hidden_act="silu"))


class DraftHead(torch.nn.Module):
    """The weights of a head over some of the target's tokens, (tokens, hidden). The others have probability 0.

    It is no linear layer, because the drafter multiplies it as it does the target's head.
    """

    bias = None

    def __init__(self, num_tokens: int, hidden_size: int):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(num_tokens, hidden_size))


def target_ids(draft: torch.nn.Module) -> torch.Tensor:
    """The target's ids of the tokens of a reduced vocabulary, int64 (tokens,)."""
    d2t: torch.Tensor = draft.d2t  # type: ignore[assignment]
    return torch.arange(len(d2t), device=d2t.device) + d2t


class Rotation:
    """Cosines and sines of positions, from float32 frequencies.

    It is not a module, because a cast of the network to bfloat16 would also cast the buffers of a module. At position 1000
    the angles would then be wrong by up to two radians.
    """

    def __init__(self, shape: NetworkShape):
        config = Qwen3Config(hidden_size=shape.hidden_size, num_attention_heads=shape.num_heads, head_dim=shape.head_dim,
                             max_position_embeddings=shape.max_positions, rope_parameters=dict(shape.rope))
        with torch.device("cpu"):  # on the CPU even if the network is built on the meta device
            embedding = Qwen3RotaryEmbedding(config)
        # Angles per position in radians, float32 (head_dim / 2,), and the factor of cosines and sines, as in Qwen3.
        self.frequencies, self.scale = embedding.inv_freq.float(), embedding.attention_scaling

    @torch.no_grad()
    def __call__(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, each (rows, 1, m, head_dim), of positions (rows, m). They are rounded to `dtype` at the end."""
        if self.frequencies.device != positions.device:
            self.frequencies = self.frequencies.to(positions.device)
        angles = positions[:, None, :, None].float() * self.frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype)


def _rotate(heads: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotates (rows, heads, m, head_dim) by halves: axis j and j + head_dim / 2 are one plane."""
    cosines, sines = rotation
    return heads * cosines + rotate_half(heads) * sines


Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, queries, keys, values) -> attention output; see `DFlash.forward`."""


class DFlash(torch.nn.Module):
    """The network. Its state dict is the published one: 3 tensors, 11 per layer (15 with biases), and 2 of an own head."""

    d2t: torch.Tensor
    """With an own head: int64 (tokens,), the target's id of each token minus its place."""

    layer_type: type[DraftLayer] = DraftLayer
    """Class of the layers."""

    def __init__(self, shape: DFlashShape):
        super().__init__()
        self.shape = shape
        self.rotation = Rotation(shape)
        self.layers = torch.nn.ModuleList(self.layer_type(shape) for _ in range(shape.num_layers))
        self.fc = torch.nn.Linear(len(shape.target_layers) * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(shape.hidden_size, shape.norm_eps)
        self.norm = Qwen3RMSNorm(shape.hidden_size, shape.norm_eps)
        if shape.draft_vocab_size is not None:
            self.lm_head = DraftHead(shape.draft_vocab_size, shape.hidden_size)
            self.register_buffer("d2t", torch.zeros(shape.draft_vocab_size, dtype=torch.int64))

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
    before = (context_positions[:, None] < anchors[..., None])[:, :, None]
    if seen is not None:
        before = before & seen[:, :, None]
    numbers = torch.arange(num_blocks, device=anchors.device)
    own = (numbers.repeat_interleave(n) == numbers[:, None])[:, None]
    masks = {}  # by window, bool (rows, 1, blocks · n, m + blocks · n): context before the anchor, and the block itself
    for window in set(draft.shape.sliding):
        context = block_mask(context_positions, anchors, n, window, draft.shape.causal) & before
        block = block_mask(positions, anchors, n, window, draft.shape.causal) & own
        masks[window] = torch.cat((context, block), dim=-1).flatten(1, 2)[:, None]

    def attend(layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        keys, values = torch.cat((context_keys[layer], keys), dim=2), torch.cat((context_values[layer], values), dim=2)
        return masked_attention(queries, keys, values, masks[draft.shape.sliding[layer]])

    hidden = draft(embeddings.flatten(1, 2), positions, attend)
    return hidden.view(num_rows, num_blocks, n, -1)


def block_range(anchors: torch.Tensor, n: int, window: int | None,
                causal: bool | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The first and the last position that each token of a block sees, each int64 (..., n).

    Keys before the anchor are context, keys from the anchor on belong to the block, and keys after the block are not seen. In
    a layer with a window a token sees positions less than `window` away from its own. In a causal layer it sees no position
    after its own; otherwise the tokens of a block see one another in both directions.

    Args:
        anchors: int64 (...), one for each block.
        causal: None for a causal layer if it has a window.
    """
    query = _block_positions(anchors, n)
    last = query if (window is not None if causal is None else causal) else torch.maximum(query, anchors[..., None] + n - 1)
    if window is None:
        return torch.zeros_like(query), last
    return (query - window + 1).clamp(min=0), torch.minimum(last, query + window - 1)


def block_mask(key_positions: torch.Tensor, anchors: torch.Tensor, n: int, window: int | None,
               causal: bool | None = None) -> torch.Tensor:
    """The mask of `block_range`, bool (rows, ..., n, keys), for keys at positions int64 (rows, keys), -1 for none."""
    key = key_positions.view(len(key_positions), *[1] * anchors.dim(), -1)
    first, last = block_range(anchors, n, window, causal)
    return (key >= first[..., None]) & (key <= last[..., None])


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
    return torch.nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)


def _block_positions(anchors: torch.Tensor, n: int) -> torch.Tensor:
    """Positions int64 (..., n) of the blocks of anchors (...)."""
    return anchors[..., None] + torch.arange(n, device=anchors.device)


class SlotwiseNetwork(DFlash):
    """A DFlash network whose logits are corrected by the token before each slot."""

    @abstractmethod
    def corrected(self, base: torch.Tensor, hidden: torch.Tensor, previous: torch.Tensor,
                  state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits of one slot, float32 (rows, vocabulary), and the state for the next slot.

        Args:
            base: float32 (rows, vocabulary), the head's logits of `hidden`.
            hidden: (rows, hidden), the network's output for the slot.
            previous: int64 (rows,), the token before the slot: the anchor for the first one.
            state: the state after the slot before; None in the first slot.
        """

    def along(self, base: torch.Tensor, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        state, slots = None, []
        for slot in range(base.shape[1]):
            logits, state = self.corrected(base[:, slot], hidden[:, slot], previous[:, slot], state)
            slots.append(logits)
        return torch.stack(slots, dim=1)
