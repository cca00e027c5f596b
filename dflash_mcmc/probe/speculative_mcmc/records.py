"""The record of an answer in the probe of speculative MCMC."""

from __future__ import annotations

from typing import Annotated, NotRequired, final

from typing_extensions import TypedDict

from dflash_mcmc.store.bounds import Count, Instead, Long, Range


@final
class TokenDistances(TypedDict):
    """Distances between target and draft for each predicted token; see `proposals.Distances`."""

    kl: Annotated[list[float], Long("drafted")]
    """In nats."""
    tvd: Annotated[list[float], Long("drafted")]


@final
class ChainColumns(TypedDict):
    """The simulated chain of each block; see `weighing.chains`."""

    acceptance: Annotated[list[float], Long("blocks")]
    moved: Annotated[list[float], Long("blocks")]
    equilibrium: Annotated[list[float], Long("blocks")]
    log_w: Annotated[list[float], Long("blocks")]
    log_w_std: Annotated[list[float], Long("blocks")]
    effective: Annotated[list[float], Long("blocks")]


@final
class ProposalRecord(TypedDict):
    """A proposal: the draft at a temperature, or the target. The target has joint weights alone."""

    kl: NotRequired[Annotated[list[float], Long("drafted")]]
    tvd: NotRequired[Annotated[list[float], Long("drafted")]]
    reference: NotRequired[ChainColumns]
    joint: NotRequired[ChainColumns]


@final
class SpeculativeRecord(TypedDict):
    """See `SpeculativeMCMC.record` and `timing.Timing.of`."""

    num_tokens: Count
    """Tokens of the answer."""
    blocks: Annotated[Count, Long("blocks")]
    """Whole blocks of the answer."""
    block_size: Annotated[int, Range(1)]
    """Tokens of a block, with its anchor."""
    p: TokenDistances
    """Of the unsharpened target."""
    proposals: dict[str, ProposalRecord]
    """By temperature of the draft; `target` for blocks drawn from the target."""
    seconds: Annotated[float, Range(0)]
    """Seconds since the previous record."""
    seconds_target: NotRequired[Annotated[float, Range(0)]]
    """Seconds of a proposal of the target. This field and the next two are there only if proposals were timed."""
    seconds_draft: NotRequired[Annotated[float, Range(0)]]
    timed_rows: NotRequired[Count]
    """Chains that proposed at once."""
    skipped: NotRequired[Annotated[str, Instead(("num_tokens", "blocks", "block_size", "p", "proposals", "seconds"))]]
    """Why the answer was not measured."""
