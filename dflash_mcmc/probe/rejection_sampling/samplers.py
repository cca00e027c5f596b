"""The samplers of the probe on two kinds of laws: one drafted token with synthetic logits, and the first two of a real block.

The laws of a draft are tables over the vocabulary, because the prompt is fixed: the target's and the draft's
law of the first token, and their laws of the second token after each first one.

The tables and the figure: frequencies, deviations, and the largest deviation over the number of draws. A sampler is a decoder,
or a decoder with a fault. A cell is a token, or with `probe.laws=draft` a pair of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import torch

from dflash_mcmc.chains import build
from dflash_mcmc.engine.batching import logits_processor as laws_of
from dflash_mcmc.engine.speculative import rules
from dflash_mcmc.engine.speculative.speculation import Block, BlockRandom, Fault, Noise, Speculation, Uniforms, Verdict
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.forcing import sequences
from dflash_mcmc.ops import SamplingParams
from dflash_mcmc.probe import Summary, Unit, Work
from dflash_mcmc.probe.columns import Each, Table
from dflash_mcmc.registry import name_of
from dflash_mcmc.rng import Key

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dflash_mcmc.engine.batching.language_model import LanguageModel
    from dflash_mcmc.engine.speculative.drafter import DFlashDrafter
    from dflash_mcmc.probe.rejection_sampling import RejectionSampling
    from dflash_mcmc.settings import Settings


_ELSEWHERE = ("late_penalty", "greedy_walk", "finite_window")
"""Faults that this probe does not measure."""
_DRAFTED = 2
_LARGEST_VOCABULARY = 4096
_PAIRS = 199
"""Pairs of tokens that are counted; all others are counted together."""
BLOCK = "speculative_rejection_block"
MARGINAL, BASE = "speculative_rejection marginal_q", "speculative_rejection base_logits_q"


class OneToken(NamedTuple):
    """The attributes of a drafter that predicts one token, without a network."""

    num_drafted: int = 1
    has_density: bool = True


def samplers_by_name(num_drafted: int = 1) -> dict[str, Speculation]:
    """The decoders by name, correct (`decoder`) and with each fault that this probe measures (`decoder fault`).

    All draft at the target's temperature. Matching draws its drafts with the uniform of the position, and rejection sampling
    uses separate uniforms.
    """
    samplers = {}
    for decoder, rule, faults in (("speculative_rejection", rules.reject, rules.REJECTION),
                                  ("speculative_match", rules.match, rules.MATCH)):
        for name, (wrong, fault) in {"": (None, Fault()), **faults}.items():
            if name not in _ELSEWHERE:
                samplers[f"{decoder} {name}".strip()] = Speculation(
                    wrong or rule, OneToken(num_drafted), shared_noise=rule is rules.match, temperature=None, noisy=True,
                    fault=fault)
    return samplers


def verdict(sampler: Speculation, logits: tuple[torch.Tensor, torch.Tensor], law: SamplingParams, chance: BlockRandom,
            rows: int) -> Verdict:
    """The verdict on one drafted token in each of `rows` rows. All rows have the same logits, each float32 (vocabulary,)."""
    def weigh(logits: torch.Tensor, law: SamplingParams, count: int) -> laws_of.Weights:
        return laws_of.weigh(laws_of.process(logits.expand(count, -1), law, laws_of.NO_HISTORY))

    target, draft = logits
    weights = weigh(draft, sampler.draft_params(law), rows)
    drafted = sampler.draft(weights, chance, 0)
    judged = weigh(draft, SamplingParams(), rows) if sampler.fault.raw_draft else weights
    first = torch.ones(rows, dtype=torch.bool, device=target.device)
    return sampler.rule(Block(drafted, weigh(target, law, 2 * rows), judged, first), chance)


def measure_synthetic(probe: RejectionSampling, config: Settings, work: Work) -> Iterator[tuple[Unit, dict]]:
    """Counts, for each sampler and chunk of draws, how often each token is drawn and how many drafts are accepted."""
    target, draft = (torch.from_numpy(values).to(work.device, torch.float32) for values in probe.logits())
    key, size = Key(config.seed).fold_in("rejection_sampling"), probe.chunk_size
    samplers = samplers_by_name()
    for unit in work:
        counts, accepted = {}, {}
        for name, sampler in samplers.items():
            chance = _uniforms(key.fold_in(name), unit.chain * size, (unit.chain + 1) * size, work.device)
            judged = verdict(sampler, (target, draft), SamplingParams(probe.temperature), chance, size)
            counts[name] = torch.bincount(judged.tokens[:, 0], minlength=probe.vocab_size).tolist()
            accepted[name] = int(judged.accepted.sum())
        yield unit, {"draws": size, "accepted": accepted, "counts": counts}


def _uniforms(key: Key, start: int, stop: int, device: str) -> Uniforms:
    """The uniforms of draws `start` to `stop` - 1. They depend on the number of the draw alone, not on its chunk."""
    tokens = key.fold_in("token").uniforms(2 * start, 2 * stop).reshape(-1, 2)
    return Uniforms(*(torch.from_numpy(values).to(device) for values in (tokens, *Noise.of(key, start, stop, 1))))


class Tables(NamedTuple):
    """Processed logits, float32, up to constants.

    Attributes:
        target, draft: (vocabulary,) of the first token.
        target_next, draft_next: (vocabulary, vocabulary) of the second token, after each first one.
        base: (2, vocabulary), the draft's logits before the correction.
    """

    target: torch.Tensor
    target_next: torch.Tensor
    draft: torch.Tensor
    draft_next: torch.Tensor
    base: torch.Tensor

    def joint_target(self) -> torch.Tensor:
        """The target's law of both tokens, float64 (vocabulary * vocabulary,)."""
        return (torch.softmax(self.target.double(), 0)[:, None] * torch.softmax(self.target_next.double(), -1)).flatten()

    def joint_draft(self) -> torch.Tensor:
        """The draft's law of both tokens, float64 (vocabulary * vocabulary,)."""
        return (torch.softmax(self.draft.double(), 0)[:, None] * torch.softmax(self.draft_next.double(), -1)).flatten()

    def marginal(self) -> torch.Tensor:
        """Log-probabilities of the draft's second token without its first one, (vocabulary,)."""
        return torch.log(torch.softmax(self.draft, 0) @ torch.softmax(self.draft_next, -1))


def samplers() -> dict[str, Speculation]:
    """The samplers by name: those of the synthetic probe, block verification, and rejection with a wrong q."""
    single = samplers_by_name(_DRAFTED)
    right = single["speculative_rejection"]
    return {**single, BLOCK: right._replace(rule=rules.reject_block), MARGINAL: right, BASE: right}


@torch.inference_mode()
def tables(probe: RejectionSampling, config: Settings, device: str) -> Tables:
    """The laws after the first problem's prompt. Raises UserError."""
    model = config.model.load(device)
    if model.vocab_size > _LARGEST_VOCABULARY:
        raise ConfigError("model", name_of(config.model), f"a vocabulary of at most {_LARGEST_VOCABULARY} tokens with "
                          f"probe.laws=draft, which lists all pairs of tokens; this one has {model.vocab_size}")
    drafter = cast("DFlashDrafter", config.draft.load(model))
    problem = config.dataset.problems()[0]
    prompt = build.encoded(config, model, [problem])[problem.id]
    room = (model.max_positions or math.inf) - len(prompt) - drafter.num_drafted
    if room < 0:
        raise ConfigError("dataset", name_of(config.dataset), f"a shorter prompt, or a model with more positions (problem "
                          f"{problem.id} takes {len(prompt)} of the model's {model.max_positions} positions, and a block "
                          f"{drafter.num_drafted})")
    prefix = torch.from_numpy(prompt).to(device)[None]
    reading = sequences.read(model, prefix, drafter.tapped_layers)
    hidden = _hidden(model, drafter, reading, prefix)
    base, vocabulary = drafter.logits(hidden)[0, :_DRAFTED], model.vocab_size
    every = torch.arange(vocabulary, device=device)
    # A draft may condition a slot on the token before it, so that the second slot has a row for each first token.
    previous = torch.stack([prefix[0, -1].expand(vocabulary), every], dim=1)
    rows = [value[0, :_DRAFTED].expand(vocabulary, -1, -1) for value in (drafter.logits(hidden), hidden)]
    corrected = drafter.network.along(rows[0], rows[1], previous)
    after = sequences.read(model, torch.cat([prefix.expand(vocabulary, -1), every[:, None]], dim=1)).hidden[:, -1]
    logits = (model.logits(reading.hidden[0, -1]), model.logits(after), corrected[0, 0], corrected[:, 1], base)
    return Tables(*(_processed(each, probe) for each in logits))


def _hidden(model: LanguageModel, drafter: DFlashDrafter, reading: sequences.Reading, prefix: torch.Tensor) -> torch.Tensor:
    """Hidden states (1, drafted tokens, hidden) of the block at the prefix's last token."""
    features = reading.features(model, drafter.tapped_layers)
    length = torch.tensor([prefix.shape[1]], device=prefix.device)
    return sequences.drafted(drafter.network, model, features, prefix, length, length[None] - 1)[0]


def _processed(logits: torch.Tensor, probe: RejectionSampling) -> torch.Tensor:
    rows = logits.reshape(-1, logits.shape[-1])
    return laws_of.process(rows, SamplingParams(probe.temperature), laws_of.NO_HISTORY).view(logits.shape)


def laws(probe: RejectionSampling, config: Settings) -> tuple[np.ndarray, np.ndarray, Callable[[int], str]]:
    """p and q of the counted pairs of tokens and of all other pairs together, float64 (cells,), and the name of a cell."""
    device = config.hardware.resolve()
    exact, model = tables(probe, config, device), config.model.load(device)
    pairs, size = _pairs(exact), len(exact.target)
    joint = [exact.joint_target(), exact.joint_draft()]
    p, q = (torch.cat([law[pairs], (1.0 - law[pairs].sum()).clamp(min=0.0)[None]]).cpu().numpy() for law in joint)

    def name(cell: int) -> str:
        if cell == len(pairs):
            return "others"
        return "|".join(model.decode(np.array([token])) for token in divmod(int(pairs[cell]), size))

    return p, q, name


def measure(probe: RejectionSampling, config: Settings, work: Work) -> Iterator[tuple[Unit, dict]]:
    """Counts, for each sampler and chunk of draws, how often each pair of tokens is drawn."""
    exact, size = tables(probe, config, work.device), probe.chunk_size
    key = Key(config.seed).fold_in("rejection_sampling", "draft")
    pairs, vocabulary = _pairs(exact), len(exact.target)
    cell = torch.full((vocabulary**2,), len(pairs), device=pairs.device)
    cell[pairs] = torch.arange(len(pairs), device=pairs.device)
    for unit in work:
        counts, accepted, numbers = {}, {}, (unit.chain * size, (unit.chain + 1) * size)
        for name, sampler in samplers().items():
            first, second, kept = _draw(name, sampler, exact, key.fold_in(name), numbers, probe.temperature)
            counts[name] = torch.bincount(cell[first * vocabulary + second], minlength=len(pairs) + 1).tolist()
            accepted[name] = kept
        yield unit, {"draws": size, "accepted": accepted, "counts": counts}


def _pairs(exact: Tables) -> torch.Tensor:
    """The pairs that are counted, int64 (pairs,): those with the largest p. A pair (a, b) is number a * vocabulary + b."""
    return exact.joint_target().argsort(descending=True, stable=True)[:_PAIRS]


def _draw(name: str, sampler: Speculation, exact: Tables, key: Key, numbers: tuple[int, int],
          temperature: float) -> tuple[torch.Tensor, torch.Tensor, float]:
    """First and second tokens of some draws, int64 (draws,) each, and the sum of their accepted shares."""
    start, stop = numbers
    draws, device = stop - start, exact.target.device
    uniforms = key.fold_in("token").uniforms(start * 4, stop * 4).reshape(-1, 4)
    plain = torch.from_numpy(uniforms[:, 3]).to(device)
    chance = Uniforms(*(torch.from_numpy(values).to(device)
                        for values in (uniforms[:, :3].copy(), *Noise.of(key, start, stop, _DRAFTED))))
    first = exact.draft.expand(draws, -1)
    head = sampler.draft(laws_of.weigh(first), chance, 0)[:, 0]
    following = exact.draft_next[head]
    drafted = torch.stack([head, sampler.draft(laws_of.weigh(following), chance, 1)[:, 0]], dim=1)
    judged = (first, following)
    if name == MARGINAL:
        judged = first, exact.marginal().expand(draws, -1)
    if name == BASE:
        judged = exact.base[0].expand(draws, -1), exact.base[1].expand(draws, -1)
    if sampler.fault.raw_draft:
        judged = first * temperature, following * temperature
    # The token after both drafted ones is the third, which is not counted: any law will do for it.
    after = exact.target_next[head]
    target = laws_of.weigh(torch.stack([exact.target.expand(draws, -1), after, after], dim=1).flatten(0, 1))
    block = Block(drafted, target, laws_of.weigh(torch.stack(judged, dim=1).flatten(0, 1)),
                  torch.ones(draws, dtype=torch.bool, device=device))
    verdict = sampler.rule(block, chance)
    one = verdict.tokens[:, 0]
    alone = laws_of.draw(laws_of.weigh(exact.target_next[one]), plain)[0]
    return one, torch.where(verdict.accepted > 0, verdict.tokens[:, 1], alone), float(verdict.accepted.sum()) / _DRAFTED


_LEAST_EXPECTED = 5.0
"""Smallest expected count of a chi-square cell; rarer tokens share one cell."""
_SHOWN = 24
"""Cells in the table of tokens: those with the largest p."""


class Frequencies:
    """The draws of all samplers.

    Attributes:
        p, q: probabilities of the cells under target and draft, float64 (cells,).
        name: cell -> its name.
        draws: draws of each sampler up to each record.
        error: standard error of the frequency that varies most, after as many draws.
        counts: draws of each cell up to each record, by sampler.
        deviation: frequencies minus p, by sampler.
    """

    def __init__(self, p: np.ndarray, q: np.ndarray, name: Callable[[int], int | str], records: list[dict]):
        self.p, self.q, self.name, self.records = p, q, name, records
        self.draws = np.cumsum([record["draws"] for record in records])
        self.error = np.sqrt(p * (1.0 - p)).max() / np.sqrt(self.draws)
        self.counts = {sampler: np.cumsum([record["counts"][sampler] for record in records], axis=0)
                       for sampler in records[0]["accepted"]}
        self.deviation = {sampler: counts / self.draws[:, None] - p for sampler, counts in self.counts.items()}

    def largest(self, sampler: str, number: int = -1) -> float:
        """The largest distance of a frequency from p after a record."""
        return float(np.abs(self.deviation[sampler][number]).max())

    def accepted(self, sampler: str) -> float:
        """Accepted drafts."""
        return sum(record["accepted"][sampler] for record in self.records)


SAMPLERS = Table("samplers", (
    ("decoder", "rule that verifies the draft", lambda of, sampler: sampler.partition(" ")[0]),
    ("fault", "mistake in it; empty for the correct rule", lambda of, sampler: sampler.partition(" ")[2] or None),
    ("max_deviation", "largest distance of a cell's frequency from its probability p",
     lambda of, sampler: of.largest(sampler)),
    ("standard_error", "standard error of the frequency that varies most", lambda of, sampler: float(of.error[-1])),
    ("in_standard_errors", "`max_deviation` divided by `standard_error`; empty for a target with one token",
     lambda of, sampler: float(of.largest(sampler) / of.error[-1]) if of.error[-1] else None),
    ("total_variation", "half of the sum of all distances of frequencies from p",
     lambda of, sampler: 0.5 * float(np.abs(of.deviation[sampler][-1]).sum())),
    ("chi_square_p", "p-value of Pearson's test that the draws come from p",
     lambda of, sampler: _chi_square_p(of.counts[sampler][-1], of.p)),
    ("acceptance", "share of drafted tokens that are accepted",
     lambda of, sampler: of.accepted(sampler) / int(of.draws[-1])),
    ("draws", "draws of the sampler", lambda of, sampler: int(of.draws[-1])),
))
TOKENS = Table("tokens", (
    ("token", "number of a token, or the text of a pair of tokens; the cells with the largest p",
     lambda of, number: of.name(number)),
    ("p", "its probability under the target", lambda of, number: float(of.p[number])),
    ("q", "its probability under the draft", lambda of, number: float(of.q[number])),
    Each(lambda of, _: {sampler: sampler for sampler in of.counts}, (
        ("{sampler}", "frequency among the sampler's draws minus p",
         lambda of, number, sampler: float(of.deviation[sampler][-1, number])),)),
))
COURSE = Table("course", (
    ("draws", "draws up to here", lambda of, number: int(of.draws[number])),
    ("standard_error", "as in `samplers`, for so many draws", lambda of, number: float(of.error[number])),
    Each(lambda of, _: {sampler: sampler for sampler in of.counts}, (
        ("{sampler}", "`max_deviation` after so many draws", lambda of, number, sampler: of.largest(sampler, number)),)),
))
VALUES = Table("values", (
    ("num_draws", "draws of each sampler", lambda of: int(of.draws[-1])),
    ("overlap", "sum of min(p, q) over the cells: with laws=synthetic the share of drafts that rejection sampling accepts",
     lambda of: float(np.minimum(of.p, of.q).sum())),
    Each(lambda of: {sampler.replace(" ", "/"): sampler for sampler in of.counts}, (
        ("{sampler}/max_deviation", "see `samplers`", lambda of, sampler: of.largest(sampler)),)),
))
ALL = (VALUES, SAMPLERS, TOKENS, COURSE)


def summary(p: np.ndarray, q: np.ndarray, name: Callable[[int], int | str], records: list[dict]) -> Summary:
    """The summary of records; see `Frequencies`."""
    of = Frequencies(p, q, name, records)
    shown = np.sort(np.argsort(-p, kind="stable")[:_SHOWN])
    return Summary(VALUES.row(of), {"samplers": SAMPLERS.rows((of, sampler) for sampler in of.counts)},
                   {"tokens": TOKENS.rows((of, cell) for cell in shown),
                    "course": COURSE.rows((of, row) for row in range(len(records)))})


def _chi_square_p(counts: np.ndarray, p: np.ndarray) -> float | None:
    """p-value of Pearson's test that counts (tokens,) come from p; None if there are too few draws for two cells."""
    from scipy import stats

    expected, order = counts.sum() * p, np.argsort(p)
    pooled = int(np.searchsorted(np.cumsum(expected[order]), _LEAST_EXPECTED)) + 1
    if pooled >= len(p):
        return None
    cells = [np.concatenate([[column[order[:pooled]].sum()], column[order[pooled:]]]) for column in (counts, expected)]
    return float(stats.chisquare(*cells).pvalue)


RIGHT_ONE, WRONG_ONE = "speculative_rejection", "speculative_rejection argmax_proposal"
"""The two samplers of the pull request."""


def draw_frequencies(axes: Axes, tokens: list[dict]) -> None:
    """Share of draws of each token, by the right and the wrong sampler of the pull request."""
    from dflash_mcmc.report.figure import INK, RIGHT, WRONG

    places, p = np.arange(len(tokens)), np.array([row["p"] for row in tokens])
    axes.bar(places - 0.27, p, 0.27, color=INK, label="target p")
    axes.bar(places, p + [row[RIGHT_ONE] for row in tokens], 0.27, color=RIGHT, label="proposal drawn from q")
    wrong = p + [row[WRONG_ONE] for row in tokens]
    axes.bar(places + 0.27, wrong, 0.27, color=WRONG, label="proposal: most likely token of q")
    axes.bar(places, [row["q"] for row in tokens], 0.9, fill=False, edgecolor=INK, linewidth=0.8, label="draft q")
    axes.set(title="Share of draws of each token", ylabel="share of draws")
    axes.set_xticks([])


def draw_deviations(axes: Axes, tokens: list[dict], draws: int) -> None:
    """Deviation of these shares from p, with a band of two standard errors."""
    from dflash_mcmc.report.figure import OTHER, RIGHT, WRONG

    places, p = np.arange(len(tokens)), np.array([row["p"] for row in tokens])
    band = 2.0 * np.sqrt(p * (1.0 - p) / draws)
    axes.bar(places, 2.0 * band, 0.9, bottom=-band, color=OTHER, alpha=0.4, label="two standard errors")
    axes.bar(places - 0.2, [row[RIGHT_ONE] for row in tokens], 0.4, color=RIGHT)
    axes.bar(places + 0.2, [row[WRONG_ONE] for row in tokens], 0.4, color=WRONG)
    axes.axhline(0.0, color=OTHER, linewidth=0.6)
    linear = 10.0 ** np.ceil(np.log10(max(band.max(), 1e-9)))
    axes.set_yscale("symlog", linthresh=linear, linscale=1.5)
    axes.set(title="Share of draws minus p", ylabel=f"deviation (linear to {linear:g})", xlabel="token")
    axes.set_xticks(places[:: 1 + len(places) // 25])
    axes.grid(visible=False, axis="x")


def draw_course(figure: Figure, axes: Axes, course: list[dict], names: Sequence[str]) -> None:
    """The largest deviation of any token over the number of draws, a line for each sampler."""
    from dflash_mcmc.report.figure import INK, OTHER, RIGHT, WRONG, label_lines

    draws, labels = [row["draws"] for row in course], []
    for name in names:
        colour = RIGHT if " " not in name else WRONG if name == WRONG_ONE else OTHER
        axes.plot(draws, [row[name] for row in course], color=colour, linewidth=1.2)
        labels.append((name.partition(" ")[2] or name, course[-1][name], colour))
    axes.plot(draws, [row["standard_error"] for row in course], color=INK, linestyle="--", linewidth=1.0)
    labels.append(("standard error", course[-1]["standard_error"], INK))
    axes.set(title="Largest deviation of any token", xlabel="draws", xscale="log", yscale="log")
    label_lines(figure, axes, draws[-1], labels)
