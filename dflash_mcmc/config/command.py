"""Turns a command line into its jobs. Every mistake is one line and is reported before anything is loaded or written."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from dflash_mcmc.config import flags, mistakes
from dflash_mcmc.config.compose import Composer
from dflash_mcmc.config.groups import config_folder
from dflash_mcmc.config.jobs import Job
from dflash_mcmc.config.launcher import Slurm, store_schema, to_launcher
from dflash_mcmc.config.overrides import given_value, text_of
from dflash_mcmc.config.points import job_of, jobs_of, note_idle, optional_of
from dflash_mcmc.config.schema import PACKAGE, Root, store_schemas, to_typed
from dflash_mcmc.config.sweep import Sweep, points
from dflash_mcmc.errors import ConfigError, UserError
from dflash_mcmc.fields import schema_of

_LAUNCHERS = ("basic", "slurm")
_LAUNCHING = ("hydra.mode", "hydra/launcher", "hydra.launcher.")
"""The settings of Hydra that have an effect on every command line."""
_SWEEPING = ("hydra/sweeper", "hydra.sweeper.params")
"""Those that have one in a sweep."""
_SEARCHING = ("hydra.sweeper.", "hydra.sweep.dir")
"""Those that have one in a search: Hydra's sweeper chooses the points, and writes its result into the folder."""
_composing = threading.RLock()
"""Held while Hydra is initialised, because its state belongs to the process and not to a thread."""


def prepare() -> None:
    """Registers schemas and resolvers with Hydra."""
    OmegaConf.register_new_resolver("dflash_assets", lambda: str(PACKAGE / "assets"), replace=True)
    store_schemas()
    store_schema()


@contextmanager
def composer(root: str, overrides: Sequence[str] = ()) -> Iterator[Composer]:
    """Initialises Hydra and yields the process's composer for a root file of `conf/`. A composer keeps its results.

    Args:
        overrides: the overrides that will be composed. If they have a search path, the composer is new, because options in a
            folder of the user may change while the process runs (in a notebook).
    """
    own = any(mistakes.SEARCH_PATH in text for text in overrides)
    with _composing:
        prepare()
        with initialize_config_dir(str(config_folder()), version_base="1.3"):
            yield Composer(root) if own else _composer(root)


@cache
def _composer(root: str) -> Composer:
    return Composer(root)


def compose_once(root: str, overrides: Sequence[str], cls: type[Root]) -> tuple[Root, Mapping[str, str]]:
    """The typed object of a root configuration and the option chosen in each group, for programs without sweeps.

    Raises UserError.
    """
    ConfigStore.instance().store(group="schema", name=root, node=schema_of(cls), provider="dflash_mcmc")
    with composer(root) as composing:
        parsed = [composing.parse(text) for text in overrides]
        mistakes.check_search_path(parsed)
        mistakes.check_idle(parsed)
        values, choices = composing.compose(overrides)
        return to_typed(values, cls), choices


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
    fits: tuple[float, ...] = ()
    """For each job the share of its problems that fit into the model's positions; empty if nothing was checked."""


def check_command(arguments: Sequence[str]) -> Command:
    """Composes and checks every job of the command line. Raises UserError.

    A sweep is checked as a whole: a mistake in its last point is reported before its first one starts.
    """
    parsed = flags.parsed(arguments)
    if flags.ask_for_help(parsed):
        return Command([], shows=True)
    with composer("config", parsed.overrides) as composing:
        overrides = [composing.parse(text) for text in parsed.overrides]
        mistakes.check_search_path(overrides)
        hydra = composing.with_hydra([text_of(one) for one in overrides if not one.is_sweep_override()]).hydra
        sweep, launcher = _sweep(hydra, parsed.multirun), _launcher(hydra, overrides)
        mistakes.check_idle(overrides, (*_LAUNCHING, *(_SWEEPING if sweep else ()),
                                        *(_SEARCHING if sweep and sweep.searches else ())))
        texts = _points(composing, overrides, sweep)
        optional = optional_of(composing, texts, flags.names_if_present(parsed))
        if sweep and sweep.searches:
            _refuse_conditional_ranges([*map(composing.parse, sweep.params), *overrides], optional)
            jobs = [job_of(composing, point, optional) for point in texts]
        else:
            jobs = list(jobs_of(composing, texts, optional))
            if sweep is None:
                note_idle(jobs[0], [composing.parse(text) for text in jobs[0].overrides])
    if any((job.choices["hydra/launcher"] == "slurm") != (launcher is not None) for job in jobs):
        raise UserError("hydra/launcher: given slurm at some points of the sweep only; allowed: one launcher for all points")
    shows = bool(parsed.cfg or parsed.info)
    if shows and (parsed.if_present or any(override.is_sweep_override() for override in overrides)):
        raise UserError(f"--cfg and --info: given with several values or {flags.IF_PRESENT}; allowed: the command line of one "
                        "run")
    return Command([] if shows else jobs, sweep, launcher, tuple(map(text_of, overrides)), shows, len(texts), optional)


def _refuse_conditional_ranges(overrides: Sequence[Override], optional: frozenset[str]) -> None:
    """Raises UserError for a range of a field that some points of a search do not have, because it has no effect there."""
    for override in overrides:
        if override.key_or_group in optional and override.is_sweep_override():
            raise UserError(f"{override.key_or_group}: given several values in a search, {given_value(override)}; allowed: "
                            "one value, since not every point has this field, or a search for each option that has it")


def _launcher(hydra: DictConfig, overrides: Sequence[Override]) -> Slurm | None:
    """The fields of hydra/launcher=slurm, where it is chosen. Raises UserError."""
    for override in overrides:
        if override.is_hydra_override() and override.is_sweep_override():
            raise UserError(f"{override.get_key_element()}: given several values, {given_value(override)}; "
                            "allowed: one, for all jobs")
    chosen = hydra.runtime.choices["hydra/launcher"]
    if chosen not in _LAUNCHERS:
        raise ConfigError("hydra/launcher", chosen, f"{' or '.join(_LAUNCHERS)}; all GPUs of a machine: launchers/local.py")
    return to_launcher(hydra.launcher) if chosen == "slurm" else None


def _sweep(hydra: DictConfig, asked_for: bool) -> Sweep | None:
    """The sweep that `-m` or conf/sweep requests. Raises UserError."""
    if not asked_for and hydra.mode != RunMode.MULTIRUN:
        return None
    sweeper = hydra.sweeper
    direction = sweeper.get("direction", "maximize")
    if getattr(direction, "name", direction) != "maximize":  # an enumeration, whose first value is minimize
        raise ConfigError("hydra.sweeper.direction", getattr(direction, "name", direction), "maximize, with every objective")
    params = tuple(f"{name}={values}" for name, values in (sweeper.get("params") or {}).items())
    return Sweep(params, sweeper.get("n_trials"), hydra.runtime.choices["hydra/sweeper"] != "basic")


def _points(composing: Composer, overrides: Sequence[Override], sweep: Sweep | None) -> list[list[str]]:
    """The overrides of every job of a sweep, or of the single job. Raises UserError."""
    if sweep is not None:
        if not (found := list(points([*map(composing.parse, sweep.params), *overrides], sweep))):
            raise UserError("the sweep: given no point; allowed: at least one value of everything that is swept")
        return found
    for override in overrides:
        if override.is_sweep_override():
            raise UserError(f"{override.key_or_group}: given several values, {given_value(override)}; allowed: one value, or "
                            "a sweep with -m before the overrides")
    return [[text_of(override) for override in overrides]]
