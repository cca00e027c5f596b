"""The layers of DFlash 2: DFlash's, with a short convolution over the block on both sides of attention and feed-forward."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dflash_mcmc.draft.network.dflash.layers import DraftLayer
from dflash_mcmc.draft.network.dflash.shape import DFlashShape
from dflash_mcmc.draft.network.dflash2.shape import DFlash2Shape


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
