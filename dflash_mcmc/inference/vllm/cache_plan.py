"""The memory of keys and values that vLLM needs, from config.json alone, for the plan of a dry run."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dflash_mcmc.errors import ConfigError
from dflash_mcmc.inference.vllm import starting

if TYPE_CHECKING:
    from dflash_mcmc.config.schema import Config
    from dflash_mcmc.engine.vllm import Vllm
    from dflash_mcmc.inference.target_shape import TargetShape

_GB = 1e9


class CachePlan(NamedTuple):
    """Keys and values on each device.

    Attributes:
        token_bytes: bytes of a token. Families with latent, linear or sliding attention need less.
        requests: requests in the batch at once.
        mean_length: assumed tokens of a sequence, prompt included.
        longest: tokens of the longest sequence, prompt included.
        weights: bytes of the weights; None where they are not here.
    """

    token_bytes: int
    requests: int
    mean_length: int
    longest: int
    weights: int | None

    def of_requests(self, length: int) -> float:
        """Gigabytes of all requests at a length in tokens."""
        return self.requests * length * self.token_bytes / _GB

    def line(self) -> str:
        """The plan in one line."""
        weights = "" if self.weights is None else f"; weights {self.weights / _GB:.3g} GB"
        return (f"memory of engine=vllm on each device: keys and values of {self.requests} requests, "
                f"{self.of_requests(self.mean_length):.3g} GB at {self.mean_length:,} tokens each, "
                f"{self.of_requests(self.longest):.3g} GB at {self.longest:,}{weights}; requests that do not fit wait")


def of(engine: Vllm, config: Config, shape: TargetShape) -> CachePlan:
    """The plan. Raises ConfigError if `hardware.memory_gb` does not hold the longest sequence."""
    shape = shape._replace(config=shape.config.get_text_config())
    parts = engine.pipeline_parallel_size * min(engine.tensor_parallel_size, shape.cache_shape.num_heads)
    each = shape.cache_shape.token_bytes() // parts
    if engine.kv_cache_dtype.startswith("fp8"):
        each //= shape.dtype.itemsize
    horizon, prompt = config.dataset.max_new_tokens, config.assumed.prompt_length
    width, chains = config.sampler.width(), config.dataset.num_chosen() * config.num_chains
    requests = starting.chains(config.hardware.num_slots, chains, width) * width
    weights = shape.weight_bytes()
    plan = CachePlan(each, requests, prompt + round(config.assumed.answer_length * horizon), prompt + horizon,
                     None if weights is None else weights // (engine.pipeline_parallel_size * engine.tensor_parallel_size))
    given = config.hardware.memory_gb
    if given is not None and given * _GB < plan.longest * each:
        raise ConfigError("hardware.memory_gb", given, f"at least {plan.longest * each / _GB:.3g}, the keys and values of one "
                          f"sequence of {plan.longest} tokens, with engine=vllm")
    return plan
