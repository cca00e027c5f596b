"""Speculative sampling on synthetic distributions, by samplers that draw from the target and by samplers with known faults.

The probe repeats the table of a pull request that fixed such a fault: "max_dev_correct=0.0018 max_dev_biased=0.1426
(N=50000)". The fault was to verify the most likely token of a draft as if it had been drawn (DSpark, "Sample the DSpark draft
proposal from q, not argmax").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dflash_mcmc.draft import CheckpointDraft, Draft
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.fields import identity, runtime
from dflash_mcmc.ops import SamplingParams
from dflash_mcmc.probe import Probe, Summary, Unit, Work
from dflash_mcmc.probe.rejection_sampling.meanings import MEANINGS
from dflash_mcmc.probe.rejection_sampling.records import DrawsRecord
from dflash_mcmc.registry import name_of, register
from dflash_mcmc.rng import Key
from dflash_mcmc.types import UnitCost

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure

    from dflash_mcmc.config.schema import Config
    from dflash_mcmc.engine.speculative.speculation import Chance, Speculation, Uniforms, Verdict

_LEAST_EXPECTED = 5.0
"""Smallest expected count of a chi-square cell; rarer tokens share one cell."""
_ELSEWHERE = ("late_penalty", "greedy_walk", "finite_window")
"""Faults that this probe does not measure."""
_SHOWN = 24
"""Cells in the table of tokens: those with the largest p."""


@register("probe", "rejection_sampling")
@dataclass(slots=True, kw_only=True)
class RejectionSampling(Probe):
    """Deviation of speculative samplers from the target's distribution, with synthetic logits or with those of a draft.

    The logits of target and draft are normally distributed. Each sampler uses the engine's own rules: it drafts one token,
    applies the rule and returns the resulting token. The faults that need a history and the fault `greedy_walk`
    are left out. `probe=sampled_verify` measures them.

    With `laws=draft` the logits are those of a draft and its target after the first problem's prompt. Each sampler drafts the
    first two tokens of a block, and the law of both is compared with the target's. For a draft whose second token depends on
    the first one, the probe has two further faults: rejection with the marginal law of the second token as q
    (`marginal_q`), and with the network's logits before the correction (`base_logits_q`).
    """

    laws: str = identity("where the laws come from: synthetic, or draft for the chosen draft and target; auto takes draft for "
                         "a draft whose tokens depend on each other", choices=("auto", "synthetic", "draft"), off="synthetic")
    anchor: int = identity("generated tokens before the block, drawn greedily, with laws=draft", ge=0, off=0)
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
    record_type = DrawsRecord
    meanings = MEANINGS

    def check(self, config: Config) -> None:
        """Checks that the configuration suits the probe. Raises ConfigError."""
        if self.num_draws % self.chunk_size:
            raise ConfigError("probe.num_draws", self.num_draws, f"a multiple of probe.chunk_size={self.chunk_size}")
        if self.laws == "draft" and not isinstance(config.draft, CheckpointDraft):
            raise ConfigError("draft", name_of(config.draft), "a draft with a checkpoint, with probe.laws=draft")

    def with_draft(self, draft: Draft) -> RejectionSampling:
        """The probe with the laws that `laws=auto` stands for."""
        if self.laws != "auto":
            return self
        return replace(self, laws="draft" if isinstance(draft, CheckpointDraft) and draft.is_slotwise else "synthetic")

    @property
    def needs_draft(self) -> bool:  # type: ignore[override]  # only some values of `laws` need one
        """Whether the laws are those of a draft."""
        return self.laws == "draft"

    def sources(self) -> tuple[str, ...]:
        """See `Probe.sources`. With laws=draft the records depend on target, draft and prompt."""
        return ("probe", "model", "draft", "dataset") if self.laws == "draft" else ("probe",)

    def units(self, config: Config) -> list[Unit]:
        """Chunks of draws."""
        return [Unit("draws", number) for number in range(self.num_draws // self.chunk_size)]

    def expected_cost(self, config: Config) -> UnitCost | None:
        """Nothing with synthetic laws. With laws=draft both laws are read twice, for the records and for the summary.

        That reads the prefix after each token of the anchor, and the prefix before each token of the vocabulary. None if the
        model's configuration is not here.
        """
        if self.laws != "draft":
            return UnitCost(0.0)
        if (shape := config.model.shape("cpu")) is None:
            return None
        prefixes = [config.assumed.prompt_length + number for number in range(self.anchor + 1)]
        each = 2.0 / self.num_units(config)
        return UnitCost(each * (sum(prefixes) + shape.vocab_size * (prefixes[-1] + 1)), each)

    def measure(self, config: Config, work: Work) -> Iterator[tuple[Unit, dict]]:
        """Counts, for each sampler and chunk of draws, how often each token is drawn and how many drafts are accepted."""
        import torch

        if self.laws == "draft":
            from dflash_mcmc.probe.rejection_sampling import drafted

            yield from drafted.measure(self, config, work)
            return
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
        if self.laws == "draft":
            from dflash_mcmc.probe.rejection_sampling import drafted

            return summary_of(*drafted.laws(self, config), records)
        p, q = self.both_laws()
        return summary_of(p, q, int, records)

    def figures(self, config: Config, records: list[dict], summary: Summary) -> dict[str, Figure]:
        """Distributions and deviations by token, and the largest deviation over the number of draws."""
        from matplotlib.figure import Figure

        from dflash_mcmc.probe.rejection_sampling.figures import draw_course, draw_deviations, draw_frequencies

        figure = Figure(figsize=(10.0, 5.0), layout="constrained")
        axes = figure.subplot_mosaic([["frequencies", "course"], ["deviations", "course"]])
        draw_frequencies(axes["frequencies"], summary.data["tokens"])
        draw_deviations(axes["deviations"], summary.data["tokens"], int(summary.number("num_draws")))
        draw_course(figure, axes["course"], summary.data["course"], list(records[0]["accepted"]))
        figure.legend(loc="outside upper left", ncols=5)
        return {"rejection_sampling": figure}

    def logits(self) -> tuple[np.ndarray, np.ndarray]:
        """Logits of target and draft, float64 (vocab_size,) each."""
        from scipy.special import ndtri

        target, own = (ndtri(Key(self.law_seed).fold_in(use).uniforms(0, self.vocab_size)) for use in ("target", "draft"))
        draft = self.agreement * target + np.sqrt(1.0 - self.agreement**2) * own
        return self.target_spread * target, self.draft_spread * draft

    def both_laws(self) -> tuple[np.ndarray, np.ndarray]:
        """Probabilities p of the target and q of the draft, float64 (vocab_size,) each."""
        from dflash_mcmc.engine.oracle import exact_law

        return tuple(np.exp(exact_law.log_softmax(logits / self.temperature)) for logits in self.logits())


def summary_of(p: np.ndarray, q: np.ndarray, name: Callable[[int], int | str], records: list[dict]) -> Summary:
    """The summary of records whose counts are over cells with probabilities p and q, float64 (cells,).

    Args:
        name: name of a cell.
    """
    draws = np.cumsum([record["draws"] for record in records])
    error = np.sqrt(p * (1.0 - p)).max() / np.sqrt(draws)
    counts = {name: np.cumsum([record["counts"][name] for record in records], axis=0) for name in records[0]["accepted"]}
    deviation = {name: counts[name] / draws[:, None] - p for name in counts}
    samplers = [{
        "decoder": name.partition(" ")[0], "fault": name.partition(" ")[2] or None,
        "max_deviation": float(np.abs(last).max()), "standard_error": float(error[-1]),
        "in_standard_errors": float(np.abs(last).max() / error[-1]), "total_variation": 0.5 * float(np.abs(last).sum()),
        "chi_square_p": _chi_square_p(counts[name][-1], p),
        "acceptance": sum(record["accepted"][name] for record in records) / int(draws[-1]), "draws": int(draws[-1]),
    } for name, (*_, last) in deviation.items()]
    shown = np.sort(np.argsort(-p, kind="stable")[:_SHOWN])
    tokens = [{"token": name(token), "p": float(p[token]), "q": float(q[token]),
               **{sampler: float(deviation[sampler][-1, token]) for sampler in counts}}
              for token in shown]
    course = [{"draws": int(draws[n]), "standard_error": float(error[n]),
               **{name: float(np.abs(deviation[name][n]).max()) for name in counts}} for n in range(len(draws))]
    largest = {f"{name.replace(' ', '/')}/max_deviation": row["max_deviation"]
               for name, row in zip(counts, samplers, strict=True)}
    return Summary({"num_draws": int(draws[-1]), "overlap": float(np.minimum(p, q).sum()), **largest},
                   {"samplers": samplers}, {"tokens": tokens, "course": course})


class OneToken(NamedTuple):
    """The attributes of a drafter that predicts one token, without a network."""

    num_drafted: int = 1
    has_density: bool = True


def samplers_by_name(num_drafted: int = 1) -> dict[str, Speculation]:
    """The decoders by name, correct (`decoder`) and with each fault that this probe measures (`decoder fault`).

    All draft at the target's temperature. Matching draws its drafts with the uniform of the position, and rejection sampling
    uses separate uniforms.
    """
    from dflash_mcmc.engine.speculative import rules
    from dflash_mcmc.engine.speculative.speculation import Fault, Speculation

    found = {}
    for decoder, rule, known in (("speculative_rejection", rules.reject, rules.REJECTION),
                                 ("speculative_match", rules.match, rules.MATCH)):
        for name, (wrong, fault) in {"": (None, Fault()), **known}.items():
            if name not in _ELSEWHERE:
                found[f"{decoder} {name}".strip()] = Speculation(
                    wrong or rule, OneToken(num_drafted), shared_noise=rule is rules.match, temperature=None, noisy=True,
                    fault=fault)
    return found


def verdict(sampler: Speculation, logits: tuple[torch.Tensor, torch.Tensor], law: SamplingParams, chance: Chance,
            rows: int) -> Verdict:
    """The verdict on one drafted token in each of `rows` rows. All rows have the same logits, each float32 (vocabulary,)."""
    import torch

    from dflash_mcmc.engine.batching import logits_processor as laws
    from dflash_mcmc.engine.speculative.speculation import Block

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

    from dflash_mcmc.engine.speculative.speculation import Noise, Uniforms

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
