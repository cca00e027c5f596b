"""A sweep as a whole: the points of a command line, and the outcome of each of its jobs."""

from __future__ import annotations

import itertools
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import HydraException

from dflash_mcmc.config.labels import label_of
from dflash_mcmc.config.overrides import given_value, text_of
from dflash_mcmc.errors import UserError, of_the_disk, tell
from dflash_mcmc.process import ranks

if TYPE_CHECKING:
    from dflash_mcmc.config.jobs import Job
    from dflash_mcmc.runner.result import RunResult


_MOST_POINTS = 100_000
"""The most points of a sweep. More are a mistake in a range, which would take minutes and gigabytes to compose."""
_IN_A_LABEL = ("condition", "blend", "draft", "sampler", "decoder")
"""Groups whose options the label of a run names."""


class Sweep(NamedTuple):
    """Where the points of a sweep come from."""

    params: tuple[str, ...] = ()
    """The overrides in `hydra.sweeper.params`, which a file of conf/sweep sets."""
    num_trials: int | None = None
    """Number of points of a search; None for a grid."""
    searches: bool = False
    """Whether a sweeper chooses the points, such as Optuna's; otherwise they are a grid."""


def points(overrides: Sequence[Override], sweep: Sweep) -> Iterator[list[str]]:
    """The overrides of every job of a grid. For a search, those of one point and of its variants.

    A variant has another value from one list, or the other end of one range. With the variants the caller checks every value.
    The later of two overrides of one field counts, as in Hydra. Raises UserError.
    """
    lists = list({override.get_key_element(): _values(override, sweep.searches) for override in overrides}.values())
    if math.prod(map(len, lists)) > _MOST_POINTS:
        largest = max(lists, key=len)
        many = f"{'more than ' * (len(largest) > _MOST_POINTS)}{min(len(largest), _MOST_POINTS):,}"
        raise UserError(f"{largest[0].partition('=')[0]}: given {many} values in a sweep; allowed: at most {_MOST_POINTS:,} "
                        "points of a sweep, over all its fields")
    if not sweep.searches:
        yield from map(list, itertools.product(*lists))
        return
    first = [values[0] for values in lists]
    yield first
    for place, values in enumerate(lists):
        for value in values[1:]:
            yield [*first[:place], value, *first[place + 1 :]]


def _values(override: Override, searches: bool) -> list[str]:
    """One override for each value of a swept override; any other override unchanged."""
    key, text = override.get_key_element(), text_of(override)
    if not override.is_sweep_override():
        return [text]
    if key == "sweep":
        raise UserError(f"sweep: given several values, {given_value(override)}; allowed: one value, which defines the points")
    try:
        swept = override.value()
        if isinstance(swept, IntervalSweep):
            if not searches:
                raise UserError(f"cannot sweep {text!r} as a grid; allowed: values, a range(...), or a search such as "
                                "sweep=optuna")
            return [f"{key}={swept.start}", f"{key}={swept.end}"]
        # One value too many is enough for the error: a range of the command line may have any length.
        return [f"{key}={value}" for value in itertools.islice(override.sweep_string_iterator(), _MOST_POINTS + 1)]
    except (HydraException, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"cannot read {text!r}: {' '.join(str(error).split())}") from error


def differing(jobs: Sequence[Sequence[str]]) -> list[str]:
    """The overrides of each job that are not common to all jobs, as text; all overrides of a single job."""
    common = set.intersection(*map(set, jobs)) if len(jobs) > 1 else set()
    return [" ".join(text for text in job if text not in common) for job in jobs]


def swept_names(jobs: Sequence[Sequence[str]]) -> list[str]:
    """The names of the overrides that are not common to all jobs, in the order of the command line."""
    common = set.intersection(*map(set, jobs)) if jobs else set()
    return list(dict.fromkeys(text.partition("=")[0] for job in jobs for text in job if text not in common))


class _Outcome(NamedTuple):
    overrides: Sequence[str]
    state: str
    """`done`, `before` (complete before this sweep), `same` (the run of an earlier job) or `failed`."""
    reason: str = ""
    value: float | None = None
    """The objective."""


class SweepOutcomes:
    """Runs the jobs of a sweep. A job that fails does not stop the others."""

    def __init__(self, sweep: Sweep, run: Callable[[Job], RunResult], jobs: Sequence[Job] = ()):
        self._searches, self._run = sweep.searches, run
        self._common = set.intersection(*(set(job.overrides) for job in jobs)) if len(jobs) > 1 else set[str]()
        self._num_jobs, self._swept = sweep.num_trials or len(jobs), swept_names([job.overrides for job in jobs])
        self._outcomes: list[_Outcome] = []
        self._folders: set[Path] = set()
        self._exit_code = 0

    def run(self, overrides: Sequence[str], compose: Callable[[], Job]) -> float | None:
        """Runs the job that `compose` returns and notes its outcome. Returns the objective, None if there is none.

        In a search an error is raised again, because a search notices failures by exceptions.
        """
        try:
            job = compose()
            result = self._run(job._replace(title=self._title(job)))
            value = objective_of(job.config.objective, result.summary)
            if self._searches and value is None:
                raise UserError("probe: given one whose summary has no accuracy; allowed: probe=none in a search")
        except Exception as error:
            self._fail(overrides, of_the_disk(error) or error)
            if self._searches:
                raise
            return None
        state = "done" if result.num_new else "same" if result.folder in self._folders else "before"
        self._folders.add(result.folder)
        self._outcomes.append(_Outcome(overrides, state, value=value))
        return value

    def _title(self, job: Job) -> str:
        """The place of the next job in the sweep, its label, and the values that the sweep sets and the label lacks."""
        given = {key: value for key, _, value in (text.partition("=") for text in job.overrides)}
        fields = {key: given[key] for key in self._swept if key in given and key not in _IN_A_LABEL}
        return f"[{len(self._outcomes) + 1}/{self._num_jobs}] {label_of(job.config, fields)}"

    def _fail(self, overrides: Sequence[str], error: Exception) -> None:
        of_user = isinstance(error, UserError)
        if not of_user or os.environ.get("DFLASH_MCMC_TRACEBACK"):
            traceback.print_exception(error)
        reason = str(error) if of_user else f"{type(error).__name__}: {' '.join(str(error).split())}"
        if ranks.rank():
            print_error(reason)
        elif not self._searches:  # the sweeper of a search prints it
            given = " ".join(text for text in overrides if text not in self._common)
            tell(f"failed: {given}: {reason}")
        self._exit_code = 2 if of_user and self._exit_code != 1 else 1
        self._outcomes.append(_Outcome(overrides, "failed", reason))

    @property
    def all_failed(self) -> bool:
        """Whether there were jobs and all of them failed."""
        return bool(self._outcomes) and all(outcome.state == "failed" for outcome in self._outcomes)

    def report(self, objective: str) -> int:
        """Prints which jobs failed, and the number of jobs with each outcome. The reasons in a grid are printed already.

        Returns:
            The exit code: 0, 2 if jobs failed by mistakes of the user, 1 if one failed by a bug.
        """
        states = [outcome.state for outcome in self._outcomes]
        labels = differing([outcome.overrides for outcome in self._outcomes])
        failed = [(label, outcome.reason) for label, outcome in zip(labels, self._outcomes, strict=True)
                  if outcome.state == "failed"]
        if self._searches:
            for label, reason in failed:
                tell(f"failed: {label}: {reason}")
        elif failed and len(states) > 1:
            print(f"failed, with the reasons above: {', '.join(label for label, _ in failed)}", file=sys.stderr)
        found = {label: outcome.value for label, outcome in zip(labels, self._outcomes, strict=True)
                 if outcome.value is not None}
        if self._searches and found:
            best = max(found.values())
            label, *alike = [label for label, value in found.items() if value == best]
            tie = f", a tie with {len(alike)} more" if alike else ""
            print(f"best of {len(found)}: {objective} {best:.4g} with {label}{tie}")
        same = f", {states.count('same')} equal to the run of an earlier job" if "same" in states else ""
        print(f"{len(states)} job{'s' * (len(states) != 1)}: {states.count('done')} done now, "
              f"{states.count('before')} already complete{same}, {states.count('failed')} failed")
        return self._exit_code


def print_error(reason: str) -> None:
    """Prints an error in one line. In a launch of several processes the line has the number of the process."""
    process = f" (process {ranks.rank()})" if ranks.rank() else ""
    tell(f"error{process}: {reason}")


def objective_of(name: str, summary: dict) -> float | None:
    """The value that a search maximises: `accuracy`, or `accuracy_per_cost`, the correct samples per million token-forwards.

    With `aggregate`, accuracy counts one answer for each problem, combined in the first way that it names.
    """
    from dflash_mcmc.statistics import summaries

    counted: dict[str, Any] = next(iter(summaries.aggregates_of(summary)), summary)
    accuracy = counted.get("accuracy")
    if name == "accuracy" or accuracy is None:
        return accuracy
    return 1e6 * counted["correct"] / counted["token_forwards"]
