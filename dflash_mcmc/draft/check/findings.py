"""What the measurements say: the verdict, the likely cause in a sentence, and the numbers that show it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dflash_mcmc.draft.check.alternatives import Alternative
from dflash_mcmc.draft.check.forced import SHIFTS, ForcedBlocks
from dflash_mcmc.draft.check.walks import BlockWalk
from dflash_mcmc.statistics.intervals import Clusters, IntervalEstimate

LEAST_PROBLEMS = 8
"""Intervals that resample fewer problems are too narrow."""
WIDEST = 0.15
"""Largest half-width of the interval of tau, as a part of tau, with which a draft is judged."""
LEAST_GAIN = 1.05
"""Smallest ratio of tau, with a change to without, that is named as a cause."""
LEAST_GAIN_OF_BLOCKS = 1.15
"""The same for another block size. A healthy draft can gain a few per cent in slots that it was not trained for."""
NOT_TOLD_APART = 0.98
"""Changes of the same kind whose tau is at least this part of the best one's are named beside it."""
DEVIATIONS = 3.5
"""Standard errors by which a gain must differ from 0: with 60 alternatives a false alarm has a chance below 3 %."""
_ERRORS_IN_INTERVAL = 2 * 1.96


class Ratio(NamedTuple):
    """A mean number of tokens for each forward, by problem."""

    tokens: np.ndarray
    """(problems,)."""
    forwards: np.ndarray
    """(problems,)."""


class Trial(NamedTuple):
    """What a change of one thing did."""

    kind: str
    name: str
    cause: str
    tau: IntervalEstimate
    base_tau: float
    """tau without the change, on the same blocks or problems."""
    change: IntervalEstimate
    """The difference of both."""
    not_numbers: int = 0
    step: int = 0
    """For a layout, the places from a slot to the token that it predicts."""

    @property
    def helps(self) -> bool:
        """Whether the change gains enough to be named, beyond chance."""
        if self.change.value is None or self.change.interval is None:
            return False
        error = (self.change.interval[1] - self.change.interval[0]) / _ERRORS_IN_INTERVAL
        least = LEAST_GAIN_OF_BLOCKS if self.kind == "block" else LEAST_GAIN
        return self.tau.known >= least * self.base_tau and self.change.value > DEVIATIONS * error


class Difference(NamedTuple):
    """A difference between the checkpoint's training record and this run."""

    clause: str
    of_target: bool = False
    """Whether the target may be another one than that of the training."""


class DraftVerdict(NamedTuple):
    """The outcome of a check.

    `outcome` is healthy, cause (a change explains it), below (less than expected, without an explanation), other_target (the
    checkpoint's record names other weights of the target, and nothing says what to expect), or wide (too few problems).
    """

    outcome: str
    sentence: str


def of_walks(walks: Sequence[BlockWalk]) -> Ratio:
    """tau of drawn answers, by problem."""
    return Ratio(np.array([sum(walk.gained) for walk in walks]), np.array([len(walk.gained) for walk in walks]))


def of_blocks(blocks: ForcedBlocks, problems: int) -> Ratio:
    """tau of given blocks, by problem."""
    return Ratio(np.bincount(blocks.problem, blocks.gained, problems), np.bincount(blocks.problem, minlength=problems))


def estimate(ratio: Ratio) -> IntervalEstimate:
    """tau with the interval that resamples problems."""
    return Clusters(range(len(ratio.tokens))).ratio(ratio.tokens, ratio.forwards)


def trial(kind: str, name: str, cause: str, ours: Ratio, base: Ratio, not_numbers: int = 0, step: int = 0) -> Trial:
    """Compares a change with the draft as it is. Both have the same problems, so that the difference is paired."""
    def difference(weights: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            one, two = ((weights @ part.tokens) / (weights @ part.forwards) for part in (ours, base))
        return np.where(np.isfinite(one - two), one - two, np.nan)

    return Trial(kind, name, cause, estimate(ours), float(base.tokens.sum() / base.forwards.sum()),
                 Clusters(range(len(base.tokens))).statistic(difference), not_numbers, step)


def tried(alternative: Alternative, blocks: ForcedBlocks, base: ForcedBlocks, problems: int) -> Trial:
    """The trial of an alternative on the blocks of the draft as it is."""
    return trial(alternative.kind, alternative.name, alternative.cause, of_blocks(blocks, problems), of_blocks(base, problems),
                 blocks.not_numbers, alternative.step)


def slots(blocks: ForcedBlocks) -> list[dict[str, float | int | None]]:
    """For each slot the share of its proposals that are the answer's token, and of those that are a neighbouring token.

    A slot counts whether or not the slots before it are right.
    """
    rows = []
    for slot in range(blocks.right.shape[2]):
        row: dict[str, float | int | None] = {"slot": slot + 1, "blocks": int(blocks.inside[SHIFTS.index(0), :, slot].sum())}
        for number, shift in enumerate(SHIFTS):
            count = int(blocks.inside[number, :, slot].sum())
            row[f"shift {shift:+d}" if shift else "right"] = (
                float(blocks.right[number, :, slot].sum() / count) if count else None)
        rows.append(row)
    return rows


def verdict(tau: IntervalEstimate, problems: int, trials: Sequence[Trial], slot_rows: Sequence[dict], expected: float | None,
            differences: Sequence[Difference], reference: str | None) -> DraftVerdict:
    """The outcome in a sentence.

    Args:
        tau: at temperature 0, as the engine draws.
        problems: number of problems with an answer.
        slot_rows: see `slots`.
        expected: tau that the card states; None if nothing is known.
        differences: between the checkpoint's training record and this run.
        reference: why the engine's forward and the reference forward do not agree; None if they agree.
    """
    because = "; the checkpoint's record differs: " + ", ".join(
        difference.clause for difference in differences) if differences else ""
    if problems < LEAST_PROBLEMS:
        return DraftVerdict("wide", f"the interval is too wide: tau {with_interval(tau)} on too few problems; take at least "
                            f"{LEAST_PROBLEMS} (dataset.limit)")
    if reference is not None:
        return DraftVerdict("cause", reference)
    helping = sorted((each for each in trials if each.helps), key=lambda each: -each.tau.known)
    if helping:
        return DraftVerdict("cause", _sentence(helping[0], slot_rows) + _also(helping) + because)
    half = (tau.high - tau.low) / 2 if tau.high is not None and tau.low is not None else np.inf
    if half > WIDEST * tau.known:
        needed = int(np.ceil(problems * (half / (WIDEST * tau.known)) ** 2)) if np.isfinite(half) else LEAST_PROBLEMS
        return DraftVerdict("wide", f"the interval is too wide: tau {with_interval(tau)}; take about {needed} problems "
                            "(dataset.limit)")
    if expected is not None and (tau.high if tau.high is not None else tau.known) < expected:
        left = because or "; what is left is the data: language, task, or a quantised target"
        return DraftVerdict("below", f"tau is {with_interval(tau)}, less than the expected {expected:.4g}, and no mistake "
                            f"that is known explains it{left}")
    if expected is None and any(difference.of_target for difference in differences):
        return DraftVerdict("other_target", f"tau is {with_interval(tau)}{because}; give --expected, or --trained-for=MODEL "
                            "to try the embedding and the head of the model that it was trained for")
    against = "no known mistake would raise it" if expected is None else f"expected {expected:.4g}"
    return DraftVerdict("healthy", f"tau is {with_interval(tau)}, {against}")


def _also(helping: Sequence[Trial]) -> str:
    """The changes of the same kind that gain as much as the best one, which comes first."""
    names = [each.name for each in helping[1:] if each.kind == helping[0].kind
             and each.tau.known >= NOT_TOLD_APART * helping[0].tau.known]
    return f"; not told apart from {', '.join(names)}" if names else ""


def _sentence(best: Trial, slot_rows: Sequence[dict]) -> str:
    shown = f"tau is {best.tau.known:.2f} with this changed and {best.base_tau:.2f} without"
    if step := best.step:
        row = slot_rows[0 if step > 0 else 1] if len(slot_rows) > 1 else {}
        if (neighbour := row.get(f"shift {step:+d}")) is not None:
            return (f"slot {row['slot']} predicts the token of slot {row['slot'] + step} in {neighbour:.0%} and its own in "
                    f"{row['right']:.0%}: {best.cause} ({shown})")
    return f"{best.cause} ({shown})"


def with_interval(estimate: IntervalEstimate, form: str = ".2f", unknown: str = "unknown") -> str:
    """An estimate as text: `4.75 [4.45, 5.07]`, without the interval where there is none."""
    interval = "" if estimate.interval is None else f" [{estimate.interval[0]:{form}}, {estimate.interval[1]:{form}}]"
    return unknown if estimate.value is None else f"{estimate.value:{form}}{interval}"
