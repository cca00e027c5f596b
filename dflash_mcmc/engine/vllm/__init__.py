"""vLLM: pages of keys and values, many families of models, quantised weights, several GPUs for one model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_mcmc.components import Need, Settings, identity, name_of, register, runtime
from dflash_mcmc.engine import DelegatedEngine
from dflash_mcmc.engine.batching.interface import ChainRunner
from dflash_mcmc.errors import ConfigError, UserError

if TYPE_CHECKING:
    import numpy as np

    from dflash_mcmc.engine.delegated.elsewhere import UnloadedTarget

_INSTEAD = "or engine=slots"


@register("engine", "vllm")
@dataclass(slots=True, kw_only=True)
class Vllm(DelegatedEngine):
    """vLLM, for models that one GPU or the slots engine cannot hold; draws the same tokens but for rounding."""

    needs = (*(Need(f"{group}.is_null", why=f", {_INSTEAD}, which reads layers and runs drafts")
               for group in ("probe", "decoder")),)

    tensor_parallel_size: int = runtime(1, "GPUs that share each layer", ge=1, le=1024)
    pipeline_parallel_size: int = runtime(1, "GPUs, or groups that share layers, that each hold a part of the layers", ge=1,
                                          le=1024)
    enable_expert_parallel: bool = runtime(False, "give the GPUs of a group whole experts of a mixture of experts instead of "
                                           "parts")
    max_model_len: int | None = runtime(None, "longest sequence, prompt included; null takes the longest prompt and "
                                        "dataset.max_new_tokens", ge=1)
    gpu_memory_utilization: float = runtime(0.9, "share of a GPU's memory for weights, activations, and keys and values, "
                                            "where hardware.memory_gb is null", gt=0, le=1)
    block_size: int | None = runtime(None, "positions whose keys and values are kept, and used again, together; null takes 32 "
                                     "on a CPU and vLLM's default on GPUs", ge=1)
    enforce_eager: bool = runtime(False, "run without CUDA graphs and without compiling")
    quantization: str | None = identity(None, "vLLM's name of a method that quantises weights on loading, such as fp8; null "
                                        "takes the checkpoint's own")
    kv_cache_dtype: str = identity("auto", "vLLM's name of the precision of keys and values; auto = the activations'")
    float32_head: bool = identity(True, "compute logits in float32, as engine=slots does; false takes the activations' "
                                  "precision")

    def check(self, config: Settings) -> None:
        """Checks that vLLM can run model, blend and sampler. Raises ConfigError."""
        if config.model.rope_override() is not None:
            raise ConfigError("model.rope_scaling", config.model.rope_override(), f"null with engine=vllm, {_INSTEAD}")
        if config.blend.needs_companion:
            raise ConfigError("blend", name_of(config.blend), f"one without second logits with engine=vllm, {_INSTEAD}, which "
                              "has both")
        for group in ("sampler", "blend"):
            if getattr(config, group).needs_draft:
                raise ConfigError(group, name_of(getattr(config, group)), f"one without a draft with engine=vllm, {_INSTEAD}")

    def num_devices(self) -> int:
        """GPUs of the group that shares a copy of the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def memory_note(self, config: Settings) -> str:
        """The keys and values of the requests in progress. Raises ConfigError if one sequence does not fit."""
        shape = config.model.shape("cpu")
        if shape is None:
            return ""
        from dflash_mcmc.engine.vllm import core

        return core.memory_line(self, config, shape)

    def load(self, config: Settings, device: str) -> "UnloadedTarget":
        """The target without its weights, which vLLM's workers load. Raises UserError."""
        from dflash_mcmc.engine.delegated import elsewhere

        files = config.model.files()
        if files is None:
            raise UserError("model: given a model that is loaded already; allowed: the folder or the hub name of a checkpoint "
                            f"with engine=vllm, {_INSTEAD}")
        return elsewhere.read(files.folder, files.dtype, device, config.model.tokenizer())

    def start(self, config: Settings, target: "UnloadedTarget", prompt_length: int, num_chains: int,
              second: "Mapping[bytes, np.ndarray] | None" = None) -> ChainRunner:
        """A session of the vLLM engine that stays loaded in this process. Raises UserError for what vLLM refuses."""
        from dflash_mcmc.engine.vllm import core

        needed = prompt_length + config.dataset.max_new_tokens
        if self.max_model_len is not None and self.max_model_len < needed:
            raise ConfigError("engine.max_model_len", self.max_model_len, f"null, or at least {needed}: {prompt_length} "
                              f"tokens of the longest prompt and {config.dataset.max_new_tokens} of dataset.max_new_tokens")
        if config.dataset.stop and not target.stop_ids:
            raise ConfigError("dataset.stop", list(config.dataset.stop), "[] with engine=vllm and a model without stop ids, "
                              "by which vLLM is told that an answer has ended")
        target = target.stopping_at(config.dataset.stop)
        width, slots = config.sampler.width(), config.hardware.num_slots
        chains = core.chains_at_once(slots, num_chains, width)
        engine = core.shared(core.settings(self, config, target, self.max_model_len or needed, chains * width))
        if slots is None:
            chains = core.fitting(chains, engine.capacity(), width)
        return core.VllmEngine(target, engine, chains)
