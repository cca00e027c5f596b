"""Chooses the settings of a command's jobs for their budgets: by the estimate of a dry run, corrected by short measured runs.

A short run (a pilot) draws the answers of a few problems with the chosen setting. It is an ordinary run in the experiment's
folder with `-pilots` after its name, so that the next start reads its records and makes the same choice.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from tabulate import tabulate

from dflash_mcmc.config.checks import CHAINS, checked, path_of
from dflash_mcmc.config.identity import settings_of
from dflash_mcmc.config.schema import Job
from dflash_mcmc.errors import ConfigError, UserError
from dflash_mcmc.fields import spec_of
from dflash_mcmc.registry import components, name_of
from dflash_mcmc.runner import cost, estimate
from dflash_mcmc.statistics.outcomes import TOLERANCE, UNITS

if TYPE_CHECKING:
    from dflash_mcmc.config.command import Command
    from dflash_mcmc.config.schema import Config

_MOST_PILOTS = 3
"""Largest number of pilots for one budget of a method."""
MOST = 1_000_000
"""The largest setting that is tried."""
_LEAST_SLOPE = 0.2


class ChosenSetting(NamedTuple):
    """The outcome of a job with a budget: a row of the printed plan."""

    label: str
    budget: float
    field: str | None
    """The dotted name of the field that the budget chooses; None if the method has one cost."""
    setting: int | None
    estimated: float
    """The cost of an answer before anything was measured."""
    expected: float
    measured: float | None
    """The cost in a pilot with this setting; None without one."""
    job: Job | None
    """The job with the setting; None if it is left out."""
    reason: str = ""
    """Why it is left out."""


def check(command: Command) -> None:
    """Checks the budgets of a command, before a model is loaded. Raises UserError."""
    jobs = [job for job in command.jobs if job.config.budget is not None]
    if not jobs:
        return
    first = jobs[0].config
    if command.sweep is not None and command.sweep.searches:
        raise ConfigError("budget", first.budget, "null in a search, which chooses the settings itself")
    if command.launcher is not None and first.pilot_problems and not first.dry_run:
        raise ConfigError("pilot_problems", first.pilot_problems, "0 with hydra/launcher=slurm, which takes the settings from "
                          "the estimates; or hydra/launcher=basic")
    if all(job.config.sampler.cost_field() is None for job in jobs):
        raise ConfigError("budget", first.budget, f"null with sampler={name_of(first.sampler)}, whose cost no field scales")
    for job in jobs:
        _refuse_setting(job)


def _methods(jobs: Sequence[Job]) -> Iterable[list[Job]]:
    """The jobs of each method, which differ in their budgets only."""
    methods: dict[str, list[Job]] = {}
    for job in jobs:
        methods.setdefault(_key(job.config), []).append(job)
    return methods.values()


def _refuse_setting(job: Job) -> None:
    """Raises ConfigError if the command sets the field that the budget chooses."""
    field = job.config.sampler.cost_field()
    for text in job.overrides if field is not None else ():
        name, _, value = text.lstrip("+").partition("=")
        if field is not None and name == path_of(field):
            raise ConfigError(name, value, f"no value with budget={job.config.budget:g}, which chooses it")


def _check_largest(config: Config, field: str, budget: float) -> None:
    """Raises ConfigError if the largest budget of a method does not pay for its smallest setting."""
    least = _least(config, field)
    needed = _estimate(config, field, least)
    if needed > budget:
        raise ConfigError("budget", budget, f"at least {needed:,.4g} with {config.label()}, the estimated cost of "
                          f"{path_of(field)}={least} (assumed.* sets the lengths)")


def with_settings(command: Command, measure: bool) -> tuple[Command, str]:
    """The command with the settings that its budgets choose, and the plan as text; the same command if it has no budget.

    Args:
        measure: whether pilots are run; otherwise the settings follow the estimates.
    """
    if all(job.config.budget is None for job in command.jobs):
        return command, ""
    counted = {id(job): config for job, config in zip(command.jobs, estimate.with_lengths(command), strict=True)}
    planned = {id(job): row for jobs in _methods(command.jobs)
               for job, row in zip(jobs, _of_method(jobs, counted[id(jobs[0])], measure), strict=True)}
    rows = [planned[id(job)] for job in command.jobs]
    kept = [row.job for row in rows if row.job is not None]
    if not kept:
        raise UserError(f"budget: given {rows[0].budget:g}; allowed: more, since {rows[0].label}: {rows[0].reason}")
    first = command.jobs[0].config
    return command._replace(jobs=kept, num_points=len(kept)), _text(rows, first, measure and first.pilot_problems > 0)


def _key(config: Config) -> str:
    """What distinguishes methods: all settings but the one that the budget chooses, and the problems."""
    field = config.sampler.cost_field()
    settings = {name: value for name, value in settings_of(config).items() if field is None or name != path_of(field)}
    selection = [config.dataset.limit, config.dataset.ids, config.dataset.shards, config.dataset.num_shards]
    return json.dumps([settings, selection, config.budget_unit, config.budget is None], sort_keys=True, default=str)


def _of_method(jobs: Sequence[Job], counted: Config, measure: bool) -> list[ChosenSetting]:
    """The rows of one method's jobs, which differ only in their budgets. Pilots of all budgets correct one curve.

    Args:
        counted: the first job's configuration, with the counted lengths as its assumptions.
    """
    config = jobs[0].config
    field = config.sampler.cost_field()
    if config.budget is None or field is None:
        return _of_one_cost(jobs, counted)
    budgets = [job.config.budget or 0.0 for job in jobs]
    _check_largest(counted, field, max(budgets))
    curve = CostCurve(lambda setting: _estimate(counted, field, setting), _least(config, field))
    for budget in sorted(budgets) if measure and config.pilot_problems else ():
        for _ in range(_MOST_PILOTS):
            setting = curve.nearest(budget)
            if setting in curve.measured:  # a further pilot would measure the same setting
                break
            curve.measured[setting] = _measured(_with(config, field, setting), field)
    chosen = [curve.nearest(budget) for budget in budgets]
    rows = []
    for index, (job, budget, setting) in enumerate(zip(jobs, budgets, chosen, strict=True)):
        expected = curve.cost(setting)
        reason = ""
        if expected > (1.0 + TOLERANCE) * budget and setting == curve.least:
            reason = f"{path_of(field)}={setting} costs {expected:,.4g}"
        elif setting in chosen[:index]:
            reason = f"the same run as at budget {budgets[chosen.index(setting)]:,g}"
        new_job = None if reason else Job(_with(job.config, field, setting), (*job.overrides, f"{path_of(field)}={setting}"),
                                       job.choices, job.left_out)
        rows.append(ChosenSetting(config.label(), budget, path_of(field), setting, curve.estimate(setting), expected,
                            curve.measured.get(setting), new_job, reason))
    return rows


def _of_one_cost(jobs: Sequence[Job], counted: Config) -> list[ChosenSetting]:
    """The rows of jobs without a budget or without a field that scales their cost. The first one of a method is run."""
    rows = []
    for index, job in enumerate(jobs):
        reason = f"the same run as at budget {jobs[0].config.budget:,g}" if index and job.config.budget is not None else ""
        estimable = cost.token_forwards(counted) is not None
        estimated = _estimate(counted, None, 1) if estimable else float("nan")
        rows.append(ChosenSetting(job.config.label(), job.config.budget or float("nan"), None, None, estimated, estimated,
                                  None, None if reason else job, reason))
    return rows


def _least(config: Config, field: str) -> int:
    """The smallest setting of a field: one unit of what it counts, or two chains for a vote."""
    if field == CHAINS:
        return 2 if config.aggregates() else 1
    declared = next(one for one in dataclasses.fields(config.sampler) if one.name == field)  # type: ignore[arg-type]
    return max(1, int(spec_of(declared).ge or 0))


def _with(config: Config, field: str, setting: int) -> Config:
    """The checked configuration with a setting. Raises UserError if the sampler does not allow it."""
    return checked(_set(config, field, setting))


def _set(config: Config, field: str, setting: int) -> Config:
    if field == CHAINS:
        return dataclasses.replace(config, num_chains=setting)
    sampler = dataclasses.replace(config.sampler, **{field: setting})  # type: ignore[type-var]
    return dataclasses.replace(config, sampler=sampler)


def _estimate(config: Config, field: str | None, setting: int) -> float:
    """The estimated cost of an answer, in the unit of the budget. Raises UserError for a sampler without an estimate."""
    forwards = cost.token_forwards(config if field is None else _set(config, field, setting))
    if forwards is None:
        raise ConfigError("budget", config.budget, f"null with sampler={name_of(config.sampler)}, which has no estimate")
    answer = forwards * setting if field == CHAINS else forwards
    if config.budget_unit == "seconds":
        return answer / (config.hardware.tokens_per_second or config.assumed.tokens_per_second or float("nan"))
    return answer


def _measured(config: Config, field: str) -> float:
    """The mean cost of an answer in a pilot, which is drawn unless it is recorded. Raises UserError."""
    from dflash_mcmc.runner.loop import execute
    from dflash_mcmc.store.reading import read_records

    pilot = _pilot(config)
    result = execute(Job(pilot), waits=True)
    problems, unit = {*(pilot.dataset.ids or ())}, UNITS[config.budget_unit]
    costs = [record[unit] for record in read_records(result.folder)  # a pilot of another budget may have left more chains
             if record["problem"] in problems and record["chain"] < pilot.num_chains and record["token_forwards"]]
    if not costs:
        raise UserError(f"{result.folder}: no sample of this pilot could be drawn; its records say why")
    return sum(costs) / len(costs) * (config.num_chains if field == CHAINS else 1)


def _pilot(config: Config) -> Config:
    """The run of a pilot: problems chosen at random, the same for all methods, without a tracker."""
    problems = [problem.id for problem in config.dataset.problems()]
    order = np.random.default_rng(0).permutation(len(problems))[:config.pilot_problems]
    dataset = dataclasses.replace(config.dataset, ids=[problems[index] for index in sorted(order)], limit=None, shards=None,
                                  num_shards=None)
    tracker = next(option for option in components("tracker").values() if option.cls.is_null).cls()
    return checked(dataclasses.replace(config, name=f"{config.name}-pilots", dataset=dataset, tracker=tracker, budget=None,
                                       aggregate=None))


def _text(rows: Sequence[ChosenSetting], config: Config, measure: bool) -> str:
    """The plan as a table."""
    def amount(value: float | None) -> str:
        return "-" if value is None or value != value else f"{value:,.0f}" if value >= 100.0 else f"{value:.3g}"

    unit = "token-forwards" if config.budget_unit == "token_forwards" else "seconds"
    cells = [[row.label, amount(row.budget), f"{row.field}={row.setting}" if row.field else "-", amount(row.estimated),
              amount(row.measured), amount(row.expected), row.reason] for row in rows]
    headers = ["method", "budget", "setting", "estimated", "measured", "expected", "left out"]
    table = tabulate(cells, headers=headers, tablefmt="github", disable_numparse=True,
                     colalign=["left", "right", "left", "right", "right", "right", "left"])
    pilots = f"measured: the mean of a pilot on {config.pilot_problems} problems, in {config.name}-pilots"
    source = pilots if measure else "the settings follow the estimates; nothing was measured"
    return "\n".join([f"{unit} of an answer", table, source, ""])


class CostCurve:
    """The expected cost of an answer as a function of a setting, a whole number.

    With one measured setting, the estimate is multiplied by its measured / estimated. With more, the logarithm of the cost is
    linear in the logarithm of the estimate between neighbouring measured settings. Outside, it continues the nearest such
    line, with a slope of at least 0.2 and at most 1: forwards that draws share make the cost rise more slowly than the
    estimate. The curve rises if the estimate and the measured costs rise.

    Args:
        estimate: the cost before anything is measured; it rises with the setting.
        least: the smallest setting.
    """

    def __init__(self, estimate: Callable[[int], float], least: int):
        self.estimate, self.least = estimate, least
        self.measured: dict[int, float] = {}
        """Measured cost of an answer, by setting."""

    def cost(self, setting: int) -> float:
        """The expected cost of an answer."""
        at = math.log(self.estimate(setting))
        points = sorted((math.log(self.estimate(other)), math.log(cost)) for other, cost in self.measured.items())
        if not points:
            return math.exp(at)
        if len(points) == 1:
            return math.exp(points[0][1] + at - points[0][0])
        left = max(0, min(len(points) - 2, sum(x <= at for x, _ in points) - 1))
        (x, y), (next_x, next_y) = points[left], points[left + 1]
        slope = (next_y - y) / (next_x - x)
        if at < x:
            return math.exp(y + _clipped(slope) * (at - x))
        if at > next_x:
            return math.exp(next_y + _clipped(slope) * (at - next_x))
        return math.exp(y + slope * (at - x))

    def nearest(self, budget: float) -> int:
        """The setting whose cost has the smallest ratio to the budget, or of the budget to it; the smaller one in a tie.

        Raises ValueError if the largest setting that is tried costs less than the budget.
        """
        low, high = self.least, self.least
        if self.cost(low) >= budget:
            return low
        while self.cost(high) < budget:
            low, high = high, 2 * high
            if high > MOST:
                raise ValueError(f"a setting of {low:,} costs {self.cost(low):,.0f}, less than the budget of {budget:,.0f}")
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.cost(middle) < budget else (low, middle)
        return low if budget / self.cost(low) <= self.cost(high) / budget else high


def _clipped(slope: float) -> float:
    return min(1.0, max(_LEAST_SLOPE, slope))
