"""The record of an answer in the probe of blended logits."""

from __future__ import annotations

from typing import Annotated, NotRequired, final

from typing_extensions import TypedDict

from dflash_mcmc.store.bounds import AsList, Count, Long, Range

Cell = Annotated[tuple[float, float, float, float, float, float, float, float], AsList()]
"""The sums named in `gains.SUMS`, in this order."""


@final
class BlendSums(TypedDict):
    """Sums over the hard and over the easy tokens of an answer, by source. A source has a cell for each beta."""

    hard: Annotated[dict[str, list[Cell]], Long("betas")]
    easy: Annotated[dict[str, list[Cell]], Long("betas")]


@final
class LogitBlendRecord(TypedDict):
    """See `gains.record`."""

    num_tokens: Count
    """Tokens of the answer."""
    num_hard: Count
    """Hard tokens."""
    sums: BlendSums
    seconds: NotRequired[Annotated[float, Range(0)]]
    """Seconds of the measurement. An answer that was not read has none."""
