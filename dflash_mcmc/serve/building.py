"""Loads the model and starts the engine and the thread that serve requests."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from dflash_mcmc.config.checks import checked
from dflash_mcmc.data import template_limits
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.serve.app import Service
from dflash_mcmc.serve.metrics import Metrics
from dflash_mcmc.serve.options import ServeOptions, model_name
from dflash_mcmc.serve.work import Workers

if TYPE_CHECKING:
    from dflash_mcmc.config.schema import Config
    from dflash_mcmc.inference.interface import ChainRunner

_PROMPT = 1024
_MOST_SLOTS = 256


def built(options: ServeOptions, config: Config) -> Service:
    """The service of a configuration as it was composed. Raises UserError for an engine that cannot be started.

    The engine of the server's own stop strings is started here, so that a lack of memory is found before any request.
    """
    whole = checked(copy.deepcopy(config))
    target = whole.engine.load(whole, whole.hardware.resolve())
    if whole.model.chat:  # here, since a request would be a late place to find that the template has no end
        template_limits.check(target.tokenizer, [{"role": "user", "content": "1 + 1?"}], None, add_generation_prompt=True)
    longest_prompt = _prompt_tokens(options, whole, target.max_positions)

    def start(stop: tuple[str, ...]) -> ChainRunner:
        mine = copy.copy(whole)
        mine.dataset = copy.copy(whole.dataset)
        mine.dataset.stop = list(stop)
        return whole.engine.start(mine, target, longest_prompt, whole.hardware.num_slots or _MOST_SLOTS)

    metrics = Metrics()
    workers = Workers(start, whole.engine.resource(target), options.max_waiting, lambda: metrics.add("engine_failures_total"))
    workers.prepare(tuple(whole.dataset.stop))
    workers.begin()
    return Service(options, model_name(options, config), config, target, workers, metrics, longest_prompt)


def _prompt_tokens(options: ServeOptions, config: Any, positions: int | None) -> int:
    """The longest prompt. Raises ConfigError."""
    room, longest = config.dataset.max_new_tokens, options.max_prompt_tokens
    if positions is None:
        return longest or _PROMPT
    if room >= positions:
        raise ConfigError("dataset.max_new_tokens", room, f"at most {positions - 1} (the model has {positions} positions)")
    if longest is not None and longest + room > positions:
        raise ConfigError("serve.max_prompt_tokens", longest, f"at most {positions - room} (the model has {positions} "
                          f"positions, and dataset.max_new_tokens takes {room})")
    return longest or min(_PROMPT, positions - room)
