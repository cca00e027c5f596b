"""The normalised content of a draft's config.json."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashShape:
    """The shape of a draft, as `config.read_shape` returns it."""

    hidden_size: int
    """Hidden size of the draft and of the target."""
    num_layers: int
    num_heads: int
    num_key_heads: int
    head_dim: int
    intermediate_size: int
    block_size: int
    """Positions of a block: the anchor and the drafted tokens."""
    mask_token_id: int
    target_layers: tuple[int, ...]
    """0-based layers of the target whose outputs are the features, in the order in which they are concatenated."""
    num_target_layers: int | None = None
    norm_eps: float = 1e-6
    rope: dict
    """As `rope_parameters` of transformers: rope_type, rope_theta, and the fields of the type."""
    max_positions: int
    bias: bool = False
    """Whether the four projections of attention have a bias."""
    sliding: tuple[int | None, ...]
    """Window of each layer in positions, the token's own included; None for full attention."""
    causal: bool | None = None
    """Whether a token of a block sees no later one of its block; None: in layers with a window alone."""
    embedding_scale: float = 1.0
    """Factor for rows of the target's embedding table, applied by the caller instead of the target's own scale."""
    logit_scale: float = 1.0
    """Factor for the head's logits, applied by the caller."""
    logit_softcap: float | None = None
    """c of c·tanh(logit / c), which the caller applies after `logit_scale`."""
    vocab_size: int | None = None
    """Tokens of the target's head, if the network has tensors of this size."""
    activation: str = "silu"
    dtype: torch.dtype = torch.float32
    """Dtype of the weights in the checkpoint."""

    @property
    def first_row(self) -> int:
        """The first row of a block that predicts a drafted token. DFlash does not use the anchor's row."""
        return 1

    @property
    def num_drafted(self) -> int:
        """Drafted tokens of a block."""
        return self.block_size - self.first_row
