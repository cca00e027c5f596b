"""The DFlash 2 draft network: DFlash's, with a short convolution over the block on both sides of attention and feed-forward,
and a selector that rescores the best tokens of each slot.

Row k of a block predicts the token k places after the anchor, as in DFlash.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from dflash_mcmc.draft.network.checkpoint import DraftConfig, Family
from dflash_mcmc.draft.network.dflash import DFlashShape, DraftLayer, SlotwiseNetwork


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlash2Shape(DFlashShape):
    """The shape of a DFlash 2 draft."""

    vocab_size: int
    """Tokens of the target's head."""
    kernel_size: int
    """Taps of a convolution: the row itself and the rows before it in the block."""
    group_size: int
    """Channels that share a dynamic coefficient; divides the hidden size."""
    selector_rank: int
    selector_top_k: int
    """Candidates of a slot: the most likely tokens by the head's logits. The other tokens have probability 0."""


class DFlash2Config(DraftConfig):
    """The config.json of a DFlash 2 draft."""

    network = "DFlash 2"
    shape_type = DFlash2Shape
    speculators = None
    architectures = ("DFlash2DraftModel",)
    looks_ahead = True
    allowed = "DFlash2DraftModel"
    foreign: ClassVar[dict[str, tuple]] = {
        **DraftConfig.foreign, "causal": (None, True, False), "is_causal": (None, True, False),
        "projector_type": (None, "dflash", "dflash2"), "attention_sink_bias": (None, False),
    }

    def fields(self) -> dict[str, Any]:
        if (self.folder / "mask_embedding.pt").exists():
            self.refuse("has a mask_embedding.pt, another mask than the target's embedding", "a checkpoint without it")
        stated = {value for name in ("is_causal", "causal") for value in (self.own.get(name), self.top.get(name))
                  if value is not None}
        if len(stated) > 1:
            self.refuse("has is_causal and causal that contradict each other", "one of them, or equal ones")
        return {**super().fields(), "causal": stated.pop() if stated else None, "vocab_size": self.integer("vocab_size"),
                "kernel_size": self.integer("conv_kernel_size"), "group_size": self.integer("conv_group_size"),
                "selector_rank": self.integer("selector_rank"), "selector_top_k": self.integer("selector_top_k")}

    def check(self, shape: Any) -> None:
        super().check(shape)
        if shape.hidden_size % shape.group_size:
            self.refuse(f"has conv_group_size {shape.group_size}", f"a divisor of hidden_size, which is {shape.hidden_size}")
        if shape.selector_top_k > shape.vocab_size:
            self.refuse(f"has selector_top_k {shape.selector_top_k}", f"at most {shape.vocab_size}, the vocabulary")


class ConvolvedLayer(DraftLayer):
    """A decoder layer of whole blocks. Context states are not convolved."""

    def __init__(self, shape: DFlashShape):
        super().__init__(shape)
        if not isinstance(shape, DFlash2Shape):
            raise TypeError("a convolved layer needs the shape of a DFlash 2 draft")
        self.attention_conv = BlockConvolution(shape)
        self.mlp_conv = BlockConvolution(shape)

    def forward(self, hidden: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], attend: Callable) -> torch.Tensor:
        hidden = hidden + self.attention_conv(self.input_layernorm(hidden), lambda x: self.self_attn(x, rotation, attend))
        return hidden + self.mlp_conv(self.post_attention_layernorm(hidden), self.mlp)


class BlockConvolution(torch.nn.Module):
    """A depthwise causal convolution before and after a sublayer, over the rows of each block separately.

    A coefficient is the sum of a base kernel and of a dynamic one, which is a linear function of the sublayer's input at the
    output row. Both sides take their dynamic kernel from the input of the sublayer.
    """

    def __init__(self, shape: DFlash2Shape):
        super().__init__()
        self.block_size, self.group_size, self.taps = shape.block_size, shape.group_size, shape.kernel_size
        self.base_kernel = torch.nn.Parameter(torch.zeros(2, self.taps, shape.hidden_size))
        groups = shape.hidden_size // shape.group_size
        self.kernel_projection = torch.nn.Linear(shape.hidden_size, 2 * self.taps * groups, bias=False)

    def forward(self, hidden: torch.Tensor, sublayer: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """The sublayer between both convolutions, (rows, blocks · block_size, hidden)."""
        dynamic = self.kernel_projection(hidden).unflatten(-1, (2, self.taps, -1))
        return self._convolve(sublayer(self._convolve(hidden, dynamic, 0)), dynamic, 1)

    def _convolve(self, hidden: torch.Tensor, dynamic: torch.Tensor, side: int) -> torch.Tensor:
        blocks = hidden.unflatten(1, (-1, self.block_size))
        kernel = dynamic[:, :, side].repeat_interleave(self.group_size, dim=-1).unflatten(1, (-1, self.block_size))
        total = torch.zeros_like(blocks)
        for tap in range(self.taps):
            # Rows before the start of the block are zero.
            shifted = torch.nn.functional.pad(blocks, (0, 0, tap, 0))[:, :, : self.block_size]
            total = total + self.base_kernel[side, tap] * shifted + kernel[..., tap, :] * shifted
        return total.flatten(1, 2)


class CandidateSelector(torch.nn.Module):
    """Adds a term of the pair (token before the slot, token) to the logits of the most likely tokens."""

    def __init__(self, shape: DFlash2Shape):
        super().__init__()
        self.top_k = shape.selector_top_k
        self.hidden_projection = torch.nn.Linear(shape.hidden_size, shape.selector_rank, bias=False)
        self.predecessor_codebook = torch.nn.Parameter(torch.zeros(shape.vocab_size, shape.selector_rank))
        self.successor_codebook = torch.nn.Parameter(torch.zeros(shape.vocab_size, shape.selector_rank))

    def forward(self, base: torch.Tensor, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Logits (rows, vocabulary), -inf outside the candidates; the arguments are those of `SlotwiseNetwork.corrected`.

        The candidates are the tokens with the largest `base`, before the term is added.
        """
        values, candidates = base.topk(min(self.top_k, base.shape[-1]), dim=-1)
        pair = self.predecessor_codebook[previous] * self.hidden_projection(hidden)
        term = (pair[:, None] * self.successor_codebook[candidates]).sum(dim=-1)
        return torch.full_like(base, -torch.inf).scatter(-1, candidates, values + term.float())


class DFlash2(SlotwiseNetwork):
    """The network. Its state dict is the published one."""

    shape: DFlash2Shape
    layer_type = ConvolvedLayer

    def __init__(self, shape: DFlash2Shape):
        super().__init__(shape)
        self.candidate_selector = CandidateSelector(shape)

    def corrected(self, base: torch.Tensor, hidden: torch.Tensor, previous: torch.Tensor,
                  state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.candidate_selector(base, hidden, previous), None


FAMILY = Family(DFlash2Config, DFlash2)
