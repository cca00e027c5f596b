"""What vLLM is started with. Nothing here imports vLLM."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

CONFIG = "dflash_mcmc"
"""The name of this package's part of vLLM's additional configuration."""
BLENDED = {name: f"DflashMcmc{name}" for name in ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")}
"""Names of the model classes with a blend (`blended.py`), by the names of vLLM's classes."""
_PLUGIN = "dflash_mcmc.engine.vllm.plugin"


class VllmSettings(NamedTuple):
    """Values for vLLM's engine. Two equal settings can share an engine.

    Attributes:
        model: folder of the checkpoint.
        dtype: precision of weights and activations.
        max_model_len: longest sequence, prompt included.
        max_num_seqs: requests in a batch at once.
        forbidden: ids that can never be drawn.
        kv_cache_bytes: memory for keys and values on each device; None lets vLLM take what its share leaves.
        device_ids: numbers of the GPUs; None on a CPU.
        float32_head: whether logits are computed in float32.
        blend: name and fields of a blend; empty without one.
        architecture: the name of the model class that mixes it; None without a blend.
        more: further arguments of vLLM's engine, by name.
    """

    model: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    forbidden: tuple[int, ...]
    kv_cache_bytes: int | None = None
    device_ids: tuple[int, ...] | None = None
    float32_head: bool = False
    blend: tuple[tuple[str, Any], ...] = ()
    architecture: str | None = None
    more: tuple[tuple[str, Any], ...] = ()

    def num_workers(self) -> int:
        """Processes, or GPUs, that share a copy of the model."""
        more = dict(self.more)
        return more.get("tensor_parallel_size", 1) * more.get("pipeline_parallel_size", 1)

    def arguments(self) -> dict[str, Any]:
        """Arguments of vLLM's `EngineArgs`.

        The token is drawn by the logits processor. Asynchronous scheduling would hide earlier tokens from it.
        """
        overrides: dict[str, Any] = {"head_dtype": "float32"} if self.float32_head else {}
        if self.architecture is not None:
            overrides["architectures"] = [self.architecture]
        values = dict(
            model=self.model, dtype=self.dtype, max_model_len=self.max_model_len, max_num_seqs=self.max_num_seqs, seed=0,
            skip_tokenizer_init=True, generation_config="vllm", trust_remote_code=False, async_scheduling=False,
            disable_log_stats=True, enable_prefix_caching=True, logits_processors=[f"{_PLUGIN}:DrawingProcessor"],
            worker_extension_cls=f"{_PLUGIN}.Extension", kv_cache_memory_bytes=self.kv_cache_bytes,
            additional_config={CONFIG: {"forbidden": list(self.forbidden), "blend": dict(self.blend)}},
            hf_overrides=overrides, limit_mm_per_prompt={}, **dict(self.more))
        if self.device_ids is not None:
            values["device_ids"] = list(self.device_ids)
        return values


def prepare_environment() -> None:
    """Sets the variables that vLLM reads when it is imported. vLLM then reports nothing and runs in this process.

    Its second model runner is off, since that one has no logits processors. vLLM does not bind threads to cores, so that
    `hardware.num_threads` holds, and processes on the same machine do not share cores.
    """
    os.environ.update({"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_NO_USAGE_STATS": "1",
                       "VLLM_DO_NOT_TRACK": "1"})
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
