"""New networks for a training plan: DFlash, DSpark and DFlash 2 of the same shape differ in their heads alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from dflash_mcmc.draft.network.dflash import checkpoint
from dflash_mcmc.draft.network.dflash.network import DFlash
from dflash_mcmc.draft.network.dflash.shape import DFlashShape
from dflash_mcmc.draft.network.dflash2.layers import BlockConvolution
from dflash_mcmc.draft.network.dflash2.network import FAMILY as DFLASH2
from dflash_mcmc.draft.network.dflash2.network import DFlash2
from dflash_mcmc.draft.network.dspark.network import FAMILY as DSPARK
from dflash_mcmc.draft.network.dspark.network import DSpark
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.train.recipe import Heads

FAMILIES = {"dflash": checkpoint.DFLASH, "dspark": DSPARK, "dflash2": DFLASH2}
"""The kinds of networks by the values of `heads.network`."""


def with_heads(shape: DFlashShape, heads: Heads, vocab_size: int) -> DFlashShape:
    """The shape of the plan's kind of network. Raises ConfigError."""
    family = FAMILIES[heads.network]
    if heads.network == "dflash":
        return shape
    more: dict[str, Any] = {"vocab_size": vocab_size}
    if heads.network == "dspark":
        more.update(markov_rank=heads.rank or 0, markov_head=heads.markov_head, confidence=heads.confidence,
                    confidence_with_markov=heads.confidence and heads.rank is not None)
    else:
        if shape.hidden_size % (heads.group_size or 1):
            raise ConfigError("heads.group_size", heads.group_size, f"a divisor of the hidden size {shape.hidden_size}")
        more.update(kernel_size=heads.kernel_size, group_size=heads.group_size, selector_rank=heads.rank,
                    selector_top_k=min(heads.top_k or 1, vocab_size))
    fields = {field.name: getattr(shape, field.name) for field in dataclasses.fields(shape)}
    return family.config.shape_type(**{**fields, **more})


def initialise(draft: DFlash) -> None:
    """Initialises the heads, so that the network computes what DFlash's computes with the same backbone.

    The matrix that a head's output passes last is zero, as are the convolutions' dynamic coefficients; their base kernel is
    the identity.
    """
    if isinstance(draft, DSpark):
        if draft.markov_head is not None:
            torch.nn.init.zeros_(draft.markov_head.markov_w2.weight)
        if draft.confidence_head is not None:
            torch.nn.init.zeros_(draft.confidence_head.proj.weight)
            torch.nn.init.zeros_(draft.confidence_head.proj.bias)
    if isinstance(draft, DFlash2):
        torch.nn.init.zeros_(draft.candidate_selector.successor_codebook)
        for module in draft.modules():
            if isinstance(module, BlockConvolution):
                torch.nn.init.zeros_(module.kernel_projection.weight)
                with torch.no_grad():
                    module.base_kernel.zero_()[:, 0] = 1.0


def start_from(draft: DFlash, heads: Heads) -> None:
    """Copies the tensors of the plan's backbone into the draft. Raises UserError if they do not fit."""
    if heads.backbone is None:
        return
    tensors = checkpoint.load(heads.start().local(), torch.float32, "cpu").state_dict()
    mine = draft.state_dict()
    for name, tensor in tensors.items():
        if name not in mine or mine[name].shape != tensor.shape:
            wanted = f"is of shape {tuple(mine[name].shape)}" if name in mine else "is in the plan's shape"
            raise ConfigError("heads.backbone", heads.backbone, f"a draft whose {name} {wanted}")
    if missing := [name for name in mine if name.startswith("layers.") and name not in tensors and "_conv." not in name]:
        raise ConfigError("heads.backbone", heads.backbone, f"a draft with {missing[0]}, as the plan's shape")
    draft.load_state_dict({**mine, **tensors})
