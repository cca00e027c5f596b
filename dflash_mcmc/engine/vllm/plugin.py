"""The classes that vLLM's worker loads by their names: the logits processor and the worker extension. Imports vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed import get_pp_group
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor

from dflash_mcmc.engine.vllm import blended
from dflash_mcmc.engine.vllm.ledger import LEDGER, Drawn, StopTable
from dflash_mcmc.engine.vllm.rows import BatchRows
from dflash_mcmc.engine.vllm.settings import CONFIG

if TYPE_CHECKING:
    from vllm.config import VllmConfig

blended.register()  # a worker imports this module before it makes the model


class DrawingProcessor(LogitsProcessor):
    """Draws the token of every row, and leaves vLLM's sampler nothing else to choose."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool):
        self._rows = BatchRows(LEDGER, vllm_config.additional_config[CONFIG]["forbidden"], device)

    def is_argmax_invariant(self) -> bool:
        """No: the token that is drawn is rarely the most likely one."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follows the rows of the batch."""
        if batch_update is not None:
            self._rows.update(batch_update.removed, batch_update.added, batch_update.moved)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """See `BatchRows.apply`."""
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
