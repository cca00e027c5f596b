"""The host's state of a live chain: its request, the answers so far, its slots, and its cost."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from dflash_mcmc.engine.batching.contents import assign
from dflash_mcmc.engine.batching.interface import Finished
from dflash_mcmc.engine.batching.slots import Slot, chunks
from dflash_mcmc.ops import Chain, Operation, Request, Together
from dflash_mcmc.types import ChainResult, Cost, Trajectory, common_prefix


class LiveChain:
    """A chain that has begun.

    A chain keeps a slot for each operation of its largest request so far. A slot may have a row of the batch or none. The
    tokens that are read and their cost therefore depend neither on the number of rows nor on other chains.

    Attributes:
        operations: the operations of the current request.
        slots: the slots of the chain.
        cost: the cost of earlier requests.
        seconds: the chain's share of the engine's time, in seconds.
        prefill_seconds: the part of it in which prompts and prefixes were read; None where it is not measured.
        walk: a trace entry for each drafted block, if a trace is kept.
        ended: whether the chain has ended.
        adapted: whether the chain has been charged for what the draft has learned from its prompt.
        adapt_seconds: seconds of the steps of a draft that learns.
    """

    def __init__(self, tag: Hashable, generator: Chain):
        self.tag, self.generator = tag, generator
        self.started, self.seconds, self.cost = time.perf_counter(), 0.0, Cost()
        self.walk: list[dict[str, object]] = []
        self.slots: list[Slot] = []
        self.operations: Sequence[Operation] = ()
        self.ended = self._together = self.adapted = False
        self.adapt_seconds = 0.0
        self.prefill_seconds: float | None = None

    def ask(self, request: Request) -> None:
        """Takes the next request."""
        self._together = isinstance(request, Together)
        self.operations = request.operations if isinstance(request, Together) else (request,)
        count = len(self.operations)
        self._answers: list[Trajectory | None] = [None] * count
        self._costs, self._walks = [Cost()] * count, [list[dict[str, object]]() for _ in range(count)]
        self._shared_from: dict[int, Trajectory] = {}
        self._forwards_of_reading = 0

    @property
    def complete(self) -> bool:
        """Whether all operations of the request have their answers."""
        return None not in self._answers

    def has_answer(self, number: int) -> bool:
        """Whether an operation of the request has its answer."""
        return self._answers[number] is not None

    def note(self, number: int, answer: Trajectory, walk: Sequence[dict[str, object]] = ()) -> None:
        """Notes the answer to an operation of the request."""
        self._answers[number], self._walks[number] = answer, list(walk)

    def answer(self) -> Trajectory | tuple[Trajectory | None, ...] | None:
        """The answer to the complete request. Adds up its cost."""
        self.settle()
        return tuple(self._answers) if self._together else self._answers[0]

    def advance(self, begin: Callable[[LiveChain], None], end: Callable[[LiveChain, ChainResult], None]) -> None:
        """Gives the chain the answers to complete requests, until one is not complete or the chain ends.

        Args:
            begin: begins the operations of a new request.
            end: takes the result of a chain that has ended.
        """
        while self.complete and not self.ended:
            try:
                request: Request = self.generator.send(self.answer())
            except StopIteration as stop:
                end(self, stop.value)
                return
            self.ask(request)
            begin(self)

    def slots_for(self, bases: dict[int, Trajectory], first_alike: dict[int, int]) -> dict[int, Slot]:
        """A slot for each operation, in the order in which they are placed.

        The operations that are the first to extend their tokens come first. They get the slots that hold the most of these
        tokens.
        """
        first = list(dict.fromkeys(first_alike.values()))
        again = [number for number in bases if number not in first]
        self.slots += [Slot(self) for _ in range(len(bases) - len(self.slots))]
        pairs = assign([slot.contents for slot in self.slots], [bases[number].sequence for number in first])
        slots = {first[mine]: self.slots[theirs] for mine, theirs in pairs}
        rest = [slot for slot in self.slots if slot not in slots.values()]
        return slots | dict(zip(again, rest, strict=False))

    def finished(self, result: ChainResult | None, failure: str = "") -> Finished:
        """Ends the chain. Returns what the engine yields of it."""
        self.ended = True
        seconds = time.perf_counter() - self.started
        return Finished(self.tag, result, self.cost, seconds, self.seconds, failure, tuple(self.walk),
                        self.adapt_seconds, self.prefill_seconds)

    def settle(self) -> None:
        """Adds up the cost of the request. Its depth is that of its longest reading plus that of its longest operation."""
        if self._costs:
            cost = Cost(*map(sum, zip(*self._costs, strict=True)))
            shared = self._repeated()
            depth = self._forwards_of_reading + max(each.target_forwards for each in self._costs)
            cost = cost._replace(target_forwards=depth,
                                 token_forwards=cost.token_forwards - shared, tokens_shared=shared)
            self.cost = Cost(*map(sum, zip(self.cost, cost, strict=True)))
        self.walk += [entry for walk in self._walks for entry in walk]

    def charge(self, number: int, **amounts: int) -> None:
        """Adds to the cost of an operation, by the names of `Cost`."""
        cost = self._costs[number]
        self._costs[number] = cost._replace(**{name: getattr(cost, name) + amount for name, amount in amounts.items()})

    def charge_reading(self, number: int, start: int, stop: int, chunk: int) -> None:
        """Charges an operation for positions `start` to `stop - 1`, which are read in pieces of at most `chunk` tokens."""
        self._forwards_of_reading = max(self._forwards_of_reading, len(list(chunks(start, stop, chunk))))
        self.charge(number, token_forwards=stop - start)

    def share(self, bases: dict[int, Trajectory]) -> None:
        """Notes the draws that share forwards while their tokens are equal, and the trajectories that they extend."""
        self._shared_from = bases if self._together else {}

    def _repeated(self) -> int:
        """Forwards that draws of the request would repeat if they did not share them."""
        groups: dict[bytes, list[np.ndarray]] = {}
        for number, base in self._shared_from.items():
            answer = self._answers[number]
            if answer is not None:
                groups.setdefault(base.sequence.tobytes(), []).append(answer.tokens[base.length :])
        return sum(map(_repeated, groups.values()))


def _repeated(drawn: Sequence[np.ndarray]) -> int:
    """Number of forwards that draws from one sequence repeat.

    A draw of n tokens has n forwards: one before its first token, and one after each token but the last. In sorted order a
    draw repeats the forwards that it shares with the draw before it.

    Args:
        drawn: the tokens of each draw, int64 (n,) with n > 0.
    """
    ordered = sorted(drawn, key=lambda tokens: tokens.tolist())
    return sum(min(common_prefix(a, b) + 1, len(a), len(b)) for a, b in itertools.pairwise(ordered))
