"""Checks every job of a command line before the first weight is loaded and before anything is written.

The start of a run repeats each check. Here a check uses only what is known without weights: the problems, the tokenizer, and
the config.json and the headers of both checkpoints. A complete run draws nothing, so that only its problems are read. A dry
run compares prompts with the positions that config.json states.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

import numpy as np

from dflash_mcmc.config.identity import identity_hash, run_folder
from dflash_mcmc.config.sweep import differing
from dflash_mcmc.errors import UserError, note
from dflash_mcmc.grading import check_golds
from dflash_mcmc.process import program
from dflash_mcmc.registry import name_of
from dflash_mcmc.runner import tasks_of
from dflash_mcmc.settings import groups_of
from dflash_mcmc.store.reading import recorded_keys
from dflash_mcmc.types import Lengths

if TYPE_CHECKING:
    from dflash_mcmc.config.schema import Config, Job
    from dflash_mcmc.engine.batching.plan import MemoryPlan, TargetShape
    from dflash_mcmc.engine.batching.prompt_encoder import PromptEncoder
    from dflash_mcmc.types import Problem

T = TypeVar("T")


class CheckedJob(NamedTuple):
    """What the checks of a job have read and counted."""

    lengths: Lengths = Lengths()
    prompts: Mapping[str, np.ndarray] = {}
    """Token ids of the prompts of all problems, by id; empty where no prompt is read."""


class _EncodedPrompts(NamedTuple):
    """The prompts of a dataset."""

    encoded: dict[str, np.ndarray]
    longest: int
    """Tokens of the longest prompt that fits."""
    num_fitting: int
    """Number of problems that fit."""
    mean: float
    """Mean tokens of the prompts that fit."""
    solutions: float | None
    """Mean tokens of the solutions; None where the answers are drawn."""


def check(jobs: Sequence[Job], here: bool = True) -> tuple[str | None, tuple[CheckedJob, ...]]:
    """Checks all jobs. Raises UserError for the first job that cannot run; in a sweep the error names its point.

    Args:
        here: whether the jobs run on this machine. Otherwise its device and its free memory do not count.

    Returns the memory of the largest engine as a line, None if no memory was planned; and the result for each job.
    """
    checks, checked = _Checks(here), []
    for job, point in zip(jobs, differing([job.overrides for job in jobs]), strict=True):
        try:
            checked.append(checks.check(job.config))
        except UserError as error:
            if len(jobs) == 1 or not point:
                raise
            raise UserError(f"{error} (the point {point})") from error
    return checks.memory(), tuple(checked)


class _Checks:
    """The checks of the jobs of one command. Points that share a model or a dataset have it read only once."""

    def __init__(self, here: bool):
        self._here, self._read = here, dict[tuple[str, ...], object]()
        self._plans: list[tuple[MemoryPlan, int | None]] = []

    def memory(self) -> str | None:
        """The largest plan of memory as a line; None without a plan."""
        plan, weights = max(self._plans, key=lambda planned: planned[0].total + (planned[1] or 0), default=(None, None))
        return None if plan is None else plan.describe(weights)

    def check(self, config: Config) -> CheckedJob:
        """Raises UserError for a configuration that cannot run."""
        used = groups_of(config)
        if config.show is not None or "dataset" not in used:
            return CheckedJob()
        problems = self._problems(config)
        if not config.dry_run and self._is_complete(config):
            return CheckedJob()
        if "grader" in used:
            self._once(("golds", repr(config.grader), repr(config.dataset)), lambda: check_golds(config.grader, problems))
        with program.importing():  # of torch and transformers
            encoder = self._encoder(config, used, problems)
        if encoder is None:
            return CheckedJob()
        prompts = self._prompts(config, encoder, problems)
        if config.blend.has_prompts:
            self._once(("second", repr(config.blend), repr(config.model), repr(config.dataset)),
                       lambda: config.blend.second_prompts(config, encoder, problems, prompts.encoded))
        if "sampler" in used and config.engine.plans_memory:
            self._plan_memory(config, prompts.longest, prompts.num_fitting * config.num_chains * config.sampler.width())
        return CheckedJob(Lengths(prompts.num_fitting / len(problems), prompts.mean, prompts.solutions), prompts.encoded)

    def _encoder(self, config: Config, used: Collection[str], problems: list[Problem]) -> PromptEncoder | None:
        """What encodes the prompts, None if nothing does, after a check of device and checkpoints. Raises UserError."""
        if self._here and not config.dry_run and "model" in used:
            config.hardware.found()  # raises for a device that this machine does not have
        drafts = "draft" in used and not config.draft.is_null
        if (drafts or not config.dry_run) and not self._fits(config, drafts):
            return None
        return self._once(("encoder", repr(config.model), name_of(config.engine)),
                          lambda: config.engine.prompt_encoder(config)) if problems else None

    def _is_complete(self, config: Config) -> bool:
        """Whether every task is recorded. A file of records that cannot be read is an error of the run that opens it."""
        # The identity reads dataset and checkpoint: only if a folder could be that of the run.
        folder = run_folder(config, "*")
        if not self._once(("folders", str(folder)), lambda: any(folder.parent.glob(folder.name))):
            return False
        try:
            tasks = tasks_of(config)
            return set(tasks.keys()) <= recorded_keys(run_folder(config, identity_hash(config)), tasks.schema())
        except UserError:
            return False

    def _shape(self, config: Config) -> TargetShape | None:
        return self._once(("shape", repr(config.model)), lambda: config.model.shape("cpu"))

    def _fits(self, config: Config, drafts: bool) -> bool:
        """Checks config.json, and that probe and draft fit the target. False if config.json is not here. Raises UserError."""
        target = self._shape(config)
        if target is not None:
            config.probe.check_target(target)
            self._once(("blend", repr(config.blend), repr(config.model)), lambda: config.blend.check_model(config.model))
        if target is not None and drafts:
            self._once(("draft", repr(config.draft), repr(config.model)), lambda: config.draft.check_target(target))
            self._once(("tokens", repr(config.draft), repr(config.model)), lambda: config.draft.check_model(config.model))
        return target is not None

    def _problems(self, config: Config) -> list[Problem]:
        """The requested problems; an empty list in a dry run of a published dataset on the hub."""
        dataset = config.dataset
        if dataset.is_unread(config):
            note(f"dataset={name_of(dataset)}: a dry run reads nothing from the hub: problems and prompts are not checked")
            return []
        return self._once(("problems", repr(dataset)), dataset.problems)

    def _prompts(self, config: Config, encoder: PromptEncoder, problems: list[Problem]) -> _EncodedPrompts:
        """Raises UserError if no prompt fits."""
        from dflash_mcmc.chains import build
        from dflash_mcmc.runner import fitting

        drawn = config.probe.draws_answers()

        def prompts() -> _EncodedPrompts:
            encoded = build.encoded(config, encoder, problems)
            fit = fitting.fit(config, encoder, problems, gold=not drawn, known=encoded)
            fit.check(config)
            if fit.too_long:
                name, first = next(iter(fit.too_long.items()))
                note(f"{len(fit.too_long)} of {len(problems)} problems are recorded as too_long: {name}: {first.reason}")
            lengths = [len(prompt) for prompt in fit.prompts.values()]
            solved = [problem.solution for problem in problems if problem.id in fit.prompts and problem.solution]
            solutions = [] if drawn else [len(encoder.encode(text)) for text in solved]
            return _EncodedPrompts(encoded, max(lengths), len(problems) - len(fit.too_long), sum(lengths) / len(lengths),
                                   sum(solutions) / len(solutions) if solutions else None)

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
        beside, anti = config.blend.companion_shape(target), config.blend.anti_shape(target)
        draft = config.draft.size()
        if draft is not None and draft.model is not None:
            draft = draft._replace(model=draft.model._replace(device=target.device))
        weights = _weights(target, beside, anti, draft.model if draft else None)
        if weights is None:
            note("memory: the size of the weights is not known (they are not here, and transformers cannot build the model "
                 "from its config.json), so that the plan does not count them")
            if not has_limit:
                return
        try:
            _, plan = memory_plan(config, target, longest, num_draws, draft, weights or 0, beside, anti)
            self._plans.append((plan, weights))
        except UserError:
            if not run_folder(config, identity_hash(config)).exists():
                raise

    def _once(self, key: tuple[str, ...], read: Callable[[], T]) -> T:
        """The result of `read`, which is called once for each key."""
        if key not in self._read:
            self._read[key] = read()
        return cast("T", self._read[key])


def _weights(*shapes: TargetShape | None) -> int | None:
    """Bytes of the weights of the target, of a blend's model and of one that drafts; None if they are not known."""
    sizes = [shape.weight_bytes() for shape in shapes if shape is not None]
    return None if None in sizes else sum(size for size in sizes if size)
