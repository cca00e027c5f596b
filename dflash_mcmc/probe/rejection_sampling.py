"""Speculative sampling on synthetic distributions, by samplers that draw from the target and by samplers with known faults.

The probe repeats the table of a pull request that fixed such a fault, to verify the most likely token of a draft as if it had
been drawn (DSpark, "Sample the DSpark draft proposal from q, not argmax"): "max_dev_correct=0.0018 max_dev_biased=0.1426
(N=50000)". A sampler is a decoder, or a decoder with a fault.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash_mcmc.components import Settings, identity, register, runtime
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.ops import SamplingParams
from dflash_mcmc.probe import Each, Probe, Summary, Table, Unit, Work
from dflash_mcmc.rng import Key
from dflash_mcmc.types import UnitCost

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure

    from dflash_mcmc.engine.speculative.rules import BlockRandom, Speculation, Verdict

# The pair of laws of the document's table. At this seed argmax_proposal deviates as much; the median of 1,000 seeds is 0.19.
_LAW_SEED, _TARGET_SPREAD, _DRAFT_SPREAD = 890, 1.5, 2.0
"""Seed of the logits, and their standard deviations in nats: the draft is more peaked than the target."""
_AGREEMENT = 0.8
"""Correlation of the draft's logits with the target's."""


@register("probe", "rejection_sampling")
@dataclass(slots=True, kw_only=True)
class RejectionSampling(Probe):
    """Deviation of speculative samplers from the target's distribution, with synthetic logits.

    The logits of target and draft are normally distributed. Each sampler drafts one token and applies the engine's own rule.
    The faults that need a history and `greedy_walk` are left out: `probe=sampled_verify` measures them.
    """

    vocab_size: int = identity(12, "number of tokens in the vocabulary", ge=2, le=1_000_000)
    temperature: float = identity(0.8, "temperature of target and draft", gt=0)
    chunk_size: int = identity(500, "draws of each sampler in one record; a killed run loses at most one record", ge=1,
                               le=1_000_000)
    num_draws: int = runtime(50000, "draws of each sampler in total, a multiple of chunk_size; may be raised later", ge=1)

    uses = ()
    unit = "chunk"

    def check(self, config: Settings) -> None:
        if self.num_draws % self.chunk_size:
            raise ConfigError("probe.num_draws", self.num_draws, f"a multiple of probe.chunk_size={self.chunk_size}")

    def units(self, config: Settings) -> list[Unit]:
        return [Unit("draws", chunk) for chunk in range(self.num_draws // self.chunk_size)]

    def expected_cost(self, config: Settings) -> UnitCost:
        """Nothing: no model is read."""
        return UnitCost(0.0)

    def measure(self, config: Settings, work: Work) -> Iterator[tuple[Unit, dict]]:
        """Counts, for each sampler and chunk of draws, how often each token is drawn and how many drafts are accepted.

        A draw depends on its number alone, not on its chunk.
        """
        import torch

        from dflash_mcmc.engine.speculative.rules import Noise, Uniforms

        size, samplers, law = self.chunk_size, samplers_by_name(), SamplingParams(self.temperature)
        target, draft = (torch.from_numpy(values).to(work.device, torch.float32) for values in self.logits())
        for unit in work:
            counts, accepted = {}, {}
            start, stop = unit.chain * size, (unit.chain + 1) * size
            for name, sampler in samplers.items():
                key = Key(config.seed).fold_in("rejection_sampling").fold_in(name)
                tokens = key.fold_in("token").uniforms(2 * start, 2 * stop).reshape(-1, 2)
                chance = Uniforms(*(torch.from_numpy(values).to(work.device)
                                    for values in (tokens, *Noise.of(key, start, stop, 1))))
                judged = verdict(sampler, (target, draft), law, chance, size)
                counts[name] = judged.tokens[:, 0].bincount(minlength=self.vocab_size).tolist()
                accepted[name] = int(judged.accepted.sum())
            yield unit, {"draws": size, "accepted": accepted, "counts": counts}

    def summarise(self, config: Settings, records: list[dict]) -> Summary:
        """The table of samplers, a row per token, and the largest deviation after each chunk."""
        of = frequencies(records, *self.both_laws())
        shown = np.sort(np.argsort(-of["p"], kind="stable")[:_SHOWN])
        return Summary(VALUES.row(of), {"samplers": SAMPLERS.rows({**of, "sampler": sampler} for sampler in of["samplers"])},
                       {"tokens": TOKENS.rows({**of, "token": token} for token in shown),
                        "course": COURSE.rows({**of, "record": number} for number in range(len(records)))})

    def figures(self, config: Settings, records: list[dict], summary: Summary) -> "dict[str, Figure]":
        """Shares of draws of the right and of the wrong sampler of the pull request, and all samplers' deviations by draws."""
        from matplotlib.figure import Figure

        from dflash_mcmc.report.figure import INK, OTHER, RIGHT, WRONG, name_lines

        right_one, wrong_one = "speculative_rejection", "speculative_rejection argmax_proposal"
        tokens, course = summary.data["tokens"], summary.data["course"]
        places, p = np.arange(len(tokens)), np.array([row["p"] for row in tokens])
        figure = Figure(figsize=(10.0, 5.0), layout="constrained")
        panels = figure.subplot_mosaic([["frequencies", "course"], ["deviations", "course"]])

        axes = panels["frequencies"]
        axes.bar(places - 0.27, p, 0.27, color=INK, label="target p")
        axes.bar(places, p + [row[right_one] for row in tokens], 0.27, color=RIGHT, label="proposal drawn from q")
        wrong = p + [row[wrong_one] for row in tokens]
        axes.bar(places + 0.27, wrong, 0.27, color=WRONG, label="proposal: most likely token of q")
        axes.bar(places, [row["q"] for row in tokens], 0.9, fill=False, edgecolor=INK, linewidth=0.8, label="draft q")
        axes.set(title="Share of draws of each token", ylabel="share of draws")
        axes.set_xticks([])

        axes = panels["deviations"]
        band = 2.0 * np.sqrt(p * (1.0 - p) / summary.number("num_draws"))
        axes.bar(places, 2.0 * band, 0.9, bottom=-band, color=OTHER, alpha=0.4, label="two standard errors")
        axes.bar(places - 0.2, [row[right_one] for row in tokens], 0.4, color=RIGHT)
        axes.bar(places + 0.2, [row[wrong_one] for row in tokens], 0.4, color=WRONG)
        axes.axhline(0.0, color=OTHER, linewidth=0.6)
        linear = 10.0 ** np.ceil(np.log10(max(band.max(), 1e-9)))
        axes.set_yscale("symlog", linthresh=linear, linscale=1.5)
        axes.set(title="Share of draws minus p", ylabel=f"deviation (linear to {linear:g})", xlabel="token")
        axes.set_xticks(places[:: 1 + len(places) // 25])
        axes.grid(visible=False, axis="x")

        axes = panels["course"]
        draws = [row["draws"] for row in course]
        looks = {name: RIGHT if " " not in name else WRONG if name == wrong_one else OTHER for name in records[0]["accepted"]}
        for name, colour in looks.items():
            axes.plot(draws, [row[name] for row in course], color=colour, linewidth=1.2)
        axes.plot(draws, [row["standard_error"] for row in course], color=INK, linestyle="--", linewidth=1.0)
        axes.set(title="Largest deviation of any token", xlabel="draws", xscale="log", yscale="log")
        figure.legend(loc="outside upper left", ncols=5)
        figure.draw_without_rendering()  # the limits of the axes are final
        name_lines(figure, axes, [(name.partition(" ")[2] or name, draws[-1], course[-1][name], colour)
                                  for name, colour in {**looks, "standard_error": INK}.items()])
        return {"rejection_sampling": figure}

    def logits(self) -> tuple[np.ndarray, np.ndarray]:
        """Logits of target and draft, float64 (vocab_size,) each."""
        from scipy.special import ndtri

        target, own = (ndtri(Key(_LAW_SEED).fold_in(use).uniforms(0, self.vocab_size)) for use in ("target", "draft"))
        draft = _AGREEMENT * target + np.sqrt(1.0 - _AGREEMENT**2) * own
        return _TARGET_SPREAD * target, _DRAFT_SPREAD * draft

    def both_laws(self) -> tuple[np.ndarray, np.ndarray]:
        """Probabilities p of the target and q of the draft, float64 (vocab_size,) each."""
        from dflash_mcmc.engine.oracle import exact_law

        return tuple(np.exp(exact_law.log_softmax(logits / self.temperature)) for logits in self.logits())


_ELSEWHERE = ("late_penalty", "greedy_walk", "finite_window")
"""Faults that this probe does not measure."""


def samplers_by_name() -> "dict[str, Speculation]":
    """The decoders by name, correct (`decoder`) and with each fault that this probe measures (`decoder fault`).

    All draft at the target's temperature. Matching draws its drafts with the uniform of the position, and rejection sampling
    uses separate uniforms.
    """
    from dflash_mcmc.engine.speculative import rules

    samplers, drafter = {}, SimpleNamespace(num_drafted=1, has_density=True)
    for decoder, rule, faults in (("speculative_rejection", rules.reject, rules.REJECTION),
                                  ("speculative_match", rules.match, rules.MATCH)):
        for name, (wrong, fault) in {"": (None, rules.Fault()), **faults}.items():
            if name not in _ELSEWHERE:
                samplers[f"{decoder} {name}".strip()] = rules.Speculation(
                    wrong or rule, drafter, shared_noise=rule is rules.match, temperature=None, noisy=True, fault=fault)
    return samplers


def verdict(sampler: "Speculation", logits: "tuple[torch.Tensor, torch.Tensor]", law: SamplingParams, chance: "BlockRandom",
            rows: int) -> "Verdict":
    """The verdict on one drafted token in each of `rows` rows. All rows have the same logits, each float32 (vocabulary,)."""
    from dflash_mcmc.engine.batching import logits_processor as laws
    from dflash_mcmc.engine.speculative.rules import Block

    def weigh(logits: "torch.Tensor", law: SamplingParams, count: int) -> laws.Weights:
        return laws.weigh(laws.process(logits.expand(count, -1), law, laws.NO_HISTORY))

    target, draft = logits
    weights = weigh(draft, sampler.draft_params(law), rows)
    drafted = sampler.draft(weights, chance, 0)
    judged = weigh(draft, SamplingParams(), rows) if sampler.fault.raw_draft else weights
    first = target.new_ones(rows).bool()
    return sampler.rule(Block(drafted, weigh(target, law, 2 * rows), judged, first), chance)


_LEAST_EXPECTED = 5.0
"""Smallest expected count of a chi-square cell; rarer tokens share one cell."""
_SHOWN = 24
"""Tokens in their table: those with the largest p."""


def frequencies(records: list[dict], p: np.ndarray, q: np.ndarray) -> dict[str, Any]:
    """The draws of all samplers.

    Keys: `p` and `q`, probabilities of the tokens under target and draft, float64 (vocab_size,); the number of `draws` up to
    each record, and the standard `error` of the frequency that varies most after them; by sampler the `counts` of the tokens
    up to each record, the `deviation` of their frequencies from p, its `largest` size, and the `accepted` drafts.
    """
    draws, samplers = np.cumsum([record["draws"] for record in records]), list(records[0]["accepted"])
    counts = {sampler: np.cumsum([record["counts"][sampler] for record in records], axis=0) for sampler in samplers}
    deviation = {sampler: each / draws[:, None] - p for sampler, each in counts.items()}
    return {"p": p, "q": q, "draws": draws, "error": np.sqrt(p * (1.0 - p)).max() / np.sqrt(draws),
            "counts": counts, "deviation": deviation, "samplers": samplers,
            "largest": {sampler: np.abs(each).max(axis=1) for sampler, each in deviation.items()},
            "accepted": {sampler: sum(record["accepted"][sampler] for record in records) for sampler in samplers}}


SAMPLERS = Table("samplers", (  # of the frequencies and the name of a `sampler`
    ("decoder", "rule that verifies the draft", lambda of: of["sampler"].partition(" ")[0]),
    ("fault", "mistake in it; empty for the correct rule", lambda of: of["sampler"].partition(" ")[2] or None),
    ("max_deviation", "largest distance of a token's frequency from its probability p",
     lambda of: float(of["largest"][of["sampler"]][-1])),
    ("standard_error", "standard error of the frequency that varies most", lambda of: float(of["error"][-1])),
    ("in_standard_errors", "`max_deviation` divided by `standard_error`; empty for a target with one token",
     lambda of: float(of["largest"][of["sampler"]][-1] / of["error"][-1]) if of["error"][-1] else None),
    ("total_variation", "half of the sum of all distances of frequencies from p",
     lambda of: 0.5 * float(np.abs(of["deviation"][of["sampler"]][-1]).sum())),
    ("chi_square_p", "p-value of Pearson's test that the draws come from p",
     lambda of: _chi_square_p(of["counts"][of["sampler"]][-1], of["p"])),
    ("acceptance", "share of drafted tokens that are accepted",
     lambda of: of["accepted"][of["sampler"]] / int(of["draws"][-1])),
    ("draws", "draws of the sampler", lambda of: int(of["draws"][-1])),
))
TOKENS = Table("tokens", (  # of the frequencies and the number of a `token`
    ("token", "number of a token; those with the largest p", lambda of: int(of["token"])),
    ("p", "its probability under the target", lambda of: float(of["p"][of["token"]])),
    ("q", "its probability under the draft", lambda of: float(of["q"][of["token"]])),
    Each(lambda of: of["samplers"], (("{sampler}", "frequency among the sampler's draws minus p",
                                      lambda of, sampler: float(of["deviation"][sampler][-1, of["token"]])),)),
))
COURSE = Table("course", (  # of the frequencies and the number of a `record`
    ("draws", "draws up to here", lambda of: int(of["draws"][of["record"]])),
    ("standard_error", "as in `samplers`, for so many draws", lambda of: float(of["error"][of["record"]])),
    Each(lambda of: of["samplers"], (("{sampler}", "`max_deviation` after so many draws",
                                      lambda of, sampler: float(of["largest"][sampler][of["record"]])),)),
))
VALUES = Table("values", (
    ("num_draws", "draws of each sampler", lambda of: int(of["draws"][-1])),
    ("overlap", "sum of min(p, q) over the tokens: the share of drafts that rejection sampling accepts",
     lambda of: float(np.minimum(of["p"], of["q"]).sum())),
    Each(lambda of: {sampler.replace(" ", "/"): sampler for sampler in of["samplers"]}, (
        ("{sampler}/max_deviation", "see `samplers`", lambda of, sampler: float(of["largest"][sampler][-1])),)),
))
ALL = (VALUES, SAMPLERS, TOKENS, COURSE)


def _chi_square_p(counts: np.ndarray, p: np.ndarray) -> float | None:
    """p-value of Pearson's test that counts (tokens,) come from p; None if there are too few draws for two cells."""
    from scipy import stats

    expected, order = counts.sum() * p, np.argsort(p)
    pooled = int(np.searchsorted(np.cumsum(expected[order]), _LEAST_EXPECTED)) + 1
    if pooled >= len(p):
        return None
    cells = [np.concatenate([[column[order[:pooled]].sum()], column[order[pooled:]]]) for column in (counts, expected)]
    return float(stats.chisquare(*cells).pvalue)
