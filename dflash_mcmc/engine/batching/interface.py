"""The interface of engines: what runs chains and on which target, their options, finished chains and counters."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from dflash_mcmc.ops import Chain
from dflash_mcmc.types import ChainResult, Cost

if TYPE_CHECKING:
    import torch


Tag = TypeVar("Tag", bound=Hashable)
"""A caller's name for a chain."""
DROPPED = "the chain was dropped"
"""The failure of a chain that `ChainRunner.drop` has ended."""
NOT_NUMBERS = "the model, or its draft, gave logits that are not numbers; try model.dtype=float32 and draft.dtype=float32"


class Finished(NamedTuple, Generic[Tag]):
    """A chain that has ended."""

    tag: Tag
    result: ChainResult | None
    """The result of the chain; None for a chain that could not be drawn."""
    cost: Cost
    seconds: float
    """Seconds from the chain's start in a slot to its end."""
    share_seconds: float
    """The chain's share of the engine's seconds: the time of each step is divided among its chains, and that of prompts
    that are read ahead among the chains of these prompts."""
    failure: str = ""
    """The reason for a missing result."""
    walk: tuple[dict[str, object], ...] = ()
    """A trace entry for each drafted block, where the decoder keeps a trace."""
    prefill_seconds: float | None = None
    """The part of `share_seconds` in which prompts and prefixes were read; None where it is not measured."""


class Options(NamedTuple):
    """How the engine works. No option changes an answer, except by rounding."""

    prefill_chunk: int = 64
    """Longest piece in which prompts and missing prefixes are read, a power of two >= 8."""
    read_ahead: int = 32
    """Prompts of waiting chains that are read together, at least 1."""
    skip_identical: bool = True
    """Take the tokens that a draw shares with `Draw.along` without a forward of the model."""
    attention: str = "auto"
    """As `hardware.attention`."""
    cuda_graphs: bool = True
    """Replay decode steps as CUDA graphs, where there is a GPU."""
    steps_between_checks: int | None = None
    """Decode steps between two checks for ended draws. None means 1 on a CPU and for a model with recurrent layers, and 4 on a
    GPU otherwise, where a check has to wait."""
    snapshot_every: int = 256
    """Positions between two snapshots of the states of recurrent layers."""


class Counters(NamedTuple):
    """Work that an engine has done. Times are in seconds."""

    steps: int = 0
    row_steps: int = 0
    """Rows that drew a token, summed over steps."""
    busy_row_steps: int = 0
    """Like `row_steps`, but only over the steps during which a chain still waited."""
    busy_slot_steps: int = 0
    """Number of slots, summed over the steps during which a chain still waited."""
    read_tokens: int = 0
    """Tokens of prompts and prefixes that were read."""
    read_forwards: int = 0
    step_seconds: float = 0.0
    read_seconds: float = 0.0

    @property
    def utilisation(self) -> float:
        """Share of slots that drew a token while chains waited; 1 if no chain ever waited."""
        return self.busy_row_steps / self.busy_slot_steps if self.busy_slot_steps else 1.0


class ChainTarget(Protocol):
    """The target of an engine, as far as prompts and answers need it."""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of transformers."""

    @property
    def max_positions(self) -> int | None:
        """Longest sequence, prompt included; None without a limit."""

    @property
    def vocab_size(self) -> int:
        """Ids that the target knows: 0 to vocab_size - 1."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a generation."""

    def encode(self, text: str, add_special_tokens: bool = False) -> np.ndarray:
        """Token ids of a prompt, int64."""

    def decode(self, tokens: np.ndarray) -> str:
        """Text of generated tokens, without special tokens, up to a stop string."""


Hidden = TypeVar("Hidden", "torch.Tensor", "np.ndarray")


class TargetBlend:
    """What an engine asks of a blend. This one changes nothing of the target's last hidden state before its head."""

    __slots__ = ()

    needs_draft: ClassVar[bool] = False
    """Whether `mix` takes the draft's hidden state instead of outputs of the target's layers."""

    def tapped_layers(self, num_layers: int) -> tuple[int, ...]:
        """The decoder layers of the target, 0-based, whose outputs `mix` takes. Raises ConfigError for a missing layer."""
        return ()

    def mix(self, last: Hidden, tapped: Sequence[Hidden], final_norm: Callable[[Hidden], Hidden]) -> Hidden:
        """The blended state. The function is linear, so its arguments may be hidden states or the logits of one head."""
        return last


class Meter:
    """The counters and the clock of an engine.

    Attributes:
        now: the clock that measures the turns of chains, in seconds.
        clock: seconds per chain since the start of the run. The time of each step is divided among the chains in it.
        reading_clock: the part of `clock` in which prompts and prefixes were read.
    """

    def __init__(self) -> None:
        self.counters, self.now = Counters(), time.perf_counter
        self.clock = self.reading_clock = self._reading = 0.0

    def reset_clock(self) -> None:
        """Resets the clocks at the start of a run. The counters are kept."""
        self.clock = self.reading_clock = self._reading = 0.0

    def share(self, started: float, chains: int) -> None:
        """Divides the time since `started` among chains."""
        self.clock += (time.perf_counter() - started) / max(1, chains)
        self.reading_clock += self._reading / max(1, chains)
        self._reading = 0.0

    def count_reading(self, tokens: int, forwards: int, started: float, ahead: bool = False) -> None:
        """Counts tokens that were read since `started`.

        Args:
            ahead: whether they were read for chains that have not begun, and take no part in the next step.
        """
        counters, seconds = self.counters, time.perf_counter() - started
        self._reading += 0.0 if ahead else seconds
        self.counters = counters._replace(
            read_tokens=counters.read_tokens + tokens, read_forwards=counters.read_forwards + forwards,
            read_seconds=counters.read_seconds + seconds)

    def count_steps(self, steps: int, row_steps: int, busy_slots: int, started: float) -> None:
        """Counts decode steps since `started`.

        Args:
            row_steps: rows that drew a token, summed over steps.
            busy_slots: number of slots of the engine if chains wait, else 0.
        """
        counters = self.counters
        self.counters = counters._replace(
            steps=counters.steps + steps, row_steps=counters.row_steps + row_steps,
            busy_row_steps=counters.busy_row_steps + (row_steps if busy_slots else 0),
            busy_slot_steps=counters.busy_slot_steps + steps * busy_slots,
            step_seconds=counters.step_seconds + time.perf_counter() - started)


class ChainRunner(ABC):
    """An engine that has been started, with a meter. `steps` ends the chains of the tags in `_dropped`."""

    model: ChainTarget
    """The target."""

    def __init__(self) -> None:
        self._meter, self._dropped = Meter(), set[Hashable]()

    @property
    def counters(self) -> Counters:
        """The engine's work so far."""
        return self._meter.counters

    def run(self, chains: Iterable[tuple[Tag, Chain] | None]) -> Iterator[Finished[Tag]]:
        """Yields chains as they end. `chains` are (tag, generator) pairs; a few may be taken before there is room for them.

        None in place of a pair says that no chain waits now. While a slot is free, the engine asks again after each step. The
        run ends when no chain is live and none waits, although `chains` may have more later.
        """
        return (done for done in self.steps(chains) if done is not None)

    @abstractmethod
    def steps(self, chains: Iterable[tuple[Tag, Chain] | None]) -> Generator[Finished[Tag] | None, None, None]:
        """Like `run`, but also yields None after every step, to let the caller do something else in between."""

    def drop(self, tags: Collection[Hashable]) -> None:
        """Ends chains of `steps` before its next step, each with the failure `DROPPED`. Unknown tags are ignored.

        The thread that reads `steps` calls this between two of its values.
        """
        self._dropped.update(tags)

    def close(self) -> None:  # noqa: B027 - most engines hold nothing else
        """Releases what the engine holds beyond this process's memory."""
