"""The target of vLLM and the settings that it is started with, from a checkpoint's files: vLLM's workers load the weights."""

import dataclasses
from typing import Any, Protocol

import torch

from dflash_mcmc.components import Settings, name_of
from dflash_mcmc.engine.batching.cache import CacheShape
from dflash_mcmc.engine.batching.elsewhere import UnloadedTarget
from dflash_mcmc.engine.batching.plan import TargetShape
from dflash_mcmc.engine.vllm.core import arguments
from dflash_mcmc.engine.vllm.drawing import BLENDED
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.process import machine, ranks


class VllmFields(Protocol):
    """The fields of the component `engine=vllm` that its start reads."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    enable_expert_parallel: bool
    block_size: int | None
    enforce_eager: bool
    kv_cache_dtype: str
    float32_head: bool


_MOST_CHAINS = 256
"""Chains in progress where `hardware.num_slots` is null and the memory holds more."""
_CPU_SHARE, _CPU_MOST = 0.25, 4 * 10**9
"""The most for keys and values on a CPU where `hardware.memory_gb` is null: a share of the free memory, and so many bytes."""

CPU_BLOCK = 32
"""The smallest block of vLLM's attention on a CPU, and that of a plan; vLLM's default on most GPUs is half of it, and on a CPU
128, which reads most of a proposal's prefix again (notebook)."""
_SAME = ("tensor_parallel_size", "pipeline_parallel_size", "enable_expert_parallel", "quantization", "kv_cache_dtype",
         "gpu_memory_utilization")
"""Fields of the engine that are arguments of vLLM under the same names."""
_GB = 1e9


def chains_at_once(num_slots: int | None, num_chains: int, width: int) -> int:
    """Chains in progress at once in this process.

    Args:
        num_slots: draws in the batch at once; None for the largest default.
        num_chains: chains that all processes run together.
        width: draws that a chain asks for together.
    """
    slots = _MOST_CHAINS if num_slots is None else num_slots
    return max(1, min(slots // width, -(-num_chains // ranks.place().total)))


def fitting(chains: int, requests: float, width: int) -> int:
    """Chains in progress where `hardware.num_slots` is null: as many as can all be at full length, so that none is preempted.

    Args:
        chains: at most so many.
        requests: requests at full length that the memory holds.
        width: draws that a chain asks for together.
    """
    return max(1, int(min(chains, requests // width)))


def settings(engine: VllmFields, config: Settings, target: UnloadedTarget, max_model_len: int,
             max_num_seqs: int) -> dict[str, Any]:
    """The `arguments` of vLLM. Raises ConfigError for what it cannot run on this device."""
    on_cpu, parts = target.device == "cpu", engine.tensor_parallel_size * engine.pipeline_parallel_size
    if on_cpu and engine.enable_expert_parallel and engine.tensor_parallel_size > 1:
        raise ConfigError("engine.enable_expert_parallel", True, "false on a CPU, where vLLM gives a worker the numbers of "
                          "experts that it has not; engine.tensor_parallel_size alone shares each expert")
    memory_gb, kv_cache_bytes = config.hardware.memory_gb, None
    if memory_gb is not None:
        kv_cache_bytes = int(memory_gb * _GB)
    elif on_cpu:
        kv_cache_bytes = min(_CPU_MOST, int(machine.free_memory() * _CPU_SHARE))
        if (needed := cache_need(engine, target, max_model_len, max_num_seqs)) is not None:
            kv_cache_bytes = min(kv_cache_bytes, needed)
    blend, architecture = dict[str, Any](), None
    if not config.blend.is_null:
        mixed: Any = config.blend
        blend = {"name": name_of(mixed), **dataclasses.asdict(mixed)}
        name = (getattr(target.config, "architectures", None) or ["none"])[0]
        if (architecture := BLENDED.get(name)) is None:
            raise ConfigError("model.path", name, f"a checkpoint of {', '.join(BLENDED)} with a blend and engine=vllm, or "
                              "engine=slots")
    device_ids = None
    if not on_cpu:
        # `hardware.device=cuda` is `cuda:N` for local rank N: so many GPUs for each process of a launch on this machine
        rank, num_gpus = int(target.device.partition(":")[2] or 0), torch.cuda.device_count()
        if (rank + 1) * parts > num_gpus:
            most = f"at most {num_gpus // (rank + 1)} for process {rank} of this machine, which has {num_gpus} GPUs"
            raise ConfigError("engine.tensor_parallel_size * engine.pipeline_parallel_size", parts, most)
        device_ids = tuple(range(rank * parts, (rank + 1) * parts))
    same: dict[str, Any] = {name: getattr(engine, name) for name in _SAME}
    return arguments(
        str(target.folder), target.dtype, max_model_len, max_num_seqs, target.forbidden, kv_cache_bytes=kv_cache_bytes,
        device_ids=device_ids, float32_head=engine.float32_head and target.dtype != "float32", blend=blend,
        architecture=architecture, block_size=engine.block_size or (CPU_BLOCK if on_cpu else None),
        enforce_eager=engine.enforce_eager or on_cpu, **same)  # a CPU always runs eagerly here


def cache_need(engine: VllmFields, target: UnloadedTarget, max_model_len: int, max_num_seqs: int) -> int | None:
    """Bytes of keys and values on each device that all requests at full length use, twice; None for recurrent layers.

    Twice, since a proposal begins as the state that it may replace, whose blocks are found again only while they are kept.
    """
    shape = TargetShape(target.config, torch.device("cpu"), getattr(torch, target.dtype), None).cache_shape
    if shape.recurrent is not None:
        return None  # vLLM's pages of states have sizes of their own
    block = engine.block_size or CPU_BLOCK
    return 2 * max_num_seqs * (-(-max_model_len // block) * block) * token_bytes(engine, shape)


def token_bytes(engine: VllmFields, shape: CacheShape) -> int:
    """Bytes of the keys and values of a token on each device."""
    num_parts = engine.pipeline_parallel_size * min(engine.tensor_parallel_size, shape.num_heads)
    each = -(-shape.token_bytes() // num_parts)
    return each // shape.dtype.itemsize if engine.kv_cache_dtype.startswith("fp8") else each


def memory_line(engine: VllmFields, config: Settings, shape: TargetShape) -> str:
    """The plan of keys and values on each device, in one line. Families with latent, linear or sliding attention need less.

    Raises ConfigError if `hardware.memory_gb` does not hold the longest sequence.
    """
    text = shape._replace(config=shape.config.get_text_config())
    each, weights = token_bytes(engine, text.cache_shape), shape.weight_bytes()
    horizon, prompt, block = config.dataset.max_new_tokens, config.assumed.prompt_length, engine.block_size or CPU_BLOCK
    longest = -(-(prompt + horizon) // block) * block
    slots, width, memory_gb = config.hardware.num_slots, config.sampler.width(), config.hardware.memory_gb
    if memory_gb is not None and int(memory_gb * _GB) < longest * each:
        raise ConfigError("hardware.memory_gb", memory_gb, f"at least {longest * each / _GB:.3g}, the keys and values of one "
                          f"sequence of {longest} tokens, with engine=vllm")
    chains = chains_at_once(slots, config.dataset.num_chosen() * config.num_chains, width)
    if slots is None and memory_gb is not None:
        chains = fitting(chains, int(memory_gb * _GB) // (longest * each), width)
    requests, num_parts = chains * width, engine.pipeline_parallel_size * engine.tensor_parallel_size
    of_weights = "" if weights is None else f"; weights {weights // num_parts / _GB:.3g} GB"
    start = "memory of engine=vllm on each device: keys and values of"
    if slots is None and memory_gb is None:
        return (f"{start} a request take {longest * each / _GB:.3g} GB at {longest:,} tokens; hardware.num_slots=null starts "
                f"as many as fit at this length, at most {requests}: hardware.memory_gb shows how many{of_weights}")
    mean = prompt + round(config.assumed.answer_length * horizon)
    at_mean, at_longest = (requests * length * each / _GB for length in (mean, longest))
    end = "requests that do not fit wait" if slots is not None else "hardware.num_slots=null takes as many as fit"
    return (f"{start} {requests} requests, {at_mean:.3g} GB at {mean:,} tokens each, {at_longest:.3g} GB at {longest:,}"
            f"{of_weights}; {end}")
