"""Compares the rules of votes over the same chains: the majority vote, and votes with weights from log p and log q."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash_mcmc.report.parts import (
    Column,
    Drawing,
    Section,
    Table,
    counted,
    differing,
    ends,
    named,
    paragraphs,
    percent,
    probability,
    shared,
)
from dflash_mcmc.report.runs import Run
from dflash_mcmc.report.sections.paired import VERDICTS
from dflash_mcmc.report.study import Study, full, votes, weighted_rules
from dflash_mcmc.statistics.chains import aggregated, majority_curve, weighted_curve
from dflash_mcmc.statistics.intervals import IntervalEstimate
from dflash_mcmc.statistics.outcomes import outcomes
from dflash_mcmc.statistics.paired import compare, holm, verdict
from dflash_mcmc.statistics.shares import accuracy_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dflash_mcmc.statistics.rules import VoteRule

_MAJORITY = "majority vote"
_MOST_PANELS = 3
"""The largest number of runs in the figure."""
_TEXT = """
Each rule combines the same recorded chains into one answer per problem. The power vote weighs a chain by
exp(alpha log p - log q), so that an answer's summed weight estimates its probability under p^alpha. The softsat vote weighs by
the rank of log p. The answer power draw returns an answer with probability proportional to its summed weight for p^alpha,
raised to gamma; its accuracy is that of a draw. A chain without an answer has no weight, and a tie counts as the expected
value of a uniform draw among the winners. Differences, intervals and p are those of the paired table, against the majority
vote of the same run; p (Holm) is adjusted for the rows of the table.

Effective chains are (sum of weights)^2 / (sum of squared weights), averaged over problems. If one chain has more than half of
the weight on most problems, the vote is little more than the answer of that chain.
"""
_WITHOUT = """
Importance weights need independent draws with a known log q and without truncation. These runs have none, and therefore no
power vote and no answer power draw: {runs}.
"""


def section(study: Study) -> Section | None:
    """One row per run and rule, and the accuracy over the number of chains. None without several chains of answers."""
    voting = [run for run in study.runs if votes(run)]
    if not voting:
        return None
    rows = [row for run in voting for row in _rows(run, weighted_rules(run, study.alphas))]
    compared = [row for row in rows if row["p_value"] is not None]
    for row, adjusted in zip(compared, holm([row["p_value"] for row in compared]), strict=True):
        row["p_holm"], row["verdict"] = adjusted, VERDICTS[verdict(row["difference"], adjusted)]
    curves = {run.shown: _curves(run, weighted_rules(run, study.alphas)) for run in voting}
    without = [run.shown for run in voting if not any(rule.needs_log_q for rule in weighted_rules(run))]
    text = _TEXT + ("\n\n" + _WITHOUT.format(runs="; ".join(without)) if without else "")
    shown = dict(list(curves.items())[:_MOST_PANELS])
    of = f"; the first {_MOST_PANELS} runs" if len(curves) > _MOST_PANELS else ""
    data = [row for rules in curves.values() for curve in rules.values() for row in curve]
    return Section("rules", "Rules of votes", paragraphs(text),
                   [Table("vote_rules", "Rules of votes", _columns(), rows),
                    Table("vote_curves", "Accuracy over the number of chains", _curve_columns(), data)],
                   [Drawing(f"fig_{study.dataset}_vote_rules", f"Accuracy of each rule over the number of chains{of}.",
                            lambda: _figure(shown))])


def _rows(run: Run, rules: list[VoteRule]) -> list[dict]:
    """The majority vote of a run, and each rule compared with it."""
    records = full(run)
    base = outcomes(aggregated(records))
    rows = [{"run": run.shown, "rule": _MAJORITY, "k": run.num_chains, "problems": len(base.problems),
             **accuracy_of(base).columns("accuracy"), "effective": None, "dominated": None,
             **IntervalEstimate(None, None, None, 0).columns("difference"), "p_value": None, "p_holm": None, "verdict": "-"}]
    for rule in rules:
        combined = aggregated(records, rule)
        found = outcomes(combined)
        paired = compare(found, base)
        rows.append({"run": run.shown, "rule": rule.shown, "k": run.num_chains, "problems": len(found.problems),
                     **accuracy_of(found).columns("accuracy"),
                     "effective": sum(row["effective"] for row in combined) / len(combined),
                     "dominated": sum(row["dominated"] for row in combined) / len(combined),
                     **paired.difference.columns("difference"), "p_value": paired.p_value, "p_holm": None, "verdict": "tie"})
    return rows


def _curves(run: Run, rules: list[VoteRule]) -> dict[str, list[dict]]:
    """For each rule, one row per number of chains."""
    found = {_MAJORITY: majority_curve(run.records), **{rule.shown: weighted_curve(run.records, rule) for rule in rules}}
    return {rule: [{"run": run.shown, "rule": rule, **row} for row in rows] for rule, rows in found.items()}


def _columns() -> list[Column]:
    return [named("run", "run"), named("rule", "rule"), counted("chains", "k"), shared("accuracy", "accuracy"),
            differing("difference to majority (points)", "difference"),
            Column("p (Holm)", lambda row: probability(row["p_holm"])), named("verdict", "verdict"),
            Column("effective chains", lambda row: "-" if row["effective"] is None else f"{row['effective']:.1f}"),
            Column("problems with most weight on one chain", lambda row: percent(row["dominated"])),
            counted("problems", "problems")]


def _curve_columns() -> list[Column]:
    return [named("run", "run"), named("rule", "rule"), counted("k", "k"), shared("accuracy", "accuracy"),
            counted("problems", "n"), counted("problems left out", "left_out")]


def _figure(curves: dict[str, dict[str, list[dict]]]) -> Figure:
    """One panel per run, one line per rule."""
    from matplotlib.figure import Figure

    from dflash_mcmc.report.figure import MARKERS, PALETTE, error_bars

    names = list(dict.fromkeys(rule for rules in curves.values() for rule in rules))
    drawn = Figure(figsize=(1.4 + 3.9 * len(curves), 3.8), layout="constrained")
    panels = drawn.subplots(1, len(curves), sharey=True, squeeze=False)[0]
    for axes, (run, rules) in zip(panels, curves.items(), strict=True):
        for rule, rows in rules.items():
            number = names.index(rule)
            estimates = [IntervalEstimate(*ends(row, "accuracy"), row["n"]) for row in rows]
            shift = 1.0 + 0.03 * (number - (len(names) - 1) / 2)
            axes.errorbar([row["k"] * shift for row in rows], [100.0 * estimate.known for estimate in estimates],
                          error_bars(estimates), color=PALETTE[number % len(PALETTE)], marker=MARKERS[number % len(MARKERS)],
                          markersize=5, capsize=2, label=rule)
        ticks = sorted({row["k"] for rows in rules.values() for row in rows})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.set_xlabel("chains per problem, k")
        axes.set_title(run if len(run) <= 44 else f"{run[:41]}...")
    panels[0].set_ylabel("correct answers, %, with 95 % intervals")
    handles = {label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    drawn.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(2, len(handles)))
    return drawn
