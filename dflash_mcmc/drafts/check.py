"""Whether a draft accepts what it should: tau by temperature and position, and two mistakes that cost tokens without a word.

A draft whose rows are off by one, or whose features come from wrong layers, gives no wrong answer, because the target verifies
every token. The blocks of greedy answers are drafted again by a forward that has no cache and reads whole sequences: as they
are, with rows that predict the token one place later or earlier, and with features of the layers above or below. As they are
they must gain what the engine's blocks gained.

`measure` times steps of blocks and plain steps. A block costs a forward of the target over more tokens, and the draft. With
many chains, or at a high temperature, it can cost more than it gains. Break-even is the tau at which both are equally fast.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from tabulate import tabulate

from dflash_mcmc.chains import build
from dflash_mcmc.components import name_of
from dflash_mcmc.config.schema import Config
from dflash_mcmc.draft import CheckpointDraft
from dflash_mcmc.engine import slots
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.speculative.drafter import DFlashDrafter, Drafter
from dflash_mcmc.errors import ConfigError, UserError
from dflash_mcmc.forcing import sequences
from dflash_mcmc.ops import Chain, Draw, SamplingParams
from dflash_mcmc.process import bars
from dflash_mcmc.rng import Key
from dflash_mcmc.statistics.estimates import Clusters, IntervalEstimate
from dflash_mcmc.types import ChainResult, Trajectory

TEMPERATURES = (0.0, 1.0)
LEAST_PROBLEMS = 8
"""Intervals that resample fewer problems are too narrow."""
LEAST_GAIN, DEVIATIONS = 1.05, 3.5
"""Smallest ratio of tau, with a change to without, that is called a mistake, and the standard errors by which the difference
must differ from 0: a false alarm among the changes has a chance below 0.2 %."""
EDGES = (16, 64)
"""Tokens of the answer at which the ranges of positions are divided."""
_MOST_BLOCKS = 256
"""Blocks that are drafted again. More of them cost time and hardly narrow an interval over problems."""
_LEAST_AGREEMENT = 0.98
"""Share of blocks in which both forwards must gain the same. Near-ties differ, most of all in half precision."""
_TURNS = 2
"""Each case is timed so often, and the fastest counts: other programs only make it slower."""


class BlockWalk(NamedTuple):
    """An answer that was drawn block by block: its prompt and tokens, int64 each, and the tokens that each forward gave."""

    problem: str
    prompt: np.ndarray
    tokens: np.ndarray
    gained: tuple[int, ...]

    def anchors(self) -> np.ndarray:
        """Position in the sequence of each block's anchor, int64 (blocks,). The first one is the prompt's last token."""
        return len(self.prompt) - 1 + np.concatenate([[0], np.cumsum(self.gained)[:-1]]).astype(np.int64)


def walked(config: Config, model: LanguageModel, drafter: Drafter | None, prompts: dict[str, np.ndarray], temperature: float,
           trace: bool = True) -> tuple[Callable[[], Iterator[BlockWalk]], Callable[[], float]]:
    """An engine with the configuration's decoder, or without a drafter a plain one.

    Returns a function that draws the answers as they end, and one that tells the seconds of a chain's step in the latest turn.
    Steps without a trace count as one token. Raises UserError if an answer cannot be drawn.
    """
    speculation = None if drafter is None else config.decoder.speculation(drafter)
    engine = slots.engine_of(config, model.stopping_at(config.dataset.stop), max(map(len, prompts.values())), len(prompts),
                             None, speculation and speculation._replace(trace=trace), drafter)

    def chain(problem: str) -> Chain:
        return ChainResult((yield Draw(Trajectory.start(prompts[problem]), config.dataset.max_new_tokens,
                                       SamplingParams(temperature=temperature), Key(config.seed).fold_in("drafts", problem))))

    def turn() -> Iterator[BlockWalk]:
        engine.reset_counters()
        for done in engine.run((problem, chain(problem)) for problem in prompts):
            if done.result is None:
                raise UserError(f"draft: the answer to problem {done.tag} cannot be drawn: {done.failure}")
            tokens = done.result.trajectory.tokens.astype(np.int64)
            gained = tuple(cast("int", block["gained"]) for block in done.walk) or (1,) * len(tokens)
            yield BlockWalk(done.tag, prompts[done.tag], tokens, gained)

    return turn, lambda: engine.counters.step_seconds / engine.counters.row_steps


def draw(config: Config, model: LanguageModel, drafter: Drafter, prompts: dict[str, np.ndarray],
         temperature: float) -> list[BlockWalk]:
    """The answers of two and more tokens, in the order of the prompts. The draft proposes its most likely tokens."""
    walks = dict[str, BlockWalk]()
    with bars.Bar(len(prompts), "answer", f"temperature {temperature:g}") as bar:
        for walk in walked(config, model, drafter, prompts, temperature)[0]():
            walks[walk.problem] = walk
            bar.update()
    return [walks[problem] for problem in prompts if len(walks[problem].tokens) > 1]


class Ratio(NamedTuple):
    """Tokens and forwards of the target by problem, each (problems,). tau is the ratio of their sums."""

    tokens: np.ndarray
    forwards: np.ndarray

    @classmethod
    def of(cls, gained: Sequence[Sequence[int] | np.ndarray]) -> "Ratio":
        """The ratio of blocks, given the tokens that each block of each problem gained."""
        return cls(np.array([sum(each) for each in gained]), np.array([len(each) for each in gained]))

    def tau(self) -> IntervalEstimate:
        """Tokens for each forward, with an interval that resamples problems."""
        return Clusters(range(len(self.tokens))).ratio(self.tokens, self.forwards)


class Change(NamedTuple):
    """A draft that is run in another way, and what is wrong if it then accepts more.

    Attributes:
        layers: the target's layers whose outputs are the features.
        step: places by which each row predicts a later token.
    """

    name: str
    mistake: str
    layers: tuple[int, ...]
    step: int = 0


class Trial(NamedTuple):
    """tau with a change, that of the same blocks without it, and the difference, which is paired by problem."""

    change: Change
    tau: IntervalEstimate
    base_tau: float
    difference: IntervalEstimate

    @property
    def helps(self) -> bool:
        """Whether the draft accepts more with the change, beyond chance."""
        if self.difference.value is None or self.difference.interval is None:
            return False
        error = (self.difference.interval[1] - self.difference.interval[0]) / (2 * 1.96)
        return self.tau.known >= LEAST_GAIN * self.base_tau and self.difference.value > DEVIATIONS * error


class Checked(NamedTuple):
    """The measurements of a check.

    Attributes:
        title: the draft, the model, and tau of the training if the checkpoint has it.
        positions: tau by temperature and position in the answer.
        agreement: share of blocks that gain the same in the engine and in the second forward.
    """

    title: str
    problems: int
    positions: dict[str, IntervalEstimate]
    agreement: float
    trials: list[Trial]

    def verdict(self) -> str:
        """What the measurements say, as a sentence."""
        tau = f"tau is {_shown(self.positions['temperature 0'])}"
        if self.agreement < _LEAST_AGREEMENT:
            return (f"the engine's blocks gain what the second forward gives in only {self.agreement:.0%}: the mistake is in "
                    "the engine or in half precision, not in the checkpoint")
        if self.problems < LEAST_PROBLEMS:
            return f"{tau} on too few problems for a check; take at least {LEAST_PROBLEMS} (dataset.limit)"
        if not (helping := [trial for trial in self.trials if trial.helps]):
            return f"{tau}; rows and layers are right"
        best = max(helping, key=lambda trial: trial.tau.known)
        return f"{best.change.mistake} (tau is {best.tau.known:.2f} with {best.change.name}, {best.base_tau:.2f} without)"

    def text(self) -> str:
        """The tables and the verdict."""
        rows = [[trial.change.name, _shown(trial.tau), _shown(trial.difference, "+.2f"), "helps" if trial.helps else ""]
                for trial in self.trials]
        return "\n\n".join([
            self.title, tabulate([[name, _shown(tau)] for name, tau in self.positions.items()], ["situation", "tau"], "github",
                                 disable_numparse=True),
            tabulate(rows, ["changed", "tau", "difference", ""], "github", disable_numparse=True),
            f"{self.agreement:.1%} of the blocks gain the same in the engine and in the second forward.\n{self.verdict()}"])

    def values(self) -> dict[str, object]:
        """Everything that was measured, for JSON."""
        return {**self._asdict(), "verdict": self.verdict(),
                "positions": [{"name": name, **tau.columns("tau")} for name, tau in self.positions.items()],
                "trials": [{"name": trial.change.name, **trial.tau.columns("tau"), "base_tau": trial.base_tau,
                            **trial.difference.columns("difference"), "helps": trial.helps} for trial in self.trials]}


def check(config: Config) -> Checked:
    """Measures the draft of a configuration whose decoder is speculative_match.

    Raises UserError for a draft without a checkpoint, or one that does not fit the target.
    """
    draft = config.draft
    if not (isinstance(draft, CheckpointDraft) and draft.has_block_network):
        raise ConfigError("draft", name_of(draft), "dflash, dspark or dflash2, or a preset of these, with drafts check "
                          "(drafts speed measures every kind)")
    config.hardware.found()
    model = config.model.load(config.hardware.resolve())
    drafter = cast("DFlashDrafter", draft.load(model))
    prompts = build.prompts(config, model, config.dataset.problems())
    drawn = {temperature: draw(config, model, drafter, prompts, temperature) for temperature in TEMPERATURES}
    if not (greedy := drawn[0.0]):
        raise UserError("dataset: no answer has two tokens; allowed: problems with longer answers")
    trained = draft.training_record().get("held_out_tau")
    title = f"{name_of(draft)} {draft.path} on {cast('Any', config.model).path}, {len(greedy)} problems" + (
        f"; tau of its training is {trained:.2f}" if isinstance(trained, (int, float)) else "")
    positions = dict[str, IntervalEstimate]()
    for temperature, walks in drawn.items():  # a block counts where it begins
        for first, below in ((0, None), *zip((0, *EDGES), (*EDGES, None), strict=True)):
            inside = [[gained for gained, anchor in zip(walk.gained, walk.anchors(), strict=True)
                       if first <= anchor + 1 - len(walk.prompt) < (below or np.inf)] for walk in walks]
            places = f", tokens {first} to {below - 1}" if below else f", tokens from {first}" if first else ""
            positions[f"temperature {temperature:g}{places}"] = Ratio.of(inside).tau()
    return Checked(title, len(greedy), positions, *redrafted(drafter, greedy))


def changes(layers: tuple[int, ...], num_layers: int) -> list[Change]:
    """The draft as it is, which reads these layers, and the changes that a target of so many layers allows."""
    rows = "the block is off by one slot: each row predicts the token {} its own slot"
    above, below = (tuple(layer + step for layer in layers) for step in (1, -1))
    made = [Change("nothing", "", layers), Change("rows one later", rows.format("after"), layers, 1),
            Change("rows one earlier", rows.format("before"), layers, -1),
            Change(f"layers {list(above)}", f"the layers of the features, {list(layers)}, are one too low", above),
            Change(f"layers {list(below)}", f"the layers of the features, {list(layers)}, are one too high", below)]
    return [change for change in made if all(0 <= layer < num_layers for layer in change.layers)]


def redrafted(drafter: DFlashDrafter, walks: Sequence[BlockWalk]) -> tuple[float, list[Trial]]:
    """Drafts blocks of greedy answers again. Returns the share that gains what the engine's blocks gained, and the trials."""
    model, base = drafter.target, tuple(drafter.network.shape.target_layers)
    tried = changes(base, len(model.layers))
    layers = tuple(sorted({layer for change in tried for layer in change.layers}))
    every = max(1, -(-sum(len(walk.gained) for walk in walks) // _MOST_BLOCKS))
    gained, drawn = [list[np.ndarray]() for _ in tried], list[np.ndarray]()
    with bars.Bar(len(walks), "answer", "drafts again") as bar:
        for index, walk in enumerate(walks):
            blocks = np.arange(index % every, len(walk.gained), every)
            drawn.append(np.array(walk.gained)[blocks])
            tokens, anchors = (torch.from_numpy(x).to(model.device) for x in (
                np.concatenate([walk.prompt, walk.tokens]), walk.anchors()[blocks]))
            reading = sequences.read(model, tokens[None], layers)
            outputs = dict(zip(layers, reading.outputs, strict=True))
            for change, found in zip(tried, gained, strict=True):
                chosen = reading._replace(outputs=tuple(outputs[layer] for layer in change.layers))
                found.append(_gained(drafter, chosen.features(model, change.layers), tokens, anchors, change.step))
            bar.update()
    as_is, *changed = map(Ratio.of, gained)
    agreement = float((np.concatenate(gained[0]) == np.concatenate(drawn)).mean())
    return agreement, [trial(change, ratio, as_is) for change, ratio in zip(tried[1:], changed, strict=True)]


def trial(change: Change, ours: Ratio, base: Ratio) -> Trial:
    """Compares blocks with a change to the same blocks without it, by problem."""
    def difference(weights: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            one, two = ((weights @ ratio.tokens) / (weights @ ratio.forwards) for ratio in (ours, base))
        return np.where(np.isfinite(one - two), one - two, np.nan)

    return Trial(change, ours.tau(), base.tau().known, Clusters(range(len(base.tokens))).statistic(difference))


@torch.no_grad()
def _gained(drafter: DFlashDrafter, features: torch.Tensor, tokens: torch.Tensor, anchors: torch.Tensor,
            step: int) -> np.ndarray:
    """int64 (blocks,), accepted tokens and the target's token after them, at most what is left of the answer.

    Args:
        features: (1, length, features · hidden). tokens: int64 (length,). anchors: int64 (blocks,).
        step: places by which each row predicts a later token.
    """
    network, length = drafter.network, len(tokens)
    step += 1 - network.shape.first_row  # row r predicts the token r + step places after the anchor
    first = max(0, 1 - step)
    given = torch.full((1, len(anchors), drafter.num_drafted + network.shape.first_row), network.shape.mask_token_id,
                       device=tokens.device)
    given[0, :, 0] = tokens[anchors]
    hidden = sequences.drafted(network, drafter.target, features, tokens[None], torch.tensor([length], device=tokens.device),
                               anchors[None], given, first_row=first)[0]
    places = anchors[:, None] + first + step + torch.arange(hidden.shape[1], device=tokens.device)
    at, proposed = places.clamp(max=length - 1), []
    at_once = max(1, sequences.positions_at_once(drafter.target.vocab_size) // places.shape[1])
    for states, before in zip(hidden.split(at_once), tokens[at - 1].split(at_once), strict=True):
        best = network.along(drafter.logits(states), states, before).max(dim=-1)
        proposed.append(best.indices.where(best.values.isfinite(), -1))  # NaN is the maximum of a row that has one
    right = (torch.cat(proposed) == tokens[at]) & (places < length) if proposed else at.new_zeros(at.shape)
    return torch.minimum(right.long().cumprod(dim=1).sum(dim=1) + 1, length - 1 - anchors).cpu().numpy()


def _shown(estimate: IntervalEstimate, form: str = ".2f") -> str:
    """An estimate as text: `4.75 [4.45, 5.07]`, without the interval where there is none."""
    interval = "" if estimate.interval is None else f" [{estimate.interval[0]:{form}}, {estimate.interval[1]:{form}}]"
    return "-" if estimate.value is None else f"{estimate.value:{form}}{interval}"


class Pace(NamedTuple):
    """Blocks of a size at a temperature, against plain decoding of the same problems.

    Attributes:
        tau: tokens for each forward of the target.
        break_even: the time of a chain's step with a block over that of a plain step.
        accepted: the share of blocks that kept at least 1, 2, ... drafted tokens.
    """

    temperature: float
    num_drafted: int
    tau: float
    break_even: float
    accepted: tuple[float, ...]

    @property
    def gain(self) -> float:
        """The rate of tokens over that of plain decoding."""
        return self.tau / self.break_even


def measure(config: Config) -> list[Pace]:
    """Draws the configuration's problems plainly and with blocks of each size, as many chains at once as it has slots.

    The configuration has a decoder with a draft. Raises UserError for an answer that cannot be drawn.
    """
    model = config.model.load(config.hardware.resolve())
    drafter = config.draft.load(model)
    assert drafter is not None
    prompts = build.prompts(config, model, config.dataset.problems())
    drafters, paces = [drafter], list[Pace]()
    # And the drafters of 1, 3, 7, ... tokens, where the draft's fields allow another number
    names = {field.name for field in dataclasses.fields(config.draft)}  # type: ignore[arg-type]
    field, anchors = ("num_drafted", 0) if "num_drafted" in names else ("block_size", 1)
    for count in reversed([2**power - 1 for power in range(1, drafter.num_drafted.bit_length() + 1)]):
        if count < drafter.num_drafted and field in names:
            shorter = dataclasses.replace(config.draft, **{field: count + anchors}).load(model)  # type: ignore[type-var]
            assert shorter is not None
            drafters.insert(0, shorter)
    with bars.Bar(len(TEMPERATURES) * (1 + len(drafters)) * (1 + _TURNS) * len(prompts), "answer", "drafts speed") as bar:
        for temperature in TEMPERATURES:
            timed = partial(_timed, config, model, prompts, temperature, bar.update)
            _, plain = timed(None)
            for each in drafters:
                gained, seconds = timed(each)
                kept = tuple(float(np.mean(np.asarray(gained) > count)) for count in range(1, each.num_drafted + 1))
                paces.append(Pace(temperature, each.num_drafted, float(np.mean(gained)), seconds / plain, kept))
    return paces


def shown_paces(paces: Sequence[Pace]) -> str:
    """A table, and for each temperature whether to speculate."""
    rows = [[f"{each.temperature:g}", each.num_drafted, f"{each.tau:.2f}", f"{each.break_even:.2f}", f"{each.gain:.2f}",
             " ".join(f"{100.0 * share:.0f}" for share in each.accepted)] for each in paces]
    lines = [tabulate(rows, ["temperature", "drafted tokens", "tau", "break-even tau", "rate / plain", "kept 1, 2, ... (%)"],
                      "github", disable_numparse=True), ""]
    for temperature in dict.fromkeys(each.temperature for each in paces):
        best = max((each for each in paces if each.temperature == temperature), key=lambda each: (each.gain, each.tau))
        said = (f"speculate, {best.gain:.2f} times as fast as plain decoding" if best.gain > 1.0 else "do not speculate "
                f"(decoder=plain): the best block has {best.gain:.2f} times the rate of plain decoding")
        lines.append(f"temperature {temperature:g}: {said} ({best.num_drafted} drafted tokens, tau {best.tau:.2f}, break-even "
                     f"{best.break_even:.2f})")
    return "\n".join(lines)


def _timed(config: Config, model: LanguageModel, prompts: dict[str, np.ndarray], temperature: float,
           step: Callable[[], object], drafter: Drafter | None) -> tuple[list[int], float]:
    """The tokens that each step gave, and the seconds of a chain's step. `step` is called after each answer.

    A trace takes time and rules out CUDA graphs: one turn with it gives the tokens, and others without it the seconds.
    """
    gained, fastest = list[int](), np.inf
    for walk in walked(config, model, drafter, prompts, temperature)[0]():
        gained += walk.gained
        step()
    turn, seconds = walked(config, model, drafter, prompts, temperature, trace=False)
    for _ in range(_TURNS):
        for _ in turn():
            step()
        fastest = min(fastest, seconds())
    return gained, fastest
