"""AUROC of signals that separate wrong answers or steps from right ones, its differences by problem, and its figures.

AUROC is the probability that a wrong case has a larger signal than a right one, where ties count half. It equals
Mann-Whitney's U divided by the number of pairs (Hanley & McNeil 1982). Signals are never reversed. An AUROC below 0.5 means
that the signal is smaller for wrong cases.

Probabilities of being wrong are predicted from signals by logistic regression. It is fitted to the cases of other problems
(cross-validation by problem), so that the fit has not seen the case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dflash_mcmc.probe import Summary
from dflash_mcmc.report.figure import INK, RIGHT, WRONG
from dflash_mcmc.rng import Key
from dflash_mcmc.statistics.intervals import Clusters, IntervalEstimate, divided

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


DRAFT, TARGET, OTHER = "draft", "target", "other"
"""Kinds of signals: signals that need the draft, signals of the target alone, and signals that need neither."""

_RIDGE = 1e-3
"""Weight of the penalty on squared coefficients. It keeps them finite if a signal separates the cases or all labels agree."""


class Signal(NamedTuple):
    """A value per case that may predict whether the case is wrong."""

    name: str
    kind: str
    statistic: str | None
    """`mean` or `max` over the case's tokens; None for signals that are not computed from tokens."""
    values: np.ndarray
    """float64 (cases,)."""

    @property
    def label(self) -> str:
        """Name and statistic."""
        return self.name if self.statistic is None else f"{self.name} {self.statistic}"


class Cases:
    """Answers or steps, right or wrong, grouped by problem.

    Args:
        problems: the problem of each case.
        wrong: whether each case is wrong.
        signals: signals of all cases.
    """

    def __init__(self, problems: Sequence[str], wrong: Sequence[bool], signals: Sequence[Signal]):
        self.problems, self.wrong, self.signals = list(problems), np.asarray(wrong, bool), list(signals)
        self.names = list(dict.fromkeys(self.problems))
        index_of = {name: index for index, name in enumerate(self.names)}
        self.place, self.num_problems = np.array([index_of[name] for name in self.problems], np.int64), len(self.names)
        # The bootstrap resamples problems, and all statistics need only sums over a problem's cases. Each problem is
        # therefore one observation.
        self._clusters = Clusters(self.names)

    @property
    def size(self) -> int:
        """Number of cases."""
        return len(self.wrong)

    @property
    def decided(self) -> bool:
        """Whether there are both wrong and right cases; otherwise there is no AUROC."""
        return bool(self.wrong.any() and not self.wrong.all())

    def pairs(self, scores: np.ndarray) -> np.ndarray:
        """The number of pairs in which the wrong case has the larger score, float64 (problems, problems).

        The wrong case is from the first problem, the right case from the second one. Ties count half. The sum over all
        problems is Mann-Whitney's U.
        """
        wrong, right = np.flatnonzero(self.wrong), np.flatnonzero(~self.wrong)
        order = right[np.argsort(scores[right], kind="stable")]
        upto = np.zeros((len(right) + 1, self.num_problems))  # number of right cases of each problem among the first n
        upto[np.arange(1, len(right) + 1), self.place[order]] = 1.0
        upto = upto.cumsum(axis=0)
        below, not_above = (np.searchsorted(scores[order], scores[wrong], side=side) for side in ("left", "right"))
        pairs = np.zeros((self.num_problems, self.num_problems))
        np.add.at(pairs, self.place[wrong], 0.5 * (upto[below] + upto[not_above]))
        return pairs

    def auroc(self, pairs: np.ndarray, group: np.ndarray | None = None) -> IntervalEstimate:
        """The AUROC from a signal's pairs. The difference of two signals' pairs gives the paired difference of their AUROCs.

        Args:
            group: int64 (problems,); only pairs within a group count. None means all pairs.
        """
        group = np.zeros(self.num_problems, np.int64) if group is None else group
        pairs, member = pairs * (group[:, None] == group), np.eye(group.max() + 1)[group]
        wrong, right = (self.sums(kind)[:, None] * member for kind in (self.wrong, ~self.wrong))

        def of(counts: np.ndarray) -> np.ndarray:
            return divided(((counts @ pairs) * counts).sum(axis=1), ((counts @ wrong) * (counts @ right)).sum(axis=1))

        return self.statistic(of)

    def mean(self, values: np.ndarray) -> IntervalEstimate:
        """Mean over the cases."""
        return self.ratio(values, np.ones(self.size))

    def ratio(self, above: np.ndarray, below: np.ndarray) -> IntervalEstimate:
        """The sum of `above` over the cases divided by the sum of `below`."""
        return self._clusters.ratio(self.sums(above), self.sums(below))._replace(n=self.size)

    def statistic(self, function: Callable[[np.ndarray], np.ndarray]) -> IntervalEstimate:
        """Any other statistic: function(counts (resamples, problems)) -> (resamples,), with nan if it is undefined."""
        return self._clusters.statistic(function)._replace(n=self.size)

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Sum over each problem's cases, float64 (problems,)."""
        return np.bincount(self.place, values, self.num_problems)


def roc(wrong: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Shares of right and of wrong cases at or above each threshold, from none to all. The curve's area is the AUROC."""
    order = np.argsort(-scores, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)
    hits = np.cumsum(wrong[order])[ends]
    return (np.append(0.0, (ends + 1 - hits) / (~wrong).sum()), np.append(0.0, hits / wrong.sum()))


class Predictions(NamedTuple):
    """Predicted probabilities that cases are wrong. Each array is float64 (cases,) and uses only cases of other problems."""

    chance: np.ndarray
    base: np.ndarray
    """For each case, the share of wrong cases among the cases of its fit."""


class Scores(NamedTuple):
    """Scores of predictions."""

    brier: IntervalEstimate
    """Mean squared difference of predicted probability and outcome (Brier 1950)."""
    skill: IntervalEstimate
    """1 - Brier score / Brier score of the base rate: the information that the signal adds to the share of wrong cases."""
    calibration_error: float | None
    """Expected calibration error: mean of |observed share - mean probability| over bins of equally many cases.

    It has no interval, because resampling adds noise to a quantity that is never negative. Compare it with
    `error_by_chance`.
    """
    error_by_chance: float | None
    """Approximate calibration error of perfectly calibrated probabilities: sqrt(2/pi) standard deviations in each bin."""


def predict(cases: Cases, signals: Sequence[np.ndarray], fold_of: np.ndarray) -> Predictions:
    """Predictions from one or several signals, each float64 (cases,). The signals are standardised first.

    Args:
        fold_of: the result of `folds`, for at least two problems.
    """
    from scipy.special import expit

    features, labels, fold = np.stack(signals, axis=1), cases.wrong.astype(np.float64), fold_of[cases.place]
    chance, base = np.empty(cases.size), np.empty(cases.size)
    for index in np.unique(fold):
        held, fitted = fold == index, fold != index
        centre, scale = features[fitted].mean(axis=0), features[fitted].std(axis=0)
        seen, unseen = ((features[rows] - centre) / np.where(scale > 0, scale, 1.0) for rows in (fitted, held))
        chance[held] = expit(_with_one(unseen) @ fit(seen, labels[fitted]))
        base[held] = labels[fitted].mean()
    return Predictions(chance, base)


def folds(problems: Sequence[str], num_folds: int) -> np.ndarray:
    """The fold of each problem, int64 (problems,). Folds are equally large and assigned in random order.

    The dataset's own order is not used, because consecutive problems may cycle through the levels.
    """
    order = np.argsort([Key(0).fold_in("fold", problem).uniform() for problem in problems], kind="stable")
    fold = np.empty(len(problems), np.int64)
    fold[order] = np.arange(len(problems)) % num_folds
    return fold


def fit(features: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Coefficients of logistic regression, float64 (1 + features,), constant first."""
    from scipy.optimize import minimize
    from scipy.special import expit

    design = _with_one(features)

    def loss(coefficients: np.ndarray) -> tuple[float, np.ndarray]:
        score = design @ coefficients
        value = (np.logaddexp(0.0, score) - labels * score).sum() + 0.5 * _RIDGE * (coefficients**2).sum()
        return float(value), design.T @ (expit(score) - labels) + _RIDGE * coefficients

    return minimize(loss, np.zeros(design.shape[1]), jac=True, options={"gtol": 1e-9}).x


def score(cases: Cases, predictions: Predictions, num_bins: int) -> Scores:
    """The scores of the predicted probabilities."""
    squared, of_base = ((chance - cases.wrong) ** 2 for chance in predictions)
    skill = cases.ratio(squared, of_base).mapped(lambda ratio: 1.0 - ratio)
    skill = skill._replace(low=skill.high, high=skill.low)  # the ends swap, because 1 - ratio decreases as the ratio increases
    bin_of = bins(predictions.chance, num_bins)
    gaps = np.bincount(bin_of, cases.wrong - predictions.chance)
    spread = np.bincount(bin_of, predictions.chance * (1.0 - predictions.chance))
    return Scores(cases.mean(squared), skill, float(np.abs(gaps).sum() / cases.size),
                  float(np.sqrt(2.0 / np.pi * spread).sum() / cases.size))


def bins(values: np.ndarray, num_bins: int) -> np.ndarray:
    """The bin of each value, int64. Bins are in order and equally large, except that equal values share a bin."""
    order = np.sort(values)
    first = np.searchsorted(order, values)
    return np.unique(first * num_bins // len(values), return_inverse=True)[1]


def _with_one(features: np.ndarray) -> np.ndarray:
    return np.column_stack([np.ones(len(features)), features])


_LOOKS = {DRAFT: (RIGHT, "o", "-"), TARGET: (WRONG, "s", "--"), OTHER: ("#666666", "D", ":")}
"""Colour, marker and line of each kind of signal, distinct in greyscale too."""
_MEANING = {DRAFT: "needs the draft", TARGET: "the target alone", OTHER: "neither"}
_NAMES = {"kl_target_draft": "KL(target || draft)", "kl_draft_target": "KL(draft || target)",
          "minus_log_acceptance": "$-$log acceptance", "top1_disagreement": "top-1 disagreement",
          "num_tokens": "number of tokens", "level": "level of the problem"}


def figures(summary: Summary) -> dict[str, Figure]:
    """The figures by name. A panel without wrong cases or without right cases has a text that states this."""
    return {"fig_difficulty_auroc": _auroc(summary), "fig_difficulty_roc": _roc(summary),
            "fig_difficulty_reliability": _reliability(summary)}


def _panels(summary: Summary, size: tuple[float, float]) -> tuple[Figure, list[tuple[str, Axes]]]:
    """A figure with a panel for answers and one for steps, and the panels that have data."""
    from matplotlib.figure import Figure

    figure, drawn = Figure(figsize=size, layout="constrained"), []
    for name, axes in zip(("answers", "steps"), figure.subplots(1, 2, sharex=True, sharey=True), strict=True):
        (row,) = [row for row in summary.tables["outcomes"] if row["cases"] == name]
        axes.set_title(f"{name.capitalize()}: {row['wrong']} wrong of {row['n']}")
        if 0 < row["wrong"] < row["n"]:
            drawn.append((name, axes))
        else:
            missing = "no case" if not row["n"] else "all are right" if not row["wrong"] else "all are wrong"
            _say(axes, f"{missing}, so there is no AUROC")
    return figure, drawn


def _say(axes: Axes, text: str) -> None:
    """Writes a text into a panel that has no data."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center")
    axes.grid(visible=False)


def _auroc(summary: Summary) -> Figure:
    """One row per signal; the mean over tokens is filled, the maximum hollow."""
    from matplotlib.lines import Line2D

    figure, panels = _panels(summary, (10.0, 4.8))
    names = list(dict.fromkeys(row["signal"] for row in summary.tables["answers"] + summary.tables["steps"]))
    for table, axes in panels:
        for row in summary.tables[table]:
            _draw_estimate(axes, row, names.index(row["signal"]))
        axes.axvline(0.5, color=INK, linewidth=0.8)
        axes.set_xlabel("AUROC (0.5: no information)")
    for axes in figure.axes:
        axes.set_yticks(range(len(names)), [_readable(name) for name in names])
        axes.set_ylim(len(names) - 0.5, -0.5)
    handles = [Line2D([], [], color=colour, marker=marker, linestyle="", label=_MEANING[kind])
               for kind, (colour, marker, _) in _LOOKS.items()]
    handles += [Line2D([], [], color=INK, marker="o", linestyle="", markerfacecolor=face, label=text)
                for text, face in (("mean over tokens", INK), ("maximum over tokens", "white"))]
    figure.legend(handles=handles, loc="outside upper left", ncols=5)
    return figure


def _draw_estimate(axes: Axes, row: dict, y: int) -> None:
    """Draws a value with its interval. The mean and the maximum of a signal are drawn one above the other."""
    colour, marker, _ = _LOOKS[row["kind"]]
    height = y + {"mean": -0.17, "max": 0.17}.get(row["statistic"], 0.0)
    if row["auroc_low"] is not None:
        axes.plot([row["auroc_low"], row["auroc_high"]], [height, height], color=colour, linewidth=1.2)
    axes.plot(row["auroc"], height, color=colour, marker=marker, markersize=5,
              markerfacecolor="white" if row["statistic"] == "max" else colour)


def _roc(summary: Summary) -> Figure:
    """ROC curves of the best signal of each kind."""
    figure, panels = _panels(summary, (9.4, 5.0))
    for name, axes in panels:
        of_table = {_label(row): row for row in summary.tables[name]}
        rows = [row for row in summary.data["roc"] if row["cases"] == name]
        for signal in dict.fromkeys(row["signal"] for row in rows):
            own, auroc = [row for row in rows if row["signal"] == signal], of_table[signal]
            colour, _, line = _LOOKS[own[0]["kind"]]
            text = f"{_readable(signal)}: {auroc['auroc']:.2f}{_interval(auroc, 'auroc')}"
            axes.plot([row["share_of_right"] for row in own], [row["share_of_wrong"] for row in own], color=colour,
                      linestyle=line, label=text)
        _diagonal(axes)
        axes.legend(loc="lower right", title="best of its kind: AUROC", title_fontsize=8.5, alignment="left")
        axes.set(xlabel=f"share of right {name} flagged", ylabel=f"share of wrong {name} flagged")
    return figure


def _reliability(summary: Summary) -> Figure:
    """Cross-validated probabilities against outcomes, for the best signal of the draft and the best baseline."""
    figure, panels = _panels(summary, (9.4, 5.0))
    for name, axes in panels:
        rows = [row for row in summary.tables["reliability"] if row["cases"] == name]
        if not rows:
            _say(axes, "only one problem: no cross-validation")
            continue
        for signal in dict.fromkeys(row["signal"] for row in rows):
            own = [row for row in rows if row["signal"] == signal]
            (colour, marker, _), sizes = _LOOKS[own[0]["kind"]], [row["n"] for row in own]
            for row in own:
                if row["observed_low"] is not None:
                    axes.plot([row["predicted"]] * 2, [row["observed_low"], row["observed_high"]], color=colour, linewidth=0.9)
            between = str(min(sizes)) if min(sizes) == max(sizes) else f"{min(sizes)} to {max(sizes)}"
            axes.plot([row["predicted"] for row in own], [row["observed"] for row in own], color=colour, marker=marker,
                      markersize=5, linestyle="", label=f"{_readable(signal)}: bins of {between}")
        _diagonal(axes)
        axes.legend(loc="upper left")
        axes.set(xlabel="predicted probability of being wrong", ylabel=f"share of {name} that is wrong")
    return figure


def _diagonal(axes: Axes) -> None:
    axes.plot([0.0, 1.0], [0.0, 1.0], color=INK, linewidth=0.8)
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
    axes.set_box_aspect(1)


def _label(row: dict) -> str:
    return row["signal"] if row["statistic"] is None else f"{row['signal']} {row['statistic']}"


def _readable(label: str) -> str:
    """A signal's name for readers, with its statistic if it has one."""
    name, _, statistic = label.partition(" ")
    return " ".join([_NAMES.get(name, name.replace("_", " ")), statistic]).strip()


def _interval(row: dict, name: str) -> str:
    return "" if row[f"{name}_low"] is None else f" [{row[f'{name}_low']:.2f}, {row[f'{name}_high']:.2f}]"
