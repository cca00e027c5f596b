"""Measures a draft and tries the known mistakes. The result is a `Checked`, which `report` writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from dflash_mcmc.draft import CheckpointDraft
from dflash_mcmc.draft.check import findings
from dflash_mcmc.draft.check.findings import Difference, DraftVerdict, Ratio, Trial
from dflash_mcmc.errors import ConfigError, UserError
from dflash_mcmc.registry import name_of
from dflash_mcmc.statistics.intervals import IntervalEstimate

if TYPE_CHECKING:
    import torch

    from dflash_mcmc.config.schema import Config
    from dflash_mcmc.draft.check.alternatives import CheckedPair
    from dflash_mcmc.draft.check.forced import DraftSetting
    from dflash_mcmc.draft.check.walks import BlockWalk
    from dflash_mcmc.engine.batching.language_model import LanguageModel
    from dflash_mcmc.engine.speculative.drafter import DFlashDrafter
    from dflash_mcmc.model.hf import HFModel

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
    """Measures the draft of a configuration whose decoder is speculative_match with a trace.

    Args:
        expected: tau at temperature 0 that the draft should have; None for what its config.json states.
        other: a model that the draft may have been trained for.

    Raises UserError for a draft without a checkpoint, or one that does not fit the target.
    """
    from dflash_mcmc.draft.check import walks

    draft = _checkpoint_draft(config)
    config.hardware.found()
    device = config.hardware.resolve()
    model = config.model.load(device)
    drafter = cast("DFlashDrafter", draft.load(model))
    prompts = walks.prompts_of(config, model)
    greedy, sampled = (walks.draw(config, model, drafter, prompts, temperature, f"temperature {temperature:g}")
                       for temperature in (0.0, 1.0))
    if not greedy:
        raise UserError("dataset: no answer has two tokens; allowed: problems with longer answers")
    record = draft.training_record()
    templates, states = _templates(config, model, drafter, prompts, greedy)
    loaded = None if other is None else other.load(device)
    forced = _tried(config, model, drafter, greedy, loaded)
    expected = _stated(record) if expected is None else expected
    differences, tau = _differences(config, record), findings.estimate(findings.of_walks(greedy))
    reference = None if forced.agreement >= _LEAST_AGREEMENT else (
        f"the engine's blocks gain what the reference forward gives in only {forced.agreement:.0%}: the mistake is in the "
        "engine or in half precision, not in the checkpoint")
    trials = [*states, *forced.trials]
    verdict = findings.verdict(tau, len(greedy), trials, forced.slots, expected, differences, reference)
    positions = _positions(greedy, 0.0) + _positions(sampled, 1.0)
    return Checked(f"{name_of(config.draft)} {draft.path}", name_of(config.model), len(greedy), expected,
                   [difference.clause for difference in differences], positions, templates, forced.slots, forced.agreement,
                   trials, forced.absent, verdict)


def _checkpoint_draft(config: Config) -> CheckpointDraft:
    """The draft. Raises ConfigError for a draft without a network of DFlash's layout, or one that learns."""
    if not isinstance(config.draft, CheckpointDraft):
        raise ConfigError("draft", name_of(config.draft), "a draft with a checkpoint: dflash, dspark, dflash2 or a preset")
    if config.draft.learns():
        raise ConfigError("draft.adapt", "online or context", "none: a draft that learns is another draft in every block")
    return config.draft


def _stated(record: dict) -> float | None:
    """tau at temperature 0 on held-out prompts that the record states, `training.held_out_tau`."""
    stated = record.get("held_out_tau")
    return float(stated) if isinstance(stated, (int, float)) else None


def _differences(config: Config, record: dict) -> list[Difference]:
    """Differences between the training record and the configuration."""
    model, found = cast("HFModel", config.model), []
    for name, mine in (("model.chat", model.chat), ("model.enable_thinking", model.enable_thinking if model.chat else None)):
        trained = record.get(name)
        if isinstance(trained, bool) and mine is not None and trained != mine:
            found.append(Difference(f"{name} was {str(trained).lower()} in training and is {str(mine).lower()} here"))
    weights, content = record.get("model.weights"), record.get("model.content")
    if weights is not None and weights != model.weights_fingerprint():
        found.append(Difference("the target's weights are not those that it was trained for", of_target=True))
    elif content is not None and content != model.fingerprint():
        found.append(Difference(_OTHER_FILES, of_target=True) if weights is None else Difference(_OTHER_CONFIGURATION))
    return found


def _positions(walks: Sequence[BlockWalk], temperature: float) -> list[Row]:
    from dflash_mcmc.draft.check.walks import by_position

    names = [f"tokens {first} to {below - 1}" for first, below in zip((0, *EDGES), EDGES, strict=False)]
    rows = [Row(f"temperature {temperature:g}", findings.estimate(findings.of_walks(walks)))]
    for name, (tokens, forwards) in zip([*names, f"tokens from {EDGES[-1]}"], by_position(walks, EDGES), strict=True):
        rows.append(Row(f"temperature {temperature:g}, {name}", findings.estimate(Ratio(tokens, forwards))))
    return rows


def _templates(config: Config, model: LanguageModel, drafter: DFlashDrafter, prompts: dict[str, np.ndarray],
               greedy: Sequence[BlockWalk]) -> tuple[list[Row], list[Trial]]:
    """tau in every template state, and the trials of those that differ from the given one."""
    from dflash_mcmc.draft.check import walks

    given = {walk.problem: walk for walk in greedy}
    rows, trials = [Row("as given", findings.estimate(findings.of_walks(greedy)))], []
    for state in walks.template_states(config):
        empty = IntervalEstimate(None, None, None, 0)
        try:
            theirs = walks.prompts_of(state.config, model)
        except UserError as error:
            rows.append(Row(state.name, empty, f"not possible: {error}"))
            continue
        if walks.same_prompts(prompts, theirs):
            rows.append(Row(state.name, empty, "the same prompts as given"))
            continue
        drawn = [walk for walk in walks.draw(state.config, model, drafter, theirs, 0.0, state.name) if walk.problem in given]
        if not drawn:
            rows.append(Row(state.name, empty, "no answer has two tokens"))
            continue
        rows.append(Row(state.name, findings.estimate(findings.of_walks(drawn))))
        cause = f"the draft knows other prompts: it accepts more with {state.name}"
        trials.append(findings.trial("template", state.name, cause, findings.of_walks(drawn),
                                     findings.of_walks([given[walk.problem] for walk in drawn])))
    return rows, trials


def _base(drafter: DFlashDrafter, model: LanguageModel) -> DraftSetting:
    """The setting in which the engine runs the draft."""
    from dflash_mcmc.draft.check.forced import DraftSetting, with_shape

    network = drafter.network
    size = drafter.num_drafted + network.shape.first_row
    if size != network.shape.block_size:
        network = with_shape(network, block_size=size)
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
    from tqdm import tqdm

    from dflash_mcmc.draft.check import forced
    from dflash_mcmc.draft.check.alternatives import alternatives

    subject = _subject(config, drafter, model, other)
    changed = alternatives(subject)
    settings, kept = [subject.base, *(each.setting for each in changed)], forced.kept_anchors(greedy, _MOST_BLOCKS)
    with tqdm(total=len(settings) * forced.chunks(greedy), unit="forward", desc="drafts again",
              mininterval=0.5, dynamic_ncols=True) as bar:
        base, *found = forced.forced(model, greedy, kept, settings, _logits(drafter), bar.update)
    drawn = np.concatenate([np.array(walk.gained)[chosen] for walk, chosen in zip(greedy, kept, strict=True)])
    trials = [findings.tried(each, blocks, base, len(greedy)) for each, blocks in zip(changed, found, strict=True)]
    return _Redrafted(trials, findings.slots(base), float((drawn == base.gained).mean()), _absent(subject))


def _subject(config: Config, drafter: DFlashDrafter, model: LanguageModel, other: LanguageModel | None) -> CheckedPair:
    import torch

    from dflash_mcmc.draft.check.alternatives import CheckedPair

    float32 = None
    if drafter.dtype != torch.float32:
        exact = dataclasses.replace(config.draft, dtype="float32")  # type: ignore[type-var]
        float32 = _base(cast("DFlashDrafter", exact.load(model)), model).network
    return CheckedPair(_base(drafter, model), model, float32, other)


def _logits(drafter: DFlashDrafter) -> Callable[[LanguageModel, torch.Tensor], torch.Tensor]:
    """The draft's logits through the head of a model, with the draft's scales."""
    from dflash_mcmc.engine.batching.float32_head import soft_capped

    shape = drafter.network.shape

    def logits(model: LanguageModel, hidden: torch.Tensor) -> torch.Tensor:
        return soft_capped(model.head_logits(hidden) * shape.logit_scale, shape.logit_softcap, model.forbidden)

    return logits


def _absent(subject: CheckedPair) -> list[str]:
    """Checks that are not made, with the reason."""
    layers, found = subject.base.layers, []
    if len(subject.target.layers) - 1 not in layers:
        found.append("the last layer before the final norm: the draft does not read the last layer")
    if subject.float32 is None:
        found.append("precision: the draft runs in float32")
    if subject.other is None:
        found.append("embedding and head of another model: give it with --trained-for")
    if len(layers) == 1:
        found.append("order of the features: the draft reads one layer")
    return found
