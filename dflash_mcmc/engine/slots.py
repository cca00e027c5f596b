"""What the batched engine keeps for each live chain: its slot on the host, its row of tensors on the device."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator

import numpy as np
import torch

from dflash_mcmc.ops import Chain, Operation
from dflash_mcmc.types import Cost

_SMALLEST_CHUNK = 8


class Slot:
    """A live chain: its generator, the operation under way, and the tokens whose keys and values its row holds."""

    __slots__ = ("chain", "cost", "held", "operation", "share_seconds", "started", "tag", "top")

    def __init__(self, tag: Hashable, chain: Chain):
        self.tag, self.chain, self.started = tag, chain, time.perf_counter()
        self.operation: Operation | None = None
        self.held, self.cost, self.share_seconds = np.empty(0, np.int64), Cost(), 0.0
        self.top = 0
        """Position of the token that is fed next: the host's copy of `Rows.position`."""

    def charge(self, tokens_drawn: int, target_forwards: int, token_forwards: int) -> None:
        """Adds to the chain's cost."""
        cost = self.cost
        self.cost = Cost(cost.tokens_drawn + tokens_drawn, cost.target_forwards + target_forwards,
                         cost.token_forwards + token_forwards)


class Rows:
    """Tensors with a row for each slot. A row's generated token number t stands at position prompt_length + t.

    Attributes:
        tokens: int64 (rows, length), prompt and generation.
        uniforms, log_p, log_q: float64 (rows, length), at the position of the token they belong to.
        position: int64 (rows,), of the token that is fed next.
        last: int64 (rows,), position of the last token that may be drawn.
        seen: bool (rows, vocabulary), tokens in prompt or generation; empty until a law needs it.
    """

    def __init__(self, num_rows: int, length: int, vocab_size: int, device: torch.device):
        self.num_rows, self.vocab_size, self.device = num_rows, vocab_size, device
        self.tokens = torch.zeros(num_rows, length, dtype=torch.int64, device=device)
        self.uniforms, self.log_p, self.log_q = (
            torch.zeros(num_rows, length, dtype=torch.float64, device=device) for _ in range(3)
        )
        self.position = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.last = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.seen = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)

    def move(self, source: int, destination: int) -> None:
        """Copies a row over another."""
        for state in (self.tokens, self.uniforms, self.log_p, self.log_q, self.position, self.last, self.seen):
            if len(state):
                state[destination] = state[source]

    def put(self, row: int, start: int, tokens: np.ndarray) -> None:
        """Writes tokens at positions from `start` on."""
        self.tokens[row, start : start + len(tokens)] = torch.from_numpy(tokens).to(self.device)

    def mark_seen(self, row: int, tokens: np.ndarray) -> None:
        """Sets what a repetition penalty counts as present in the row."""
        if not len(self.seen):
            self.seen = torch.zeros(self.num_rows, self.vocab_size, dtype=torch.bool, device=self.device)
        self.seen[row] = False
        self.seen[row, torch.from_numpy(tokens).to(self.device)] = True

    def read(self, row: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(tokens, log p, log q) of a span, on the host."""
        return tuple(state[row, start:stop].cpu().numpy().copy() for state in (self.tokens, self.log_p, self.log_q))


def chunks(start: int, stop: int, largest: int) -> Iterator[tuple[int, int]]:
    """(first position, size) of chunks that cover `start` to `stop - 1`; the last may reach beyond."""
    while start < stop:
        size = _SMALLEST_CHUNK
        while size < min(stop - start, largest):
            size *= 2
        yield start, size
        start += size


def round_up(value: int, step: int) -> int:
    """The smallest multiple of `step` that is not below `value`."""
    return -(-value // step) * step
