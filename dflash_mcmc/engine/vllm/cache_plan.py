"""The memory of keys and values that vLLM needs, from config.json alone, for the plan of a dry run."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dflash_mcmc.engine.vllm import starting
from dflash_mcmc.errors import ConfigError

if TYPE_CHECKING:
    from dflash_mcmc.config.schema import Config
    from dflash_mcmc.engine.batching.plan import TargetShape
    from dflash_mcmc.engine.vllm import Vllm

_GB = 1e9
_BLOCK = starting.CPU_BLOCK
"""Positions of a block where `engine.block_size` is null; vLLM's default on most GPUs is half of it."""


class CachePlan(NamedTuple):
    """Keys and values on each device.

    Attributes:
        token_bytes: bytes of a token. Families with latent, linear or sliding attention need less.
        requests: requests in the batch at once.
        mean_length: assumed tokens of a sequence, prompt included.
        longest: tokens of the longest sequence, prompt included, in whole blocks.
        weights: bytes of the weights; None where they are not here.
        chosen: whether the memory chooses the number of requests; they then all fit at the longest length.
        memory: bytes for keys and values; None where they are not given.
    """

    token_bytes: int
    requests: int
    mean_length: int
    longest: int
    weights: int | None
    chosen: bool = False
    memory: int | None = None

    def of_requests(self, length: int) -> float:
        """Gigabytes of all requests at a length in tokens."""
        return self.requests * length * self.token_bytes / _GB

    def line(self) -> str:
        """The plan in one line."""
        each, weights = self.longest * self.token_bytes / _GB, "" if self.weights is None else (
            f"; weights {self.weights / _GB:.3g} GB")
        start = "memory of engine=vllm on each device: keys and values of"
        if self.chosen and self.memory is None:
            return (f"{start} a request take {each:.3g} GB at {self.longest:,} tokens; hardware.num_slots=null starts as many "
                    f"as fit at this length, at most {self.requests}: hardware.memory_gb shows how many{weights}")
        lengths = (f"{self.requests} requests, {self.of_requests(self.mean_length):.3g} GB at {self.mean_length:,} tokens "
                   f"each, {self.of_requests(self.longest):.3g} GB at {self.longest:,}")
        end = "requests that do not fit wait" if not self.chosen else "hardware.num_slots=null takes as many as fit"
        return f"{start} {lengths}{weights}; {end}"


def of(engine: Vllm, config: Config, shape: TargetShape) -> CachePlan:
    """The plan. Raises ConfigError if `hardware.memory_gb` does not hold the longest sequence."""
    text = shape._replace(config=shape.config.get_text_config())
    each, weights = starting.token_bytes(engine, text.cache_shape), shape.weight_bytes()
    horizon, prompt, block = config.dataset.max_new_tokens, config.assumed.prompt_length, engine.block_size or _BLOCK
    longest = -(-(prompt + horizon) // block) * block
    slots, width, memory_gb = config.hardware.num_slots, config.sampler.width(), config.hardware.memory_gb
    memory = None if memory_gb is None else int(memory_gb * _GB)
    if memory is not None and memory < longest * each:
        raise ConfigError("hardware.memory_gb", memory_gb, f"at least {longest * each / _GB:.3g}, the keys and values of one "
                          f"sequence of {longest} tokens, with engine=vllm")
    chains = starting.chains(slots, config.dataset.num_chosen() * config.num_chains, width)
    if slots is None and memory is not None:
        chains = starting.fitting(chains, memory // (longest * each), width)
    return CachePlan(each, chains * width, prompt + round(config.assumed.answer_length * horizon), longest,
                     None if weights is None else weights // (engine.pipeline_parallel_size * engine.tensor_parallel_size),
                     slots is None, memory)

