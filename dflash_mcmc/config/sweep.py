"""The points of a command line, the job of each point, and the outcomes of a sweep.

A job leaves out what does not apply to its point: a field that the point's options do not have, or a group that its probe does
not use. Points that do the same share a job. A field or a group that applies to no point is an error.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from dflash_mcmc.components import GROUPS, has_spec, name_of, registered, spec_of
from dflash_mcmc.config import mistakes
from dflash_mcmc.config.compose import Composer
from dflash_mcmc.config.identity import effects_of, point_label, swept_names
from dflash_mcmc.config.overrides import given_value, text_of
from dflash_mcmc.config.schema import Config, Job, component_of, to_config, to_typed, unused
from dflash_mcmc.errors import ConfigError, UserError, note, of_the_disk, tell
from dflash_mcmc.process import bars, program, ranks
from dflash_mcmc.types import RunResult

Texts = tuple[str, ...]
T = TypeVar("T")
_INPUTS = ("model", "draft", "dataset")
"""Groups whose options can be left out, because some experiments do not use these groups."""
_MOST_POINTS = 100_000
"""The most points of a sweep. More are a mistake in a range, which would take minutes and gigabytes to compose."""
_MOST_SILENT = 300
"""The most points that are checked without a progress bar: about a second's worth."""


def points_of(overrides: Sequence[Override], written: Sequence[Texts] = ()) -> Iterator[list[str]]:
    """The overrides of every job of a sweep. The later of two overrides of one field counts, as in Hydra. Raises UserError.

    Args:
        written: the points that a file of conf/sweep writes out. Each is combined with the values of the lists.
    """
    lists = list({override.get_key_element(): _values(override) for override in overrides}.values())
    if math.prod(map(len, lists)) > _MOST_POINTS:
        largest = max(lists, key=len)
        many = f"{'more than ' * (len(largest) > _MOST_POINTS)}{min(len(largest), _MOST_POINTS):,}"
        raise UserError(f"{largest[0].partition('=')[0]}: given {many} values in a sweep; allowed: at most {_MOST_POINTS:,} "
                        "points of a sweep, over all its fields")
    if not all(lists):
        return  # a list without a value has no point
    taken: dict[str, list[str]] = {}
    for key, _, asked in (text.partition("=") for point in written for text in point):
        taken.setdefault(key, []).append(asked)
    for key, _, asked in (text.partition("=") for texts in lists for text in texts):
        if key in taken and key not in (*GROUPS, "condition"):
            raise ConfigError(key, asked, f"no value, since the points of the sweep have their own, such as {taken[key][0]}")
        if key in taken and asked not in taken[key]:
            raise ConfigError(key, asked, f"options of the sweep's points: {', '.join(dict.fromkeys(taken[key]))}")
    beside = {texts[0].partition("=")[0]: texts for texts in lists}
    for point in written or ((),):
        own = {text.partition("=")[0]: text for text in point}
        if all(own[key] in texts for key, texts in beside.items() if key in own):
            open_lists = [texts for key, texts in beside.items() if key not in own]
            yield from ([*point, *texts] for texts in itertools.product(*open_lists))


def _values(override: Override) -> list[str]:
    """One override for each value of a swept override; any other override unchanged."""
    key, text = override.get_key_element(), text_of(override)
    if not override.is_sweep_override():
        return [text]
    if key == "sweep":
        raise UserError(f"sweep: given several values, {given_value(override)}; allowed: one value, which defines the points")
    try:
        # One value too many is enough for the error: a range of the command line may have any length.
        return [f"{key}={value}" for value in itertools.islice(override.sweep_string_iterator(), _MOST_POINTS + 1)]
    except (HydraException, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"cannot sweep {text!r}: {' '.join(str(error).split())}; allowed: values, or a range(...)") from error


def job_of(composing: Composer, texts: Sequence[str]) -> Job:
    """The checked job of overrides without swept values. Raises UserError.

    If an experiment chooses the probe, a model, draft or dataset that the probe does not use is left out with a note. One
    command line therefore suits all experiments.
    """
    composed, choices, _ = composing.compose(texts)
    config = to_config(composed)
    overrides = [composing.parse(text) for text in texts]
    may_be_idle = () if any(override.key_or_group == "probe" for override in overrides) else _INPUTS
    for override in _idle(config, overrides):
        name, _, value = text_of(override).lstrip("+~").partition("=")
        if name in may_be_idle:
            note(f"{name}={value} is left out where nothing uses it: probe={name_of(config.probe)}")
            continue
        probe = name_of(config.probe)
        raise ConfigError(name, value, f"no override of {_group(override)}, since probe={probe} does not use it")
    return Job(config, tuple(text_of(one) for one in composing.overrides(texts) if not one.is_hydra_override()), choices)


def note_idle(job: Job, overrides: Sequence[Override]) -> None:
    """Prints a note for each override of a job that has no effect. In a sweep such values are common, outside it a mistake."""
    for override in overrides:
        group, dot, last = override.key_or_group.partition(".")
        if not dot or group not in GROUPS:
            continue
        component: Any = component_of(job.config, group)
        chosen = job.choices[group]
        if group == "draft" and component.is_null and chosen != name_of(component):
            note(f"{override.key_or_group} has no effect: nothing uses draft={chosen}")
        elif any(spec_of(field).no_effect for field in dataclasses.fields(component)
                 if field.name == last and has_spec(field)):
            note(f"{override.key_or_group} has no effect with {group}={chosen}")


def jobs_of(composing: Composer, points: Sequence[Sequence[str]]) -> Iterator[Job]:
    """The checked job of each point of a sweep, in order. Points that do the same share the job of the first one.

    A job leaves out overrides that do not apply to it, and swept values that have no effect in it. Raises UserError, whose
    line names the point.
    """
    optional = _optional_of(composing, points)
    kept = [_applying(composing, tuple(texts), optional) for texts in points]
    everywhere = set(kept[0]).intersection(*kept)

    def checked(texts: Texts) -> Job:
        try:
            return job_of(composing, texts)
        except UserError as error:
            if own := [text for text in texts if text not in everywhere]:
                error.args = (f"{error}; at the point {' '.join(own)}",)
            raise

    jobs = {texts: checked(texts) for texts in _shown(tuple(dict.fromkeys(kept)), "points")}  # equal texts are one job
    effects = {texts: _effects(job) for texts, job in jobs.items()}
    alike: dict[str, list[int]] = {}
    for index, texts in enumerate(kept):
        alike.setdefault(effects[texts], []).append(index)
    for effects_of_all, indices in alike.items():
        first, needed = points[indices[0]], kept[indices[0]]
        # What varies among points that do the same is left out of the label, if the first point does the same without it.
        left = tuple(text for text in needed if all(text in kept[index] for index in indices))
        with contextlib.suppress(UserError):  # a needed value is missing, such as the draft
            if left != needed and _effects(job_of(composing, left)) == effects_of_all:
                needed = left
        job = jobs[needed] if needed in jobs else job_of(composing, needed)
        yield job._replace(left_out=tuple(composing.parse(text).key_or_group for text in first if text not in needed))


def _optional_of(composing: Composer, points: Sequence[Sequence[str]]) -> frozenset[str]:
    """The names of the fields and groups that apply to some of the points of a sweep but not to all.

    Raises UserError for a field that no point has.
    """
    lacking = [composing.lacking(texts) for texts in _shown(points, "fields")]
    # A field that no point has is a typing mistake; one that some points have applies only there.
    if nowhere := set(lacking[0]).intersection(*lacking):
        name = next(name for name in lacking[0] if name in nowhere)
        fields = {field for texts in points for field in composing.known_fields(name.rpartition(".")[0], texts)}
        raise mistakes.in_no_point(name, sorted(fields))
    optional = frozenset(name for each in lacking for name in each)
    idle = [_idle_names(composing, _applying(composing, tuple(texts), optional)) for texts in _shown(points, "values")]
    return optional | {name for name in set().union(*idle) if not all(name in other for other in idle)}


def _shown(points: Sequence[T], title: str) -> Iterator[T]:
    """The points, with a progress bar if one waits for them."""
    with bars.Bar(len(points), "point", f"checking {title}", shown=len(points) > _MOST_SILENT) as bar:
        for point in points:
            yield point
            bar.update()


def _effects(job: Job) -> str:
    return json.dumps(effects_of(job.config), sort_keys=True, default=str)


def _applying(composing: Composer, texts: Texts, optional: frozenset[str]) -> Texts:
    """The overrides without those that are optional and do not apply. Raises UserError."""
    if not optional:
        return texts
    out = optional.intersection(composing.lacking(texts))
    kept = tuple(text for text in texts if composing.parse(text).key_or_group not in out)
    idle = optional.intersection(_idle_names(composing, kept)) if optional else set()
    return tuple(text for text in kept if composing.parse(text).key_or_group not in idle)


def _idle_names(composing: Composer, texts: Texts) -> set[str]:
    """The names of the overrides of groups that the probe does not use. Raises UserError."""
    probe = registered("probe").get(composing.choices(texts)["probe"])
    if probe is not None and probe.cls.is_null:
        return set()
    config = to_typed(composing.compose(texts).values, Config)
    return {override.key_or_group for override in _idle(config, [composing.parse(text) for text in texts])}


def _idle(config: Config, overrides: Sequence[Override]) -> list[Override]:
    """The overrides of groups that the probe does not use."""
    idle = unused(config)
    return [override for override in overrides if _group(override) in idle]


def _group(override: Override) -> str:
    return override.key_or_group.partition("/")[0].partition(".")[0]


def differing(jobs: Sequence[Sequence[str]]) -> list[str]:
    """The overrides of each job that are not common to all jobs, as text; all overrides of a single job."""
    common = set.intersection(*map(set, jobs)) if len(jobs) > 1 else set()
    return [" ".join(text for text in job if text not in common) for job in jobs]


class Outcome(NamedTuple):
    """What became of a job of a sweep."""

    label: str
    """The overrides that are not common to all jobs."""
    state: str
    """`done`, `before` (complete before this sweep), `same` (the run of an earlier job), `left` to others, `failed` by a
    mistake of the user, or `bug`."""


def run_jobs(jobs: Sequence[Job], run: Callable[[Job], RunResult]) -> list[Outcome]:
    """Runs the jobs of a sweep. A job that fails does not stop the others: neither a mistake nor a bug costs later points."""
    overrides = [job.overrides for job in jobs]
    swept, outcomes, folders = swept_names(overrides), list[Outcome](), set[Path]()
    for number, (job, label) in enumerate(zip(jobs, differing(overrides), strict=True), 1):
        try:
            result = run(job._replace(title=f"[{number}/{len(jobs)}] {point_label(job, swept)}"))
        except Exception as error:
            outcomes.append(Outcome(label, _failed(of_the_disk(error) or error, label)))
            continue
        before = "same" if result.folder in folders else "left" if result.num_left else "before"
        folders.add(result.folder)
        outcomes.append(Outcome(label, "done" if result.num_new else before))
    return outcomes


def _failed(error: Exception, label: str) -> str:
    """Prints why a job has failed, and returns its state."""
    of_user = isinstance(error, UserError)
    if not of_user or os.environ.get("DFLASH_MCMC_TRACEBACK"):
        traceback.print_exception(error)
    reason = str(error) if of_user else f"{type(error).__name__}: {' '.join(str(error).split())}"
    if ranks.rank():
        program.print_error(reason)
    else:
        tell(f"failed: {label}: {reason}")
    return "failed" if of_user else "bug"


def report(outcomes: Sequence[Outcome]) -> int:
    """Prints which jobs failed, for reasons that are printed already, and the number of jobs with each outcome.

    Returns:
        The exit code: 0, 2 if jobs failed by mistakes of the user, 1 if one failed by a bug.
    """
    states = [outcome.state for outcome in outcomes]
    failed = [outcome.label for outcome in outcomes if outcome.state in ("failed", "bug")]
    if failed and len(states) > 1:
        print(f"failed, with the reasons above: {', '.join(failed)}", file=sys.stderr)
    same = f", {states.count('same')} equal to the run of an earlier job" if "same" in states else ""
    same += f", {states.count('left')} being drawn by other processes" if "left" in states else ""
    print(f"{len(states)} job{'s' * (len(states) != 1)}: {states.count('done')} done now, "
          f"{states.count('before')} already complete{same}, {len(failed)} failed")
    return 1 if "bug" in states else 2 if failed else 0
