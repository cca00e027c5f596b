"""Measures how much each token gains from blending an intermediate layer's logits, compared with a mere flattening.

The guided-power-sampling document builds on "beta = 0.05-0.1 of layer 33 beats the target on 20.5 % of hard tokens". Wins on
hard tokens alone prove little. A token is hard because the target gives it a low probability, which is mostly too low, and
every mixture moves it up (regression to the mean). The cost appears on the easy tokens. The control `flattened` blends with
the uniform distribution: a temperature of 1 / (1 - beta). It adds no information and keeps all ranks, but wins log p on hard
tokens too. Ranks are biased in the same way; their control are the first layers. A raw layer can also sharpen, if its residual
stream has a large norm: the last layer with norm=none shows this effect alone.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from dflash_mcmc.chains import cost
from dflash_mcmc.chains.build import encoded
from dflash_mcmc.components import Settings, identity, name_of, register
from dflash_mcmc.errors import ConfigError, UserError
from dflash_mcmc.forcing.answers import Answer, solutions
from dflash_mcmc.probe import SKIPPED, AnswerProbe, Each, Observations, Summary, Table, Unit, Work, measured, rounded
from dflash_mcmc.types import UnitCost

if TYPE_CHECKING:
    import torch

    from dflash_mcmc.engine.batching.language_model import LanguageModel
    from dflash_mcmc.engine.speculative.drafter import DFlashDrafter
    from dflash_mcmc.forcing.sequences import Source

DRAFT, BLEND, FLATTENED = "draft", "blend", "flattened"
"""Sources that are not layers; a layer is named by its number."""
PARTS = ("hard", "easy")
SUMS = ("n", "gain", "wins", "losses", "rank_wins", "rank_losses", "gain_over_flattened", "wins_over_flattened")
"""Sums over tokens: their number, log p of the blend minus that of the target in nats, positive and negative gains, better and
worse ranks, log p of the blend minus that of the target flattened by the same beta, and how often this is positive."""
AGREEMENT = ("n", "kl", "rank_correlation")
"""Sums over tokens: their number, KL(target, source) in nats, and Spearman's correlation of the vocabulary's two orders."""


@register("probe", "logit_blend")
@dataclass(slots=True, kw_only=True)
class LogitBlend(AnswerProbe):
    """Gain of hard and easy tokens from blending other logits into the target's, by source and share.

    The blend is logits = (1 - beta) * target + beta * head(h_layer), as in `blend=layer`. Other sources are the draft, on the
    tokens that it predicts; what `blend=...` mixes in, if it is chosen, whatever its own beta and mask; and as a control the
    flattened target.
    """
    layers: list[int] | None = identity(None, "0-based decoder layers; negative counts from the end; null takes all")
    norm: Literal["none", "final"] = identity(
        "none", "norm between a layer's hidden state and the head: none, as published; final = the model's final norm")
    betas: list[float] = identity([0.01, 0.05, 0.1, 0.2, 0.5], "shares of the blended logits, from -10 to 1, as of "
                                  "blend=layer")
    hard_below: float = identity(0.01, "a token is hard if its probability under the target is smaller than this", gt=0, lt=1)

    takes_draft = reads_blend = True

    def check(self, config: Settings) -> None:
        if not self.betas or len(set(self.betas)) < len(self.betas) or not all(-10.0 <= beta <= 1.0 for beta in self.betas):
            raise ConfigError("probe.betas", self.betas, "different numbers from -10 to 1, at least one")
        num_layers = config.model.num_layers()
        if num_layers is not None:
            self.blended_layers(num_layers)
        if config.blend.needs_draft:
            raise ConfigError("blend", name_of(config.blend), f"another one, or none: probe={name_of(self)} with draft=... "
                              "reads the draft's logits already")
        super().check(config)

    def expected_cost(self, config: Settings) -> UnitCost:
        """See `AnswerProbe.expected_cost`. A blend of layers reads the answer again, and so does one of another prompt.

        The length of that prompt is not counted, since it is not known.
        """
        expected, answer = super().expected_cost(config), cost.forced(config)
        if config.blend.is_null or (config.blend.needs_companion and not config.blend.has_prompts):
            return expected
        again = answer.length + (0.0 if config.blend.has_prompts else answer.prompt)
        return expected._replace(token_forwards=expected.token_forwards + again)

    def canonical(self, config: Settings) -> dict[str, object]:
        """The layers counted from 0, with null replaced by all layers. In a model of 36 layers, -3 and 33 are the same."""
        num_layers = config.model.num_layers()
        return {} if num_layers is None else {"layers": self.blended_layers(num_layers)}

    def blended_layers(self, num_layers: int) -> list[int]:
        """The decoder layers, 0-based. Raises ConfigError if there are none, if one repeats, or if the model lacks one."""
        wanted = list(range(num_layers)) if self.layers is None else self.layers
        layers = [layer % num_layers for layer in wanted if -num_layers <= layer < num_layers]
        if not wanted or len(layers) < len(wanted) or len(set(layers)) < len(layers):
            raise ConfigError("probe.layers", self.layers, f"different layers from -{num_layers} to {num_layers - 1} (the "
                              f"model has {num_layers} layers), at least one; or null")
        return layers

    def recorder(self, config: Settings, model: "LanguageModel", draft: "DFlashDrafter | None",
                 work: Work) -> Callable[[Unit, Answer], dict]:
        """Sums over the hard and over the easy tokens of an answer; see `record`.

        Raises UserError for a model of the chosen blend with too few positions.
        """
        from dflash_mcmc.forcing.sequences import other_source

        blend, asked = config.blend, {unit.problem for unit in work.units}
        if blend.is_null:
            return lambda unit, answer: self.record(model, draft, answer)
        companion = blend.companion(model)
        problems = [problem for problem in config.dataset.problems() if problem.id in asked]
        if self.answers == "gold":
            prompts, tokens = solutions(config, model, problems)
            longest = max(len(prompt) + len(tokens[name]) for name, prompt in prompts.items())
        else:
            prompts = encoded(config, model, problems)
            longest = max(map(len, prompts.values())) + config.dataset.max_new_tokens
        if companion is not None and companion.max_positions is not None and longest > companion.max_positions:
            raise UserError(f"blend: prompt and answer need {longest} positions; allowed: {companion.max_positions} (those "
                            "of the blend's model)")
        second = blend.second_prompts(config, model, problems, prompts)

        def other(answer: Answer, last: "torch.Tensor") -> "Source":
            return other_source(model, blend, companion, answer, last, second.get(answer.prompt.tobytes()))

        return lambda unit, answer: self.record(model, draft, answer, other)

    def record(self, model: "LanguageModel", draft: "DFlashDrafter | None", answer: Answer,
               other: "Callable[[Answer, torch.Tensor], Source] | None" = None) -> dict:
        """The record of an answer: `SUMS` over its hard tokens and over its easy tokens, for each source and beta, and
        `AGREEMENT` over the hard ones by source.

        Args:
            other: (answer, the target's last states) -> what the chosen blend mixes in; None without a blend.

        Raises NotNumbers.
        """
        import torch

        from dflash_mcmc.forcing import sequences

        tokens = torch.from_numpy(answer.tokens).to(model.device)
        totals: dict[str, torch.Tensor] = {}
        agreement: dict[str, torch.Tensor] = {}
        for last, outputs in sequences.readings(model, answer, self.blended_layers(len(model.layers))):
            sources: dict[str, Source | None] = {str(layer): sequences.layer_source(model, states, self.norm)
                                                 for layer, states in outputs.items()}
            if not totals:  # only with the first group of layers
                sources |= {} if draft is None else {DRAFT: sequences.draft_source(model, draft, answer)}
                sources |= {} if other is None else {BLEND: other(answer, last)}
                sources[FLATTENED] = None
            for piece in sequences.pieces(model, len(tokens)):
                labels, logits = tokens[piece], model.logits(last[piece])
                target = sequences.standing(logits, labels)
                flat = [sequences.log_probability(blended(logits, None, beta, model.forbidden), labels)
                        for beta in self.betas]
                is_hard = target.log_p < math.log(self.hard_below)
                for name, source in sources.items():
                    others = None if source is None else source.head(source.states[piece])
                    speaks = torch.ones_like(is_hard) if source is None else source.speaks[piece]
                    cells = []
                    for beta, flattened in zip(self.betas, flat, strict=True):
                        # Flattening keeps the order of all logits, except for ties from rounding.
                        mixed = target._replace(log_p=flattened) if others is None else sequences.standing(
                            blended(logits, others, beta, model.forbidden), labels)
                        gain, over = mixed.log_p - target.log_p, mixed.log_p - flattened
                        cells.append(torch.stack([  # `SUMS` of each token, float64 (sums, n)
                            torch.ones_like(gain), gain, gain > 0, gain < 0, mixed.rank < target.rank,
                            mixed.rank > target.rank, over, over > 0]).double())
                    parts = torch.stack([speaks & is_hard, speaks & ~is_hard]).double()
                    totals[name] = totals.get(name, 0.0) + torch.einsum("pt,bst->pbs", parts, torch.stack(cells))
                    if others is not None:
                        agreement[name] = agreement.get(name, 0.0) + agreeing(
                            *(part[speaks & is_hard][:, ~model.forbidden] for part in (logits, others)))
        order = sorted(totals, key=lambda name: (not name.isdecimal(), name == FLATTENED))
        sums = {part: {name: [rounded(row, 9) for row in totals[name][number]] for name in order}
                   for number, part in enumerate(PARTS)}
        return {"num_tokens": len(tokens), "num_hard": int(sums["hard"][FLATTENED][0][0]), "sums": sums,
                "agreement": {name: rounded(agreement[name], 9) for name in order if name in agreement}}

    def summarise(self, config: Settings, records: list[dict]) -> Summary:
        """The tables `grid` (all tokens), `hard` and `easy`, with a row per source and beta, and `agreement`, one per source.

        A gain is the mean of log p of the blend minus log p of the target, in nats. A win is a token for which the blend's log
        p is strictly larger. The source `best` is chosen on the same hard tokens for which it is reported, so it looks better
        than it is.
        """
        kept = measured(records)
        tables = {"grid": rows_of(GRID, kept, self.betas, *PARTS), "hard": rows_of(HARD, kept, self.betas, "hard"),
                  "easy": rows_of(EASY, kept, self.betas, "easy"),
                  "agreement": AGREEING.rows(_sums(kept, name, [record["agreement"][name] for record in kept], AGREEMENT)
                                             for name in (kept[0]["agreement"] if kept else ()))}
        return Summary(VALUES.row({"records": records, "kept": kept, "hard": tables["hard"]}), tables, {})


def agreeing(target: "torch.Tensor", source: "torch.Tensor") -> "torch.Tensor":
    """`AGREEMENT` of two logits (n, vocabulary), float64 (3,). Equal logits of a row are in the order of ids."""
    import torch

    log_p, log_q = (logits.double().log_softmax(dim=-1) for logits in (target, source))
    mine, theirs = (law.argsort(dim=-1, stable=True).argsort(dim=-1).double() for law in (log_p, log_q))
    size = log_p.shape[-1]
    correlation = 1.0 - 6.0 * (mine - theirs).square().sum(dim=-1) / (size * (size**2 - 1.0))
    kl = (log_p.exp() * (log_p - log_q)).sum(dim=-1)
    return torch.stack([torch.ones_like(kl).sum(), kl.sum(), correlation.sum()])


def blended(target: "torch.Tensor", others: "torch.Tensor | None", beta: float, forbidden: "torch.Tensor") -> "torch.Tensor":
    """(1 - beta) * target + beta * others, float32 (n, vocabulary).

    `others` None is the uniform distribution, with all logits 0. The result equals the target to the last bit if beta is 0 or
    if both are equal. Ids without a token keep -inf.
    """
    mixed = target * (1.0 - beta) if others is None else target.lerp(others, beta)
    return mixed.masked_fill_(forbidden, -math.inf)


def _sums(kept: list[dict], name: str, sums: list, columns: Sequence[str], **names: Any) -> Observations:
    """The sums over some tokens of each problem, for the rows of a source."""
    layer = int(name) if name.isdecimal() else None
    return Observations({"problem": range(len(kept)), **dict(zip(columns, np.array(sums).T, strict=True))},
                        source=name if layer is None else "layer", layer=layer, **names)


def rows_of(table: Table, records: list[dict], betas: Sequence[float], *parts: str) -> list[dict]:
    """A row for each source and beta, over the tokens of these parts. `records` are results of `record`, one per problem."""
    return table.rows(
        _sums(records, name, np.sum([[record["sums"][part][name][number] for record in records] for part in parts], axis=0),
              SUMS, beta=beta)
        for name in (records[0]["sums"]["hard"] if records else ()) for number, beta in enumerate(betas))


_SOURCE = (
    ("source", "what is blended: `layer` (the head on a layer's output), `draft`, `blend` (what the chosen blend mixes in), "
     "or `flattened` (all logits 0), the control"),
    ("layer", "number of the layer, from 0"),
)
_ROWS = (
    *_SOURCE,
    ("beta", "share of the source in the blend"),
    ("gain", "mean of log p under the blend minus log p under the target, nats"),
    ("wins", "share of tokens whose log p is larger under the blend"),
    ("rank_wins", "share of tokens whose rank is better under the blend"),
    ("rank_losses", "share of tokens whose rank is worse under the blend"),
    ("gain_over_flattened", "mean of log p under the blend minus log p under the flattened target with this beta, nats"),
)
_N = ("n", "tokens of the row", lambda of: of.n)
GRID, EASY = Table("grid", (*_ROWS, _N)), Table("easy", (*_ROWS, _N))
HARD = Table("hard", (  # The published claim is about hard tokens. These rows have paired differences, too.
    *_ROWS,
    ("wins_over_flattened", "share of tokens whose log p is larger under the blend than under the flattened target"),
    ("wins_minus_losses", "share of wins minus share of losses in log p",
     lambda of: of.mean(of.values["wins"] - of.values["losses"])),
    ("rank_wins_minus_losses", "share of better ranks minus share of worse ranks",
     lambda of: of.mean(of.values["rank_wins"] - of.values["rank_losses"])),
    _N,
))
AGREEING = Table("agreement", (
    *_SOURCE,
    ("kl", "mean over hard tokens of KL(target, source), the divergence of the source's own law from the target's, nats; 0 "
     "where they agree"),
    ("rank_correlation", "mean over hard tokens of Spearman's correlation between the vocabulary in the order of the target "
     "and in that of the source; 1 where they agree"),
    _N,
))


def _best(hard: list[dict]) -> dict[str, dict]:
    """The row with the largest gain among the sources, `best`, and among those of the control; empty without tokens."""
    rows = [row for row in hard if row["gain"] is not None]
    return {name: max((row for row in rows if (row["source"] == FLATTENED) == control), key=lambda row: row["gain"],
                      default={}) for name, control in (("best", False), (FLATTENED, True))}


VALUES = Table("values", (  # of all `records`, those that are `kept`, and the table `hard`
    SKIPPED,
    ("num_tokens", "tokens of all answers", lambda of: sum(record["num_tokens"] for record in of["kept"])),
    ("num_hard", "hard tokens", lambda of: sum(record["num_hard"] for record in of["kept"])),
    Each(lambda of: _best(of["hard"]), (
        ("{which}/source", "source with the largest `gain` on hard tokens, chosen on these tokens: `best`, or always "
                           "`flattened`", lambda of, row: _name(row) if row else None),
        ("{which}/beta", "beta of the best setting of this source", lambda of, row: row.get("beta")),
        ("{which}/gain", "its `gain` on hard tokens, nats", lambda of, row: row.get("gain")),
        ("{which}/wins", "its `wins` on hard tokens, share", lambda of, row: row.get("wins")),
        ("{which}/wins_over_flattened", "its `wins_over_flattened` on hard tokens, share",
         lambda of, row: row.get("wins_over_flattened")),
    )),
))
ALL = (VALUES, GRID, HARD, EASY, AGREEING)


def _name(row: dict) -> str:
    return row["source"] if row["layer"] is None else f"layer {row['layer']}"
