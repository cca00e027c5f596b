"""The tables of the difficulty probe, computed from its records: which signals predict wrong answers and wrong steps.

The best signal and the best baseline are those with the largest AUROC on the same records. The selection favours
both, and the intervals do not include its effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dflash_mcmc.grading.verdicts import NO_ANSWER
from dflash_mcmc.probe import Summary
from dflash_mcmc.probe.difficulty import calibration, signals
from dflash_mcmc.probe.difficulty.detection import DRAFT, OTHER, TARGET, Cases, Signal, roc
from dflash_mcmc.statistics.intervals import IntervalEstimate

_NO_ESTIMATE = IntervalEstimate(None, None, None, 0)


class Detector(NamedTuple):
    """A signal and its AUROC."""

    signal: Signal
    pairs: np.ndarray
    """See `Cases.pairs`."""
    auroc: IntervalEstimate


class SignalComparison(NamedTuple):
    """All signals of some cases, and the signals for comparison. It is empty unless there are both right and wrong cases."""

    cases: Cases
    detectors: list[Detector]
    entropy: dict[str | None, Detector]
    """Target entropy, by statistic."""
    best_draft: Detector | None = None
    best_baseline: Detector | None = None
    """Best signal that needs no draft."""


def summary(records: Sequence[dict], num_folds: int, num_bins: int) -> Summary:
    """Tables `outcomes`, `answers`, `steps`, `combined`, `reliability`. Values are None if all cases have one label."""
    measured = [record for record in records if "skipped" not in record]
    compared = {"answers": compare(answer_cases(measured)), "steps": compare(step_cases(measured))}
    fitted = {name: _Fitted(of.cases, num_folds) for name, of in compared.items()}
    left_out = {"answers": len(records) - len(measured), "steps": sum(record["steps_left_out"] for record in measured)}
    tables = {
        "outcomes": [_outcome(name, of.cases, left_out[name]) for name, of in compared.items()],
        **{name: [_row(of, detector, fitted[name], num_bins) for detector in of.detectors] for name, of in compared.items()},
        "combined": [row for name, of in compared.items() for row in _combined(name, of, fitted[name])],
        "reliability": [row for name, of in compared.items() for row in _reliability(name, of, fitted[name], num_bins)],
    }
    values = {"num_answers": len(measured), "num_skipped": left_out["answers"],
              "num_skipped_not_correct": sum("skipped" in record and record["verdict"] != "correct" for record in records),
              "num_no_answer": sum(record["verdict"] == NO_ANSWER for record in measured)}
    for name, of in compared.items():
        values.update(_values(name, of))
    return Summary(values, tables, {"roc": [row for name, of in compared.items() for row in _roc(name, of)]})


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


def compare(cases: Cases) -> SignalComparison:
    """Computes the AUROC of every signal."""
    if not cases.decided:
        return SignalComparison(cases, [Detector(signal, np.empty((0, 0)), _NO_ESTIMATE) for signal in cases.signals], {})
    detectors = [Detector(signal, pairs, cases.auroc(pairs))
                 for signal in cases.signals for pairs in (cases.pairs(signal.values),)]
    entropy = {detector.signal.statistic: detector for detector in detectors if detector.signal.name == "target_entropy"}
    return SignalComparison(cases, detectors, entropy, best(detectors, DRAFT), best(detectors, TARGET, OTHER))


def best(detectors: Sequence[Detector], *kinds: str) -> Detector:
    """The detector of these kinds with the largest AUROC, the first one in a tie. Every detector must have an AUROC."""
    of_kinds = [detector for detector in detectors if detector.signal.kind in kinds]
    return max(of_kinds, key=lambda detector: detector.auroc.value or 0.0)


class _Fitted:
    """Predicted probabilities from signals, each computed once."""

    def __init__(self, cases: Cases, num_folds: int):
        self._cases, self.folds = cases, calibration.folds(cases.names, num_folds)
        self._found: dict[tuple[str, ...], calibration.Predictions] = {}
        self.possible = cases.decided and cases.num_problems > 1

    def of(self, *asked: Signal) -> calibration.Predictions:
        names = tuple(signal.label for signal in asked)
        if names not in self._found:
            self._found[names] = calibration.predict(self._cases, [signal.values for signal in asked], self.folds)
        return self._found[names]


def _signals(cases: Sequence[dict], records: Sequence[dict]) -> list[Signal]:
    """The signals of answers or steps, and the level of the problem if it is a number for all problems."""
    found = [Signal(name, kind, statistic, np.array([case[statistic][name] for case in cases], np.float64))
             for kind, names in ((DRAFT, signals.DRAFT), (TARGET, signals.TARGET)) for name in names
             for statistic in ("mean", "max")]
    found.append(Signal("num_tokens", OTHER, None, np.array([case["num_tokens"] for case in cases], np.float64)))
    levels = [record["level"] for record in records]
    if all(isinstance(level, int) for level in levels):
        found.append(Signal("level", OTHER, None, np.array(levels, np.float64)))
    return found


def _outcome(name: str, cases: Cases, left_out: int) -> dict:
    """Share of wrong cases, and the draft's acceptance and the target's entropy of right and of wrong cases."""
    values = {signal.label: signal.values for signal in cases.signals}
    row = {"cases": name, **_among(cases, cases.wrong, np.ones(cases.size)).columns("share_wrong")}
    for outcome, kind in (("right", ~cases.wrong), ("wrong", cases.wrong)):
        row.update(_among(cases, 1.0 - values["total_variation mean"], kind).columns(f"acceptance_{outcome}"))
        row.update(_among(cases, values["target_entropy mean"], kind).columns(f"entropy_{outcome}"))
    return {**row, "wrong": int(cases.wrong.sum()), "n": cases.size, "left_out": left_out}


def _among(cases: Cases, values: np.ndarray, kind: np.ndarray) -> IntervalEstimate:
    return cases.ratio(values * kind, kind) if cases.size else _NO_ESTIMATE


def _row(of: SignalComparison, detector: Detector, fitted: _Fitted, num_bins: int) -> dict:
    """AUROC, its differences from the best baseline and target entropy, and the quality of probabilities from this signal."""
    signal = detector.signal
    row = {"signal": signal.name, "kind": signal.kind, "statistic": signal.statistic, **detector.auroc.columns("auroc")}
    for name, other in (("best", of.best_baseline), ("entropy", of.entropy.get(signal.statistic or "mean"))):
        apart = _NO_ESTIMATE if other is None or other is detector else of.cases.auroc(detector.pairs - other.pairs)
        row.update(apart.columns(f"minus_{name}"))
    scores = calibration.score(of.cases, fitted.of(signal), num_bins) if fitted.possible else \
        calibration.Scores(_NO_ESTIMATE, _NO_ESTIMATE, None, None)
    return {**row, **scores.brier.columns("brier"), **scores.skill.columns("brier_skill"),
            "ece": scores.calibration_error, "ece_by_chance": scores.error_by_chance,
            "wrong": int(of.cases.wrong.sum()), "n": of.cases.size}


def _combined(name: str, of: SignalComparison, fitted: _Fitted) -> list[dict]:
    """Gains from adding a signal of the draft to a baseline.

    Target entropy is combined with each signal, and the best baseline with the best signal. All AUROCs here, also the AUROC of
    the baseline alone, use cross-validated probabilities and only pairs within a fold. Probabilities of different folds come
    from different fits and are not comparable.
    """
    best_draft, best_baseline = of.best_draft, of.best_baseline
    if best_draft is None or best_baseline is None or not fitted.possible:
        return []
    pairs = [(of.entropy[detector.signal.statistic], detector) for detector in of.detectors if detector.signal.kind == DRAFT]
    if best_baseline.signal.name != "target_entropy":
        pairs.append((best_baseline, best_draft))
    return [_gain(name, of.cases, fitted, baseline.signal, detector.signal) for baseline, detector in pairs]


def _gain(name: str, cases: Cases, fitted: _Fitted, baseline: Signal, signal: Signal) -> dict:
    alone, joined = fitted.of(baseline).chance, fitted.of(baseline, signal).chance
    of_alone, of_joined = cases.pairs(alone), cases.pairs(joined)
    brier = cases.mean((alone - cases.wrong) ** 2 - (joined - cases.wrong) ** 2)
    return {"cases": name, "baseline": baseline.label, "signal": signal.label,
            **cases.auroc(of_alone, fitted.folds).columns("auroc_baseline"),
            **cases.auroc(of_joined, fitted.folds).columns("auroc_combined"),
            **cases.auroc(of_joined - of_alone, fitted.folds).columns("auroc_gain"), **brier.columns("brier_gain"),
            "wrong": int(cases.wrong.sum()), "n": cases.size}


def _reliability(name: str, of: SignalComparison, fitted: _Fitted, num_bins: int) -> list[dict]:
    """Calibration rows of the best signal of the draft and of the best baseline."""
    asked = [detector.signal for detector in (of.best_draft, of.best_baseline) if detector and fitted.possible]
    return [{"cases": name, "signal": signal.label, "kind": signal.kind, **row}
            for signal in asked for row in calibration.reliability(of.cases, fitted.of(signal), num_bins)]


def _roc(name: str, of: SignalComparison) -> list[dict]:
    """ROC curves of the best signal of each kind."""
    asked = [best(of.detectors, kind).signal for kind in (DRAFT, TARGET, OTHER) if of.cases.decided]
    return [{"cases": name, "signal": signal.label, "kind": signal.kind, "share_of_right": float(right),
             "share_of_wrong": float(wrong)}
            for signal in asked for right, wrong in zip(*roc(of.cases.wrong, signal.values), strict=True)]


def _values(name: str, of: SignalComparison) -> dict[str, float | int | str | None]:
    """The best signal of the draft, the best baseline, and the difference of their AUROCs."""
    found: dict[str, float | int | str | None] = {f"{name}/n": of.cases.size, f"{name}/wrong": int(of.cases.wrong.sum())}
    for role, detector in (("best_draft", of.best_draft), ("best_baseline", of.best_baseline)):
        found[f"{name}/{role}"] = detector.signal.label if detector else None
        found.update((detector.auroc if detector else _NO_ESTIMATE).columns(f"{name}/{role}_auroc"))
    draft, baseline = of.best_draft, of.best_baseline
    apart = of.cases.auroc(draft.pairs - baseline.pairs) if draft and baseline else _NO_ESTIMATE
    return {**found, **apart.columns(f"{name}/difference")}
