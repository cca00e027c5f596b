"""Does the draft's disagreement with the target predict that an answer is wrong?

This tests the closing idea of the document "Speculative MCMC Probe" (section 6.3, "a free difficulty detector").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, NotRequired, cast, final

import numpy as np
from typing_extensions import TypedDict

from dflash_mcmc.chains import build, cost
from dflash_mcmc.draft import check_features, load_feature_drafter
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.grading import settled
from dflash_mcmc.grading.extraction import continued
from dflash_mcmc.grading.verdicts import NOT_DRAWN, VERDICTS
from dflash_mcmc.probe import ProblemProbe, Summary, Unit, Work
from dflash_mcmc.registry import name_of, options_with, register
from dflash_mcmc.store.schema import Count, Instead, OneOf, Whole
from dflash_mcmc.types import UnitCost

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dflash_mcmc.engine.batching.interface import ChainRunner
    from dflash_mcmc.engine.batching.language_model import LanguageModel
    from dflash_mcmc.engine.speculative.drafter import DFlashDrafter
    from dflash_mcmc.ops import Chain
    from dflash_mcmc.settings import Settings
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
    skipped: NotRequired[Annotated[str, Instead(("num_compared", "mean", "max"))]]
    """Why the answer has no signals."""


@register("probe", "difficulty")
@dataclass(slots=True, kw_only=True)
class Difficulty(ProblemProbe):
    """Whether draft-target disagreement distinguishes wrong answers from right ones.

    The sampler draws answers, which are graded and teacher-forced through target and draft in whole blocks. Every answer that
    is not graded correct is wrong, including one without a box. An answer that could not be drawn has no signals and is left
    out. Signals of draft and target are compared on the same tokens. A draft disagrees more in slots that are further from the
    anchor, whatever the token. `draft.block_size=2` measures the first slot alone.
    """

    uses = ("model", "draft", "blend", "sampler", "decoder", "dataset", "grader")
    unit = "answer"
    record_type = DifficultyRecord
    tables_in = f"{__name__}.tables"
    measures_chains = True
    needs_draft = True

    def check(self, config: Settings) -> None:
        """Checks that the configuration suits the probe. Raises ConfigError."""
        check_features(config, "probe=difficulty")
        if not config.blend.is_null:
            none = options_with("blend", "is_null")
            raise ConfigError("blend", name_of(config.blend), f"{none} with probe=difficulty: its signals are the plain "
                              "target's")

    def expected_cost(self, config: Settings) -> UnitCost | None:
        """The cost of drawing a sample, reading it once, and drafting each of its blocks."""
        forwards, drafted = cost.token_forwards(config), cost.draft_blocks(config)
        if forwards is None:
            return None
        answer = cost.forced(config)
        return UnitCost(forwards + answer.prompt + answer.length, drafted + answer.blocks)

    def measure(self, config: Settings, work: Work) -> Iterator[tuple[Unit, dict]]:
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

    def summarise(self, config: Settings, records: list[dict]) -> Summary:
        """AUROC of each signal, and its difference from the best one without a draft."""
        from dflash_mcmc.probe.difficulty import tables

        return tables.summary(records)

    def figures(self, config: Settings, records: list[dict], summary: Summary) -> dict[str, Figure]:
        """AUROC of all signals."""
        from dflash_mcmc.probe.difficulty import tables

        return {"fig_difficulty_auroc": tables.figure(summary)}


def _graded(config: Settings, engine: ChainRunner, problems: dict[str, Problem], chains: Iterator[tuple[Unit, Chain]],
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
                    pool.submit(unit, continued(build.ending(engine.model, answer.prompt), text), problem.answer,
                                problem.question)
            yield from decided()
        yield from decided(wait=True)
    finally:
        pool.close()


def _along(model: LanguageModel, drafter: DFlashDrafter, answer: Trajectory) -> dict:
    """The record of an answer, without its grade."""
    from dflash_mcmc.engine.batching.interface import NOT_NUMBERS
    from dflash_mcmc.probe.difficulty import signals

    if answer.length < drafter.num_drafted + 1:
        return {"num_tokens": answer.length, "skipped": f"shorter than {drafter.num_drafted + 1} tokens"}
    along = signals.along(model, drafter, answer.prompt, answer.tokens)
    if not all(np.isfinite(values).all() for values in along.values()):
        return {"num_tokens": answer.length, "skipped": NOT_NUMBERS}
    return {"num_tokens": answer.length, "num_compared": len(along[signals.DRAFT[0]]),
            **{statistic: {name: float(f"{of(values):.6g}") for name, values in along.items()}
               for statistic, of in (("mean", np.mean), ("max", np.max))}}
