"""Walks along an answer block by block, with a frozen draft and with drafts that learn. The record of an answer.

The walk drafts a block at its anchor and keeps the drafted tokens before the first one that differs from the answer. The
answer's token replaces that one and is the next anchor. A second set of blocks, at every B-th token of the answer, gives the
draft's log-probability of each token. These blocks are the same for all settings, so that the means are over the same tokens.
The draft has then learned what the walk has learned up to them.

The tables have each setting against the frozen draft, and tau by position in the answer. tau is the mean number of tokens for
each forward of the target: tokens divided by blocks. Intervals are clustered by problem. Changes are paired: a resample has
the same problems for both drafts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from dflash_mcmc.draft.adaptation.learning import Adapter, AdaptSettings, Blocks, LowRankDraft, Student, padded
from dflash_mcmc.engine.speculative.drafter import DFlashDrafter
from dflash_mcmc.forcing import sequences
from dflash_mcmc.forcing.answers import Answer
from dflash_mcmc.probe import Summary
from dflash_mcmc.probe.columns import ABSENT, PROBLEMS, SKIPPED, Table
from dflash_mcmc.report.figure import INK, MARKERS, PALETTE, RIGHT, WRONG, bars_of, rows_size
from dflash_mcmc.statistics.intervals import Clusters, IntervalEstimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


FROZEN = "frozen"
_BLOCKS_AT_ONCE = 32


def name_of(settings: AdaptSettings) -> str:
    """The name of a setting in records and tables."""
    pace = f"{settings.steps} steps" if settings.mode == "context" else f"every {settings.every_blocks}"
    return f"{settings.mode}, {settings.modules}, rank {settings.rank}, rate {settings.rate:g}, {pace}"


class _Text(NamedTuple):
    """An answer after its prompt, and what the target gives for it."""

    tokens: np.ndarray
    """int64 (length,), prompt and answer."""
    start: int
    """Position of the answer's first token."""
    features: torch.Tensor
    """(1, length, features), in the draft's dtype."""
    hidden: torch.Tensor
    """(length, hidden), the target's last states."""


class Walker:
    """Measures answers with one draft.

    Args:
        drafter: the draft, as its checkpoint is.
        settings: how it learns.
    """

    def __init__(self, drafter: DFlashDrafter, settings: list[AdaptSettings]):
        self._drafter, self._target, self._settings = drafter, drafter.target, settings
        table = drafter.target.decoder.get_input_embeddings().weight
        self._students = {name_of(each): Student(LowRankDraft(drafter.network, each.modules, each.rank), table, drafter.logits,
                                                 drafter.num_drafted, each) for each in settings}

    def record(self, answer: Answer) -> dict:
        """The record of an answer of at least two tokens. Raises NotNumbers.

        For every setting it has the blocks as pairs (offset in the answer, tokens gained), log q of the tokens that the second
        set of blocks drafts, the steps, the dropped steps, and the seconds of the steps.
        """
        layers = self._drafter.tapped_layers
        tokens = torch.from_numpy(answer.sequence).to(self._target.device)
        reading = sequences.read(self._target, tokens[None], layers)
        features = reading.features(self._target, layers).to(self._drafter.dtype)
        text = _Text(answer.sequence, len(answer.prompt), features, reading.hidden[0])
        frozen = next(iter(self._students.values()))
        walks = {FROZEN: self._frozen(frozen, text, Adapter.fresh(frozen.start), Adapter.fresh(frozen.start), 0.0)}
        for name, student in self._students.items():
            adapter, started = Adapter.fresh(student.start), time.perf_counter()
            if student.settings.mode == "online":
                walks[name] = self._online(student, text, adapter)
                continue
            if text.start > 1:
                student.learn_prompt(adapter, text.features[:, : text.start - 1], answer.prompt)
            walks[name] = self._frozen(student, text, adapter, adapter, time.perf_counter() - started)
        log_p = self._log_p(text, self._drafted_at(text))
        if not all(np.isfinite(found).all() for found in (log_p, *(walk["log_q"] for walk in walks.values()))):
            raise sequences.NotNumbers
        return {"num_tokens": len(answer.tokens), "prompt_length": text.start, "log_p": _short(log_p),
                "seconds": {name: entry.pop("seconds") for name, entry in walks.items()}, "settings": walks}

    @torch.no_grad()
    def _frozen(self, student: Student, text: _Text, adapter: Adapter, counted: Adapter, seconds: float) -> dict:
        """The record of a draft that learns nothing along the answer."""
        anchor, blocks, log_q = text.start - 1, [], []
        while anchor < len(text.tokens) - 1:
            gained = self._gained(student, text, adapter, anchor)
            blocks.append((anchor + 1 - text.start, gained))
            anchor += gained
        anchors = self._grid(text)
        for start in range(0, len(anchors), _BLOCKS_AT_ONCE):
            log_q.append(self._log_q(student, text, adapter, anchors[start : start + _BLOCKS_AT_ONCE]))
        return _entry(blocks, np.concatenate(log_q), counted, seconds)

    def _online(self, student: Student, text: _Text, adapter: Adapter) -> dict:
        """The record of a draft that learns from the blocks of the walk."""
        anchor, blocks, pending, seconds = text.start - 1, [], list[tuple[int, int]](), 0.0
        grid, log_q = list(self._grid(text)), []
        while anchor < len(text.tokens) - 1:
            with torch.no_grad():
                gained = self._gained(student, text, adapter, anchor)
                due = [at for at in grid if at < anchor + gained]
                if due:
                    log_q.append(self._log_q(student, text, adapter, np.array(due)))
            grid = grid[len(due) :]
            blocks.append((anchor + 1 - text.start, gained))
            pending.append((anchor, min(gained, student.num_drafted)))
            anchor += gained
            if len(pending) == student.settings.every_blocks:
                started = time.perf_counter()
                self._learn(student, text, adapter, pending)
                pending, seconds = [], seconds + time.perf_counter() - started
        return _entry(blocks, np.concatenate(log_q), adapter, seconds)

    def _learn(self, student: Student, text: _Text, adapter: Adapter, pending: list[tuple[int, int]]) -> None:
        """A step on the target's laws in the latest blocks. Slots without a kept token before them are not learned."""
        anchors, counts = (np.array(column) for column in zip(*pending, strict=True))
        at = torch.from_numpy(anchors[:, None] + np.arange(student.num_drafted)).clamp(max=len(text.tokens) - 1)
        with torch.no_grad():
            target = self._target.logits(text.hidden[at.flatten().to(text.hidden.device)]).view(*at.shape, -1)
        student.learn_verified(adapter, text.features, anchors, text.tokens[anchors], counts, target)

    def _gained(self, student: Student, text: _Text, adapter: Adapter, anchor: int) -> int:
        """Tokens of the answer that one forward of the target gives after an anchor."""
        proposed = student.logits(self._blocks(student, text, np.array([anchor])), adapter.values)[0].argmax(dim=-1)
        expected = text.tokens[anchor + 1 : anchor + 1 + student.num_drafted]
        same = proposed.cpu().numpy()[: len(expected)] == expected
        return min(int(same.cumprod().sum()) + 1, len(text.tokens) - 1 - anchor)

    def _log_q(self, student: Student, text: _Text, adapter: Adapter, anchors: np.ndarray) -> np.ndarray:
        """log q of the tokens that the blocks at these anchors draft, float64 (tokens,)."""
        logits = student.logits(self._blocks(student, text, anchors), adapter.values)
        at = anchors[:, None] + 1 + np.arange(student.num_drafted)
        inside = at < len(text.tokens)
        labels = torch.from_numpy(text.tokens[np.minimum(at, len(text.tokens) - 1)]).to(logits.device)
        log_q = torch.log_softmax(logits, dim=-1).gather(2, labels[..., None])[..., 0]
        return log_q.cpu().numpy()[inside].astype(np.float64)

    def _log_p(self, text: _Text, positions: np.ndarray) -> np.ndarray:
        """log p of the tokens at these positions under the target, float64 (tokens,)."""
        log_p, at_once = [], sequences.positions_at_once(self._target.vocab_size)
        with torch.no_grad():
            for piece in torch.from_numpy(positions).to(text.hidden.device).split(at_once):
                laws = torch.log_softmax(self._target.logits(text.hidden[piece - 1]), dim=-1)
                labels = torch.from_numpy(text.tokens[piece.cpu().numpy()]).to(laws.device)
                log_p.append(laws.gather(1, labels[:, None])[:, 0].cpu().numpy().astype(np.float64))
        return np.concatenate(log_p)

    def _grid(self, text: _Text) -> np.ndarray:
        """Anchors of the second set of blocks: the prompt's last token, and every B-th token of the answer."""
        return np.arange(text.start - 1, len(text.tokens) - 1, self._drafter.num_drafted + 1)

    def _drafted_at(self, text: _Text) -> np.ndarray:
        """Positions of the tokens that the second set of blocks drafts."""
        at = (self._grid(text)[:, None] + 1 + np.arange(self._drafter.num_drafted)).flatten()
        return at[at < len(text.tokens)]

    def _blocks(self, student: Student, text: _Text, anchors: np.ndarray) -> Blocks:
        device, last = text.features.device, max(int(anchors[-1]), 1)
        return Blocks(*padded(text.features[:, :last]), torch.from_numpy(anchors).to(device),
                      torch.from_numpy(text.tokens[anchors]).to(device), torch.empty(0, student.num_drafted))


def _entry(blocks: list[tuple[int, int]], log_q: np.ndarray, adapter: Adapter, seconds: float) -> dict:
    return {"blocks": blocks, "log_q": _short(log_q), "steps": adapter.steps, "dropped": adapter.dropped,
            "seconds": round(seconds, 6)}


def _short(values: np.ndarray) -> list[float]:
    return [float(f"{value:.7g}") for value in values]


Counts = tuple[Sequence[float], Sequence[float]]
"""Tokens and blocks of each problem."""


class Walks:
    """The walks along all answers with one draft: the frozen one, or one that learns by some settings."""

    def __init__(self, records: list[dict], name: str, learns: AdaptSettings | None):
        own, frozen = ([record["settings"][each] for record in records] for each in (name, FROZEN))
        self.name, self.learns, self._records, self._own = name, learns, records, own
        self.problems = Clusters(range(len(records)))
        tokens = [record["num_tokens"] for record in records]
        self.counts: Counts = tokens, [len(walk["blocks"]) for walk in own]
        self.frozen: Counts = tokens, [len(walk["blocks"]) for walk in frozen]
        self.log_q, self.frozen_log_q = ([np.array(walk["log_q"]) for walk in walks] for walks in (own, frozen))
        self.log_p = [np.array(record["log_p"]) for record in records]
        self.drafted = list(map(len, self.log_q))

    @property
    def pace(self) -> int | None:
        """Steps on the prompt, or blocks between two steps."""
        if self.learns is None:
            return None
        return self.learns.steps if self.learns.mode == "context" else self.learns.every_blocks

    def learning(self, field: str) -> object:
        """A field of the settings; None for the frozen draft."""
        return None if self.learns is None else getattr(self.learns, field)

    def mean(self, values: list[np.ndarray]) -> IntervalEstimate:
        """Mean over the compared tokens of all answers."""
        return self.problems.ratio([each.sum() for each in values], self.drafted)

    def apart(self, ours: list[np.ndarray], theirs: list[np.ndarray]) -> list[np.ndarray]:
        """The differences of two values of each token."""
        return [one - other for one, other in zip(ours, theirs, strict=True)]

    def total(self, count: str) -> int:
        """The sum of `steps` or `dropped` over the answers."""
        return sum(walk[count] for walk in self._own)

    @property
    def seconds(self) -> float | None:
        """Mean seconds of learning for an answer."""
        return self.problems.ratio([record["seconds"][self.name] for record in self._records], [1] * len(self._records)).value


SETTINGS = Table("settings", (
    ("setting", "`frozen`, or the name of a setting of the draft that learns", lambda walks: walks.name),
    ("mode", "`draft.adapt` of the setting", lambda walks: walks.learning("mode")),
    ("modules", "`draft.adapt_modules` of the setting", lambda walks: walks.learning("modules")),
    ("rank", "rank of the learned matrices", lambda walks: walks.learning("rank")),
    ("rate", "learning rate", lambda walks: walks.learning("rate")),
    ("pace", "steps of learning in the prompt (mode `context`), or blocks between two steps (mode `online`)",
     lambda walks: walks.pace),
    ("tau", "mean tokens for each forward of the target, with a new block after the tokens that are kept",
     lambda walks: walks.problems.ratio(*walks.counts)),
    ("tau_change", "`tau` minus that of the frozen draft on the same problems, tokens",
     lambda walks: change(walks.problems, walks.counts, walks.frozen)),
    ("tau_ratio", "`tau` divided by that of the frozen draft on the same problems",
     lambda walks: change(walks.problems, walks.counts, walks.frozen, relative=True)),
    ("mean_log_q", "mean log-probability of the answer's tokens under the draft, nats", lambda walks: walks.mean(walks.log_q)),
    ("log_q_change", "`mean_log_q` minus that of the frozen draft, nats",
     lambda walks: walks.mean(walks.apart(walks.log_q, walks.frozen_log_q))),
    ("mean_log_p", "mean log-probability of the same tokens under the target, nats", lambda walks: walks.mean(walks.log_p)),
    ("beats_target", "share of these tokens that have a higher probability under the draft than under the target",
     lambda walks: walks.mean([q > p for q, p in zip(walks.log_q, walks.log_p, strict=True)])),
    ("drafted", "tokens that `mean_log_q` is over: blocks begin at every B-th token", lambda walks: sum(walks.drafted)),
    ("blocks", "blocks that `tau` is over", lambda walks: sum(walks.counts[1])),
    ("steps", "steps of learning, over all problems", lambda walks: walks.total("steps")),
    ("dropped", "steps that were left out because their gradient was not finite, over all problems",
     lambda walks: walks.total("dropped")),
    ("seconds", "mean seconds of learning for a problem", lambda walks: walks.seconds),
))


class Positions(NamedTuple):
    """The blocks of one draft that begin in a range of positions of the answers."""

    first: int
    below: int | None
    name: str
    problems: Clusters
    counts: Counts
    frozen: Counts


POSITIONS = Table("positions", (
    ("from", "first token of the answer at which the blocks of the row begin, from 0", lambda part: part.first),
    ("to_below", "end of this range, exclusive; empty for the last range", lambda part: part.below),
    ("setting", "as in `settings`", lambda part: part.name),
    ("tau", "mean tokens for each of these blocks", lambda part: part.problems.ratio(*part.counts)),
    ("tau_change", "`tau` minus that of the frozen draft in the same range, tokens",
     lambda part: change(part.problems, part.counts, part.frozen)),
    ("blocks", "blocks of the row", lambda part: sum(part.counts[1])),
))


class Measured(NamedTuple):
    """All records, and the row of the frozen draft; no row without a measured answer."""

    records: list[dict]
    frozen: dict

    def of_frozen(self, column: str) -> object:
        """A value of the frozen draft."""
        return self.frozen.get(column, ABSENT)


VALUES = Table("values", (
    PROBLEMS, SKIPPED,
    ("frozen/tau", "`tau` of the frozen draft", lambda measured: measured.of_frozen("tau")),
    ("frozen/mean_log_q", "`mean_log_q` of the frozen draft, nats", lambda measured: measured.of_frozen("mean_log_q")),
    ("frozen/mean_log_p", "`mean_log_p`, nats", lambda measured: measured.of_frozen("mean_log_p")),
    ("frozen/beats_target", "`beats_target` of the frozen draft, share", lambda measured: measured.of_frozen("beats_target")),
))
ALL = (VALUES, SETTINGS, POSITIONS)


def summary(records: list[dict], listed: Sequence[AdaptSettings], edges: Sequence[int]) -> Summary:
    """The tables `settings` and `positions`, and the values of the frozen draft.

    Args:
        listed: the settings of the records.
        edges: the positions at which the ranges of `positions` are divided.
    """
    measured = [record for record in records if "skipped" not in record]
    if not measured:
        return Summary(VALUES.row(Measured(records, {})), {"settings": [], "positions": []}, {})
    drafts = {FROZEN: None, **{name_of(each): each for each in listed}}
    rows = SETTINGS.rows(Walks(measured, name, learns) for name, learns in drafts.items())
    return Summary(VALUES.row(Measured(records, rows[0])),
                   {"settings": rows, "positions": POSITIONS.rows(_positions(measured, edges))}, {})


def _positions(records: list[dict], edges: Sequence[int]) -> Iterator[Positions]:
    """Each draft in each range of positions in the answer that has blocks. A block counts where it begins."""
    problems = Clusters(range(len(records)))
    for first, below in zip((0, *edges), (*edges, None), strict=True):
        counts: dict[str, Counts] = {}
        for name in records[0]["settings"]:
            gained = [[n for offset, n in record["settings"][name]["blocks"] if first <= offset < (below or np.inf)]
                      for record in records]
            counts[name] = [sum(each) for each in gained], [len(each) for each in gained]
        for name, own in counts.items():
            if sum(own[1]) and sum(counts[FROZEN][1]):
                yield Positions(first, below, name, problems, own, counts[FROZEN])


def change(problems: Clusters, ours: Counts, theirs: Counts, relative: bool = False) -> IntervalEstimate:
    """The difference, or with `relative` the quotient, of two ratios of sums over problems, each (above, below)."""
    (a, b), (c, d) = (tuple(np.array(part, np.float64) for part in pair) for pair in (ours, theirs))

    def statistic(weights: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            first, second = (weights @ a) / (weights @ b), (weights @ c) / (weights @ d)
            compared = first / second if relative else first - second
        return np.where(np.isfinite(compared), compared, np.nan)

    estimate = problems.statistic(statistic)
    # Where one problem has all blocks, every resample has the same value.
    return estimate if min(np.count_nonzero(b), np.count_nonzero(d)) > 1 else estimate._replace(low=None, high=None)


_LINES = 6
"""Settings with a line in the first panel: those with the highest tau. More lines cannot be told apart."""


def figure(settings: list[dict], positions: list[dict]) -> Figure:
    """tau by position in the answer, and the change of tau and of log q against the frozen draft in every setting."""
    from matplotlib.figure import Figure

    learned = [row for row in settings if row["setting"] != FROZEN]
    height = max(4.4, rows_size([row["setting"] for row in learned])[1] + 1.2)
    figure = Figure(figsize=(15.0, height), layout="constrained")
    first, second, third = figure.subplots(1, 3, width_ratios=(1.2, 1.0, 1.0))
    best = sorted(learned, key=lambda row: -row["tau"])[:_LINES]
    _by_position(first, positions, [FROZEN, *(row["setting"] for row in best)])
    first.set_title("Tokens for each forward, by position")
    for axes, column, title, label in (
            (second, "tau_change", "Change of tau", "change of tokens for each forward"),
            (third, "log_q_change", "Change of log q of the answer's tokens", "change of the mean log q, in nats")):
        _changes(axes, learned, column)
        axes.set(title=title, xlabel=label)
    third.set_yticklabels([])
    figure.legend(*first.get_legend_handles_labels(), loc="outside lower left", ncols=2, fontsize=7.5)
    return figure


def _by_position(axes: Axes, positions: list[dict], shown: list[str]) -> None:
    ranges = list(dict.fromkeys((row["from"], row["to_below"]) for row in positions))
    aside = 0.5 / len(shown)
    for index, name in enumerate(shown):
        rows = {(row["from"], row["to_below"]): row for row in positions if row["setting"] == name}
        xs = [x for x, each in enumerate(ranges) if each in rows]
        shown_rows = [rows[ranges[x]] for x in xs]
        colour = INK if name == FROZEN else PALETTE[(index - 1) % (len(PALETTE) - 1)]
        axes.errorbar([x + (index - len(shown) / 2) * aside for x in xs], [row["tau"] for row in shown_rows],
                      bars_of(shown_rows, "tau"), color=colour, marker=MARKERS[index % len(MARKERS)], markersize=4.5,
                      linestyle="-" if index else "--", linewidth=1.2, elinewidth=0.9, capsize=2.0, label=name)
    blocks = {(row["from"], row["to_below"]): row["blocks"] for row in positions if row["setting"] == FROZEN}
    axes.set_xticks(range(len(ranges)), [f"{low}-{high - 1 if high else ''}\n{blocks.get((low, high), 0):,} blocks"
                                         for low, high in ranges], fontsize=7.5)
    axes.set(xlabel="token of the answer at which the block begins", ylabel="tau, tokens for each forward of the target")


def _changes(axes: Axes, rows: list[dict], column: str) -> None:
    for y, row in enumerate(rows):
        low, high = row[f"{column}_low"], row[f"{column}_high"]
        colour = INK if low is None or low <= 0.0 <= high else RIGHT if low > 0.0 else WRONG
        if low is not None:
            axes.plot([low, high], [y, y], color=colour, linewidth=2.0, alpha=0.6, solid_capstyle="butt")
        axes.plot(row[column], y, MARKERS[0], color=colour, markersize=5.5)
    axes.axvline(0.0, color=INK, linewidth=0.9)
    axes.set_yticks(range(len(rows)), [row["setting"] for row in rows], fontsize=7.5)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
