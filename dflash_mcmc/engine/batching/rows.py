"""The state of all rows on the device, and the interface of the steps that change it.

A step is plain, block by block, speculative, or a captured graph.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from dflash_mcmc.engine.batching import logits_processor as laws
from dflash_mcmc.engine.batching.cache import KVCache
from dflash_mcmc.engine.batching.stop_strings import Endings
from dflash_mcmc.ops import Draw, SamplingParams
from dflash_mcmc.types import Trajectory


class Status(enum.IntEnum):
    """Status of a row. A step computes all rows of the batch, and changes only live ones."""

    LIVE = 0
    DONE = 1
    """The draw reached a stop id or its last position, or the row is idle."""
    ABANDONED = 2
    """The draw crossed its floor."""
    FAILED = 3
    """The model gave logits that are not numbers."""
    DIVERGED = 4
    """The draw can no longer share the forwards of another row. It continues when it has keys and values of its own."""


class Limit(NamedTuple):
    """The floor of a draw (`ops.Floor`) that goes on after some tokens. The default is below every weight."""

    alpha: float = 0.0
    weight: float = 0.0
    """Sum of alpha log p - log q over the draw's tokens so far, in nats."""
    threshold: float = -np.inf
    """The draw is abandoned once the weight, plus the length term, is not above this."""
    log_length: float = -np.inf
    """Log of `Floor.length`: the length term is log_length - log(generated tokens). -inf for none."""

    @staticmethod
    def of(draw: Draw, base: Trajectory) -> "Limit":
        """The floor of a draw whose next token follows `base`, the draw's trajectory or a longer one."""
        if (floor := draw.floor) is None:
            return Limit()
        return Limit(floor.alpha, floor.weight(base, draw.trajectory.length), floor.threshold,
                     -np.inf if floor.length is None else float(np.log(floor.length)))


class Start(NamedTuple):
    """The start of a draw in a row. Positions count from the start of the prompt.

    `fed` is the token at `first - 1`. `uniforms` belong to positions `first` to `last`. `noise`, (last - first + 1, k),
    belongs to blocks whose anchors are at `first - 1` to `last - 1`. `origin` is the position of the first generated token.
    `matched` is the state of the stop strings after the token at `first - 1` (`stop_strings.py`).
    """

    row: int
    fed: int
    first: int
    last: int
    origin: int
    uniforms: np.ndarray
    limit: Limit = Limit()
    matched: int = 0
    noise: np.ndarray | None = None

    def whole(self) -> tuple[int, ...]:
        """The whole numbers of the row: position, last, origin, status, rounds, fed, blocks, kept and matched (`Rows`)."""
        return self.first - 1, self.last, self.origin, Status.LIVE, 0, 0, 0, 0, self.matched


class RowProgress(NamedTuple):
    """A copy on the host of the first rows of some attributes of `Rows`, each int64 (rows,)."""

    position: np.ndarray
    status: np.ndarray
    rounds: np.ndarray
    fed: np.ndarray
    blocks: np.ndarray
    kept: np.ndarray

    def counts(self, row: int) -> "RowCounts":
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

    `columns`, float64 (n, k), has the further columns of `rows.py`.
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
        columns: float64 (rows, length, k), entropy, log q and intervals under further laws, and kept sets; k may be 0.
        position: int64 (rows,), position of the token that is fed next.
        last: int64 (rows,), position of the last token that may be drawn.
        origin: int64 (rows,), position of the first generated token.
        status: int64 (rows,), a Status.
        rounds: int64 (rows,), steps of the draw.
        fed: int64 (rows,), positions at which the target was evaluated in these steps.
        blocks: int64 (rows,), blocks drafted for the draw.
        kept: int64 (rows,), drafted tokens that were kept.
        matched: int64 (rows,), state of the stop strings after the token at `position` (`stop_strings.py`).
        noise: float64 (rows, length, k), uniforms of the block whose anchor is at a position; k may be 0.
        alpha, weight, floor, log_length: float64 (rows,), see `Limit`; the floor is its threshold.
        nowhere: a position that belongs to no token.
        seen: bool (rows, vocabulary), tokens in prompt or generation; empty until a repetition penalty needs it.
        counts: float32 (rows, vocabulary), how often a token is in the generation, or in the prompt too; empty until a
            frequency or presence penalty needs it.
        reads_tokens: whether a law reads the tokens before the next one, which its draw has written from the start.
        has_floors: whether any draw has a floor. If not, floors are not checked.
    """

    def __init__(self, num_rows: int, length: int, vocab_size: int, device: torch.device, num_noise: int = 0):
        self.num_rows, self.vocab_size, self.device = num_rows, vocab_size, device
        self.ids = torch.arange(num_rows, device=device)
        self.tokens = torch.zeros(num_rows, length, dtype=torch.int64, device=device)
        self.uniforms = torch.zeros(num_rows, length, dtype=torch.float64, device=device)
        self.scores = torch.zeros(num_rows, length, 4, dtype=torch.float64, device=device)
        self.columns = torch.zeros(num_rows, length, 0, dtype=torch.float64, device=device)
        self.noise = torch.zeros(num_rows, length, num_noise, dtype=torch.float64, device=device)
        self._whole = torch.zeros(9, num_rows, dtype=torch.int64, device=device)
        self._real = torch.zeros(4, num_rows, dtype=torch.float64, device=device)
        (self.position, self.last, self.origin, self.status, self.rounds, self.fed, self.blocks, self.kept,
         self.matched) = self._whole  # the order of `Start.whole` and of `progress`
        self.work = self._whole[4:6]  # rounds and fed, which a step of one token increases together
        self.alpha, self.weight, self.floor, self.log_length = self._real
        self.nowhere = length - 1  # results of idle rows are written to this position
        self.status.fill_(Status.DONE)
        self.seen = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self.counts = torch.zeros(0, vocab_size, device=device)
        self.reads_tokens = self.has_floors = False

    def begin(self, starts: Sequence[Start]) -> None:
        """Prepares rows for draws, with one transfer for each kind of value."""
        packed = torch.tensor([[s.row, s.fed, *s.whole()] for s in starts], dtype=torch.int64, device=self.device).T
        rows, fed = packed[:2]
        self._whole[:, rows] = packed[2:]
        self._real[:, rows] = torch.tensor([s.limit for s in starts], dtype=torch.float64, device=self.device).T
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
        """Sets the tokens that frequency and presence penalty count in the row: the generation so far, or the prompt too."""
        if not len(self.counts):
            self.counts = torch.zeros(self.num_rows, self.vocab_size, device=self.device)
        self.counts[row] = laws.counts_of(tokens, self.counts[row])

    def history(self, batch: int) -> laws.History:
        """The tokens that laws read, for the first `batch` rows."""
        seen, counts = (values[:batch] if len(values) else None for values in (self.seen, self.counts))
        if not self.reads_tokens:
            return laws.History(seen, counts)
        lengths = (self.position[:batch] + 1) * (self.status[:batch] == Status.LIVE)
        return laws.History(seen, counts, self.tokens[:batch], lengths)

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

    def idle(self, row: int | slice, position: int = 0) -> None:
        """Marks a row, or all rows, as free. A step that feeds it writes keys and values from `position` on."""
        self.position[row], self.status[row] = position, Status.DONE

    def progress(self, num_rows: int) -> RowProgress:
        """Progress of the first rows. Waits for the device."""
        position, _, _, status, rounds, fed, blocks, kept, _ = self._whole[:, :num_rows].cpu().numpy().copy()
        return RowProgress(position, status, rounds, fed, blocks, kept)

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


class Group(NamedTuple):
    """Rows that draw with the same sampling parameters from the same logits."""

    params: SamplingParams
    source: str
    rows: torch.Tensor | None
    """int64 indices; None for all rows of the batch."""
    laws: tuple[SamplingParams, ...] = ()
    """Further laws under which the tokens get log q and interval."""
    entropy: bool = False
    """Whether the tokens get the entropy of p."""
    kept: bool = False
    """Whether the tokens get the set that `params` keep."""

    @property
    def has_penalty(self) -> bool:
        """Whether a law of the group has a penalty, which depends on earlier tokens directly and not only by the logits."""
        return any(params.has_penalty for params in (self.params, *self.laws))

    def slots(self, count: int) -> torch.Tensor:
        """Indices of `count` consecutive slots for each of the rows, int64 (rows * count,)."""
        rows = self.members()
        return (rows[:, None] * count + torch.arange(count, device=rows.device)).reshape(-1)

    def members(self) -> torch.Tensor:
        """The indices of the rows. Raises ValueError for a single group, which does not list its rows."""
        if self.rows is None:
            raise ValueError("a single group has all rows of the batch and does not list them")
        return self.rows


class SharedForwards(NamedTuple):
    """Rows that share the forwards of other rows, since they have had the same tokens."""

    batch: int
    """Rows that draw: a shape of the ladder, at least the rows that are fed."""
    leader: torch.Tensor
    """int64 (batch,), the row that makes the forward for each row; a row's own number if it makes it itself."""


class Stepper(Protocol):
    """Makes decode steps."""

    tokens_a_step: int
    """The most tokens that a row can gain in a step."""
    reach: int
    """Number of positions after the row's position that a step may touch."""

    def cost(self, group: Group, tokens: int, counts: RowCounts) -> dict[str, int]:
        """The cost of a draw of `tokens` tokens in a row of this group, by the names of `Cost`: here without a decoder's."""
        return {"tokens_drawn": tokens, "target_forwards": counts.rounds, "token_forwards": counts.fed,
                "blocks_drafted": counts.blocks}

    def step(self, cache: KVCache, state: Rows, batch: int, key_length: int, groups: tuple[Group, ...],
             riders: SharedForwards | None = None) -> None:
        """One step for every live row among the first `batch`. The results are in `state`.

        Args:
            cache, state: the cache and the state of all rows.
            batch, key_length: a shape of the ladder.
            groups: the sampling parameters of the rows.
            riders: rows after these that draw from the logits of other rows. Only plain steps can have them.
        """


_LAW = 3
"""Columns of a law: log q, and the two ends of the interval."""


class AsksColumns(Protocol):
    """An operation or a group, which tells the columns of its tokens."""

    @property
    def params(self) -> SamplingParams: ...
    @property
    def laws(self) -> Sequence[SamplingParams]: ...
    @property
    def entropy(self) -> bool: ...
    @property
    def kept(self) -> bool: ...


def num_columns(asked: AsksColumns) -> int:
    """The number of columns: 0 if none is asked for, else one for the entropy, three for each law, and the kept set."""
    kept = 2 * asked.params.top_k if asked.kept else 0
    return 1 + _LAW * len(asked.laws) + kept if asked.laws or asked.entropy or kept else 0


def split_columns(asked: AsksColumns, columns: np.ndarray) -> tuple[np.ndarray | None, ...]:
    """(laws, entropy, kept) of `Trajectory` from columns (tokens, k); None for a part that is not asked for."""
    count = len(asked.laws)
    end = 1 + _LAW * count
    under = columns[:, 1:end].reshape(len(columns), count, _LAW).copy() if count else None
    kept = columns[:, end : num_columns(asked)].reshape(len(columns), asked.params.top_k, 2).copy() if asked.kept else None
    return under, columns[:, 0].copy() if asked.entropy else None, kept


def columns_of_tokens(tokens: torch.Tensor, logits: torch.Tensor, target: laws.Weights, asked: AsksColumns,
                      history: laws.History) -> torch.Tensor:
    """Columns of tokens, float64 (rows, k).

    Args:
        tokens: int64 (rows,).
        logits: float32 (rows, vocabulary), of the source that the tokens are drawn from.
        target: weights of the (blended) target.
        history: the tokens that penalties read.
    """
    columns = [entropy(target)[:, None]]
    for params in asked.laws:
        weights = laws.weigh(laws.process(logits, params, history))
        columns += [weights.log_probability(tokens)[:, None], laws.intervals(weights, tokens)]
    if asked.kept:
        columns.append(laws.kept(laws.weigh(laws.process(logits, asked.params, history)), asked.params.top_k))
    return torch.cat(columns, dim=1)


def columns_of_groups(groups: Sequence[Group], tokens: torch.Tensor, logits: dict[str, torch.Tensor], target: laws.Weights,
              history: laws.History, slots: int, width: int) -> torch.Tensor | None:
    """Columns of the tokens of all rows, each by its own group: float64 (rows * slots, width).

    Returns None if no group asks for columns.

    Args:
        slots: tokens of a row.
    """
    if not any(map(num_columns, groups)):
        return None
    all_columns = torch.zeros(len(tokens), width, dtype=torch.float64, device=tokens.device)
    for group in groups:
        if num_columns(group):
            mine = slice(None) if group.rows is None else group.slots(slots)
            columns = columns_of_tokens(tokens[mine], logits[group.source][mine],
                                        laws.Weights(*(values[mine] for values in target)), group,
                                        history if group.rows is None else history.of_rows(group.slots(slots)))
            all_columns[mine, : columns.shape[1]] = columns
    return all_columns


def processed(logits: torch.Tensor | Mapping[str, torch.Tensor], groups: Sequence[Group], slots: int,
              history: laws.History = laws.NO_HISTORY,
              params_of: Callable[[SamplingParams], SamplingParams] = lambda params: params) -> torch.Tensor:
    """Logits processed by each row's group, (rows * slots, vocabulary).

    Args:
        logits: those of every group, or by the names of sources.
        params_of: the law for a group's parameters.
    """
    of_groups = [logits if isinstance(logits, torch.Tensor) else logits[group.source] for group in groups]
    if len(groups) == 1:
        return laws.process(of_groups[0], params_of(groups[0].params), history)
    result = torch.zeros_like(of_groups[0])
    for group, values in zip(groups, of_groups, strict=True):
        mine = group.slots(slots)
        result[mine] = laws.process(values[mine], params_of(group.params), history.of_rows(mine))
    return result


def entropy(weights: laws.Weights) -> torch.Tensor:
    """Entropy in nats of rows of weights, float64 (rows,): log Z - sum v log v / Z for weights v with sum Z."""
    total = weights.upto[:, -1]
    return total.log() - torch.special.xlogy(weights.values, weights.values).sum(dim=(1, 2), dtype=torch.float64) / total


class Proposal(NamedTuple):
    """Tokens offered to the first rows of the batch, in slots.

    Attributes:
        at: int64 (rows, slots), the positions of the slots.
        first, last: int64 (rows,), the first and the last slot offered.
        tokens: int64 (rows, slots).
        scores: float64 (rows, slots, 4), as in `Rows`.
        bad: bool (rows, slots), where logits were not numbers.
    """

    at: torch.Tensor
    first: torch.Tensor
    last: torch.Tensor
    tokens: torch.Tensor
    scores: torch.Tensor
    bad: torch.Tensor
    columns: torch.Tensor | None = None
    """float64 (rows, slots, k), further columns of the tokens (`columns_of_tokens`)."""


def commit(state: Rows, offer: Proposal, endings: Endings) -> torch.Tensor:
    """Adds the offered tokens to the live rows, up to the token that ends their draw. Other rows do not change.

    Args:
        endings: finds the tokens that end a draw.

    Returns:
        int64 (rows,), the number of tokens that each row has gained.
    """
    batch, slots = offer.at.shape
    slot = torch.arange(slots, device=offer.at.device)
    live = state.status[:batch] == Status.LIVE
    offered = (slot >= offer.first[:, None]) & (slot <= offer.last[:, None])
    states = endings.states(state.matched[:batch], offer.tokens, offered)
    stop = endings.ends(offer.tokens, offer.at, state.last[:batch], states)
    kind = Status.DONE * stop
    if state.has_floors:
        gain = state.alpha[:batch, None] * offer.scores[..., 0] - offer.scores[..., 1]
        weight = state.weight[:batch, None] + torch.where(offered, gain, 0.0).cumsum(dim=1)
        kind = torch.where(stop, kind, Status.ABANDONED * below_floor(state, offer.at, weight))
    kind = torch.where(offer.bad, Status.FAILED, kind)
    ends = (kind != Status.LIVE) & offered
    ended, at = ends.any(dim=1), ends.long().argmax(dim=1)
    status = torch.where(ended, kind.gather(1, at[:, None])[:, 0], Status.LIVE)
    # A token that ends its draw is kept. One whose logits were not numbers is not.
    following = torch.where(ended, at + (status != Status.FAILED), offer.last + 1)
    gained = offered & (slot < following[:, None]) & live[:, None]
    count = gained.sum(dim=1)
    rows, where = state.ids[:batch, None], torch.where(gained, offer.at, state.nowhere)
    state.tokens[rows, where], state.scores[rows, where] = offer.tokens, offer.scores
    if offer.columns is not None:
        state.columns[rows, where] = offer.columns
    if len(state.seen):
        counts = torch.zeros(batch, state.seen.shape[1], dtype=torch.int32, device=gained.device)
        state.seen[:batch] |= counts.scatter_add_(1, offer.tokens, gained.int()) > 0
    if len(state.counts):
        state.counts[:batch].scatter_add_(1, offer.tokens, gained.to(state.counts.dtype))
    if state.has_floors:
        last = weight.gather(1, (following - 1).clamp(min=0)[:, None])[:, 0]
        # A row that gained nothing has no last token: for it `following` was clamped to the first slot.
        state.weight[:batch] = torch.where(count > 0, last, state.weight[:batch])
    if states is not None:
        after = states.gather(1, (following - 1).clamp(min=0)[:, None])[:, 0]
        state.matched[:batch] = torch.where(count > 0, after, state.matched[:batch])
    state.position[:batch] += count
    state.rounds[:batch] += live
    state.fed[:batch] += live * slots
    state.status[:batch] = torch.where(live, status, state.status[:batch])
    return count


def below_floor(state: Rows, at: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Whether the first rows may be abandoned at positions int64 (rows, slots), given weights float64 (rows, slots)."""
    batch = len(at)
    generated, log_length = (at - state.origin[:batch, None] + 1).double(), state.log_length[:batch, None]
    term = torch.where(torch.isfinite(log_length), log_length - generated.log(), 0.0)
    return weight + term <= state.floor[:batch, None]
