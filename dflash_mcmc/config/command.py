"""Turns a command line into its jobs, one for each point of a sweep, and runs a sweep's jobs. Every mistake is one line and is
reported before anything is loaded or written.

A job leaves out what does not apply to its point: a field that the point's options do not have, or a group that its probe does
not use. Points that do the same share a job. A field or a group that applies to no point is an error.
"""

import dataclasses
import io
import itertools
import json
import math
import os
import sys
import threading
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf

from dflash_mcmc.components import GROUPS, has_spec, name_of, registered, spec_of
from dflash_mcmc.config import compose, schema
from dflash_mcmc.config.compose import SHOWING, Composer, given_value, parse_arguments, readable, text_of
from dflash_mcmc.config.identity import effects_of, point_label, swept_names
from dflash_mcmc.config.schema import Config, Job, Root, Slurm, component_of, to_typed, unused
from dflash_mcmc.errors import ConfigError, UserError, note, of_the_disk, tell
from dflash_mcmc.options import config_folder
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
    config = schema.to_config(composed)
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
        with suppress(UserError):  # a needed value is missing, such as the draft
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
        raise compose.in_no_point(name, sorted(fields))
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
    option = registered("probe").get(composing.choices(texts)["probe"])
    if option is not None and option.cls.is_null:
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


_LAUNCHERS = ("basic", "slurm")
_LAUNCHING = ("hydra.mode", "hydra/launcher", "hydra.launcher.")
"""The settings of Hydra that have an effect on every command line."""
_SWEEPING = "hydra.sweeper.params"
"""The one that has an effect in a sweep."""
_kept_composer = cache(Composer)
_hydra_lock = threading.RLock()
"""Held while Hydra is initialised, because its state belongs to the process and not to a thread."""


def prepare() -> None:
    """Registers schemas and resolvers with Hydra, which is initialised with them."""
    OmegaConf.register_new_resolver("dflash_assets", lambda: str(schema.PACKAGE / "assets"), replace=True)
    # Hydra copies the store with all schemas for each composition, a third of its time, and copies again what it takes out.
    store = ConfigStore.instance()
    store.__deepcopy__ = lambda memo: store  # type: ignore[attr-defined]
    schema.store_schemas()
    schema.store_launcher()


@contextmanager
def composer(root: str, overrides: Sequence[str] = ()) -> Iterator[Composer]:
    """Initialises Hydra and yields the process's composer for a root file of `conf/`. A composer keeps its results.

    Args:
        overrides: the overrides that will be composed. If they have a search path, the composer is new, because options in a
            folder of the user may change while the process runs (in a notebook).
    """
    own = any(compose.SEARCH_PATH in text for text in overrides)
    with _hydra_lock:
        prepare()
        with initialize_config_dir(str(config_folder()), version_base="1.3"):
            yield Composer(root) if own else _kept_composer(root)


def compose_once(root: str, overrides: Sequence[str], cls: type[Root]) -> tuple[Root, Mapping[str, str]]:
    """The typed object of a root configuration and the option chosen in each group, for programs without sweeps.

    Raises UserError.
    """
    schema.store_schema(root, cls)
    with composer(root) as composing:
        parsed = [composing.parse(text) for text in overrides]
        compose.check_search_path(parsed)
        compose.check_idle(parsed)
        composed, choices, _ = composing.compose(overrides)
        return to_typed(composed, cls), choices


class Command(NamedTuple):
    """A checked command line."""

    jobs: list[Job]
    """The jobs of a run or a sweep. Empty if `shows`."""
    is_sweep: bool = False
    launcher: Slurm | None = None
    """The fields of hydra/launcher=slurm, which submits the jobs; None if they run here."""
    overrides: tuple[str, ...] = ()
    """The overrides as they were typed, swept ones included."""
    shows: bool = False
    """Whether a flag of Hydra shows something, such as `--cfg job`, and nothing is run."""
    num_points: int = 1
    """The number of points. Points that do the same share a job."""
    memory: str | None = None
    """The memory of the largest engine, as a line; None if no memory was planned."""


def check_command(arguments: Sequence[str]) -> Command:
    """Composes and checks every job of the command line. Raises UserError.

    A sweep is checked as a whole: a mistake in its last point is reported before its first one starts.
    """
    flags = parse_arguments(arguments)
    if any(getattr(flags, name) for name in SHOWING):
        return Command([], shows=True)
    with composer("config", flags.overrides) as composing:
        overrides = [composing.parse(text) for text in flags.overrides]
        texts, swept = [text_of(one) for one in overrides], [one for one in overrides if one.is_sweep_override()]
        compose.check_search_path(overrides)
        if flags.cfg or flags.info:
            if swept:
                raise UserError("--cfg and --info: given with several values; allowed: the command line of one run")
            composing.compose(texts)  # no check as a run: nothing is read
            return Command([], overrides=tuple(texts), shows=True)
        # Hydra's own settings are the same at every point, so that they are composed without the swept values.
        hydra = composing.with_hydra([text_of(one) for one in overrides if one not in swept]).hydra
        for override in swept:
            if override.is_hydra_override():
                raise UserError(f"{override.get_key_element()}: given several values, {given_value(override)}; "
                                "allowed: one, for all jobs")
        chosen = hydra.runtime.choices["hydra/launcher"]
        if chosen not in _LAUNCHERS:
            raise ConfigError("hydra/launcher", chosen,
                              f"{' or '.join(_LAUNCHERS)}; all GPUs of a machine: launchers/local.py")
        is_sweep = flags.multirun or hydra.mode == RunMode.MULTIRUN
        launcher = schema.to_launcher(hydra.launcher) if chosen == "slurm" else None
        compose.check_idle(overrides, (*_LAUNCHING, _SWEEPING) if is_sweep else _LAUNCHING)
        points = [texts]
        if is_sweep:
            params = dict(hydra.sweeper.get("params") or {})
            written = [tuple(line.split()) for line in str(params.pop("points", "")).splitlines()]
            of_file = [composing.parse(f"{name}={values}") for name, values in params.items()]
            if not (points := list(points_of([*of_file, *overrides], written))):
                raise UserError("the sweep: given no point; allowed: at least one value of everything that is swept")
            jobs = list(jobs_of(composing, points))
            if len(seeds := {job.config.seed for job in jobs}) > 1:
                note(f"seed: {len(seeds)} values make as many runs, each with a row of its own in tables; num_chains="
                     f"{len(seeds)} draws as many samples of each problem in one run, whose row has their mean")
        elif swept:
            raise UserError(f"{swept[0].key_or_group}: given several values, {given_value(swept[0])}; allowed: one value, or "
                            "a sweep with -m before the overrides")
        else:
            jobs = [job_of(composing, texts)]
            note_idle(jobs[0], [composing.parse(text) for text in jobs[0].overrides])
    if any((job.choices["hydra/launcher"] == "slurm") != (launcher is not None) for job in jobs):
        raise UserError("hydra/launcher: given slurm at some points of the sweep only; allowed: one launcher for all points")
    return Command(jobs, is_sweep, launcher, tuple(texts), False, len(points))


def show_for_flag(arguments: Sequence[str]) -> None:
    """Prints what --cfg, --info, --hydra-help or --shell-completion ask for.

    The output of --cfg job begins with the option of each group as comments of YAML, because the values do not name it.
    """
    import hydra

    flags = parse_arguments(arguments)
    if flags.cfg or flags.info:
        with composer("config", flags.overrides) as composing:
            if flags.cfg in ("job", "all") and not flags.package:
                own = {group: option for group, option in composing.compose(flags.overrides).choices.items()
                       if not group.startswith(("hydra/", "schema/")) and "@" not in group}
                width = max(map(len, own))
                print("# option of each group", *(f"#   {group:<{width}}  {option}" for group, option in own.items()),
                      sep="\n", flush=True)
            arguments = [argument for text in arguments for argument in (
                map(text_of, composing.overrides([text])) if text in flags.overrides else [text])]
    prepare()
    sys.argv = [sys.argv[0], *map(readable, arguments)]
    shown = io.StringIO()  # printed here: Hydra shows a traceback where the reader of its output has gone
    try:
        with redirect_stdout(shown):
            hydra.main(config_path=str(config_folder()), config_name="config", version_base="1.3")(lambda composed: None)()
    finally:
        print(shown.getvalue(), end="", flush=True)


def options_of(parser: ArgumentParser, arguments: Sequence[str]) -> tuple[Namespace, list[str]]:
    """A program's own options, and the overrides. Raises UserError for an option that it does not have."""
    given, overrides = parser.parse_known_args(arguments)
    if unknown := [text for text in overrides if text.startswith("-")]:
        raise UserError(f"{unknown[0]}: not an option; see {parser.prog} --help")
    return given, overrides


def single_job(program: str, overrides: Sequence[str], groups: Sequence[str], add: Callable[[set[str]], list[str]]) -> Job:
    """The checked job of overrides of some groups, after those that `add` makes of the given names. Raises UserError."""
    names = {text.partition("=")[0].lstrip("+~") for text in overrides}
    if others := [name for name in names if name.partition(".")[0] not in groups]:
        raise UserError(f"{min(others)}: given with {program}; allowed: {', '.join(groups)}, and their fields")
    command = check_command([*add(names), *overrides])
    if len(command.jobs) != 1 or command.is_sweep:
        raise UserError(f"{program}: given several values or a flag of Hydra; allowed: one value of each field")
    return command.jobs[0]
