"""The settings of vLLM for a configuration and the device of this process."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import psutil

from dflash_mcmc.engine.batching.plan import TargetShape
from dflash_mcmc.engine.vllm.settings import BLENDED, VllmSettings
from dflash_mcmc.engine.vllm.target import VllmTarget
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.process import ranks
from dflash_mcmc.registry import name_of

if TYPE_CHECKING:
    from dflash_mcmc.config.schema import Config
    from dflash_mcmc.engine.batching.cache import CacheShape
    from dflash_mcmc.engine.vllm import Vllm

_MOST_CHAINS = 256
"""Chains in progress where `hardware.num_slots` is null and the memory holds more."""
_CPU_SHARE, _CPU_MOST = 0.25, 4 * 10**9
"""The most for keys and values on a CPU where `hardware.memory_gb` is null: a share of the free memory, and so many bytes."""

CPU_BLOCK = 32
"""The smallest block of vLLM's attention on a CPU. Its default of 128 reads most of a proposal's prefix again (LOG.md)."""


def chains(num_slots: int | None, num_chains: int, width: int) -> int:
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


def settings(engine: Vllm, config: Config, target: VllmTarget, max_model_len: int, max_num_seqs: int) -> VllmSettings:
    """What vLLM is started with. Raises ConfigError for what it cannot run on this device."""
    on_cpu, blend = target.device == "cpu", _blend(config)
    if on_cpu and engine.enable_expert_parallel and engine.tensor_parallel_size > 1:
        raise ConfigError("engine.enable_expert_parallel", True, "false on a CPU, where vLLM gives a worker the numbers of "
                          "experts that it has not; engine.tensor_parallel_size alone shares each expert")
    needed = cache_need(engine, target, max_model_len, max_num_seqs) if on_cpu else None
    return VllmSettings(
        model=str(target.folder), dtype=target.dtype, max_model_len=max_model_len, max_num_seqs=max_num_seqs,
        forbidden=target.forbidden, kv_cache_bytes=_cache_bytes(config.hardware.memory_gb, on_cpu, needed),
        device_ids=None if on_cpu else _devices(target.device, engine.tensor_parallel_size * engine.pipeline_parallel_size),
        float32_head=engine.float32_head and target.dtype != "float32",
        blend=blend, architecture=_architecture(target) if blend else None, more=tuple(_more(engine, on_cpu).items()))


def _more(engine: Vllm, on_cpu: bool) -> dict[str, Any]:
    """Fields of the engine that are arguments of vLLM under the same names. A CPU always runs eagerly here."""
    names = ("tensor_parallel_size", "pipeline_parallel_size", "enable_expert_parallel", "max_num_batched_tokens",
             "quantization", "kv_cache_dtype", "gpu_memory_utilization")
    values: dict[str, Any] = {name: getattr(engine, name) for name in names}
    block_size = engine.block_size or (CPU_BLOCK if on_cpu else None)
    return {**values, "block_size": block_size, "enforce_eager": engine.enforce_eager or on_cpu}


def _blend(config: Config) -> tuple[tuple[str, Any], ...]:
    """Name and fields of the blend; nothing without one."""
    if config.blend.is_null:
        return ()
    blend: Any = config.blend
    return (("name", name_of(blend)), *dataclasses.asdict(blend).items())


def _architecture(target: VllmTarget) -> str:
    """The model class with a blend. Raises ConfigError for a family without one."""
    names = getattr(target.config, "architectures", None) or ["none"]
    if names[0] not in BLENDED:
        raise ConfigError("model.path", names[0], f"a checkpoint of {', '.join(BLENDED)} with a blend and engine=vllm, or "
                          "engine=slots")
    return BLENDED[names[0]]


def _devices(device: str, count: int) -> tuple[int, ...]:
    """The GPUs of this process: `count` of them for each process of a launch on this machine, starting at the device's number.

    `hardware.device=cuda` is `cuda:N` for local rank N, which with one GPU a process is its number. Raises ConfigError if the
    machine has fewer.
    """
    import torch

    number, found = int(device.partition(":")[2] or 0), torch.cuda.device_count()
    if (number + 1) * count > found:
        most = f"at most {found // (number + 1)} for process {number} of this machine, which has {found} GPUs"
        raise ConfigError("engine.tensor_parallel_size * engine.pipeline_parallel_size", count, most)
    return tuple(range(number * count, (number + 1) * count))


def cache_need(engine: Vllm, target: VllmTarget, max_model_len: int, max_num_seqs: int) -> int | None:
    """Bytes of keys and values on each device that all requests at full length use, twice; None for recurrent layers.

    Twice, since a proposal begins as the state that it may replace, whose blocks are found again only while they are kept.
    """
    import torch

    shape = TargetShape(target.config, torch.device("cpu"), getattr(torch, target.dtype), None).cache_shape
    if shape.recurrent is not None:
        return None  # vLLM's pages of states have sizes of their own
    block = engine.block_size or CPU_BLOCK
    return 2 * max_num_seqs * (-(-max_model_len // block) * block) * token_bytes(engine, shape)


def token_bytes(engine: Vllm, shape: CacheShape) -> int:
    """Bytes of the keys and values of a token on each device."""
    parts = engine.pipeline_parallel_size * min(engine.tensor_parallel_size, shape.num_heads)
    each = -(-shape.token_bytes() // parts)
    return each // shape.dtype.itemsize if engine.kv_cache_dtype.startswith("fp8") else each


def _cache_bytes(memory_gb: float | None, on_cpu: bool, needed: int | None) -> int | None:
    if memory_gb is not None:
        return int(memory_gb * 1e9)
    if not on_cpu:
        return None
    most = min(_CPU_MOST, int(psutil.virtual_memory().available * _CPU_SHARE))
    return most if needed is None else min(most, needed)
