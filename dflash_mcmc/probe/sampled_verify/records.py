"""The record of a generation in the probe of sampled verification."""

from __future__ import annotations

from typing import Annotated, NotRequired, final

from typing_extensions import TypedDict

from dflash_mcmc.probe.sampled_verify.arms import AGENT, LONG, SHORT
from dflash_mcmc.store.bounds import Count, Instead, Long, OneOf, Range


@final
class GenerationRecord(TypedDict):
    """The generation by one decoder at one temperature."""

    decoder: str
    temperature: Annotated[float, Range(0)]
    tokens: list[Count]
    """Token ids."""
    target_forwards: Count
    """Forward passes of the target."""
    tool_call: NotRequired[bool]
    """Whether the text has a call of a tool; only where the prompt shows tools."""
    failure: NotRequired[Annotated[str, Instead(("tokens",))]]
    """Why it could not be drawn."""


@final
class GenerationsRecord(TypedDict):
    """The generations of one unit by all decoders."""

    workload: Annotated[str, OneOf((SHORT, LONG, AGENT))]
    prompt_tokens: Count
    """Tokens of the prompt."""
    seconds: Annotated[list[Annotated[float, Range(0)]], Long("cells")]
    """The unit's share of the batch's time, for each cell."""
    cells: Annotated[list[GenerationRecord], Long("cells")]
