"""The tables of the difficulty probe, computed from its records: which signals predict wrong answers and wrong steps.

A case is an answer or an equation in an answer. It is right or wrong. The best signal and the best baseline are those with the
largest AUROC on the same records. The selection favours both, and the intervals do not include its effect.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dflash_mcmc.grading.verdicts import NO_ANSWER
from dflash_mcmc.probe import Summary
from dflash_mcmc.probe.columns import SKIPPED, Each, Table, skipped
from dflash_mcmc.probe.difficulty import detection, signals
from dflash_mcmc.probe.difficulty.detection import DRAFT, OTHER, TARGET, Cases, Predictions, Scores, Signal, roc
from dflash_mcmc.statistics.intervals import IntervalEstimate

_NO_ESTIMATE = IntervalEstimate(None, None, None, 0)


class Detector(NamedTuple):
    """A signal and its AUROC."""

    signal: Signal
    pairs: np.ndarray
    """See `Cases.pairs`."""
    auroc: IntervalEstimate


class Fitted:
    """Predicted probabilities from signals, each computed once."""

    def __init__(self, cases: Cases, num_folds: int):
        self._cases, self.folds = cases, detection.folds(cases.names, num_folds)
        self._predictions: dict[tuple[str, ...], Predictions] = {}
        self.possible = cases.decided and cases.num_problems > 1

    def of(self, *combined: Signal) -> Predictions:
        names = tuple(signal.label for signal in combined)
        if names not in self._predictions:
            self._predictions[names] = detection.predict(self._cases, [signal.values for signal in combined], self.folds)
        return self._predictions[names]


class ComparedCases:
    """Answers or steps, with the AUROC of every signal. Without both right and wrong cases, no signal has one.

    Attributes:
        name: `answers` or `steps`.
        left_out: number of cases that were not measured.
        entropy: target entropy, by statistic.
        best_draft: the best signal of the draft.
        best_baseline: the best signal that needs no draft.
    """

    def __init__(self, name: str, cases: Cases, left_out: int, num_folds: int, num_bins: int):
        self.name, self.cases, self.left_out, self.num_bins = name, cases, left_out, num_bins
        self.values = {signal.label: signal.values for signal in cases.signals}
        self.fitted = Fitted(cases, num_folds)
        self.entropy: dict[str | None, Detector] = {}
        self.best_draft: Detector | None = None
        self.best_baseline: Detector | None = None
        if not cases.decided:
            self.detectors = [Detector(signal, np.empty((0, 0)), _NO_ESTIMATE) for signal in cases.signals]
            return
        self.detectors = [Detector(signal, pairs, cases.auroc(pairs))
                          for signal in cases.signals for pairs in (cases.pairs(signal.values),)]
        self.entropy = {detector.signal.statistic: detector for detector in self.detectors
                        if detector.signal.name == "target_entropy"}
        self.best_draft, self.best_baseline = best(self.detectors, DRAFT), best(self.detectors, TARGET, OTHER)

    def among(self, values: np.ndarray, kind: np.ndarray) -> IntervalEstimate:
        """Mean of values over the cases of a kind."""
        return self.cases.ratio(values * kind, kind) if self.cases.size else _NO_ESTIMATE

    def difference(self, one: Detector | None, other: Detector | None) -> IntervalEstimate:
        """The paired difference of two AUROCs; none unless there are two signals."""
        if one is None or other is None or one is other:
            return _NO_ESTIMATE
        return self.cases.auroc(one.pairs - other.pairs)


def best(detectors: Sequence[Detector], *kinds: str) -> Detector:
    """The detector of these kinds with the largest AUROC, the first one in a tie. Every detector must have an AUROC."""
    of_kinds = [detector for detector in detectors if detector.signal.kind in kinds]
    return max(of_kinds, key=lambda detector: detector.auroc.value or 0.0)


def answer_cases(records: Sequence[dict]) -> Cases:
    """The answers as cases; an answer is wrong unless graded correct."""
    return Cases([record["problem"] for record in records], [record["verdict"] != "correct" for record in records],
                 _signals(records, records))


def step_cases(records: Sequence[dict]) -> Cases:
    """The equations as cases; an equation is wrong if its sides differ."""
    pairs = [(record, step) for record in records for step in record["steps"]]
    steps = [step for _, step in pairs]
    return Cases([record["problem"] for record, _ in pairs], [step["wrong"] for step in steps],
                 _signals(steps, [record for record, _ in pairs]))


def _signals(cases: Sequence[dict], records: Sequence[dict]) -> list[Signal]:
    """The signals of answers or steps, and the level of the problem if it is a number for all problems."""
    of_cases = [Signal(name, kind, statistic, np.array([case[statistic][name] for case in cases], np.float64))
             for kind, names in ((DRAFT, signals.DRAFT), (TARGET, signals.TARGET)) for name in names
             for statistic in ("mean", "max")]
    of_cases.append(Signal("num_tokens", OTHER, None, np.array([case["num_tokens"] for case in cases], np.float64)))
    levels = [record["level"] for record in records]
    if all(isinstance(level, int) for level in levels):
        of_cases.append(Signal("level", OTHER, None, np.array(levels, np.float64)))
    return of_cases


_CASES = ("cases", "`answers` or `steps` (equations in the answers)", lambda row: row.of.name)
_COUNTS = (("wrong", "wrong cases among them", lambda row: int(row.of.cases.wrong.sum())),
           ("n", "cases of the row", lambda row: row.of.cases.size))
_SIGNAL = (
    ("signal", "name of the signal, with `mean` or `max` over the case's tokens; larger values should mean wrong",
     lambda row: row.signal.label),
    ("kind", "what the signal needs: `draft`, `target`, or `other` for neither", lambda row: row.signal.kind),
)


class Outcome(NamedTuple):
    """All answers or steps."""

    of: ComparedCases

    def acceptance(self, kind: np.ndarray) -> IntervalEstimate:
        """The draft's mean acceptance over the cases of a kind."""
        return self.of.among(1.0 - self.of.values["total_variation mean"], kind)

    def entropy(self, kind: np.ndarray) -> IntervalEstimate:
        """The target's mean entropy over the cases of a kind."""
        return self.of.among(self.of.values["target_entropy mean"], kind)


OUTCOMES = Table("outcomes", (
    _CASES,
    ("share_wrong", "share of wrong cases", lambda row: row.of.among(row.of.cases.wrong, np.ones(row.of.cases.size))),
    ("acceptance_right", "mean expected acceptance of the draft, 1 - total variation, over right cases",
     lambda row: row.acceptance(~row.of.cases.wrong)),
    ("entropy_right", "mean entropy of the target over right cases, nats", lambda row: row.entropy(~row.of.cases.wrong)),
    ("acceptance_wrong", "the same acceptance over wrong cases", lambda row: row.acceptance(row.of.cases.wrong)),
    ("entropy_wrong", "the same entropy over wrong cases, nats", lambda row: row.entropy(row.of.cases.wrong)),
    *_COUNTS,
    ("left_out", "cases that were not measured", lambda row: row.of.left_out),
))


class Detected(NamedTuple):
    """A signal, and the scores of the probabilities that it predicts."""

    of: ComparedCases
    detector: Detector
    scores: Scores

    @property
    def signal(self) -> Signal:
        """The signal."""
        return self.detector.signal


_ROWS = (
    ("signal", "name of the signal; larger values should mean wrong", lambda row: row.signal.name),
    _SIGNAL[1],
    ("statistic", "mean or maximum over the tokens of a case; empty for a signal of the whole case",
     lambda row: row.signal.statistic),
    ("auroc", "share of pairs of a wrong and a right case that the signal orders correctly; 0.5 is chance",
     lambda row: row.detector.auroc),
    ("minus_best", "`auroc` minus that of the best signal that needs no draft, on the same cases",
     lambda row: row.of.difference(row.detector, row.of.best_baseline)),
    ("minus_entropy", "`auroc` minus that of the target's entropy with the same statistic",
     lambda row: row.of.difference(row.detector, row.of.entropy.get(row.signal.statistic or "mean"))),
    ("brier", "mean squared difference of outcome and probability, which is predicted from the signal by cross-validated "
              "logistic regression", lambda row: row.scores.brier),
    ("brier_skill", "1 - `brier` divided by that of the base rate; 0 means that the signal adds nothing",
     lambda row: row.scores.skill),
    ("ece", "expected calibration error: mean distance of predicted and observed shares over bins",
     lambda row: row.scores.calibration_error),
    ("ece_by_chance", "`ece` that perfectly calibrated probabilities would have on as many cases",
     lambda row: row.scores.error_by_chance),
    *_COUNTS,
)
OF_CASES = {name: Table(name, _ROWS) for name in ("answers", "steps")}


class Gain:
    """A baseline, and a signal of the draft that is added to it.

    All AUROCs, also that of the baseline alone, use cross-validated probabilities and only pairs within a fold. Probabilities
    of different folds come from different fits and are not comparable.
    """

    def __init__(self, of: ComparedCases, baseline: Signal, signal: Signal):
        self.of, self.baseline, self.signal = of, baseline, signal
        self.alone, self.joined = of.fitted.of(baseline).chance, of.fitted.of(baseline, signal).chance
        self.pairs_alone, self.pairs_joined = of.cases.pairs(self.alone), of.cases.pairs(self.joined)

    def auroc(self, pairs: np.ndarray) -> IntervalEstimate:
        """The AUROC within folds."""
        return self.of.cases.auroc(pairs, self.of.fitted.folds)

    @property
    def brier(self) -> IntervalEstimate:
        """By how much the Brier score falls."""
        wrong = self.of.cases.wrong
        return self.of.cases.mean((self.alone - wrong) ** 2 - (self.joined - wrong) ** 2)


COMBINED = Table("combined", (
    _CASES,
    ("baseline", "signal without a draft", lambda gain: gain.baseline.label),
    ("signal", "signal of the draft that is added", lambda gain: gain.signal.label),
    ("auroc_baseline", "AUROC of cross-validated probabilities from the baseline, over pairs within a fold",
     lambda gain: gain.auroc(gain.pairs_alone)),
    ("auroc_combined", "AUROC of those from both signals", lambda gain: gain.auroc(gain.pairs_joined)),
    ("auroc_gain", "difference of the two", lambda gain: gain.auroc(gain.pairs_joined - gain.pairs_alone)),
    ("brier_gain", "Brier score of the baseline minus that of both; above 0 the draft helps", lambda gain: gain.brier),
    *_COUNTS,
))


class Bin(NamedTuple):
    """Cases whose predicted probabilities are similar."""

    of: ComparedCases
    signal: Signal
    number: int
    predictions: Predictions
    own: np.ndarray
    """bool (cases,)."""


RELIABILITY = Table("reliability", (
    _CASES, *_SIGNAL,
    ("bin", "bin of predicted probabilities, from 1; bins have equally many cases", lambda row: row.number + 1),
    ("predicted", "mean predicted probability of being wrong", lambda row: float(row.predictions.chance[row.own].mean())),
    ("observed", "share of wrong cases", lambda row: row.of.cases.ratio(row.of.cases.wrong & row.own, row.own)),
    ("wrong", _COUNTS[0][1], lambda row: int(row.of.cases.wrong[row.own].sum())),
    ("n", _COUNTS[1][1], lambda row: int(row.own.sum())),
))


class Threshold(NamedTuple):
    """A threshold of a signal."""

    of: ComparedCases
    signal: Signal
    right: float
    wrong: float


ROC = Table("roc", (
    _CASES, *_SIGNAL,
    ("share_of_right", "share of right cases at or above a threshold of the signal", lambda row: float(row.right)),
    ("share_of_wrong", "share of wrong cases at or above it", lambda row: float(row.wrong)),
))


class DifficultyResult(NamedTuple):
    """All records, and the cases of the measured ones."""

    records: Sequence[dict]
    measured: Sequence[dict]
    compared: Sequence[ComparedCases]


VALUES = Table("values", (
    ("num_answers", "measured answers", lambda result: len(result.measured)),
    SKIPPED,
    ("num_skipped_not_correct", "answers among them that are not correct",
     lambda result: sum("skipped" in record and record["verdict"] != "correct" for record in result.records)),
    ("num_no_answer", "measured answers without a final answer",
     lambda result: sum(record["verdict"] == NO_ANSWER for record in result.measured)),
    Each(lambda result: {of.name: of for of in result.compared}, (
        ("{cases}/n", "number of answers or of steps", lambda _, of: of.cases.size),
        ("{cases}/wrong", "wrong ones among them", lambda _, of: int(of.cases.wrong.sum())),
        ("{cases}/best_draft", "signal of the draft with the largest AUROC, chosen on these cases",
         lambda _, of: of.best_draft.signal.label if of.best_draft else None),
        ("{cases}/best_draft_auroc", "its AUROC", lambda _, of: of.best_draft.auroc if of.best_draft else _NO_ESTIMATE),
        ("{cases}/best_baseline", "signal without a draft with the largest AUROC, chosen on these cases",
         lambda _, of: of.best_baseline.signal.label if of.best_baseline else None),
        ("{cases}/best_baseline_auroc", "its AUROC",
         lambda _, of: of.best_baseline.auroc if of.best_baseline else _NO_ESTIMATE),
        ("{cases}/difference", "difference of the two AUROCs", lambda _, of: of.difference(of.best_draft, of.best_baseline)),
    )),
))
ALL = (VALUES, OUTCOMES, *OF_CASES.values(), COMBINED, RELIABILITY, ROC)


def summary(records: Sequence[dict], num_folds: int, num_bins: int) -> Summary:
    """All tables and values. Values are None if all cases have one label."""
    measured = [record for record in records if "skipped" not in record]
    compared = [ComparedCases("answers", answer_cases(measured), skipped(records), num_folds, num_bins),
                ComparedCases("steps", step_cases(measured), sum(record["steps_left_out"] for record in measured), num_folds,
                              num_bins)]
    tables = {
        "outcomes": OUTCOMES.rows(map(Outcome, compared)),
        **{of.name: OF_CASES[of.name].rows(Detected(of, detector, _scores(of, detector.signal)) for detector in of.detectors)
           for of in compared},
        "combined": COMBINED.rows(gain for of in compared for gain in _gains(of)),
        "reliability": RELIABILITY.rows(row for of in compared for row in _bins(of)),
    }
    return Summary(VALUES.row(DifficultyResult(records, measured, compared)), tables,
                   {"roc": ROC.rows(row for of in compared for row in _thresholds(of))})


def _scores(of: ComparedCases, signal: Signal) -> Scores:
    if not of.fitted.possible:
        return Scores(_NO_ESTIMATE, _NO_ESTIMATE, None, None)
    return detection.score(of.cases, of.fitted.of(signal), of.num_bins)


def _gains(of: ComparedCases) -> Iterator[Gain]:
    """Target entropy with each signal of the draft, and the best baseline with the best signal."""
    if of.best_draft is None or of.best_baseline is None or not of.fitted.possible:
        return
    for detector in of.detectors:
        if detector.signal.kind == DRAFT:
            yield Gain(of, of.entropy[detector.signal.statistic].signal, detector.signal)
    if of.best_baseline.signal.name != "target_entropy":
        yield Gain(of, of.best_baseline.signal, of.best_draft.signal)


def _bins(of: ComparedCases) -> Iterator[Bin]:
    """The bins of the best signal of the draft and of the best baseline."""
    for detector in (of.best_draft, of.best_baseline):
        if detector and of.fitted.possible:
            yield from bins_of(of, detector.signal, of.fitted.of(detector.signal))


def bins_of(of: ComparedCases, signal: Signal, predictions: Predictions) -> Iterator[Bin]:
    """The bins of a signal's predictions."""
    bin_of = detection.bins(predictions.chance, of.num_bins)
    for index in range(int(bin_of.max()) + 1):
        yield Bin(of, signal, index, predictions, bin_of == index)


def _thresholds(of: ComparedCases) -> Iterator[Threshold]:
    """ROC curves of the best signal of each kind."""
    for kind in (DRAFT, TARGET, OTHER) if of.cases.decided else ():
        signal = best(of.detectors, kind).signal
        for right, wrong in zip(*roc(of.cases.wrong, signal.values), strict=True):
            yield Threshold(of, signal, right, wrong)
