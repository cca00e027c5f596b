"""The record of an answer in the adaptation probe."""

from __future__ import annotations

from typing import Annotated, final

from typing_extensions import TypedDict

from dflash_mcmc.store.bounds import AsList, Count, Long, Range


@final
class WalkRecord(TypedDict):
    """A walk along an answer by a draft that is frozen, or that learns in one way."""

    blocks: list[Annotated[tuple[Count, Annotated[int, Range(1)]], AsList()]]
    """For each block, the place of its first token in the answer, and the tokens that it gained."""
    log_q: Annotated[list[float], Long("drafted")]
    """Log q of the compared tokens in nats, in the order of `log_p`."""
    steps: Count
    """Gradient steps."""
    dropped: Count
    """Steps that were left out, because their gradient was not finite."""


@final
class AdaptationRecord(TypedDict):
    """See `walks.Walker.record`."""

    num_tokens: Count
    """Tokens of the answer."""
    prompt_length: Count
    """Tokens of the prompt."""
    log_p: Annotated[list[float], Long("drafted")]
    """Log p of the compared tokens under the target, in nats."""
    seconds: dict[str, Annotated[float, Range(0)]]
    """Seconds of the gradient steps, by setting."""
    settings: dict[str, WalkRecord]
    """The walks, by setting; one is `frozen`."""
