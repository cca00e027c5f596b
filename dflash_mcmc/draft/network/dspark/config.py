"""Reads the config.json of a DSpark draft, in both published layouts, as a `DSparkShape`.

DeepSpec writes its own fields at the top level, SpecForge in `dflash_config`. The DFlash baselines of DeepSpec have the same
layout without heads.
"""

from __future__ import annotations

from typing import Any, ClassVar

from dflash_mcmc.draft.network.dflash.config import DraftConfig
from dflash_mcmc.draft.network.dflash.config import to_config as dflash_config
from dflash_mcmc.draft.network.dspark.shape import HEADS, DSparkShape

_DFLASH = "DFlashDraftModel"
"""A class that has DSpark's layout if `projector_type` says so."""


class DSparkConfig(DraftConfig):
    """The config.json of a DSpark draft."""

    network = "DSpark"
    shape_type = DSparkShape
    architectures = ("DSparkDraftModel", "Qwen3DSparkModel")
    least_layer = -1
    allowed = "DSparkDraftModel or Qwen3DSparkModel, or a draft with projector_type dspark"
    foreign: ClassVar[dict[str, tuple]] = {
        **DraftConfig.foreign, "projector_type": (None, "dspark"), "sample_from_anchor": (None, True, False),
        "dspark_block_size": (None,), "dspark_markov_rank": (None,), "dspark_noise_token_id": (None,),
        "dspark_target_layer_ids": (None,), "rope_is_neox_style": (None, True), "attention_sink_bias": (None, False),
    }

    def fields(self) -> dict[str, Any]:
        """The fields of a `DSparkShape`. Raises UserError."""
        rank, confidence = self.integer("markov_rank", 0, least=0), self.get("enable_confidence_head")
        if confidence is None:
            confidence = self.number("confidence_head_alpha", 0.0) > 0
        head = str(self.get("markov_head_type", HEADS[0])).lower()
        if rank and head not in HEADS:
            self.refuse(f"has markov_head_type {head!r}", ", ".join(HEADS))
        with_markov = bool(confidence) and bool(self.get("confidence_head_with_markov", False))
        if with_markov and not rank:
            self.refuse("has confidence_head_with_markov without a Markov head", "markov_rank >= 1")
        return {**super().fields(), "vocab_size": self.integer("vocab_size"), "markov_rank": rank, "markov_head": head,
                "confidence": bool(confidence), "confidence_with_markov": with_markov,
                "from_anchor": self.get("sample_from_anchor", True)}

    def check(self, shape: Any) -> None:
        """Refuses numbers that do not fit one another. Raises UserError."""
        super().check(shape)
        mode, grouped = self.get("attention_mode"), shape.num_key_heads < shape.num_heads
        if mode not in (None, "gqa" if grouped else "mha"):
            self.refuse(f"has attention_mode {mode!r} with {shape.num_heads} heads and {shape.num_key_heads} key heads",
                        "gqa with fewer key heads than heads, mha with as many")

    def check_architecture(self, names: Any) -> None:
        """Refuses other classes. DFlash's own class is DSpark with `projector_type` dspark."""
        if names == [_DFLASH] and self.get("projector_type") == "dspark":
            return
        super().check_architecture(names or ["a network without a name"])


def to_config(shape: DSparkShape) -> dict[str, Any]:
    """The published spelling of a shape, in SpecForge's layout, without the dtype."""
    config = dflash_config(shape)
    own = {"projector_type": "dspark", "markov_rank": shape.markov_rank, "markov_head_type": shape.markov_head,
           "enable_confidence_head": shape.confidence, "confidence_head_with_markov": shape.confidence_with_markov,
           "sample_from_anchor": shape.from_anchor}
    return {**config, "architectures": [DSparkConfig.architectures[0]], "vocab_size": shape.vocab_size,
            "tie_word_embeddings": False, "dflash_config": {**config["dflash_config"], **own}}
