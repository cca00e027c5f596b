"""Speculative sampling on synthetic distributions, by samplers that draw from the target and by samplers with known faults.

The probe repeats the table of a pull request that fixed such a fault: "max_dev_correct=0.0018 max_dev_biased=0.1426
(N=50000)". The fault was to verify the most likely token of a draft as if it had been drawn (DSpark, "Sample the DSpark draft
proposal from q, not argmax").
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal, TypedDict, final

import numpy as np

from dflash_mcmc.draft import CheckpointDraft, Draft
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.fields import identity, runtime
from dflash_mcmc.probe import Probe, Summary, Unit, Work
from dflash_mcmc.registry import name_of, register
from dflash_mcmc.rng import Key
from dflash_mcmc.store.schema import Count, Long, Range
from dflash_mcmc.types import UnitCost

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dflash_mcmc.settings import Settings

# The pair of laws of the document's table. At this seed argmax_proposal deviates as much; the median of 1,000 seeds is 0.19.
_LAW_SEED, _TARGET_SPREAD, _DRAFT_SPREAD = 890, 1.5, 2.0
"""Seed of the logits, and their standard deviations in nats: the draft is more peaked than the target."""
_AGREEMENT = 0.8
"""Correlation of the draft's logits with the target's."""


@final
class DrawsRecord(TypedDict):
    """The draws of a chunk, by sampler: a decoder, with the name of its fault."""

    draws: Annotated[int, Range(1)]
    """Draws of each sampler."""
    accepted: dict[str, Annotated[float, Range(0)]]
    """Accepted drafts; of a block of several tokens, the sum of the accepted shares."""
    counts: Annotated[dict[str, list[Count]], Long("cells")]
    """How often each token, or pair of tokens, was drawn."""


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

    laws: Literal["auto", "synthetic", "draft"] = identity(
        "auto", "where the laws come from: synthetic, or draft for the chosen draft and target; auto takes draft for a draft "
        "whose tokens depend on each other")
    vocab_size: int = identity(12, "number of tokens in the vocabulary", ge=2, le=1_000_000)
    temperature: float = identity(0.8, "temperature of target and draft", gt=0)
    chunk_size: int = identity(500, "draws of each sampler in one record; a killed run loses at most one record", ge=1,
                               le=1_000_000)
    num_draws: int = runtime(50000, "draws of each sampler in total, a multiple of chunk_size; may be raised later", ge=1)

    uses = ()
    unit = "chunk"
    record_type = DrawsRecord
    tables_in = f"{__name__}.samplers"

    def check(self, config: Settings) -> None:
        """Checks that the configuration suits the probe. Raises ConfigError."""
        if self.num_draws % self.chunk_size:
            raise ConfigError("probe.num_draws", self.num_draws, f"a multiple of probe.chunk_size={self.chunk_size}")
        if self.laws == "draft" and not (isinstance(config.draft, CheckpointDraft) and config.draft.has_block_network):
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

    def units(self, config: Settings) -> list[Unit]:
        """Chunks of draws."""
        return [Unit("draws", chunk) for chunk in range(self.num_draws // self.chunk_size)]

    def expected_cost(self, config: Settings) -> UnitCost | None:
        """Nothing with synthetic laws. With laws=draft both laws are read twice, for the records and for the summary.

        That reads the prompt, and the prompt before each token of the vocabulary. None if the model's configuration is not
        here.
        """
        if self.laws != "draft":
            return UnitCost(0.0)
        if (shape := config.model.shape("cpu")) is None:
            return None
        prompt, each = config.assumed.prompt_length, 2.0 / self.num_units(config)
        return UnitCost(each * (prompt + shape.vocab_size * (prompt + 1)), each)

    def measure(self, config: Settings, work: Work) -> Iterator[tuple[Unit, dict]]:
        """Counts, for each sampler and chunk of draws, how often each token is drawn and how many drafts are accepted."""
        from dflash_mcmc.probe.rejection_sampling import samplers

        measure = samplers.measure if self.laws == "draft" else samplers.measure_synthetic
        return measure(self, config, work)

    def summarise(self, config: Settings, records: list[dict]) -> Summary:
        """The table of samplers, a row per token, and the largest deviation after each chunk.

        `overlap` is the sum of min(p, q), with laws=synthetic the share of drafts that rejection accepts. `standard_error` is
        the standard error of the token whose frequency varies most.
        """
        from dflash_mcmc.probe.rejection_sampling import samplers

        if self.laws == "draft":
            return samplers.summary(*samplers.laws(self, config), records)
        return samplers.summary(*self.both_laws(), int, records)

    def figures(self, config: Settings, records: list[dict], summary: Summary) -> dict[str, Figure]:
        """Distributions and deviations by token, and the largest deviation over the number of draws."""
        from matplotlib.figure import Figure

        from dflash_mcmc.probe.rejection_sampling.samplers import draw_course, draw_deviations, draw_frequencies

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

        target, own = (ndtri(Key(_LAW_SEED).fold_in(use).uniforms(0, self.vocab_size)) for use in ("target", "draft"))
        draft = _AGREEMENT * target + np.sqrt(1.0 - _AGREEMENT**2) * own
        return _TARGET_SPREAD * target, _DRAFT_SPREAD * draft

    def both_laws(self) -> tuple[np.ndarray, np.ndarray]:
        """Probabilities p of the target and q of the draft, float64 (vocab_size,) each."""
        from dflash_mcmc.engine.oracle import exact_law

        return tuple(np.exp(exact_law.log_softmax(logits / self.temperature)) for logits in self.logits())
