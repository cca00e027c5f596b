"""The record of an answer in the probe of layers' ranks."""

from __future__ import annotations

from typing import Annotated, NotRequired, TypedDict, final

from dflash_mcmc.store.bounds import AsList, Count, Long, Range


@final
class LayerRankRecord(TypedDict):
    """The tokens of an answer by row name (see `ranks.py`), such as `target` or `3 final`."""

    num_tokens: Annotated[Count, Long("num_tokens")]
    """Tokens of the answer."""
    num_hard: Annotated[Count, Long("num_hard")]
    """Hard tokens."""
    vocabulary: Annotated[int, Range(1)]
    """Ids that have a token."""
    hard: Annotated[list[Count], Long("num_hard")]
    """Places of the hard tokens in the answer."""
    ranks: Annotated[dict[str, list[Annotated[int, Range(1)] | None]], Long("num_tokens")]
    """The rank of each token, from 1; null where the draft does not predict it."""
    log_p: dict[str, Annotated[tuple[float, float], AsList()]]
    """Sum of log p in nats over all predicted tokens, and over the hard ones."""
    agreements: dict[str, Annotated[tuple[Count, Count], AsList()]]
    """Places at which the row's most likely token is the target's, among all predicted tokens and among the hard ones."""
    seconds: NotRequired[Annotated[float, Range(0)]]
    """Seconds of the measurement. An answer that was not read has none."""
