"""The classes that vLLM loads by their names: the logits processor, the worker extension, and models with a blend. Imports
vLLM.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.registry import ModelRegistry
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor

from dflash_mcmc.components import registered
from dflash_mcmc.engine.vllm.drawing import BLENDED, CONFIG, LEDGER, Drawn, RequestRows, StopTable


class _WithBlend:
    """Adds the outputs of the tapped layers to a model's forward, and mixes them.

    vLLM's models can return the outputs of chosen layers, for its EAGLE drafts: entry n is the input of layer n.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]  # that of vLLM's class
        model: Any = self.model  # type: ignore[attr-defined]
        # The blend with these fields and this `name`
        values = vllm_config.additional_config[CONFIG]["blend"]
        cls = registered("blend")[values["name"]].cls
        self._blend = cls(**{field.name: values[field.name] for field in dataclasses.fields(cls)})
        self._tapped = self._blend.tapped_layers(model.config.num_hidden_layers)
        model._set_aux_hidden_state_layers(tuple(layer + 1 for layer in self._tapped))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The mixture, (tokens, width). A rank that does not have the last layer returns what vLLM's model returns."""
        output = super().forward(*args, **kwargs)  # type: ignore[misc]  # that of vLLM's class
        if not isinstance(output, tuple):
            return output
        last, tapped = output
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


register()  # a worker imports this module before it makes the model


class DrawingProcessor(LogitsProcessor):
    """Draws the token of every row, and leaves vLLM's sampler nothing else to choose."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool):
        self._rows = RequestRows(LEDGER, vllm_config.additional_config[CONFIG]["forbidden"], device)

    def is_argmax_invariant(self) -> bool:
        """No: the token that is drawn is rarely the most likely one."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follows the rows of the batch."""
        if batch_update is not None:
            self._rows.update(batch_update.removed, batch_update.added, batch_update.moved)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """See `RequestRows.apply`."""
        return self._rows.apply(logits)


class Extension:
    """Methods that the session calls in vLLM's workers."""

    if TYPE_CHECKING:  # of vLLM's worker
        model_runner: Any

    def dflash_mcmc_prepare(self) -> None:
        """Makes the buffers for what another part of a pipeline computes. vLLM makes them only where it compiles."""
        runner = self.model_runner
        if runner.intermediate_tensors is None and not get_pp_group().is_first_rank:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device)

    def dflash_mcmc_stop_at(self, stops: StopTable | None) -> None:
        """See `Ledger.stop_at`."""
        LEDGER.stop_at(stops)

    def dflash_mcmc_take(self, numbers: Sequence[int]) -> dict[int, Drawn]:
        """See `Ledger.take`."""
        return LEDGER.take(numbers)
