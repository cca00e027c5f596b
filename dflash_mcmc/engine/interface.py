"""What goes into the batched engine and what comes out of it: options, finished chains, counters."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from dflash_mcmc.types import ChainResult, Cost

NOT_NUMBERS = "the model, or its draft, gave logits that are not numbers; try model.dtype=float32 and draft.dtype=float32"


class Finished(NamedTuple):
    """A chain that has ended."""

    tag: Hashable
    result: ChainResult | None
    """None where the chain could not be drawn."""
    cost: Cost
    seconds: float
    """From the chain's start in a slot to its end."""
    share_seconds: float
    """Its share of the engine's time: each step's time divided among the chains that took part."""
    failure: str = ""
    """Why there is no result."""
    walk: tuple[dict[str, object], ...] = ()
    """What became of every drafted block, where a decoder keeps a trace."""


class Options(NamedTuple):
    """How the engine works. None of it changes an answer, but for rounding."""

    prefill_chunk: int = 64
    """Longest piece in which prompts and missing prefixes are read, a power of two >= 8."""
    read_ahead: int = 32
    """Prompts of waiting chains that are read at once; 0 reads each in its slot."""
    reuse_prefix: bool = True
    """Keep keys and values between the operations of a chain; False reads every path anew."""
    keep_current: bool = True
    """Keep the current sequence's keys and values in a spare row while a draw overwrites them."""
    skip_identical: bool = True
    """Take tokens that a draw shares with the path it goes along without asking the model."""
    whole_blocks: bool = True
    """Draw the tokens that a draft says of a block at once, and read them in one forward of the target."""
    attention: str = "auto"
    """One of `attention.CHOICES`."""
    cuda_graphs: bool = True
    """Replay decode steps as CUDA graphs, where there is a GPU."""
    steps_between_checks: int | None = None
    """Decode steps between looks at what has ended; None takes 1 on a CPU and 4 on a GPU, where a look waits for it."""


DEFAULTS = Options()


class Counters(NamedTuple):
    """What an engine has done. Times in seconds."""

    steps: int = 0
    row_steps: int = 0
    """Rows that drew a token, summed over steps."""
    busy_row_steps: int = 0
    """The same, of the steps in which a chain still waited."""
    busy_slot_steps: int = 0
    """Slots, summed over those steps."""
    read_tokens: int = 0
    """Tokens of prompts and prefixes that were read."""
    read_forwards: int = 0
    step_seconds: float = 0.0
    read_seconds: float = 0.0

    @property
    def utilisation(self) -> float:
        """Share of slots that drew a token while chains waited; 1 where none ever did."""
        return self.busy_row_steps / self.busy_slot_steps if self.busy_slot_steps else 1.0
