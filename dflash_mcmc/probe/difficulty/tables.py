"""Tables and figure of the difficulty probe: the AUROC of each signal, with intervals that resample problems.

AUROC is the probability that a wrong answer has a larger signal than a right one, where ties count half. It equals
Mann-Whitney's U divided by the number of pairs (Hanley & McNeil 1982). Signals are never reversed. An AUROC below 0.5 means
that the signal is smaller for wrong answers. The best signal and the best baseline are those with the largest AUROC on the
same answers. The selection favours both, and the intervals do not include its effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dflash_mcmc.grading.verdicts import NO_ANSWER
from dflash_mcmc.probe import Summary
from dflash_mcmc.probe.columns import PROBLEMS, SKIPPED, Table
from dflash_mcmc.probe.difficulty import signals
from dflash_mcmc.report.figure import INK, RIGHT, WRONG
from dflash_mcmc.statistics.intervals import Clusters, IntervalEstimate, divided

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRAFT, TARGET, OTHER = "draft", "target", "other"
"""Kinds of signals: those that need the draft, those of the target alone, and those that need neither."""
_NO_ESTIMATE = IntervalEstimate(None, None, None, 0)


class Answers:
    """Answers, right or wrong, grouped by problem.

    Args:
        problems: the problem of each answer.
        wrong: whether each answer is wrong.
    """

    def __init__(self, problems: Sequence[str], wrong: Sequence[bool] | np.ndarray):
        self.wrong, names = np.asarray(wrong, bool), list(dict.fromkeys(problems))
        index_of = {name: index for index, name in enumerate(names)}
        self._place, self._count = np.array([index_of[name] for name in problems], np.int64), len(names)
        # All statistics need only sums over a problem's answers, so that each problem is one observation.
        self._clusters = Clusters(names)

    def pairs(self, scores: np.ndarray) -> np.ndarray:
        """The number of pairs in which the wrong answer has the larger score, float64 (problems, problems).

        The wrong answer is from the first problem, the right one from the second. Ties count half. The sum over all problems
        is Mann-Whitney's U.
        """
        wrong, right = np.flatnonzero(self.wrong), np.flatnonzero(~self.wrong)
        order = right[np.argsort(scores[right], kind="stable")]
        upto = np.zeros((len(right) + 1, self._count))  # number of right answers of each problem among the first n
        upto[np.arange(1, len(right) + 1), self._place[order]] = 1.0
        upto = upto.cumsum(axis=0)
        below, not_above = (np.searchsorted(scores[order], scores[wrong], side=side) for side in ("left", "right"))
        pairs = np.zeros((self._count, self._count))
        np.add.at(pairs, self._place[wrong], 0.5 * (upto[below] + upto[not_above]))
        return pairs

    def auroc(self, pairs: np.ndarray) -> IntervalEstimate:
        """The AUROC of pairs. The difference of two signals' pairs gives the paired difference of their AUROCs."""
        wrong, right = (self._sums(kind) for kind in (self.wrong, ~self.wrong))

        def of(counts: np.ndarray) -> np.ndarray:
            return divided(((counts @ pairs) * counts).sum(axis=1), (counts @ wrong) * (counts @ right))

        return self._clusters.statistic(of)._replace(n=len(self.wrong))

    def mean(self, values: np.ndarray, among: np.ndarray) -> IntervalEstimate:
        """Mean over the answers that `among`, bool (answers,), selects."""
        return self._clusters.ratio(self._sums(values * among), self._sums(among))

    def _sums(self, values: np.ndarray) -> np.ndarray:
        """Sum over each problem's answers, float64 (problems,)."""
        return np.bincount(self._place, values, self._count)


class Detector(NamedTuple):
    """A value of each answer that may predict whether it is wrong."""

    name: str
    kind: str
    statistic: str | None
    """`mean` or `max` over the answer's tokens; None for what is not computed from tokens."""
    values: np.ndarray
    """float64 (answers,)."""
    pairs: np.ndarray
    auroc: IntervalEstimate

    @property
    def label(self) -> str:
        """Name and statistic."""
        return self.name if self.statistic is None else f"{self.name} {self.statistic}"


class Detected:
    """The measured answers and the AUROC of every signal. Without both right and wrong answers no signal has one."""

    def __init__(self, records: Sequence[dict]):
        measured = [record for record in records if "skipped" not in record]
        self.measured = measured
        self.answers = Answers([record["problem"] for record in measured], [one["verdict"] != "correct" for one in measured])
        self.wrong = self.answers.wrong
        self.decided = bool(self.wrong.any() and not self.wrong.all())
        self.detectors = [self._detector(name, kind, statistic, [record[statistic][name] for record in measured])
                          for kind, names in ((DRAFT, signals.DRAFT), (TARGET, signals.TARGET)) for name in names
                          for statistic in ("mean", "max")]
        for name in ("num_tokens", "level"):
            values = [record[name] for record in measured]
            if all(isinstance(value, int) for value in values):  # a level may be a word, or unknown
                self.detectors.append(self._detector(name, OTHER, None, values))
        self.by_label = {each.label: each for each in self.detectors}
        self.best_draft, self.best_baseline = self._best(DRAFT), self._best(TARGET, OTHER)

    def _detector(self, name: str, kind: str, statistic: str | None, values: Sequence[float]) -> Detector:
        scores = np.array(values, np.float64)
        pairs = self.answers.pairs(scores) if self.decided else np.empty((0, 0))
        return Detector(name, kind, statistic, scores, pairs, self.answers.auroc(pairs) if self.decided else _NO_ESTIMATE)

    def _best(self, *kinds: str) -> Detector | None:
        """The detector of these kinds with the largest AUROC, the first one in a tie."""
        return max((each for each in self.detectors if each.kind in kinds),
                   key=lambda each: each.auroc.value or 0.0) if self.decided else None

    def difference(self, one: Detector | None, other: Detector | None) -> IntervalEstimate:
        """The paired difference of two AUROCs; none unless there are two signals."""
        if not self.decided or one is None or other is None or one is other:
            return _NO_ESTIMATE
        return self.answers.auroc(one.pairs - other.pairs)

    def means(self, among: np.ndarray) -> tuple[IntervalEstimate, IntervalEstimate]:
        """The draft's mean expected acceptance and the target's mean entropy over some answers."""
        if not len(among):
            return _NO_ESTIMATE, _NO_ESTIMATE
        variation, entropy = (self.by_label[label].values for label in ("total_variation mean", "target_entropy mean"))
        return self.answers.mean(1.0 - variation, among), self.answers.mean(entropy, among)


OUTCOMES = Table("outcomes", (
    ("share_wrong", "share of wrong answers",
     lambda found: found.answers.mean(found.wrong, np.ones(len(found.wrong))) if len(found.wrong) else _NO_ESTIMATE),
    ("acceptance_right", "mean expected acceptance of the draft, 1 - total variation, over right answers",
     lambda found: found.means(~found.wrong)[0]),
    ("entropy_right", "mean entropy of the target over right answers, nats", lambda found: found.means(~found.wrong)[1]),
    ("acceptance_wrong", "the same acceptance over wrong answers", lambda found: found.means(found.wrong)[0]),
    ("entropy_wrong", "the same entropy over wrong answers, nats", lambda found: found.means(found.wrong)[1]),
    ("wrong", "wrong answers", lambda found: int(found.wrong.sum())),
    ("n", "measured answers", lambda found: len(found.wrong)),
))
ANSWERS = Table("answers", (
    ("signal", "name of the signal; larger values should mean wrong", lambda found, row: row.name),
    ("kind", "what the signal needs: `draft`, `target`, or `other` for neither", lambda found, row: row.kind),
    ("statistic", "mean or maximum over the tokens of an answer; empty for a signal of the whole answer",
     lambda found, row: row.statistic),
    ("auroc", "share of pairs of a wrong and a right answer that the signal orders correctly; 0.5 is chance",
     lambda found, row: row.auroc),
    ("minus_best", "`auroc` minus that of the best signal that needs no draft, on the same answers",
     lambda found, row: found.difference(row, found.best_baseline)),
    ("minus_entropy", "`auroc` minus that of the target's entropy with the same statistic",
     lambda found, row: found.difference(row, found.by_label[f"target_entropy {row.statistic or 'mean'}"])),
))
VALUES = Table("values", (
    PROBLEMS, SKIPPED,
    ("num_skipped_not_correct", "answers among them that are not correct",
     lambda records, found: sum("skipped" in record and record["verdict"] != "correct" for record in records)),
    ("num_no_answer", "measured answers without a final answer",
     lambda records, found: sum(record["verdict"] == NO_ANSWER for record in found.measured)),
    ("num_wrong", "measured answers that are wrong", lambda records, found: int(found.wrong.sum())),
    ("best_draft", "signal of the draft with the largest AUROC, chosen on these answers",
     lambda records, found: found.best_draft and found.best_draft.label),
    ("best_draft_auroc", "its AUROC", lambda records, found: found.best_draft.auroc if found.best_draft else _NO_ESTIMATE),
    ("best_baseline", "signal without a draft with the largest AUROC, chosen on these answers",
     lambda records, found: found.best_baseline and found.best_baseline.label),
    ("best_baseline_auroc", "its AUROC",
     lambda records, found: found.best_baseline.auroc if found.best_baseline else _NO_ESTIMATE),
    ("difference", "difference of the two AUROCs",
     lambda records, found: found.difference(found.best_draft, found.best_baseline)),
))
ALL = (VALUES, OUTCOMES, ANSWERS)


def summary(records: Sequence[dict]) -> Summary:
    """All tables and values. AUROCs are None if all answers are right or all are wrong."""
    found = Detected(records)
    return Summary(VALUES.row(records, found), {"outcomes": OUTCOMES.rows([found]),
                                       "answers": [ANSWERS.row(found, each) for each in found.detectors]}, {})


_LOOKS = {DRAFT: (RIGHT, "o", "needs the draft"), TARGET: (WRONG, "s", "the target alone"), OTHER: ("#666666", "D", "neither")}
"""Colour, marker and meaning of each kind of signal, distinct in greyscale too."""


def figure(summary: Summary) -> Figure:
    """One row per signal; the mean over tokens is filled, the maximum hollow. Without AUROCs a text says why."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    (outcome,), rows = summary.tables["outcomes"], summary.tables["answers"]
    made = Figure(figsize=(7.4, 4.8), layout="constrained")
    axes, names = made.subplots(), list(dict.fromkeys(row["signal"] for row in rows))
    axes.set_title(f"{outcome['wrong']} wrong answers of {outcome['n']}")
    if not 0 < outcome["wrong"] < outcome["n"]:
        missing = "no answer" if not outcome["n"] else "all are right" if not outcome["wrong"] else "all are wrong"
        axes.text(0.5, 0.5, f"{missing}, so there is no AUROC", transform=axes.transAxes, ha="center", va="center")
        return made
    for row in rows:
        colour, marker, _ = _LOOKS[row["kind"]]
        height = names.index(row["signal"]) + {"mean": -0.17, "max": 0.17}.get(row["statistic"], 0.0)
        if row["auroc_low"] is not None:
            axes.plot([row["auroc_low"], row["auroc_high"]], [height, height], color=colour, linewidth=1.2)
        axes.plot(row["auroc"], height, color=colour, marker=marker, markersize=5,
                  markerfacecolor="white" if row["statistic"] == "max" else colour)
    axes.axvline(0.5, color=INK, linewidth=0.8)
    axes.set(xlabel="AUROC (0.5: no information)", ylim=(len(names) - 0.5, -0.5))
    axes.set_yticks(range(len(names)), [name.replace("_", " ") for name in names])
    handles = [Line2D([], [], color=colour, marker=marker, linestyle="", label=text)
               for colour, marker, text in _LOOKS.values()]
    handles += [Line2D([], [], color=INK, marker="o", linestyle="", markerfacecolor=face, label=text)
                for text, face in (("mean over tokens", INK), ("maximum over tokens", "white"))]
    made.legend(handles=handles, loc="outside upper left", ncols=3)
    return made
