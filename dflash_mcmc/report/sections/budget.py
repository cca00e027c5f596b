"""Accuracy over the budget of an answer, and each method against the majority vote of independent draws at the same budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from dflash_mcmc.config.checks import CHAINS, path_of
from dflash_mcmc.config.identity import labels_of
from dflash_mcmc.report.figure import MARKERS, PALETTE, error_bars, plain_ticks
from dflash_mcmc.report.parts import (
    P_VALUES,
    Drawing,
    ReportColumn,
    ReportTable,
    Section,
    costing,
    counted,
    differing,
    named,
    paragraphs,
    points,
    shared,
)
from dflash_mcmc.report.reading import Run
from dflash_mcmc.report.sections.paired import adjusted, planned
from dflash_mcmc.report.study import Study, full, rules_asked_for, votes
from dflash_mcmc.statistics.chains import aggregated
from dflash_mcmc.statistics.outcomes import TOLERANCE, UNITS, PairedOutcomes, accuracy_of, aligned, by_problem, outcomes
from dflash_mcmc.statistics.paired import LEVEL, compare

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dflash_mcmc.statistics.outcomes import Cost, Outcome
    from dflash_mcmc.statistics.rules import VoteRule

_APART = 0.08
"""The largest share by which a point of the figure is moved, so that intervals of methods at one cost do not overlap."""
SOUGHT = 0.05
"""The difference of accuracies that the number of problems is stated for."""
_NAMES: dict[Cost, str] = {"token_forwards": "token-forwards", "share_seconds": "device seconds"}
_TEXT = """
A budget is the cost of an answer in {unit}: one sample, or one vote of independent draws. The setting of each method was
chosen for the budget before the run; the cost that was then measured is in the tables. A point whose cost differs from its
budget by more than {tolerance:.0f} % is in the first table, but is not compared. Greedy decoding and a single draw have one
cost.

Each method is compared with the majority vote over as many draws of sampler=temperature as the budget pays for, on the
problems that both have. A vote over fewer chains than are recorded counts the mean over all ways to choose them. p comes from
the exact McNemar test if every problem has one answer that is right or wrong in both, else from a paired permutation test over
problems. p (Holm) is adjusted for all {compared} comparisons. A difference is resolved if p (Holm) is at most {level:g}.

{power}
"""
_POWER = """
With the {problems:,} problems of these runs and 80 % power, a single comparison at p = {level:g} detects differences of
{smallest} points and more (the median of the comparisons). To detect {sought:.0f} points it takes {needed:,} problems, and
{strict:,} for every one of the {compared} comparisons at once (p = {level:g} / {compared}). Both numbers assume that the
methods differ as much as here, and are those of the comparison that needs the most problems.
"""


class BudgetPoint(NamedTuple):
    """A method at a budget."""

    method: str
    budget: float | None
    """None for a method with one cost."""
    setting: str
    outcomes: PairedOutcomes
    spent: float
    """Mean cost of an answer over problems."""

    @property
    def on_budget(self) -> bool:
        """Whether the cost is near enough to the budget for a comparison."""
        return self.budget is not None and abs(self.spent - self.budget) <= TOLERANCE * self.budget


def section(study: Study) -> Section | None:
    """The points, their comparisons with the majority vote, and the figure. None without a run that has a budget."""
    runs = [run for run in study.runs if run.config.get("budget")]
    units = {str(run.config.get("budget_unit")) for run in runs}
    if not runs or len(units) > 1:
        return None
    cost = UNITS[units.pop()]
    points = points_of(runs, cost)
    rows = comparisons(points)
    tables = [ReportTable("budget", "Accuracy at each budget", _columns(cost), [_shown(point) for point in points])]
    if rows:
        tables.append(ReportTable("budget_paired", "Compared with the majority vote at the same budget", _paired_columns(),
                                  rows))
    text = _TEXT.format(unit=_NAMES[cost], tolerance=100.0 * TOLERANCE, level=LEVEL, compared=len(rows), power=_power(rows))
    title = f"Accuracy over {_NAMES[cost]} of an answer on {study.dataset}, a line for each method."
    return Section("budget", "Accuracy over budget", paragraphs(text), tables,
                   [Drawing("fig_budget", title, lambda: _figure(study.dataset, points, _NAMES[cost]))])


def points_of(runs: Sequence[Run], cost: Cost) -> list[BudgetPoint]:
    """The points of runs with budgets: methods in the order of the runs, each in the order of its budgets."""
    fields = [_field(run) for run in runs]
    rest = [{key: value for key, value in run.identity.items() if key != field}
            for run, field in zip(runs, fields, strict=True)]
    labels = labels_of([run.condition for run in runs], rest, [_without(run.config, field)
                                                               for run, field in zip(runs, fields, strict=True)])
    budgets = sorted({float(run.config["budget"]) for run in runs})
    points: list[BudgetPoint] = []
    for run, field, label in zip(runs, fields, labels, strict=True):
        if field == CHAINS:
            points += _of_draws(run, label, budgets, cost)
        else:
            budget = None if field is None else float(run.config["budget"])
            setting = f"{field}={run.identity.get(field)}" if field else "-"
            points.append(_point(label, budget, setting, run.records, cost))
    order = list(dict.fromkeys(point.method for point in points))
    return sorted(points, key=lambda point: (order.index(point.method), point.budget or 0.0))


def _field(run: Run) -> str | None:
    """The dotted name of the field that scales the cost of the run's answers."""
    field = None if run.sampler is None else run.sampler.cost_field()
    return field and path_of(field)


def _without(config: dict, field: str | None) -> dict:
    """A configuration whose sampler's setting is left to the option, so that a method has one label at all budgets."""
    group, _, name = (field or "").partition(".")
    return {**config, group: {key: value for key, value in config[group].items() if key != name}} if name else config


def _of_draws(run: Run, label: str, budgets: Sequence[float], cost: Cost) -> list[BudgetPoint]:
    """A single draw, and the votes over as many draws as each budget pays for and the run has."""
    points, records = [_point(label, None, f"{CHAINS}=1", run.records, cost)], full(run)
    if not votes(run):
        return points
    rules: list[VoteRule | str] = ["majority", *rules_asked_for(run)]
    for budget in budgets:
        num_chains = min(run.num_chains, max(1, round(budget / points[0].spent)))
        if num_chains > 1:
            points += [_point(f"{label}, {_vote(rule)}", budget, f"{CHAINS}={num_chains}",
                              aggregated(records, rule, chains=num_chains), cost) for rule in rules]
    return points


def _vote(rule: VoteRule | str) -> str:
    return "majority vote" if isinstance(rule, str) else rule.shown


def _point(method: str, budget: float | None, setting: str, records: Sequence[Outcome], cost: Cost) -> BudgetPoint:
    means = [sum(record[cost] for record in chains) / len(chains) for chains in by_problem(records).values()]
    return BudgetPoint(method, budget, setting, outcomes(records), sum(means) / len(means))


def comparisons(found: Sequence[BudgetPoint]) -> list[dict]:
    """A row for each point on its budget, other than the majority vote that it is compared with."""
    bases = {point.budget: point for point in reversed(found) if point.on_budget and point.method.endswith(_vote("majority"))}
    pairs = [(point, base, aligned(point.outcomes, base.outcomes)) for point in found
             if point.on_budget and (base := bases.get(point.budget)) not in (None, point)]
    pairs = [pair for pair in pairs if pair[2][0].problems]
    rows = [_compared(point, base, *outcomes_of, len(pairs)) for point, base, outcomes_of in pairs]
    return adjusted(rows, lambda _, p: "resolved" if p <= LEVEL else "not resolved")


def _compared(point: BudgetPoint, base: BudgetPoint, own: PairedOutcomes, other: PairedOutcomes, left_out: int,
              num_compared: int) -> dict:
    """The row of a comparison, one of `num_compared`."""
    paired = compare(own, other)
    return {"method": point.method, "budget": point.budget, "setting": point.setting, "spent": point.spent,
            "baseline": base.method, "baseline_setting": base.setting, "baseline_spent": base.spent,
            "problems": len(own.problems), "left_out": left_out, **accuracy_of(own).columns("accuracy"),
            **accuracy_of(other).columns("baseline_accuracy"), **paired.difference.columns("difference"),
            "test": paired.test, "p_value": paired.p_value, "p_holm": None, "verdict": "not resolved",
            **planned(own, other, SOUGHT),
            "problems_together": planned(own, other, SOUGHT, LEVEL / num_compared)["problems_needed"]}


def _power(rows: Sequence[dict]) -> str:
    """The sentences on the number of problems that resolve a difference."""
    single, together = ([row[key] for row in rows if row[key]] for key in ("problems_needed", "problems_together"))
    smallest = sorted(row["detectable_difference"] for row in rows if row["detectable_difference"])
    if not single or not together or not smallest:
        return "No number of problems can be stated: the methods differ on too few of the problems of these runs."
    return _POWER.format(problems=max(row["problems"] for row in rows), level=LEVEL, sought=100.0 * SOUGHT, compared=len(rows),
                         smallest=points(smallest[len(smallest) // 2]).lstrip("+"), needed=max(single), strict=max(together))


def _shown(point: BudgetPoint) -> dict:
    estimate = accuracy_of(point.outcomes)
    return {"method": point.method, "budget": point.budget, "setting": point.setting, "spent": point.spent,
            **estimate.columns("accuracy"), "problems": len(point.outcomes.problems),
            "compared": "yes" if point.on_budget else "-" if point.budget is None else "no: off its budget"}


def _columns(cost: Cost) -> list[ReportColumn]:
    return [named("method", "method"), costing("budget", "budget"), named("setting", "setting"),
            costing(f"{_NAMES[cost]} of an answer", "spent"), shared("accuracy", "accuracy"), counted("problems", "problems"),
            named("compared", "compared")]


def _paired_columns() -> list[ReportColumn]:
    return [named("method", "method"), costing("budget", "budget"), costing("spent", "spent"),
            costing("spent by the vote", "baseline_spent"), shared("accuracy", "accuracy"),
            shared("accuracy of the vote", "baseline_accuracy"), differing("difference (points)", "difference"),
            *P_VALUES,
            named("verdict", "verdict"), named("test", "test"), counted("problems", "problems"),
            counted(f"problems to detect {100 * SOUGHT:.0f} points", "problems_needed"),
            counted("for all comparisons", "problems_together")]


def _figure(dataset: str, points: Sequence[BudgetPoint], unit: str) -> Figure:
    """Accuracy over cost on a logarithmic axis, with intervals. Methods differ in colour and in marker."""
    from matplotlib.figure import Figure

    methods: dict[str, list[BudgetPoint]] = {}
    for point in points:
        methods.setdefault(point.method, []).append(point)
    drawn = Figure(figsize=(8.6, max(4.2, 0.26 * len(methods) + 1.0)), layout="constrained")
    axes = drawn.subplots()
    for index, (method, line) in enumerate(methods.items()):
        estimates = [accuracy_of(point.outcomes) for point in line]
        beside = 1.0 + _APART * (2.0 * (index + 0.5) / len(methods) - 1.0)
        axes.errorbar([beside * point.spent for point in line], [100.0 * estimate.known for estimate in estimates],
                      error_bars(estimates), label=method, capsize=2, elinewidth=0.7, markersize=5,
                      color=PALETTE[index % len(PALETTE)], marker=MARKERS[(index + index // len(PALETTE)) % len(MARKERS)],
                      linestyle=("-", "--", ":")[index // len(PALETTE) % 3])
    axes.set_xscale("log")
    plain_ticks(axes)
    axes.set_xlabel(f"{unit} of an answer, measured; points are moved apart by at most {100.0 * _APART:.0f} %")
    axes.set_ylabel("correct answers, % (95 % intervals)")
    axes.set_title(f"Accuracy over budget on {dataset}")
    drawn.legend(loc="outside right upper")
    return drawn
