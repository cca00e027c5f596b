"""The record of a chunk of draws in the probe of rejection sampling."""

from __future__ import annotations

from typing import Annotated, TypedDict, final

from dflash_mcmc.store.bounds import Count, Long, Range


@final
class DrawsRecord(TypedDict):
    """The draws of a chunk, by sampler: a decoder, with the name of its fault."""

    draws: Annotated[int, Range(1)]
    """Draws of each sampler."""
    accepted: dict[str, Annotated[float, Range(0)]]
    """Accepted drafts; of a block of several tokens, the sum of the accepted shares."""
    counts: Annotated[dict[str, list[Count]], Long("cells")]
    """How often each token, or pair of tokens, was drawn."""
