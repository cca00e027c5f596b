"""What a request asks of the logits processor. It travels in the request's sampling parameters, so it holds plain values."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from dflash_mcmc.engine.batching.draws import start_of
from dflash_mcmc.ops import Draw, Operation, SamplingParams, Score
from dflash_mcmc.rng import Key
from dflash_mcmc.types import Trajectory

FIELD = "dflash_mcmc"
"""The name of the ticket among a request's extra arguments."""


class Limit(NamedTuple):
    """The floor of a draw, as `Floor`, for a request that starts after `weight` is summed."""

    alpha: float
    weight: float
    """Sum of alpha log p - log q over the draw's tokens before the request, in nats."""
    threshold: float
    """The draw has crossed its floor if weight plus the length term is not above this."""
    log_length: float | None
    """Log of `Floor.length`; None without one."""


class Ticket(NamedTuple):
    """A draw or a score after a base. The base's tokens are the request's prompt."""

    number: int
    """The request, in the ledger."""
    prompt_length: int
    """Tokens of the request's prompt that are not generated."""
    first: int
    """Number of the request's first token, counted from the start of the generation."""
    params: SamplingParams
    laws: tuple[SamplingParams, ...]
    entropy: bool
    key: bytes
    """The digest of the draw's key; empty where no uniform is needed."""
    length: int
    """Most tokens of the request."""
    stop_ids: tuple[int, ...]
    forced: tuple[int, ...] = ()
    """The tokens of a score."""
    limit: Limit | None = None
    matched: int = 0
    """The state of the stop strings after the tokens before the request (`stop_strings.py`)."""

    @staticmethod
    def of(number: int, operation: Operation, base: Trajectory, stop_ids: Collection[int], matched: int = 0) -> Ticket:
        """The ticket of an operation that goes on after `base`.

        A floor is left out where there is no stop id by which the request could be ended. It changes no answer.
        """
        key, forced, limit = b"", tuple[int, ...](), None
        if isinstance(operation, Score):
            forced = tuple(int(token) for token in operation.tokens)
            length = len(forced)
        else:
            key = b"" if operation.params.temperature == 0.0 else operation.key.digest
            length, limit = operation.horizon - base.length, _limit(operation, base) if stop_ids else None
        return Ticket(number, len(base.prompt), base.length, operation.params, operation.laws, operation.entropy, key, length,
                      tuple(stop_ids), forced, limit, matched)

    def uniforms(self) -> np.ndarray:
        """Uniforms of the request's tokens, float64 (length,), as a draw of the engine of slots has them."""
        if not self.key:
            return np.full(self.length, 0.5)
        return Key(self.key).uniforms(self.first, self.first + self.length)

    def to_values(self) -> dict[str, Any]:
        """The ticket as lists, numbers and texts."""
        return {**self._asdict(), "params": list(self.params), "laws": [list(law) for law in self.laws],
                "key": self.key.hex(), "stop_ids": list(self.stop_ids), "forced": list(self.forced),
                "limit": None if self.limit is None else list(self.limit)}

    @staticmethod
    def from_values(values: dict[str, Any]) -> Ticket:
        """The ticket that `to_values` has turned into values."""
        limit: Sequence[Any] | None = values["limit"]
        return Ticket(**{**values, "params": SamplingParams(*values["params"]), "key": bytes.fromhex(values["key"]),
                         "laws": tuple(SamplingParams(*law) for law in values["laws"]),
                         "stop_ids": tuple(values["stop_ids"]), "forced": tuple(values["forced"]),
                         "limit": None if limit is None else Limit(*limit)})


def _limit(draw: Draw, base: Trajectory) -> Limit | None:
    if draw.floor is None:
        return None
    start = start_of(draw, base, 0, np.empty(0), 0)
    return Limit(start.alpha, start.weight, start.floor, None if draw.floor.length is None else start.log_length)
