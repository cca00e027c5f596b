"""The table of the expected cost of each run. A sweep prints it before its start, and `dry_run=true` prints it alone.

No model is loaded and nothing is written. The estimate covers all requested tasks, including those that are already recorded.
"""

from __future__ import annotations

import dataclasses
import json
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tabulate import tabulate

from dflash_mcmc.chains.cost import CostEstimate
from dflash_mcmc.config.identity import configuration_of, plain, point_labels, settings_of
from dflash_mcmc.errors import UserError
from dflash_mcmc.fields import walk
from dflash_mcmc.registry import name_of
from dflash_mcmc.runner import tasks_of
from dflash_mcmc.runner.tasks import Tasks
from dflash_mcmc.settings import groups_of
from dflash_mcmc.store.described import RUN, described, json_object
from dflash_mcmc.types import Lengths

if TYPE_CHECKING:
    from dflash_mcmc.config.command import Command
    from dflash_mcmc.config.schema import Config, Job

_LEFT_OUT, _DRAFT = "does not apply", "forwards of the draft"
_HEADERS = ("run", _LEFT_OUT, "samples", "token-forwards a sample", "token-forwards", "hours", _DRAFT)
_UNKNOWN = "no estimate"
_MOST_LOOKED_AT = 50
"""The newest finished runs among which one of the same model is looked for."""


class _PlannedRun(NamedTuple):
    """A run of the table. If several jobs are the same run, `job` is the job with the most samples."""

    label: str
    job: Job
    tasks: Tasks
    estimate: CostEstimate


def of(command: Command) -> str:
    """A row for each different run of a checked command line, their total, and the assumptions, as text.

    The points of a search are not known yet, so each trial is estimated as the most expensive job. Problems that do not fit
    are recorded as too long, and cost nothing. Raises UserError if the problems cannot be counted.
    """
    runs: dict[str, _PlannedRun] = {}
    jobs, num_trials = command.jobs, command.sweep.num_trials if command.sweep else None
    searches = command.sweep is not None and command.sweep.searches
    counted, rates = command.lengths or [Lengths()] * len(jobs), []
    needed = any(job.config.hardware.tokens_per_second is None for job in jobs)
    finished = _finished(Path(jobs[0].config.paths.outputs)) if needed else []
    for job, config, label, counted_lengths in zip(jobs, with_lengths(command), point_labels(jobs), counted, strict=True):
        speed = _speed(plain(config))
        like = next((run for run in finished if run.speed == speed), None)
        if config.hardware.tokens_per_second is None and like is not None:
            hardware: Any = config.hardware
            config = dataclasses.replace(config, hardware=dataclasses.replace(hardware, tokens_per_second=like.rate))
            rates.append(f"hours: the rate is that of {like.folder}, which this machine has finished")
        tasks = tasks_of(config)
        run = _PlannedRun(label, job, tasks, tasks.estimate().of_share(counted_lengths.share))
        planned = runs.setdefault(_settings(job.config), run)
        # Jobs of the same run share its folder, which ends with as many samples as the largest of them asks for.
        if planned.estimate.num_samples < run.estimate.num_samples:
            runs[_settings(job.config)] = run
    estimates = [run.estimate for run in runs.values()]
    rows = [_row(run.label, run.estimate, run.job.left_out) for run in runs.values()]
    if searches and num_trials is not None:
        most = max(estimates, key=lambda estimate: estimate.token_forwards or 0.0)
        rows.append(_row(f"{num_trials} trials, each at the cost of the most expensive job",
                         CostEstimate.total([most] * num_trials)))
    elif len(estimates) > 1:
        rows.append(_row("total", CostEstimate.total(estimates)))
    same = (len(jobs) if searches else command.num_points) - len(runs)
    notes = [f"points left out because they are the same run as another point: {same}" if same else "",
             *dict.fromkeys(_problems(job.config) for job in jobs),
             *dict.fromkeys(_memory(job.config) for job in jobs),
             *dict.fromkeys(line for run in runs.values() for line in run.tasks.assumptions()),
             *dict.fromkeys(rates),
             *dict.fromkeys(_counted(job, counted_lengths) for job, counted_lengths in zip(jobs, counted, strict=True)),
             "a plan is of whole runs: it counts samples that are already recorded too"]
    return "\n".join([_text(rows), "", *filter(None, notes)])


_ASSUMED = {"prompt": "assumed.prompt_length", "solution": "assumed.answer_length"}
"""The field that a counted length takes the place of."""
_PLACES = ("model.path", "draft.path", "dataset.path", "dataset.ids", "dataset.shards", "dataset.num_shards", "blend.model")


def _used(job: Job, lengths: Lengths) -> dict[str, float]:
    """The counted lengths by name, without those whose field the command sets."""
    set_fields = {text.lstrip("+").partition("=")[0] for text in job.overrides}
    return {name: value for name, field in _ASSUMED.items() if (value := getattr(lengths, name)) and field not in set_fields}


def with_lengths(command: Command) -> list[Config]:
    """The configuration of each job, with the counted lengths as its assumptions."""
    return list(map(_with_lengths, command.jobs, command.lengths)) or [job.config for job in command.jobs]


def _with_lengths(job: Job, lengths: Lengths) -> Config:
    config, used = job.config, _used(job, lengths)
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
            found.append(_PastRun(_speed(configuration_of(path.parent)), rate, path.parent))
        except (UserError, LookupError, TypeError, ArithmeticError):
            continue  # a probe, or what no run wrote: the commands that read it say so
    return found


def _counted(job: Job, lengths: Lengths) -> str:
    """The line that says which lengths are no assumption; empty if there is none."""
    used = " and ".join(f"{name}s" for name in _used(job, lengths))
    return f"counted with the model's tokenizer: the mean length of {used}" if used else ""


def _settings(config: Config) -> str:
    """A key that distinguishes runs before any content is read: the identity without content, its places, and the name."""
    places = [value for name, _, _, value in walk(config) if name in _PLACES]
    return json.dumps([config.name, settings_of(config), places], sort_keys=True, default=str)


def _problems(config: Config) -> str:
    """The line that says which part of the dataset is used; empty where no dataset is used."""
    if "dataset" not in groups_of(config):
        return ""
    dataset, num_chosen, num_all = config.dataset, config.dataset.num_chosen(), config.dataset.num_all()
    fields = [f"dataset.{name}" for name in ("ids", "shards", "limit") if getattr(dataset, name) is not None]
    which = f", by {' and '.join(fields)}" if num_chosen < num_all else ""
    return f"problems: {num_chosen:,} of {num_all:,} in dataset={name_of(dataset)}{which}"


def _memory(config: Config) -> str:
    """The line on the engine's memory; empty where no chains run."""
    return config.engine.memory_note(config) if "sampler" in groups_of(config) else ""


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
