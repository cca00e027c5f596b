"""Measures a draft, tries the known mistakes, and says what the measurements mean: the likely cause in a sentence.

The result is a `Checked`, which `report` writes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import torch

from dflash_mcmc.draft import CheckpointDraft
from dflash_mcmc.draft.check import forced
from dflash_mcmc.draft.check.forced import SHIFTS, Alternative, BlockWalk, CheckedPair, DraftSetting, ForcedBlocks
from dflash_mcmc.engine.batching.float32_head import soft_capped
from dflash_mcmc.errors import UserError
from dflash_mcmc.process import bars
from dflash_mcmc.registry import name_of
from dflash_mcmc.statistics.intervals import Clusters, IntervalEstimate

if TYPE_CHECKING:
    from dflash_mcmc.config.schema import Config
    from dflash_mcmc.engine.batching.language_model import LanguageModel
    from dflash_mcmc.engine.speculative.drafter import DFlashDrafter
    from dflash_mcmc.model.hf import HFModel

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
"""Standard errors by which a gain must differ from 0: with 30 alternatives a false alarm has a chance below 2 %."""
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
            one, two = ((weights @ ratio.tokens) / (weights @ ratio.forwards) for ratio in (ours, base))
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
        for index, shift in enumerate(SHIFTS):
            count = int(blocks.inside[index, :, slot].sum())
            row[f"shift {shift:+d}" if shift else "right"] = (
                float(blocks.right[index, :, slot].sum() / count) if count else None)
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


EDGES = (16, 64)
"""Tokens of the answer at which the ranges of positions are divided."""
_MOST_BLOCKS = 256
"""Blocks that are drafted again in each setting. More of them cost time and hardly narrow an interval over problems."""
_LEAST_AGREEMENT = 0.98
"""Share of blocks in which both forwards must gain the same. Near-ties differ, most of all in half precision."""
_OTHER_FILES = "the target's files (weights, configuration, tokenizer, template) are not those that it was trained for"
_OTHER_CONFIGURATION = ("the weights are those that it was trained for, but another file of their folder (configuration, "
                        "tokenizer, template) is not")


class Row(NamedTuple):
    """tau in one situation."""

    name: str
    tau: IntervalEstimate
    note: str = ""


class Checked(NamedTuple):
    """The measurements of a check and what they say."""

    draft: str
    model: str
    problems: int
    expected: float | None
    differences: list[str]
    positions: list[Row]
    """tau by temperature and position in the answer."""
    templates: list[Row]
    slots: list[dict]
    agreement: float
    """Share of blocks in which the engine's forward and the reference forward gain the same."""
    trials: list[Trial]
    not_applicable: list[str]
    """Checks that this draft or target rules out, as clauses."""
    verdict: DraftVerdict


def check(config: Config, expected: float | None = None, other: HFModel | None = None) -> Checked:
    """Measures the draft of a configuration whose decoder is speculative_match.

    Args:
        expected: tau at temperature 0 that the draft should have; None for what its config.json states.
        other: a model that the draft may have been trained for.

    Raises UserError for a draft without a checkpoint, or one that does not fit the target.
    """
    draft = _checkpoint_draft(config)
    config.hardware.found()
    device = config.hardware.resolve()
    model = config.model.load(device)
    drafter = cast("DFlashDrafter", draft.load(model))
    prompts = forced.prompts_of(config, model)
    greedy, sampled = (forced.draw(config, model, drafter, prompts, temperature, f"temperature {temperature:g}")
                       for temperature in (0.0, 1.0))
    if not greedy:
        raise UserError("dataset: no answer has two tokens; allowed: problems with longer answers")
    record = draft.training_record()
    templates, states = _templates(config, model, drafter, prompts, greedy)
    loaded = None if other is None else other.load(device)
    again = _tried(config, model, drafter, greedy, loaded)
    expected = _stated(record) if expected is None else expected
    differences, tau = _differences(config, record), estimate(of_walks(greedy))
    reference = None if again.agreement >= _LEAST_AGREEMENT else (
        f"the engine's blocks gain what the reference forward gives in only {again.agreement:.0%}: the mistake is in the "
        "engine or in half precision, not in the checkpoint")
    trials = [*states, *again.trials]
    judged = verdict(tau, len(greedy), trials, again.slots, expected, differences, reference)
    positions = _positions(greedy, 0.0) + _positions(sampled, 1.0)
    return Checked(f"{name_of(config.draft)} {draft.path}", cast("HFModel", config.model).path, len(greedy), expected,
                   [difference.clause for difference in differences], positions, templates, again.slots, again.agreement,
                   trials, again.absent, judged)


def _checkpoint_draft(config: Config) -> CheckpointDraft:
    """The draft. Raises UserError for a draft without a network of DFlash's layout."""
    if not (isinstance(config.draft, CheckpointDraft) and config.draft.has_block_network):
        raise UserError(f"draft: given one of the kind {name_of(config.draft)}; allowed with drafts check: a draft with a "
                        "checkpoint, dflash, dspark or dflash2, or a preset of these (drafts speed measures every kind)")
    return config.draft


def _stated(record: dict) -> float | None:
    """tau at temperature 0 on held-out prompts that the record states, `training.held_out_tau`."""
    stated = record.get("held_out_tau")
    return float(stated) if isinstance(stated, (int, float)) else None


def _differences(config: Config, record: dict) -> list[Difference]:
    """Differences between the training record and the configuration."""
    model, differences = cast("HFModel", config.model), []
    for name, mine in (("model.chat", model.chat), ("model.enable_thinking", model.enable_thinking if model.chat else None)):
        trained = record.get(name)
        if isinstance(trained, bool) and mine is not None and trained != mine:
            differences.append(Difference(f"{name} was {str(trained).lower()} in training and is {str(mine).lower()} here"))
    weights, content = record.get("model.weights"), record.get("model.content")
    if weights is not None and weights != model.weights_fingerprint():
        differences.append(Difference("the target's weights are not those that it was trained for", of_target=True))
    elif content is not None and content != model.fingerprint():
        differences.append(Difference(_OTHER_FILES, of_target=True) if weights is None else Difference(_OTHER_CONFIGURATION))
    return differences


def _positions(walks: Sequence[BlockWalk], temperature: float) -> list[Row]:
    names = [f"tokens {first} to {below - 1}" for first, below in zip((0, *EDGES), EDGES, strict=False)]
    rows = [Row(f"temperature {temperature:g}", estimate(of_walks(walks)))]
    for name, (tokens, forwards) in zip([*names, f"tokens from {EDGES[-1]}"], forced.by_position(walks, EDGES), strict=True):
        rows.append(Row(f"temperature {temperature:g}, {name}", estimate(Ratio(tokens, forwards))))
    return rows


def _templates(config: Config, model: LanguageModel, drafter: DFlashDrafter, prompts: dict[str, np.ndarray],
               greedy: Sequence[BlockWalk]) -> tuple[list[Row], list[Trial]]:
    """tau in every template state, and the trials of those that differ from the given one."""
    walks = {walk.problem: walk for walk in greedy}
    rows, trials = [Row("as given", estimate(of_walks(greedy)))], []
    for state in forced.template_states(config):
        empty = IntervalEstimate(None, None, None, 0)
        try:
            theirs = forced.prompts_of(state.config, model)
        except UserError as error:
            rows.append(Row(state.name, empty, f"not possible: {error}"))
            continue
        if forced.same_prompts(prompts, theirs):
            rows.append(Row(state.name, empty, "the same prompts as given"))
            continue
        drawn = [walk for walk in forced.draw(state.config, model, drafter, theirs, 0.0, state.name) if walk.problem in walks]
        if not drawn:
            rows.append(Row(state.name, empty, "no answer has two tokens"))
            continue
        rows.append(Row(state.name, estimate(of_walks(drawn))))
        cause = f"the draft knows other prompts: it accepts more with {state.name}"
        trials.append(trial("template", state.name, cause, of_walks(drawn),
                                     of_walks([walks[walk.problem] for walk in drawn])))
    return rows, trials


def _base(drafter: DFlashDrafter, model: LanguageModel) -> DraftSetting:
    """The setting in which the engine runs the draft."""
    network = drafter.network
    size = drafter.num_drafted + network.shape.first_row
    if size != network.shape.block_size:
        network = forced.with_shape(network, block_size=size)
    return DraftSetting(network=network, layers=tuple(network.shape.target_layers), offset=1 - network.shape.first_row,
                   embedding=model, head=model)


class _Redrafted(NamedTuple):
    """What the reference forward has measured."""

    trials: list[Trial]
    slots: list[dict]
    agreement: float
    absent: list[str]


def _tried(config: Config, model: LanguageModel, drafter: DFlashDrafter, greedy: list[BlockWalk],
           other: LanguageModel | None) -> _Redrafted:
    """Drafts the blocks of the walks again, as the engine has drafted them and in every alternative."""
    subject = _subject(config, drafter, model, other)
    changed = forced.alternatives(subject)
    settings, kept = [subject.base, *(each.setting for each in changed)], forced.kept_anchors(greedy, _MOST_BLOCKS)
    with bars.Bar(len(settings) * forced.chunks(greedy), "forward", "drafts again") as bar:
        base, *redrafted = forced.forced(model, greedy, kept, settings, _logits(drafter), bar.update)
    drawn = np.concatenate([np.array(walk.gained)[chosen] for walk, chosen in zip(greedy, kept, strict=True)])
    trials = [tried(each, blocks, base, len(greedy)) for each, blocks in zip(changed, redrafted, strict=True)]
    return _Redrafted(trials, slots(base), float((drawn == base.gained).mean()), _absent(subject))


def _subject(config: Config, drafter: DFlashDrafter, model: LanguageModel, other: LanguageModel | None) -> CheckedPair:
    float32 = None
    if drafter.dtype != torch.float32:
        exact = dataclasses.replace(config.draft, dtype="float32")  # type: ignore[type-var]
        float32 = _base(cast("DFlashDrafter", exact.load(model)), model).network
    return CheckedPair(_base(drafter, model), model, float32, other)


def _logits(drafter: DFlashDrafter) -> Callable[[LanguageModel, torch.Tensor], torch.Tensor]:
    """The draft's logits through the head of a model, with the draft's scales."""
    shape = drafter.network.shape
    if shape.draft_vocab_size is not None:  # of its own head, whatever the model
        return lambda model, hidden: drafter.logits(hidden)

    def logits(model: LanguageModel, hidden: torch.Tensor) -> torch.Tensor:
        return soft_capped(model.head_logits(hidden) * shape.logit_scale, shape.logit_softcap, model.forbidden)

    return logits


def _absent(subject: CheckedPair) -> list[str]:
    """Checks that are not made, with the reason."""
    layers, reasons = subject.base.layers, []
    if subject.float32 is None:
        reasons.append("precision: the draft runs in float32")
    if subject.other is None:
        reasons.append("embedding and head of another model: give it with --trained-for")
    if len(layers) == 1:
        reasons.append("order of the features: the draft reads one layer")
    return reasons
