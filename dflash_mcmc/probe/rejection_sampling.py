"""Speculative sampling on synthetic distributions, by samplers that draw from the target and by samplers with known faults.

The probe repeats the table of a pull request that fixed such a fault: "max_dev_correct=0.0018 max_dev_biased=0.1426
(N=50000)". The fault was to verify the most likely token of a draft as if it had been drawn (DSpark, "Sample the DSpark draft
proposal from q, not argmax").
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dflash_mcmc.errors import ConfigError
from dflash_mcmc.fields import identity, runtime
from dflash_mcmc.ops import SamplingParams
from dflash_mcmc.probe import Probe, Summary, Unit, Work
from dflash_mcmc.registry import register
from dflash_mcmc.rng import Key
from dflash_mcmc.types import UnitCost

if TYPE_CHECKING:
    import torch
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dflash_mcmc.config.schema import Config
    from dflash_mcmc.inference.speculative.speculation import Chance, Speculation, Uniforms, Verdict

_RIGHT, _WRONG = "speculative_rejection", "speculative_rejection argmax_proposal"
"""The two samplers of the pull request."""
_LEAST_EXPECTED = 5.0
"""Smallest expected count of a chi-square cell; rarer tokens share one cell."""
_ELSEWHERE = ("late_penalty", "greedy_walk", "finite_window")
"""Faults that this probe does not measure."""


@register("probe", "rejection_sampling")
@dataclass(slots=True, kw_only=True)
class RejectionSampling(Probe):
    """Deviation of speculative samplers from the target's distribution, at one position with synthetic logits.

    The logits of target and draft are normally distributed. Each sampler uses the engine's own rules: it drafts one token,
    applies the rule and returns the resulting token. The faults that need a history and the fault `greedy_walk`
    are left out. `probe=sampled_verify` measures them.
    """

    vocab_size: int = identity("number of tokens in the vocabulary", ge=2)
    law_seed: int = identity("seed of the logits of target and draft; `seed` is the seed of the draws")
    target_spread: float = identity("standard deviation of the target's logits, in nats", ge=0)
    draft_spread: float = identity("standard deviation of the draft's logits, in nats; a larger value is more peaked", ge=0)
    agreement: float = identity("correlation of the draft's logits with the target's", ge=-1, le=1)
    temperature: float = identity("temperature of target and draft", gt=0)
    chunk_size: int = identity("draws of each sampler in one record; a killed run loses at most one record", ge=1)
    num_draws: int = runtime("draws of each sampler in total, a multiple of chunk_size; may be raised later", ge=1)

    uses = ()
    unit = "chunk"

    def check(self, config: Config) -> None:
        """Checks that the configuration suits the probe. Raises ConfigError."""
        if self.num_draws % self.chunk_size:
            raise ConfigError("probe.num_draws", self.num_draws, f"a multiple of probe.chunk_size={self.chunk_size}")

    def units(self, config: Config) -> list[Unit]:
        """Chunks of draws."""
        return [Unit("draws", number) for number in range(self.num_draws // self.chunk_size)]

    def expected_cost(self, config: Config) -> UnitCost:
        """No cost, because the laws are synthetic and no model is evaluated."""
        return UnitCost(0.0)

    def measure(self, config: Config, work: Work) -> Iterator[tuple[Unit, dict]]:
        """Counts, for each sampler and chunk of draws, how often each token is drawn and how many drafts are accepted."""
        import torch

        target, draft = (torch.from_numpy(values).to(work.device, torch.float32) for values in self.logits())
        key, samplers, size = Key(config.seed).fold_in("rejection_sampling"), samplers_by_name(), self.chunk_size
        for unit in work:
            counts, accepted = {}, {}
            for name, sampler in samplers.items():
                chance = _uniforms(key.fold_in(name), unit.chain * size, (unit.chain + 1) * size, work.device)
                found = verdict(sampler, (target, draft), SamplingParams(self.temperature), chance, size)
                counts[name] = torch.bincount(found.tokens[:, 0], minlength=self.vocab_size).tolist()
                accepted[name] = int(found.accepted.sum())
            yield unit, {"draws": size, "accepted": accepted, "counts": counts}

    def summarise(self, config: Config, records: list[dict]) -> Summary:
        """The table of samplers, a row per token, and the largest deviation after each chunk.

        `overlap` is the sum of min(p, q), the share of drafts that rejection accepts. `standard_error` is the standard error
        of the token whose frequency varies most.
        """
        p, q = self.laws()
        draws = np.cumsum([record["draws"] for record in records])
        error = np.sqrt(p * (1.0 - p)).max() / np.sqrt(draws)
        counts = {name: np.cumsum([record["counts"][name] for record in records], axis=0) for name in samplers_by_name()}
        deviation = {name: counts[name] / draws[:, None] - p for name in counts}
        samplers = [{
            "decoder": name.partition(" ")[0], "fault": name.partition(" ")[2] or None,
            "max_deviation": float(np.abs(last).max()), "standard_error": float(error[-1]),
            "in_standard_errors": float(np.abs(last).max() / error[-1]), "total_variation": 0.5 * float(np.abs(last).sum()),
            "chi_square_p": _chi_square_p(counts[name][-1], p),
            "acceptance": sum(record["accepted"][name] for record in records) / int(draws[-1]), "draws": int(draws[-1]),
        } for name, (*_, last) in deviation.items()]
        tokens = [{"token": token, "p": float(p[token]), "q": float(q[token]),
                   **{name: float(deviation[name][-1, token]) for name in counts}} for token in range(self.vocab_size)]
        course = [{"draws": int(draws[n]), "standard_error": float(error[n]),
                   **{name: float(np.abs(deviation[name][n]).max()) for name in counts}} for n in range(len(draws))]
        largest = {f"{name.replace(' ', '/')}/max_deviation": row["max_deviation"]
                   for name, row in zip(counts, samplers, strict=True)}
        return Summary({"num_draws": int(draws[-1]), "overlap": float(np.minimum(p, q).sum()), **largest},
                       {"samplers": samplers}, {"tokens": tokens, "course": course})

    def figures(self, config: Config, records: list[dict], summary: Summary) -> dict[str, Figure]:
        """Distributions and deviations by token, and the largest deviation over the number of draws."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10.0, 5.0), layout="constrained")
        axes = figure.subplot_mosaic([["frequencies", "course"], ["deviations", "course"]])
        _draw_frequencies(axes["frequencies"], summary.data["tokens"])
        _draw_deviations(axes["deviations"], summary.data["tokens"], int(summary.number("num_draws")))
        _draw_course(figure, axes["course"], summary.data["course"])
        figure.legend(loc="outside upper left", ncols=5)
        return {"rejection_sampling": figure}

    def logits(self) -> tuple[np.ndarray, np.ndarray]:
        """Logits of target and draft, float64 (vocab_size,) each."""
        from scipy.special import ndtri

        target, own = (ndtri(Key(self.law_seed).fold_in(use).uniforms(0, self.vocab_size)) for use in ("target", "draft"))
        draft = self.agreement * target + np.sqrt(1.0 - self.agreement**2) * own
        return self.target_spread * target, self.draft_spread * draft

    def laws(self) -> tuple[np.ndarray, np.ndarray]:
        """Probabilities p of the target and q of the draft, float64 (vocab_size,) each."""
        from dflash_mcmc.inference.oracle import exact_law

        return tuple(np.exp(exact_law.log_softmax(logits / self.temperature)) for logits in self.logits())


class OneToken(NamedTuple):
    """The attributes of a drafter that predicts one token, without a network."""

    num_drafted: int = 1
    has_density: bool = True


def samplers_by_name() -> dict[str, Speculation]:
    """The decoders by name, correct (`decoder`) and with each fault that this probe measures (`decoder fault`).

    All draft at the target's temperature. Matching draws its drafts with the uniform of the position, and rejection sampling
    uses separate uniforms.
    """
    from dflash_mcmc.inference.speculative import faults, rules
    from dflash_mcmc.inference.speculative.speculation import Fault, Speculation

    found = {}
    for decoder, rule, known in (("speculative_rejection", rules.reject, faults.REJECTION),
                                 ("speculative_match", rules.match, faults.MATCH)):
        for name, (wrong, fault) in {"": (None, Fault()), **known}.items():
            if name not in _ELSEWHERE:
                found[f"{decoder} {name}".strip()] = Speculation(
                    wrong or rule, OneToken(), shared_noise=rule is rules.match, temperature=None, noisy=True, fault=fault)
    return found


def verdict(sampler: Speculation, logits: tuple[torch.Tensor, torch.Tensor], law: SamplingParams, chance: Chance,
            rows: int) -> Verdict:
    """The verdict on one drafted token in each of `rows` rows. All rows have the same logits, each float32 (vocabulary,)."""
    import torch

    from dflash_mcmc.inference import logits_processor as laws
    from dflash_mcmc.inference.speculative.speculation import Block

    def weigh(logits: torch.Tensor, law: SamplingParams, count: int) -> laws.Weights:
        return laws.weigh(laws.process(logits.expand(count, -1), law, laws.NO_HISTORY))

    target, draft = logits
    weights = weigh(draft, sampler.draft_params(law), rows)
    drafted = sampler.draft(weights, chance, 0)
    judged = weigh(draft, SamplingParams(), rows) if sampler.fault.raw_draft else weights
    first = torch.ones(rows, dtype=torch.bool, device=target.device)
    return sampler.rule(Block(drafted, weigh(target, law, 2 * rows), judged, first), chance)


def _uniforms(key: Key, start: int, stop: int, device: str) -> Uniforms:
    """The uniforms of draws `start` to `stop` - 1. They depend on the number of the draw alone, not on its chunk."""
    import torch

    from dflash_mcmc.inference.speculative.speculation import Noise, Uniforms

    tokens = key.fold_in("token").uniforms(2 * start, 2 * stop).reshape(-1, 2)
    return Uniforms(*(torch.from_numpy(values).to(device) for values in (tokens, *Noise.of(key, start, stop, 1))))


def _chi_square_p(counts: np.ndarray, p: np.ndarray) -> float | None:
    """p-value of Pearson's test that counts (tokens,) come from p; None if there are too few draws for two cells."""
    from scipy import stats

    expected, order = counts.sum() * p, np.argsort(p)
    pooled = int(np.searchsorted(np.cumsum(expected[order]), _LEAST_EXPECTED)) + 1
    if pooled >= len(p):
        return None
    cells = [np.concatenate([[values[order[:pooled]].sum()], values[order[pooled:]]]) for values in (counts, expected)]
    return float(stats.chisquare(*cells).pvalue)


def _draw_frequencies(axes: Axes, tokens: list[dict]) -> None:
    from dflash_mcmc.report.figure import INK, RIGHT, WRONG

    places, p = np.arange(len(tokens)), np.array([row["p"] for row in tokens])
    axes.bar(places - 0.27, p, 0.27, color=INK, label="target p")
    axes.bar(places, p + [row[_RIGHT] for row in tokens], 0.27, color=RIGHT, label="proposal drawn from q")
    axes.bar(places + 0.27, p + [row[_WRONG] for row in tokens], 0.27, color=WRONG, label="proposal: most likely token of q")
    axes.bar(places, [row["q"] for row in tokens], 0.9, fill=False, edgecolor=INK, linewidth=0.8, label="draft q")
    axes.set(title="Share of draws of each token", ylabel="share of draws")
    axes.set_xticks([])


def _draw_deviations(axes: Axes, tokens: list[dict], draws: int) -> None:
    from dflash_mcmc.report.figure import OTHER, RIGHT, WRONG

    places, p = np.arange(len(tokens)), np.array([row["p"] for row in tokens])
    band = 2.0 * np.sqrt(p * (1.0 - p) / draws)
    axes.bar(places, 2.0 * band, 0.9, bottom=-band, color=OTHER, alpha=0.4, label="two standard errors")
    axes.bar(places - 0.2, [row[_RIGHT] for row in tokens], 0.4, color=RIGHT)
    axes.bar(places + 0.2, [row[_WRONG] for row in tokens], 0.4, color=WRONG)
    axes.axhline(0.0, color=OTHER, linewidth=0.6)
    linear = 10.0 ** np.ceil(np.log10(band.max()))
    axes.set_yscale("symlog", linthresh=linear, linscale=1.5)
    axes.set(title="Share of draws minus p", ylabel=f"deviation (linear to {linear:g})", xlabel="token")
    axes.set_xticks(places[:: 1 + len(places) // 25])
    axes.grid(visible=False, axis="x")


def _draw_course(figure: Figure, axes: Axes, course: list[dict]) -> None:
    from dflash_mcmc.report.figure import INK, OTHER, RIGHT, WRONG, label_lines

    draws, labels = [row["draws"] for row in course], []
    for name in samplers_by_name():
        colour = RIGHT if " " not in name else WRONG if name == _WRONG else OTHER
        axes.plot(draws, [row[name] for row in course], color=colour, linewidth=1.2)
        labels.append((name.partition(" ")[2] or name, course[-1][name], colour))
    axes.plot(draws, [row["standard_error"] for row in course], color=INK, linestyle="--", linewidth=1.0)
    labels.append(("standard error", course[-1]["standard_error"], INK))
    axes.set(title="Largest deviation of any token", xlabel="draws", xscale="log", yscale="log")
    label_lines(figure, axes, draws[-1], labels)
