"""Does the draft's disagreement with the target predict that an answer, or a step of it, is wrong?

This tests the closing idea of the document "Speculative MCMC Probe" (section 6.3, "a free difficulty detector").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, NotRequired, cast, final

import numpy as np
from typing_extensions import TypedDict

from dflash_mcmc.draft import check_features, load_feature_drafter
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.fields import runtime
from dflash_mcmc.grading import settled
from dflash_mcmc.grading.extraction import continued
from dflash_mcmc.grading.verdicts import NOT_DRAWN, VERDICTS
from dflash_mcmc.probe import ProblemProbe, Summary, Unit, Work
from dflash_mcmc.registry import name_of, options_with, register
from dflash_mcmc.runner import build, cost
from dflash_mcmc.store.schema import Count, Instead, OneOf, Whole
from dflash_mcmc.types import UnitCost

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dflash_mcmc.config.schema import Config
    from dflash_mcmc.engine.batching.interface import ChainRunner
    from dflash_mcmc.engine.batching.language_model import LanguageModel
    from dflash_mcmc.engine.speculative.drafter import DFlashDrafter
    from dflash_mcmc.ops import Chain
    from dflash_mcmc.types import Problem, Trajectory


@final
class SignalValues(TypedDict):
    """A statistic of each signal in `signals.DRAFT` and `signals.TARGET` over some tokens. The units are stated there."""

    kl_target_draft: float
    kl_draft_target: float
    total_variation: float
    minus_log_acceptance: float
    draft_entropy: float
    draft_surprisal: float
    top1_disagreement: float
    target_entropy: float
    target_surprisal: float
    least_confidence: float


@final
class StepRecord(TypedDict):
    """An equation in an answer's text."""

    text: str
    wrong: bool
    """Whether two of its sides differ."""
    num_tokens: Count
    """Tokens that have a part of it."""
    num_compared: Count
    """Those of them that the draft predicts."""
    mean: SignalValues
    max: SignalValues


@final
class DifficultyRecord(TypedDict):
    """An answer, its grade and its signals."""

    level: Whole | str | None
    """Level of difficulty of the problem, if the dataset has one."""
    verdict: Annotated[str, OneOf(VERDICTS)]
    """One of `grading.verdicts.VERDICTS`."""
    num_tokens: Count
    """Tokens of the answer."""
    num_compared: Count
    """Tokens that the draft predicts."""
    mean: SignalValues
    max: SignalValues
    steps: list[StepRecord]
    """Equations with a token that the draft predicts."""
    steps_left_out: Count
    """Equations without such a token."""
    skipped: NotRequired[Annotated[str, Instead(("num_compared", "mean", "max", "steps", "steps_left_out"))]]
    """Why the answer has no signals."""


@register("probe", "difficulty")
@dataclass(slots=True, kw_only=True)
class Difficulty(ProblemProbe):
    """Whether draft-target disagreement distinguishes wrong answers, and wrong steps in them, from right ones.

    The sampler draws answers, which are graded and teacher-forced through target and draft in whole blocks. Every answer that
    is not graded correct is wrong, including one without a box. An answer that could not be drawn has no signals and is left
    out. A step is an equation of plain arithmetic in the answer's text; it is wrong if its sides differ. Signals of draft and
    target are compared on the same tokens. A draft disagrees more in slots that are further from the anchor, whatever the
    token. `draft.block_size=2` measures the first slot alone.
    """

    num_folds: int = runtime(5, "folds of the cross-validation by problem that turns signals into probabilities; affects the "
                             "summary alone", ge=2, le=10_000)
    num_bins: int = runtime(10, "bins with equally many cases, in which probabilities are compared with outcomes; affects the "
                            "summary alone", ge=2, le=10_000)

    uses = ("model", "draft", "blend", "sampler", "decoder", "dataset", "grader")
    unit = "answer"
    record_type = DifficultyRecord
    tables_in = f"{__name__}.tables"
    measures_chains = True
    needs_draft = True

    def check(self, config: Config) -> None:
        """Checks that the configuration suits the probe. Raises ConfigError."""
        check_features(config, "probe=difficulty")
        if not config.blend.is_null:
            none = options_with("blend", "is_null")
            raise ConfigError("blend", name_of(config.blend), f"{none} with probe=difficulty: its signals are the plain "
                              "target's")

    def expected_cost(self, config: Config) -> UnitCost | None:
        """The cost of drawing a sample, reading it once, and drafting each of its blocks."""
        forwards, drafted = cost.token_forwards(config), cost.draft_blocks(config)
        if forwards is None:
            return None
        answer = cost.forced(config)
        return UnitCost(forwards + answer.prompt + answer.length, drafted + answer.blocks)

    def measure(self, config: Config, work: Work) -> Iterator[tuple[Unit, dict]]:
        """Draws answers in a batch. Each one is teacher-forced separately while it is graded. Raises UserError."""
        problems = {problem.id: problem for problem in config.dataset.problems()}
        model = config.model.load(work.device)
        drafter = load_feature_drafter(config, model)
        block_size = drafter.num_drafted + 1
        if config.dataset.max_new_tokens < block_size:
            raise ConfigError("dataset.max_new_tokens", config.dataset.max_new_tokens, f"at least {block_size}, a block")
        prompts = build.prompts(config, model, [problems[unit.problem] for unit in work.units])
        engine = config.engine.start(config, model, max(map(len, prompts.values())), len(work.units))
        chains = ((unit, build.chain(config, config.sampler, unit.problem, unit.chain, prompts[unit.problem], model))
                  for unit in work)
        return _graded(config, engine, problems, chains, lambda answer: _along(model, drafter, answer))

    def summarise(self, config: Config, records: list[dict]) -> Summary:
        """AUROC, calibration, and the gain of the best baseline from each signal of the draft, for answers and steps."""
        from dflash_mcmc.probe.difficulty import tables

        return tables.summary(records, self.num_folds, self.num_bins)

    def figures(self, config: Config, records: list[dict], summary: Summary) -> dict[str, Figure]:
        """AUROC of all signals, calibration and ROC curves of the best ones."""
        from dflash_mcmc.probe.difficulty import detection

        return detection.figures(summary)


def _graded(config: Config, engine: ChainRunner, problems: dict[str, Problem], chains: Iterator[tuple[Unit, Chain]],
            along: Callable[[Trajectory], dict]) -> Iterator[tuple[Unit, dict]]:
    """Yields the record of each chain, `along(answer)` and the grade, as soon as the grading processes have decided."""
    pool = config.grader.start()
    measured: dict[Unit, dict] = {}

    def decided(wait: bool = False) -> Iterator[tuple[Unit, dict]]:
        for unit, grade in settled(pool, wait):
            yield unit, {"level": problems[unit.problem].level, "verdict": grade.verdict, **measured.pop(unit)}

    try:
        for done in engine.steps(chains):
            if done is not None:
                unit = cast("Unit", done.tag)
                problem = problems[unit.problem]
                if done.result is None:
                    yield unit, {"level": problem.level, "verdict": NOT_DRAWN, "num_tokens": 0, "skipped": done.failure}
                else:
                    answer = done.result.trajectory
                    measured[unit] = along(answer)
                    text = engine.model.decode(answer.tokens)
                    pool.submit(unit, continued(build.ending(engine.model, answer.prompt), text), problem.answer)
            yield from decided()
        yield from decided(wait=True)
    finally:
        pool.close()


def _along(model: LanguageModel, drafter: DFlashDrafter, answer: Trajectory) -> dict:
    """The record of an answer, without its grade."""
    from dflash_mcmc.engine.batching.interface import NOT_NUMBERS
    from dflash_mcmc.probe.difficulty import signals, steps

    if answer.length < drafter.num_drafted + 1:
        return {"num_tokens": answer.length, "skipped": f"shorter than {drafter.num_drafted + 1} tokens"}
    signals_along = signals.along(model, drafter, answer.prompt, answer.tokens)
    if not all(np.isfinite(values).all() for values in signals_along.values.values()):
        return {"num_tokens": answer.length, "skipped": NOT_NUMBERS}
    ends = steps.ends(model.decode, answer.tokens)
    of_steps, left_out = [], 0
    for step in steps.steps(model.decode(answer.tokens)):
        tokens = steps.inside(step, ends)
        own = signals_along.of(tokens)
        if not len(own.places):
            left_out += 1
            continue
        of_steps.append({"text": step.text, "wrong": step.wrong, "num_tokens": len(tokens), "num_compared": len(own.places),
                         "mean": own.mean(), "max": own.max()})
    return {"num_tokens": answer.length, "num_compared": len(signals_along.places),
            "mean": signals_along.mean(), "max": signals_along.max(),
            "steps": of_steps, "steps_left_out": left_out}
