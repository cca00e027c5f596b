"""The plan of a command line: the checks before the first weight is loaded, and the expected cost of each run.

The start of a run repeats each check. Here a check uses only what is known without weights: the problems, the tokenizer, and
the config.json and the headers of both checkpoints. A complete run draws nothing, so that only its problems are read. A dry
run compares prompts with the positions that config.json states. Nothing is written.

The table of costs covers all requested tasks, including those that are already recorded. A sweep prints it before its start,
and `dry_run=true` prints it alone.
"""

import dataclasses
import json
import socket
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import numpy as np
from tabulate import tabulate

from dflash_mcmc.chains import build
from dflash_mcmc.chains.cost import CostEstimate
from dflash_mcmc.components import groups_of, name_of, walk
from dflash_mcmc.config import identity
from dflash_mcmc.config.command import Command, check_command, differing
from dflash_mcmc.config.schema import Config, Job
from dflash_mcmc.errors import UserError, note, printable
from dflash_mcmc.grading import check_golds
from dflash_mcmc.process import ranks
from dflash_mcmc.runner import fitting
from dflash_mcmc.runner.tasks import Tasks, tasks_of
from dflash_mcmc.store.records import RUN, described, each_record, json_object, key_of
from dflash_mcmc.tokenizer import PromptEncoder
from dflash_mcmc.types import Lengths, Problem

if TYPE_CHECKING:
    from dflash_mcmc.engine.batching.plan import MemoryPlan, TargetShape

T = TypeVar("T")
_SECONDS_TO_REPORT = 60.0
"""Seconds that a process waits for the first process of a launch, which may still be starting, to report a mistake."""
_LEFT_OUT, _DRAFT = "does not apply", "forwards of the draft"
_HEADERS = ("run", _LEFT_OUT, "samples", "token-forwards a sample", "token-forwards", "hours", _DRAFT)
_UNKNOWN = "no estimate"
_MOST_LOOKED_AT = 50
"""The newest finished runs among which one of the same model is looked for."""
_ASSUMED = {"prompt": "assumed.prompt_length", "solution": "assumed.answer_length"}
"""The field that a counted length takes the place of."""
_PLACES = ("model.path", "draft.path", "dataset.path", "dataset.ids", "dataset.shards", "dataset.num_shards", "blend.model")


def checked(arguments: list[str]) -> Command:
    """The command of a command line, after every check that loads no model. Raises UserError."""
    try:
        command = check_command(arguments)
        if command.launcher and ranks.world_size() > 1:
            raise UserError(f"hydra/launcher: given slurm in a launch of {ranks.world_size()} processes; allowed: one "
                            "process, whose jobs start hydra.launcher.processes processes each")
        memory, jobs = check(command.jobs, here=not command.launcher)
        return command._replace(jobs=jobs, memory=memory)
    except UserError:
        if ranks.rank():
            # Every process of a launch finds the same mistake, and the first one reports it. This process must not end before
            # that, because a launcher ends all processes when one of them ends. It waits, and then reports the mistake, too.
            sleep(_SECONDS_TO_REPORT)
        raise


def only_shows(command: Command, arguments: list[str]) -> bool:
    """Prints what a command that runs nothing asks for: a flag of Hydra, show=prompt or dry_run. False for other commands."""
    if command.shows:
        from dflash_mcmc.config.command import show_for_flag

        show_for_flag(arguments)
    elif any(job.config.show for job in command.jobs):
        if not ranks.rank():
            print("\n\n".join(dict.fromkeys(printable(build.first_prompt(job.config), keep="\n\t") for job in command.jobs)))
    elif any(job.config.dry_run for job in command.jobs):
        print_plan(command, "dry_run=true: no model was loaded and nothing written")
    else:
        return False
    return True


def print_plan(command: Command, *notes: str) -> None:
    """Prints the runs of a command. Each run has the fields that it leaves out, its samples and its expected cost."""
    if not ranks.rank():
        print(table(command), *filter(None, [command.memory]), *notes, sep="\n", flush=True)


class _EncodedPrompts(NamedTuple):
    """The prompts of a dataset."""

    encoded: dict[str, np.ndarray]
    longest: int
    """Tokens of the longest prompt that fits."""
    num_fitting: int
    """Number of problems that fit."""
    lengths: Lengths


def check(jobs: Sequence[Job], here: bool = True) -> tuple[str | None, list[Job]]:
    """Checks all jobs. Raises UserError for the first job that cannot run; in a sweep the error names its point.

    Args:
        here: whether the jobs run on this machine. Otherwise its device and its free memory do not count.

    Returns the memory of the largest engine as a line, None if no memory was planned; and the jobs with what was read of them.
    """
    checks, checked = _Checks(here), []
    for job, point in zip(jobs, differing([job.overrides for job in jobs]), strict=True):
        try:
            checked.append(checks.check(job))
        except UserError as error:
            if len(jobs) == 1 or not point:
                raise
            raise UserError(f"{error} (the point {point})") from error
    plan, weights = max(checks.plans, key=lambda planned: planned[0].total + (planned[1] or 0), default=(None, None))
    return None if plan is None else plan.describe(weights), checked


class _Checks:
    """The checks of the jobs of one command. Points that share a model or a dataset have it read only once."""

    def __init__(self, here: bool):
        self._here, self._read = here, dict[tuple[str, ...], object]()
        self.plans: list[tuple[MemoryPlan, int | None]] = []
        """The memory of each engine, and the bytes of its weights; None if they are not known."""

    def check(self, job: Job) -> Job:
        """The job with its prompts and lengths. Raises UserError for a configuration that cannot run."""
        config, dataset = job.config, job.config.dataset
        used = groups_of(config)
        if config.show is not None or "dataset" not in used:
            return job
        problems: list[Problem] = []  # in a dry run of a published dataset on the hub
        if dataset.is_unread(config):
            note(f"dataset={name_of(dataset)}: a dry run reads nothing from the hub: problems and prompts are not checked")
        else:
            problems = self._once(("problems", repr(dataset)), dataset.problems)
        if not config.dry_run and self._is_complete(config):
            return job
        if "grader" in used:
            self._once(("golds", repr(config.grader), repr(dataset)), lambda: check_golds(config.grader, problems))
        encoder = self._encoder(config, used, problems)
        if encoder is None:
            return job
        prompts = self._prompts(config, encoder, problems)
        if config.blend.has_prompts:
            self._once(("second", repr(config.blend), repr(config.model), repr(dataset)),
                       lambda: config.blend.second_prompts(config, encoder, problems, prompts.encoded))
        if "sampler" in used and config.engine.plans_memory:
            self._plan_memory(config, prompts.longest, prompts.num_fitting * config.num_chains * config.sampler.width())
        return job._replace(lengths=prompts.lengths, prompts=prompts.encoded)

    def _encoder(self, config: Config, used: Collection[str], problems: list[Problem]) -> PromptEncoder | None:
        """What encodes the prompts, after a check of device, config.json, and that probe, blend and draft fit the target.

        None without problems, and where a config.json that is needed is not here. Raises UserError.
        """
        if self._here and not config.dry_run and "model" in used:
            config.hardware.found()  # raises for a device that this machine does not have
        drafts = "draft" in used and not config.draft.is_null
        if drafts or not config.dry_run:
            target = self._shape(config)
            if target is None:
                return None
            config.probe.check_target(target)
            self._once(("blend", repr(config.blend), repr(config.model)), lambda: config.blend.check_model(config.model))
            if drafts:
                self._once(("draft", repr(config.draft), repr(config.model)), lambda: config.draft.check_target(target))
                self._once(("tokens", repr(config.draft), repr(config.model)), lambda: config.draft.check_model(config.model))
        return self._once(("encoder", repr(config.model), name_of(config.engine)),
                          lambda: config.engine.prompt_encoder(config)) if problems else None

    def _is_complete(self, config: Config) -> bool:
        """Whether every task is recorded. A file of records that cannot be read is an error of the run that opens it."""
        # The identity reads dataset and checkpoint: only if a folder could be that of the run.
        folder = identity.run_folder(config, "*")
        if not self._once(("folders", str(folder)), lambda: any(folder.parent.glob(folder.name))):
            return False
        try:
            tasks = tasks_of(config)
            folder = identity.run_folder(config, identity.identity_hash(config))
            records = each_record(folder, tasks.schema())  # without the folder's locks
            return set(tasks.keys()) <= {key_of(record) for _, record in records}
        except UserError:
            return False

    def _shape(self, config: Config) -> "TargetShape | None":
        return self._once(("shape", repr(config.model)), lambda: config.model.shape("cpu"))

    def _prompts(self, config: Config, encoder: PromptEncoder, problems: list[Problem]) -> _EncodedPrompts:
        """Raises UserError if no prompt fits."""
        drawn = config.probe.draws_answers()

        def prompts() -> _EncodedPrompts:
            encoded = build.encoded(config, encoder, problems)
            fit = fitting.fit(config, encoder, problems, gold=not drawn, known=encoded)
            fit.check(config, gold=not drawn)
            if fit.too_long:
                name, first = next(iter(fit.too_long.items()))
                note(f"{len(fit.too_long)} of {len(problems)} problems are recorded as too_long: {name}: {first.reason}")
            lengths = [len(prompt) for prompt in fit.prompts.values()]
            solved = [problem.solution for problem in problems if problem.id in fit.prompts and problem.solution]
            solutions = [] if drawn else [len(encoder.encode(text)) for text in solved]
            counted = Lengths(len(lengths) / len(problems), statistics.fmean(lengths),
                              statistics.fmean(solutions) if solutions else None)
            return _EncodedPrompts(encoded, max(lengths), len(lengths), counted)

        return self._once(("prompts", repr(config.model), repr(config.dataset), str(drawn), name_of(config.engine)), prompts)

    def _plan_memory(self, config: Config, longest: int, num_draws: int) -> None:
        """Plans the engine's memory, and checks that it suffices for a run that has not begun. Raises ConfigError.

        A run with a folder is not refused here, because its remaining samples may need fewer slots.
        """
        has_limit = config.hardware.memory_gb is not None
        device = config.hardware.found() if self._here and not config.dry_run else None
        target = self._shape(config) if has_limit or device is not None else None
        if target is None:
            return
        import torch  # only here: a dry run without a plan does not pay for it

        from dflash_mcmc.engine.slots import memory_plan

        target = target._replace(device=torch.device(device or ("cpu" if config.hardware.device == "cpu" else "cuda")))
        beside, draft = config.blend.companion_shape(target), config.draft.size()
        if draft is not None and draft.model is not None:
            draft = draft._replace(model=draft.model._replace(device=target.device))
        shapes = (target, beside, draft.model if draft else None)
        sizes = [shape.weight_bytes() for shape in shapes if shape is not None]
        weights = None if None in sizes else sum(size for size in sizes if size)
        if weights is None:
            note("memory: the size of the weights is not known (they are not here, and transformers cannot build the model "
                 "from its config.json), so that the plan does not count them")
            if not has_limit:
                return
        try:
            _, plan = memory_plan(config, target, longest, num_draws, draft, weights or 0, beside)
            self.plans.append((plan, weights))
        except UserError:
            if not identity.run_folder(config, identity.identity_hash(config)).exists():
                raise

    def _once(self, key: tuple[str, ...], read: Callable[[], T]) -> T:
        """The result of `read`, which is called once for each key."""
        if key not in self._read:
            self._read[key] = read()
        return cast("T", self._read[key])


class _PlannedRun(NamedTuple):
    """A run of the table. If several jobs are the same run, `job` is the job with the most samples."""

    label: str
    job: Job
    tasks: Tasks
    estimate: CostEstimate


def table(command: Command) -> str:
    """A row for each different run of a checked command line, their total, and the assumptions, as text.

    Problems that do not fit are recorded as too long, and cost nothing. Raises UserError if the problems cannot be counted.
    """
    runs: dict[str, _PlannedRun] = {}
    jobs, rates = command.jobs, []
    needed = any(job.config.hardware.tokens_per_second is None for job in jobs)
    finished = _finished(Path(jobs[0].config.paths.outputs)) if needed else []
    for job, label in zip(jobs, identity.point_labels(jobs), strict=True):
        config = _with_lengths(job)
        speed = _speed(identity.plain(config))
        like = next((run for run in finished if run.speed == speed), None)
        if config.hardware.tokens_per_second is None and like is not None:
            hardware: Any = config.hardware
            config = dataclasses.replace(config, hardware=dataclasses.replace(hardware, tokens_per_second=like.rate))
            rates.append(f"hours: this rate is that of {like.folder}, which this machine has finished")
        tasks = tasks_of(config)
        run = _PlannedRun(label, job, tasks, tasks.estimate().of_share(job.lengths.share))
        # Jobs of the same run share its folder, which ends with as many samples as the largest of them asks for.
        if runs.setdefault(key := _settings(job.config), run).estimate.num_samples < run.estimate.num_samples:
            runs[key] = run
    estimates = [run.estimate for run in runs.values()]
    rows = [_row(run.label, run.estimate, run.job.left_out) for run in runs.values()]
    if len(estimates) > 1:
        rows.append(_row("total", CostEstimate.total(estimates)))
    same = command.num_points - len(runs)
    notes = [f"points left out because they are the same run as another point: {same}" if same else "",
             *dict.fromkeys(_problems(job.config) for job in jobs),
             *dict.fromkeys(job.config.engine.memory_note(job.config) for job in jobs
                            if "sampler" in groups_of(job.config)),
             *dict.fromkeys(line for run in runs.values() for line in run.tasks.assumptions()),
             *dict.fromkeys(rates),
             *dict.fromkeys(f"counted with the model's tokenizer: the mean length of {'s and '.join(used)}s"
                            for job in jobs if (used := _used(job))),
             "a plan is of whole runs: it counts samples that are already recorded too"]
    return "\n".join([_text(rows), "", *filter(None, notes)])


def _used(job: Job) -> dict[str, float]:
    """The counted lengths by name, without those whose field the command sets."""
    set_fields = {text.lstrip("+").partition("=")[0] for text in job.overrides}
    return {name: value for name, field in _ASSUMED.items()
            if (value := getattr(job.lengths, name)) and field not in set_fields}


def _with_lengths(job: Job) -> Config:
    """The configuration of a job, with the counted lengths as its assumptions."""
    config, used = job.config, _used(job)
    assumed: dict[str, Any] = {"prompt_length": used["prompt"]} if "prompt" in used else {}
    if "solution" in used:
        assumed["answer_length"] = used["solution"] / config.dataset.max_new_tokens
    return dataclasses.replace(config, assumed=dataclasses.replace(config.assumed, **assumed)) if assumed else config


class _PastRun(NamedTuple):
    """A finished run of samples of this machine."""

    speed: list[Any]
    """What its speed depends on; see `_speed`."""
    rate: float
    """Token-forwards a second."""
    folder: Path


def _speed(settings: Mapping[str, Any]) -> list[Any]:
    """What a run's token-forwards a second depend on, of a configuration by group: model, draft, engine and slots.

    A probe has no engine and reads at a speed of its own, which no run of samples tells.
    """
    hardware, engine = settings["hardware"], settings.get("engine", {})
    return [settings.get("model"), settings.get("draft"), engine.get("name"), hardware["device"], hardware["num_slots"]]


def _finished(outputs: Path) -> list[_PastRun]:
    """The newest finished runs of samples of this machine, newest first."""
    found = []
    newest = sorted(outputs.glob("*/*/summary.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in newest[:_MOST_LOOKED_AT]:
        try:
            summary = json_object(path)
            if described(path.parent / RUN)[1][-1]["host"] != socket.gethostname():
                continue
            rate = summary["token_forwards"] / (summary["mean_share_seconds"] * summary["num_samples"])
            found.append(_PastRun(_speed(identity.configuration_of(path.parent)), rate, path.parent))
        except (UserError, LookupError, TypeError, ArithmeticError):
            continue  # a probe, or what no run wrote: the commands that read it say so
    return found


def _settings(config: Config) -> str:
    """A key that distinguishes runs before any content is read: the identity without content, its places, and the name."""
    places = [value for name, _, _, value in walk(config) if name in _PLACES]
    return json.dumps([config.name, identity.settings_of(config), places], sort_keys=True, default=str)


def _problems(config: Config) -> str:
    """The line that says which part of the dataset is used; empty where no dataset is used."""
    if "dataset" not in groups_of(config):
        return ""
    dataset, num_chosen, num_all = config.dataset, config.dataset.num_chosen(), config.dataset.num_all()
    fields = [f"dataset.{name}" for name in ("ids", "shards", "limit") if getattr(dataset, name) is not None]
    which = f", by {' and '.join(fields)}" if num_chosen < num_all else ""
    return f"problems: {num_chosen:,} of {num_all:,} in dataset={name_of(dataset)}{which}"


def _text(rows: Sequence[Sequence[str]]) -> str:
    """The rows as a table. The columns `does not apply` and `forwards of the draft` are left out if they are empty."""
    shown = [column for column, header in enumerate(_HEADERS)
             if header not in (_LEFT_OUT, _DRAFT) or any(row[column] not in ("", "0") for row in rows)]
    return tabulate([[row[column] for column in shown] for row in rows], headers=[_HEADERS[column] for column in shown],
                    tablefmt="github", colalign=["left" if column < 2 else "right" for column in shown], disable_numparse=True)


def _row(label: str, estimate: CostEstimate, left_out: Sequence[str] = ()) -> list[str]:
    start, forwards, hours = [label, ", ".join(left_out), f"{estimate.num_samples:,}"], estimate.token_forwards, estimate.hours
    if forwards is None:
        return [*start, *[_UNKNOWN] * 3, ""]
    return [*start, f"{forwards / estimate.num_samples:,.0f}", f"{forwards:,.0f}", "-" if hours is None else f"{hours:,.2f}",
            f"{estimate.draft_blocks or 0.0:,.0f}"]
