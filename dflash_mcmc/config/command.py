"""Turns a command line into its jobs. Every mistake is one line and is reported before anything is loaded or written."""

import io
import sys
import threading
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import cache
from typing import NamedTuple

from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.types import RunMode
from omegaconf import OmegaConf

from dflash_mcmc.config import mistakes
from dflash_mcmc.config.compose import Composer
from dflash_mcmc.config.launcher import Slurm, store_fields, to_launcher
from dflash_mcmc.config.overrides import SHOWING, given_value, parse_arguments, readable, text_of
from dflash_mcmc.config.schema import PACKAGE, Job, Root, store_schema, store_schemas, to_typed
from dflash_mcmc.config.sweep import job_of, jobs_of, note_idle, points_of
from dflash_mcmc.errors import ConfigError, UserError, note
from dflash_mcmc.options import config_folder

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
        mistakes.check_search_path(overrides)
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
        launcher = to_launcher(hydra.launcher) if chosen == "slurm" else None
        mistakes.check_idle(overrides, (*_LAUNCHING, _SWEEPING) if is_sweep else _LAUNCHING)
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
