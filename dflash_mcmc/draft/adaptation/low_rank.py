"""Low-rank changes of a draft's projections (LoRA, Hu et al. 2021, arXiv 2106.09685). Each row has a change of its own.

A projection W becomes W + A B, with A (inputs, rank) and B (rank, outputs). B is zero at first, so that the draft begins as
its checkpoint. All changes of a row are one vector.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from dflash_mcmc.draft.network.dflash.network import DFlash
from dflash_mcmc.rng import Key

MODULES = {"fc": ("fc",), "fc+attention": ("fc", "q_proj", "k_proj", "v_proj", "o_proj")}
"""The projections that each value of `draft.adapt_modules` changes: that of the target's features, and those of attention."""


class ChangedLinear(torch.nn.Module):
    """A linear map with a low-rank change.

    Args:
        base: the map of the checkpoint.

    Attributes:
        factors: A (rows, inputs, rank) and B (rows, rank, outputs); None for no change.
    """

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


class _Part(NamedTuple):
    """A changed projection, and where its factors are in the vector of a row."""

    name: str
    linear: ChangedLinear
    start: int
    inputs: int
    outputs: int


class LowRankDraft:
    """A draft's network whose projections can be changed.

    Args:
        network: the network of the checkpoint. Its weights are shared and never changed.
        modules: a key of `MODULES`.
        rank: rank of the changes.

    Attributes:
        network: a network with the same weights, whose changes `changed` sets.
        size: numbers in the vector of a row.
    """

    def __init__(self, network: DFlash, modules: str, rank: int):
        self.rank, self.size = rank, 0
        self.network = copy.deepcopy(network, {id(weight): weight for weight in network.parameters()})
        self._parts: list[_Part] = []
        for name, module in list(self.network.named_modules()):
            parent, _, last = name.rpartition(".")
            if last in MODULES[modules] and isinstance(module, torch.nn.Linear):
                linear = ChangedLinear(module)
                setattr(self.network.get_submodule(parent), last, linear)
                self._parts.append(_Part(name, linear, self.size, module.in_features, module.out_features))
                self.size += rank * (module.in_features + module.out_features)

    def start(self) -> torch.Tensor:
        """The vector of a row that has learned nothing, float32 (size,): A uniform with deviation 1 / sqrt(inputs), B zero."""
        values = torch.zeros(self.size)
        for part in self._parts:
            count = part.inputs * self.rank
            uniforms = torch.from_numpy(Key(0).fold_in("draft", "low rank", part.name).uniforms(0, count))
            values[part.start : part.start + count] = ((2.0 * uniforms - 1.0) * (3.0 / part.inputs) ** 0.5).float()
        return values

    @contextmanager
    def changed(self, values: torch.Tensor) -> Iterator[DFlash]:
        """A context in which the network has the changes of some rows, (rows, size)."""
        for part in self._parts:
            middle = part.start + part.inputs * self.rank
            end = middle + self.rank * part.outputs
            part.linear.factors = (values[:, part.start : middle].unflatten(1, (part.inputs, self.rank)),
                                   values[:, middle:end].unflatten(1, (self.rank, part.outputs)))
        try:
            yield self.network
        finally:
            for part in self._parts:
                part.linear.factors = None
