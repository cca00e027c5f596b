"""Reads the config.json of a DFlash 2 draft as a `DFlash2Shape`."""

from __future__ import annotations

from typing import Any, ClassVar

from dflash_mcmc.draft.network.dflash.config import DraftConfig
from dflash_mcmc.draft.network.dflash.config import to_config as dflash_config
from dflash_mcmc.draft.network.dflash2.shape import DFlash2Shape


class DFlash2Config(DraftConfig):
    """The config.json of a DFlash 2 draft."""

    network = "DFlash 2"
    shape_type = DFlash2Shape
    architectures = ("DFlash2DraftModel",)
    looks_ahead = True
    allowed = "DFlash2DraftModel"
    foreign: ClassVar[dict[str, tuple]] = {
        **DraftConfig.foreign, "causal": (None, True, False), "is_causal": (None, True, False),
        "projector_type": (None, "dflash", "dflash2"), "attention_sink_bias": (None, False),
    }

    def fields(self) -> dict[str, Any]:
        """The fields of a `DFlash2Shape`. Raises UserError."""
        if (self.folder / "mask_embedding.pt").exists():
            self.refuse("has a mask_embedding.pt, another mask than the target's embedding", "a checkpoint without it")
        return {**super().fields(), "causal": self._causal(), "vocab_size": self.integer("vocab_size"),
                "kernel_size": self.integer("conv_kernel_size"), "group_size": self.integer("conv_group_size"),
                "selector_rank": self.integer("selector_rank"), "selector_top_k": self.integer("selector_top_k")}

    def check(self, shape: Any) -> None:
        """Refuses numbers that do not fit one another. Raises UserError."""
        super().check(shape)
        if shape.hidden_size % shape.group_size:
            self.refuse(f"has conv_group_size {shape.group_size}", f"a divisor of hidden_size, which is {shape.hidden_size}")
        if shape.selector_top_k > shape.vocab_size:
            self.refuse(f"has selector_top_k {shape.selector_top_k}", f"at most {shape.vocab_size}, the vocabulary")

    def _causal(self) -> bool | None:
        given = {value for name in ("is_causal", "causal") for value in (self.own.get(name), self.top.get(name))
                 if value is not None}
        if len(given) > 1:
            self.refuse("has is_causal and causal that contradict each other", "one of them, or equal ones")
        return given.pop() if given else None


def to_config(shape: DFlash2Shape) -> dict[str, Any]:
    """The published spelling of a shape, without the dtype."""
    config = dflash_config(shape)
    own = {"conv_kernel_size": shape.kernel_size, "conv_group_size": shape.group_size,
           "selector_rank": shape.selector_rank, "selector_top_k": shape.selector_top_k}
    causal = {} if shape.causal is None else {"is_causal": shape.causal}
    return {**config, **causal, "architectures": list(DFlash2Config.architectures), "vocab_size": shape.vocab_size,
            "dflash_config": {**config["dflash_config"], **own}}
