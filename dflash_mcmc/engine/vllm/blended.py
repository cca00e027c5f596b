"""Model classes of vLLM whose last hidden state is a blend's mixture. vLLM loads them by their names. Imports vLLM."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.registry import ModelRegistry

from dflash_mcmc.engine.vllm.settings import BLENDED, CONFIG
from dflash_mcmc.registry import components

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from dflash_mcmc.blend import Blend


class _WithBlend:
    """Adds the outputs of the tapped layers to a model's forward, and mixes them.

    vLLM's models can return the outputs of chosen layers, for its EAGLE drafts: entry n is the input of layer n.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]  # that of vLLM's class
        model: Any = self.model  # type: ignore[attr-defined]
        self._blend = _blend_of(vllm_config.additional_config[CONFIG]["blend"])
        self._tapped = self._blend.tapped_layers(model.config.num_hidden_layers)
        model._set_aux_hidden_state_layers(tuple(layer + 1 for layer in self._tapped))

    def forward(self, *given: Any, **named: Any) -> Any:
        """The mixture, (tokens, width). A rank that does not have the last layer returns what vLLM's model returns."""
        found = super().forward(*given, **named)  # type: ignore[misc]  # that of vLLM's class
        if not isinstance(found, tuple):
            return found
        last, tapped = found
        return self._blend.mix(last, tapped, self.model.norm)  # type: ignore[attr-defined]


class BlendedQwen3(_WithBlend, Qwen3ForCausalLM):
    """Qwen3 with a blend."""


class BlendedQwen2(_WithBlend, Qwen2ForCausalLM):
    """Qwen2 and Qwen2.5 with a blend."""


class BlendedLlama(_WithBlend, LlamaForCausalLM):
    """Llama with a blend."""


def register() -> None:
    """Tells vLLM the names of the classes."""
    for blended, base in ((BlendedQwen3, Qwen3ForCausalLM), (BlendedQwen2, Qwen2ForCausalLM),
                          (BlendedLlama, LlamaForCausalLM)):
        ModelRegistry.register_model(BLENDED[base.__name__], f"{__name__}:{blended.__name__}")


def _blend_of(values: Mapping[str, Any]) -> Blend:
    """The blend with these fields and this `name`."""
    cls = components("blend")[values["name"]].cls
    return cls(**{field.name: values[field.name] for field in dataclasses.fields(cls)})
