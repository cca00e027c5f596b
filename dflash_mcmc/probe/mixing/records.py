"""The record of a chain in the probe of mixing."""

from __future__ import annotations

from typing import Annotated, NotRequired, final

from typing_extensions import TypedDict

from dflash_mcmc.store.bounds import Anew, Count, Instead, Letters, Long

DECISIONS = {"accept": "a", "identical": "i", "reject": "r", "abandon": "x"}
"""Letters for the decision of a step in a record."""


@final
class StepColumns(TypedDict):
    """The steps of a chain by column, in their order; see `kernel.trace_entry`."""

    block: Annotated[list[Count], Long("steps")]
    step: Annotated[list[Count], Long("steps")]
    cut: Annotated[list[Count], Long("steps")]
    length: Annotated[list[Count], Long("steps")]
    """Tokens of the state before the step."""
    proposal_length: Annotated[list[Count], Long("steps")]
    log_ratio: Annotated[list[float], Long("steps")]
    """Log acceptance ratio in nats."""
    log_p: Annotated[list[float], Long("steps")]
    """Log p of the state after the step, in nats."""
    decision: Annotated[str, Letters("".join(DECISIONS.values())), Long("steps")]
    """A letter of `DECISIONS` for each step."""


@final
class CellRecord(TypedDict):
    """The chain in one setting of the grid."""

    alpha: float
    temperature: float
    """Temperature of the proposal."""
    early_reject: str
    num_tokens: Count
    """Tokens of the answer."""
    log_p: float
    """Log p of the answer, in nats."""
    proposals: Count
    accepted: Count
    moved: Count
    abandoned: Count
    tokens_drawn: Count
    tokens_skipped: Count
    token_forwards: Count
    target_forwards: Count
    trace: Annotated[StepColumns, Anew("steps")]
    failure: NotRequired[Annotated[str, Instead(("num_tokens", "log_p", "proposals", "accepted", "moved", "abandoned",
                                                 "trace"))]]
    """Why the chain could not be drawn in this setting."""


@final
class MixingRecord(TypedDict):
    """A chain in all settings, and its totals over them."""

    cells: list[CellRecord]
    """In the order of `Mixing.measured`."""
    proposals: Count
    accepted: Count
    moved: Count
