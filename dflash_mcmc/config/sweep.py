"""A sweep as a whole: the jobs that a command line stands for, and what became of each of them."""

from __future__ import annotations

import itertools
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import HydraException

from dflash_mcmc.errors import UserError, of_the_disk
from dflash_mcmc.process import ranks
from dflash_mcmc.registry import GROUPS
from dflash_mcmc.statistics import summaries

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from dflash_mcmc.run.loop import RunResult


class Sweep(NamedTuple):
    """How the points of a sweep come about."""

    params: tuple[str, ...] = ()
    """Overrides of `hydra.sweeper.params`: those of conf/sweep."""
    num_trials: int | None = None
    """Of a search, whose sweeper chooses the points; None for a grid."""


def points(overrides: Sequence[Override], sweep: Sweep) -> Iterator[list[str]]:
    """The overrides of every job of a grid. Of a search: one point, and each other value or end of a range in its place.

    Of two overrides of one field the later one counts, as Hydra has it. Raises UserError, of one line.
    """
    lists = list({override.get_key_element(): _values(override, sweep.num_trials is not None)
                  for override in overrides}.values())
    if sweep.num_trials is None:
        yield from map(list, itertools.product(*lists))
        return
    first = [values[0] for values in lists]
    yield first
    for place, values in enumerate(lists):
        for value in values[1:]:
            yield [*first[:place], value, *first[place + 1 :]]


def _values(override: Override, search: bool) -> list[str]:
    """An override for each value that a swept one stands for; itself where it is none."""
    key, text = override.get_key_element(), override.input_line
    if not override.is_sweep_override():
        return [text]
    if key == "sweep":
        raise UserError(f"sweep: given several values, {text.partition('=')[2]}; allowed: one, the points of which are swept")
    try:
        if isinstance(override.value(), IntervalSweep):
            if not search:
                raise UserError(f"cannot sweep {text!r} as a grid; allowed: values, a range(...), or a search such as "
                                "sweep=optuna")
            return [f"{key}={override.value().start}", f"{key}={override.value().end}"]
        return [f"{key}={value}" for value in override.sweep_string_iterator()]
    except (HydraException, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"cannot read {text!r}: {' '.join(str(error).split())}") from error


def deferred(override: Override) -> str:
    """The override as a sweep over its one value, where it belongs to a component.

    Hydra composes a sweep's configuration once without the groups that are swept, where a field such as `blend.beta` may
    have no place yet; what is swept is left out of that. Only bare words and numbers, which Hydra gives back as they are.
    """
    key, _, value = override.input_line.partition("=")
    of_component = key.partition(".")[0] in GROUPS and "." in key
    bare = isinstance(override.value(), (str, int, float)) and not set(value) & set("'\"$\\")
    return f"{key}=choice({value})" if of_component and bare and value else override.input_line


def differing(jobs: Sequence[Sequence[str]]) -> list[str]:
    """What each job has that not all have, as text; all that it has where it is alone."""
    common = set.intersection(*map(set, jobs)) if len(jobs) > 1 else set()
    return [" ".join(text for text in job if text not in common) for job in jobs]


class _Outcome(NamedTuple):
    overrides: list[str]
    state: str
    """`done`, `before` (complete before), `same` (the run of a job before it) or `failed`."""
    reason: str = ""
    value: float | None = None
    """The objective."""


class SweepOutcomes:
    """Runs the jobs of a sweep: one that fails does not stop the others."""

    def __init__(self, sweep: Sweep):
        self.search = sweep.num_trials is not None
        self._outcomes: list[_Outcome] = []
        self._folders: set[Path] = set()
        self._exit_code = 0

    def job(self, task: Callable[[DictConfig], tuple[RunResult, float | None]]) -> Callable[[DictConfig], float | None]:
        """The task of a job for Hydra, which returns the objective."""
        from hydra.core.hydra_config import HydraConfig

        def run(composed: DictConfig) -> float | None:
            overrides = list(HydraConfig.get().overrides.task)
            try:
                result, value = task(composed)
                if self.search and value is None:
                    raise UserError("probe: given one whose summary has no accuracy; allowed: probe=none in a search")
            except Exception as error:
                self._fail(overrides, of_the_disk(error) or error)
                if self.search:  # its sweeper learns of failures by exceptions
                    raise
                return None
            state = "done" if result.num_new else "same" if result.folder in self._folders else "before"
            self._folders.add(result.folder)
            self._outcomes.append(_Outcome(overrides, state, value=value))
            return value

        return run

    def _fail(self, overrides: list[str], error: Exception) -> None:
        of_user = isinstance(error, UserError)
        if not of_user or os.environ.get("DFLASH_MCMC_TRACEBACK"):
            traceback.print_exception(error)
        reason = str(error) if of_user else f"{type(error).__name__}: {' '.join(str(error).split())}"
        if not self.search:  # its sweeper tells it
            tell(reason)
        self._exit_code = 2 if of_user and self._exit_code != 1 else 1
        self._outcomes.append(_Outcome(overrides, "failed", reason))

    @property
    def all_failed(self) -> bool:
        """Whether there were jobs, and none of them came to its end."""
        return bool(self._outcomes) and all(outcome.state == "failed" for outcome in self._outcomes)

    def tell(self, objective: str) -> int:
        """Prints how many jobs did what, and a line for each that failed. Returns the exit code: 2 with those, 1 with bugs."""
        states = [outcome.state for outcome in self._outcomes]
        labels = differing([outcome.overrides for outcome in self._outcomes])
        for label, outcome in zip(labels, self._outcomes, strict=True):
            if outcome.state == "failed":
                print(f"failed: {label}: {outcome.reason}", file=sys.stderr)
        found = {label: outcome.value for label, outcome in zip(labels, self._outcomes, strict=True)
                 if outcome.value is not None}
        if self.search and found:
            best = max(found.values())
            label, *alike = [label for label, value in found.items() if value == best]
            tie = f", a tie with {len(alike)} more" if alike else ""
            print(f"best of {len(found)}: {objective} {best:.4g} with {label}{tie}")
        same = f", {states.count('same')} the same run as another" if "same" in states else ""
        print(f"{len(states)} job{'s' * (len(states) != 1)}: {states.count('done')} done now, "
              f"{states.count('before')} complete before{same}, {states.count('failed')} failed")
        return self._exit_code


def tell(reason: str) -> None:
    """An error, in one line, and which process of a launch had it."""
    process = f" (process {ranks.rank()})" if ranks.rank() else ""
    print(f"error{process}: {reason}", file=sys.stderr)


def objective_of(name: str, summary: dict) -> float | None:
    """What a search maximises: `accuracy`, or `accuracy_per_cost`, correct samples per million token-forwards.

    Of one answer a problem where the run has it (`aggregate`).
    """
    summary = summaries.aggregate_of(summary) or summary
    accuracy = summary.get("accuracy")
    if name == "accuracy" or accuracy is None:
        return accuracy
    return 1e6 * summary["correct"] / summary["token_forwards"]
