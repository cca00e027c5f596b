"""The record of an answer in the difficulty probe."""

from __future__ import annotations

from typing import Annotated, NotRequired, final

from typing_extensions import TypedDict

from dflash_mcmc.grading.verdicts import VERDICTS
from dflash_mcmc.store.bounds import Count, Instead, OneOf, Whole


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
