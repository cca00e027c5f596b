"""Turns a command line into its jobs. Every mistake is one line and is reported before anything is loaded or written."""

from __future__ import annotations

import copy
import io
import sys
import threading
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf

from dflash_mcmc.config import mistakes
from dflash_mcmc.config.compose import Composer
from dflash_mcmc.config.launcher import Slurm, store_fields, to_launcher
from dflash_mcmc.config.overrides import SHOWING, given_value, names_if_present, parse_arguments, readable, text_of
from dflash_mcmc.config.schema import PACKAGE, Job, Root, store_schema, store_schemas, to_typed
from dflash_mcmc.config.sweep import Sweep, job_of, jobs_of, note_idle, optional_of, points_of
from dflash_mcmc.errors import ConfigError, UserError, note
from dflash_mcmc.options import config_folder
from dflash_mcmc.registry import GROUPS

_LAUNCHERS = ("basic", "slurm")
_LAUNCHING = ("hydra.mode", "hydra/launcher", "hydra.launcher.")
"""The settings of Hydra that have an effect on every command line."""
_SWEEPING = ("hydra/sweeper", "hydra.sweeper.params")
"""Those that have one in a sweep."""
_SEARCHING = ("hydra.sweeper.", "hydra.sweep.dir")
"""Those that have one in a search: Hydra's sweeper chooses the points, and writes its result into the folder."""
_kept_composer = cache(Composer)
_hydra_lock = threading.RLock()
"""Held while Hydra is initialised, because its state belongs to the process and not to a thread."""


def prepare() -> None:
    """Registers schemas and resolvers with Hydra, which is initialised with them."""
    OmegaConf.register_new_resolver("dflash_assets", lambda: str(PACKAGE / "assets"), replace=True)
    # Hydra copies the store with all schemas for each composition, a third of its time, and copies again what it takes out.
    store = ConfigStore.instance()
    store.__deepcopy__ = lambda memo: store  # type: ignore[attr-defined]
    store_schemas()
    store_fields()


@contextmanager
def composer(root: str, overrides: Sequence[str] = ()) -> Iterator[Composer]:
    """Initialises Hydra and yields the process's composer for a root file of `conf/`. A composer keeps its results.

    Args:
        overrides: the overrides that will be composed. If they have a search path, the composer is new, because options in a
            folder of the user may change while the process runs (in a notebook).
    """
    own = any(mistakes.SEARCH_PATH in text for text in overrides)
    with _hydra_lock:
        prepare()
        with initialize_config_dir(str(config_folder()), version_base="1.3"):
            yield Composer(root) if own else _kept_composer(root)


def compose_once(root: str, overrides: Sequence[str], cls: type[Root]) -> tuple[Root, Mapping[str, str]]:
    """The typed object of a root configuration and the option chosen in each group, for programs without sweeps.

    Raises UserError.
    """
    store_schema(root, cls)
    with composer(root) as composing:
        parsed = [composing.parse(text) for text in overrides]
        mistakes.check_search_path(parsed)
        mistakes.check_idle(parsed)
        composed, choices, _ = composing.compose(overrides)
        return to_typed(composed, cls), choices


class Command(NamedTuple):
    """A checked command line."""

    jobs: list[Job]
    """The jobs of a run or a grid; for a search, the jobs with which its ranges were checked. Empty if `shows`."""
    sweep: Sweep | None = None
    """None for a single run."""
    launcher: Slurm | None = None
    """The fields of hydra/launcher=slurm, which submits the jobs; None if they run here."""
    overrides: tuple[str, ...] = ()
    """The overrides as they were typed, swept ones included."""
    shows: bool = False
    """Whether a flag of Hydra shows something, such as `--cfg job`, and nothing is run."""
    num_points: int = 1
    """The number of points. Points that do the same share a job."""
    optional: frozenset[str] = frozenset()
    """Names of the fields and groups that are left out where they do not apply."""
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
        mistakes.check_search_path(overrides)
        if flags.cfg or flags.info:
            if flags.if_present or any(override.is_sweep_override() for override in overrides):
                raise UserError("--cfg and --info: given with several values or --if-present; allowed: the command line of "
                                "one run")
            composing.compose(shown := [text_of(one) for one in overrides])  # no check as a run: nothing is read
            return Command([], overrides=tuple(shown), shows=True)
        # Hydra's own settings are the same at every point, so that they are composed without the swept values.
        hydra = composing.with_hydra([text_of(one) for one in overrides if not one.is_sweep_override()]).hydra
        # The fields of hydra/launcher=slurm, where it is chosen
        for override in overrides:
            if override.is_hydra_override() and override.is_sweep_override():
                raise UserError(f"{override.get_key_element()}: given several values, {given_value(override)}; "
                                "allowed: one, for all jobs")
        chosen = hydra.runtime.choices["hydra/launcher"]
        if chosen not in _LAUNCHERS:
            raise ConfigError("hydra/launcher", chosen,
                              f"{' or '.join(_LAUNCHERS)}; all GPUs of a machine: launchers/local.py")
        sweep, launcher = _sweep(hydra, flags.multirun), to_launcher(hydra.launcher) if chosen == "slurm" else None
        mistakes.check_idle(overrides, (*_LAUNCHING, *(_SWEEPING if sweep else ()),
                                        *(_SEARCHING if sweep and sweep.searches else ())))
        points = _points(composing, overrides, sweep)
        optional = optional_of(composing, points, names_if_present(flags))
        if sweep and sweep.searches:
            for override in (*map(composing.parse, sweep.params), *overrides):
                if override.key_or_group in optional and override.is_sweep_override():
                    raise UserError(f"{override.key_or_group}: given several values in a search, {given_value(override)}; "
                                    "allowed: one value, since not every point has this field, or a search for each option "
                                    "that has it")
            jobs = [job_of(composing, point, optional) for point in points]
        else:
            jobs = list(jobs_of(composing, points, optional))
            if sweep is None:
                note_idle(jobs[0], [composing.parse(text) for text in jobs[0].overrides])
            elif len(seeds := {job.config.seed for job in jobs}) > 1:
                note(f"seed: {len(seeds)} values make as many runs, each with a row of its own in tables; num_chains="
                     f"{len(seeds)} draws as many samples of each problem in one run, whose row has their mean")
    if any((job.choices["hydra/launcher"] == "slurm") != (launcher is not None) for job in jobs):
        raise UserError("hydra/launcher: given slurm at some points of the sweep only; allowed: one launcher for all points")
    return Command(jobs, sweep, launcher, tuple(map(text_of, overrides)), False, len(points), optional)


def _sweep(hydra: DictConfig, asked_for: bool) -> Sweep | None:
    """The sweep that `-m` or conf/sweep requests. Raises UserError."""
    if not asked_for and hydra.mode != RunMode.MULTIRUN:
        return None
    sweeper = hydra.sweeper
    direction = sweeper.get("direction", "maximize")
    if getattr(direction, "name", direction) != "maximize":  # an enumeration, whose first value is minimize
        raise ConfigError("hydra.sweeper.direction", getattr(direction, "name", direction), "maximize, with every objective")
    params = dict(sweeper.get("params") or {})
    points = tuple(tuple(line.split()) for line in str(params.pop("points", "")).splitlines())
    return Sweep(tuple(f"{name}={values}" for name, values in params.items()), points, sweeper.get("n_trials"),
                 hydra.runtime.choices["hydra/sweeper"] != "basic")


def _points(composing: Composer, overrides: Sequence[Override], sweep: Sweep | None) -> list[list[str]]:
    """The overrides of every job of a sweep, or of the single job. Raises UserError."""
    if sweep is not None:
        if not (of_sweep := list(points_of([*map(composing.parse, sweep.params), *overrides], sweep))):
            raise UserError("the sweep: given no point; allowed: at least one value of everything that is swept")
        return of_sweep
    for override in overrides:
        if override.is_sweep_override():
            raise UserError(f"{override.key_or_group}: given several values, {given_value(override)}; allowed: one value, or "
                            "a sweep with -m before the overrides")
    return [[text_of(override) for override in overrides]]


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


def search(command: Command, run: Callable[[Sequence[str], Callable[[], Job]], float | None]) -> None:
    """Lets Hydra's sweeper choose the points of a command, and calls `run` for each of them.

    Args:
        run: takes a point's overrides and the function that composes its job, and returns the objective. The sweeper
            counts an exception as a failed trial.
    """
    with composer("config", command.overrides) as composing:
        overrides = [composing.parse(text) for text in command.overrides]
        of_hydra = [text_of(override) for override in overrides if override.is_hydra_override()]
        master = _master(composing, command)
        trials = _Trials(master)
        silent: Any = SimpleNamespace(on_job_start=lambda **_: None, on_job_end=lambda **_: None)
        sweeper = Plugins.instance().instantiate_sweeper(
            config=master, hydra_context=HydraContext(config_loader=cast(ConfigLoader, trials), callbacks=silent),
            task_function=lambda _: run(trials.point, lambda: job_of(composing, [*of_hydra, *trials.point], command.optional)))
        sweeper.sweep([text for text in command.overrides if text not in of_hydra])


class _Trials:
    """The loader that gives Hydra's launcher the configuration of each trial. It notes the overrides and composes nothing.

    The launcher calls no other method of a ConfigLoader.
    """

    def __init__(self, master: DictConfig):
        self._master = master
        self.point: list[str] = []
        """The overrides of the trial that runs."""

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        """The configuration that Hydra runs a trial with: Hydra's settings, and the overrides that name the trial."""
        self.point = list(sweep_overrides)
        of_trial = copy.deepcopy(self._master)
        of_trial.hydra.overrides.task = self.point
        return of_trial


def _master(composing: Composer, command: Command) -> DictConfig:
    """The configuration that the sweeper itself reads: Hydra's node, and the root fields that name the sweep's folder."""
    single = [one for one in map(composing.parse, command.overrides) if not one.is_sweep_override()]
    master = composing.with_hydra([text_of(one) for one in single])
    # A field of a component may not exist while its group is swept.
    of_root = [text_of(one) for one in single
               if "." not in one.key_or_group or one.key_or_group.partition(".")[0] not in GROUPS]
    for name, value in composing.compose(of_root).values.items():
        if name not in GROUPS:
            OmegaConf.update(master, str(name), value)
    master.hydra.mode = RunMode.MULTIRUN
    return master


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
    if len(command.jobs) != 1 or command.sweep is not None:
        raise UserError(f"{program}: given several values or a flag of Hydra; allowed: one value of each field")
    return command.jobs[0]
