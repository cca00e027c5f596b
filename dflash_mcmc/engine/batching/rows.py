"""The state of the live chains on the device: tensors with a row for each slot, written and read in batches."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from dflash_mcmc.engine.batching.logits_processor import History, counts_of


class Status(enum.IntEnum):
    """Status of a row. A step computes all rows of the batch, and changes only live ones."""

    LIVE = 0
    DONE = 1
    """The draw reached a stop id or its last position, or the row is idle."""
    ABANDONED = 2
    """The draw crossed its floor."""
    FAILED = 3
    """The model gave logits that are not numbers."""
    PARTED = 4
    """The draw can no longer share the forwards of another row. It continues when it has keys and values of its own."""


class Start(NamedTuple):
    """The start of a draw in a row. Positions count from the start of the prompt.

    `fed` is the token at `first - 1`. `uniforms` belong to positions `first` to `last`. `noise`, (last - first + 1, k),
    belongs to blocks whose anchors are at `first - 1` to `last - 1`. `origin` is the position of the first generated token.
    `matched` is the state of the stop strings after the token at `first - 1` (`stop_strings.py`).
    The draw is abandoned once weight <= floor. If log_length is finite, log_length - log(generated tokens) is first added to
    the weight.
    """

    row: int
    fed: int
    first: int
    last: int
    origin: int
    uniforms: np.ndarray
    alpha: float = 0.0
    weight: float = 0.0
    floor: float = -np.inf
    log_length: float = -np.inf
    grid_origin: int = 0
    matched: int = 0
    noise: np.ndarray | None = None


class RowProgress(NamedTuple):
    """A copy on the host of the first rows of some attributes of `Rows`, each int64 (rows,)."""

    position: np.ndarray
    status: np.ndarray
    rounds: np.ndarray
    fed: np.ndarray
    blocks: np.ndarray
    kept: np.ndarray

    def counts(self, row: int) -> RowCounts:
        """Counts of one row."""
        return RowCounts(*(int(values[row]) for values in (self.rounds, self.fed, self.blocks, self.kept)))


class RowCounts(NamedTuple):
    """Counts of a draw: steps, positions at which the target was evaluated, drafted blocks, drafted tokens that were kept."""

    rounds: int = 0
    fed: int = 0
    blocks: int = 0
    kept: int = 0


class DrawnTokens(NamedTuple):
    """The tokens of a draw, int64 (n,), with their log p and log q, float64 (n,), and their intervals, float64 (n, 2).

    `columns`, float64 (n, k), has the further columns of `columns.py`.
    """

    tokens: np.ndarray
    log_p: np.ndarray
    log_q: np.ndarray
    interval: np.ndarray
    columns: np.ndarray


class Rows:
    """Tensors with a row for each slot. Generated token number t of a row has position prompt_length + t.

    Attributes:
        ids: int64 (rows,), the numbers of the rows.
        tokens: int64 (rows, length), the tokens of the draw; only `set_tokens` writes earlier tokens.
        uniforms: float64 (rows, length), each at the position of the token that it draws.
        scores: float64 (rows, length, 4): log p, log q and the two ends of the interval of the token at a position.
        columns: float64 (rows, length, k), entropy and log q and intervals under further laws (`columns.py`); k may be 0.
        position: int64 (rows,), position of the token that is fed next.
        last: int64 (rows,), position of the last token that may be drawn.
        origin: int64 (rows,), position of the first generated token.
        status: int64 (rows,), a Status.
        rounds: int64 (rows,), steps of the draw.
        fed: int64 (rows,), positions at which the target was evaluated in these steps.
        blocks: int64 (rows,), blocks drafted for the draw.
        kept: int64 (rows,), drafted tokens that were kept.
        grid_origin: int64 (rows,), position at which the draft's first block starts.
        matched: int64 (rows,), state of the stop strings after the token at `position` (`stop_strings.py`).
        noise: float64 (rows, length, k), uniforms of the block whose anchor is at a position; k may be 0.
        alpha, weight, floor, log_length: float64 (rows,), see `Start`.
        nowhere: a position that belongs to no token.
        seen: bool (rows, vocabulary), tokens in prompt or generation; empty until a repetition penalty needs it.
        counts: float32 (rows, vocabulary), how often a token is in the generation; empty until a frequency or presence
            penalty needs it.
    """

    def __init__(self, num_rows: int, length: int, vocab_size: int, device: torch.device, num_noise: int = 0):
        self.num_rows, self.vocab_size, self.device = num_rows, vocab_size, device
        self.ids = torch.arange(num_rows, device=device)
        self.tokens = torch.zeros(num_rows, length, dtype=torch.int64, device=device)
        self.uniforms = torch.zeros(num_rows, length, dtype=torch.float64, device=device)
        self.scores = torch.zeros(num_rows, length, 4, dtype=torch.float64, device=device)
        self.columns = torch.zeros(num_rows, length, 0, dtype=torch.float64, device=device)
        self.noise = torch.zeros(num_rows, length, num_noise, dtype=torch.float64, device=device)
        self._whole = torch.zeros(10, num_rows, dtype=torch.int64, device=device)
        self._real = torch.zeros(4, num_rows, dtype=torch.float64, device=device)
        (self.position, self.last, self.origin, self.status, self.rounds, self.fed, self.blocks, self.kept,
         self.grid_origin, self.matched) = self._whole
        self.work = self._whole[4:6]  # rounds and fed, which a step of one token increases together
        self.alpha, self.weight, self.floor, self.log_length = self._real
        self.nowhere = length - 1  # results of idle rows are written to this position
        self.status.fill_(Status.DONE)
        self.seen = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self.counts = torch.zeros(0, vocab_size, device=device)

    def begin(self, starts: Sequence[Start]) -> None:
        """Prepares rows for draws, with one transfer for each kind of value."""
        whole = [[s.row for s in starts], [s.first - 1 for s in starts], [s.last for s in starts], [s.origin for s in starts],
                 [Status.LIVE] * len(starts), *[[0] * len(starts)] * 4, [s.grid_origin for s in starts],
                 [s.matched for s in starts], [s.fed for s in starts]]
        real = [[s.alpha for s in starts], [s.weight for s in starts], [s.floor for s in starts],
                [s.log_length for s in starts]]
        packed = torch.tensor(whole, dtype=torch.int64, device=self.device)
        rows, fed = packed[0], packed[-1]
        self._whole[:, rows] = packed[1:-1]
        self._real[:, rows] = torch.tensor(real, dtype=torch.float64, device=self.device)
        self.tokens[rows, self.position[rows]] = fed
        counts = [len(s.uniforms) for s in starts]
        at = np.concatenate([np.arange(s.first, s.first + count) for s, count in zip(starts, counts, strict=True)])
        index = torch.from_numpy(np.stack([np.repeat([s.row for s in starts], counts), at])).to(self.device)
        self.uniforms[index[0], index[1]] = torch.from_numpy(np.concatenate([s.uniforms for s in starts])).to(self.device)
        if self.noise.shape[2]:
            noise = torch.from_numpy(np.concatenate([s.noise for s in starts])).to(self.device)
            self.noise[index[0], index[1] - 1] = noise

    def set_tokens(self, row: int, tokens: np.ndarray) -> None:
        """Writes a sequence from its start. A draw itself writes only the token that it is fed and later ones."""
        self.tokens[row, : len(tokens)] = torch.from_numpy(tokens).to(self.device)

    def mark_seen(self, row: int, tokens: np.ndarray) -> None:
        """Sets the tokens that a repetition penalty counts as present in the row."""
        if not len(self.seen):
            self.seen = torch.zeros(self.num_rows, self.vocab_size, dtype=torch.bool, device=self.device)
        self.seen[row] = False
        self.seen[row, torch.from_numpy(tokens).to(self.device)] = True

    def set_counts(self, row: int, tokens: np.ndarray) -> None:
        """Sets the tokens that frequency and presence penalty count in the row: those of the generation so far."""
        if not len(self.counts):
            self.counts = torch.zeros(self.num_rows, self.vocab_size, device=self.device)
        self.counts[row] = counts_of(tokens, self.counts[row])

    def history(self, batch: int) -> History:
        """The tokens that penalties read, for the first `batch` rows."""
        return History(*(values[:batch] if len(values) else None for values in (self.seen, self.counts)))

    def reserve_columns(self, width: int) -> None:
        """Makes room for `width` columns."""
        if width > self.columns.shape[2]:
            self.columns = torch.nn.functional.pad(self.columns, (0, width - self.columns.shape[2]))

    def swap(self, a: int, b: int) -> None:
        """Exchanges two rows."""
        for state in (self.tokens, self.uniforms, self.scores, self.columns, self.seen, self.counts, self.noise):
            if state.numel():
                state[[a, b]] = state[[b, a]]
        self._whole[:, [a, b]], self._real[:, [a, b]] = self._whole[:, [b, a]], self._real[:, [b, a]]

    def go_on(self, rows: Sequence[int]) -> None:
        """Continues the draws of rows that have parted from others."""
        self.status[list(rows)] = Status.LIVE

    def tokens_at(self, rows: Sequence[int], positions: np.ndarray) -> list[int]:
        """The token of each of these rows at its position."""
        return self.tokens[list(rows), torch.from_numpy(positions).to(self.device)].cpu().tolist()

    def idle(self, row: int | slice, position: int = 0) -> None:
        """Marks a row, or all rows, as free. A step that feeds it writes keys and values from `position` on."""
        self.position[row], self.status[row] = position, Status.DONE

    def progress(self, num_rows: int) -> RowProgress:
        """Progress of the first rows. Waits for the device."""
        position, _, _, status, *counts, _, _ = self._whole[:, :num_rows].cpu().numpy().copy()
        return RowProgress(position, status, *counts)

    def read(self, spans: Sequence[tuple[int, int, int]]) -> list[DrawnTokens]:
        """The tokens at positions `start` to `stop - 1` of rows, for each (row, start, stop), with one transfer."""
        rows = np.repeat([row for row, _, _ in spans], [stop - start for _, start, stop in spans])
        positions = np.concatenate([np.arange(start, stop) for _, start, stop in spans])
        index = torch.from_numpy(np.stack([rows, positions])).to(self.device)
        tokens = self.tokens[index[0], index[1]].cpu().numpy()
        scores = self.scores[index[0], index[1]].cpu().numpy()
        columns = self.columns[index[0], index[1]].cpu().numpy()
        ends = np.cumsum([stop - start for _, start, stop in spans])[:-1]
        return [DrawnTokens(t, s[:, 0].copy(), s[:, 1].copy(), s[:, 2:].copy(), c)
                for t, s, c in zip(*(np.split(values, ends) for values in (tokens, scores, columns)), strict=True)]
