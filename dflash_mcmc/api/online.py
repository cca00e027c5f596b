"""An engine that draws orders whenever they come: the server's, and that of harnesses that ask for one answer at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from dflash_mcmc.api.workers import Workers
from dflash_mcmc.config.checks import checked
from dflash_mcmc.dataset.inputs import template_limits
from dflash_mcmc.errors import ConfigError

if TYPE_CHECKING:
    from dflash_mcmc.config.schema import Config
    from dflash_mcmc.engine.batching.interface import ChainRunner, ChainTarget

_PROMPT = 1024
MOST_SLOTS = 256
"""Slots of an engine that chooses their number itself, at most."""


class Online(NamedTuple):
    """A loaded model and the thread that draws from it."""

    target: ChainTarget
    workers: Workers
    longest_prompt: int
    """Most tokens of a prompt."""


def started(config: Config, max_prompt_tokens: int | None, field: str, max_waiting: int,
            failed: Callable[[], None]) -> Online:
    """Loads the model of a configuration as it was composed, and starts the thread.

    The engine of the configured stop strings is started here, so that a lack of memory is found before any order.

    Args:
        max_prompt_tokens: longest prompt; None takes 1,024, or less where the model has fewer positions.
        field: the name of `max_prompt_tokens` in errors.
        max_waiting: orders that may wait or be drawn.
        failed: called after a failure of the engine.

    Raises:
        UserError: for an engine that cannot be started.
    """
    whole = checked(copy.deepcopy(config))
    target = whole.engine.load(whole, whole.hardware.resolve())
    if whole.model.chat:  # here, since a request would be a late place to find that the template has no end
        template_limits.check(target.tokenizer, [{"role": "user", "content": "1 + 1?"}], None, add_generation_prompt=True)
    longest_prompt = _prompt_tokens(max_prompt_tokens, field, whole, target.max_positions)

    def start(stop: tuple[str, ...]) -> ChainRunner:
        mine = copy.copy(whole)
        mine.dataset = copy.copy(whole.dataset)
        mine.dataset.stop = list(stop)
        return whole.engine.start(mine, target, longest_prompt, whole.hardware.num_slots or MOST_SLOTS)

    workers = Workers(start, whole.engine.mixes_stops, whole.engine.resource(target), max_waiting, failed)
    workers.prepare(tuple(whole.dataset.stop))
    workers.begin()
    return Online(target, workers, longest_prompt)


def _prompt_tokens(longest: int | None, field: str, config: Config, positions: int | None) -> int:
    """The longest prompt. Raises ConfigError."""
    room = config.dataset.max_new_tokens
    if positions is None:
        return longest or _PROMPT
    if room >= positions:
        raise ConfigError("dataset.max_new_tokens", room, f"at most {positions - 1} (the model has {positions} positions)")
    if longest is not None and longest + room > positions:
        raise ConfigError(field, longest, f"at most {positions - room} (the model has {positions} positions, and "
                          f"dataset.max_new_tokens takes {room})")
    return longest or min(_PROMPT, positions - room)
