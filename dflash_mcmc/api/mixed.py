"""Answers with lengths and stop strings of their own, in as few batches as the engine allows (`LoadedEngine.stream_each`)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dflash_mcmc.api.workers import MOST_SETS, own_stops

if TYPE_CHECKING:
    import numpy as np

    from dflash_mcmc.config.schema import Config
    from dflash_mcmc.ops import Chain
    from dflash_mcmc.sampler import Sampler


class AnswerRequest(NamedTuple):
    """One answer to draw."""

    id: str
    """Name of the request, which the randomness depends on."""
    prompt: np.ndarray
    """Token ids, int64, at least one."""
    sampler: Sampler
    max_new_tokens: int
    stop: tuple[str, ...]


class Batch(NamedTuple):
    """Requests that share an engine."""

    config: Config
    """That of the engine, which has room for each request."""
    numbers: list[int]
    """The requests, by their place in the whole list."""
    longest: int
    """Tokens of the longest prompt."""
    chain: Callable[[int], Chain]
    """The chain of a request, by its number."""


def batches(requests: Sequence[AnswerRequest], config_of: Callable[[Sampler, int], Config], mixes: bool,
            target: Any) -> Iterator[Batch]:
    """The batches of requests. Raises UserError.

    Args:
        config_of: the checked configuration of a sampler and a longest answer.
        mixes: whether chains of an engine can have stop strings of their own.
        target: the loaded model.
    """
    from dflash_mcmc.runner import build

    configs: dict[tuple[str, int], Config] = {}
    for request in requests:
        key = repr(request.sampler), request.max_new_tokens
        if key not in configs:
            configs[key] = config_of(request.sampler, request.max_new_tokens)
    own = [configs[repr(request.sampler), request.max_new_tokens] for request in requests]

    def chain(number: int) -> Chain:
        request = requests[number]
        drawn = build.chain(own[number], own[number].sampler, request.id, 0, request.prompt)
        return own_stops(drawn, request.stop, target) if mixes else drawn

    sets, most = list(dict.fromkeys(request.stop for request in requests)), MOST_SETS if mixes else 1
    for together in (sets[first : first + most] for first in range(0, len(sets), most)):
        numbers = [number for number, request in enumerate(requests) if request.stop in together]
        longest = max(len(requests[number].prompt) for number in numbers)
        config = copy.copy(max((own[number] for number in numbers), key=lambda each: each.sampler.width()))
        config.dataset = copy.copy(config.dataset)
        config.dataset.max_new_tokens = max(
            len(requests[number].prompt) + requests[number].max_new_tokens for number in numbers) - longest
        config.dataset.stop = [] if mixes else list(*together)
        yield Batch(config, numbers, longest, chain)
