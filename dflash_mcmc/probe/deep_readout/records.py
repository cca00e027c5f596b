"""The record of an answer in the probe of deep readout."""

from __future__ import annotations

from typing import Annotated, TypedDict, final

from dflash_mcmc.probe.deep_readout.parameters import ParameterCounts
from dflash_mcmc.store.bounds import Count, Long, Range


@final
class ReadoutRecord(TypedDict):
    """The compared tokens of an answer, in their order. A reader is `target` or a mode of the draft."""

    prompt_length: Count
    """Tokens of the prompt."""
    block_size: Annotated[int, Range(1)]
    """Tokens of a block, with its known first token."""
    block: Annotated[list[Count], Long("compared")]
    """The number of each token's block, from 0."""
    p: Annotated[dict[str, list[Annotated[float, Range(0)]]], Long("compared")]
    """Probability of each token at temperature 1, by reader."""
    rank: Annotated[dict[str, list[Annotated[int, Range(1)]]], Long("compared")]
    """1 + number of tokens with a strictly larger logit, by reader."""
    parameters: ParameterCounts
    """Parameters of target and draft, the same in all records."""
