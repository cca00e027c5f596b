"""The rank of an answer's tokens when each layer's state goes through the head, with and without the final norm.

The guided-power-sampling document reports "raw lm_head(h_33) at rank 12,520" (of 36 layers and 151,936 words) and 697 for the
draft, and calls the layer a worse predictor. But the head was trained on states after the final norm, and the output of a
layer has not passed it. The logit lens (nostalgebraist 2020) applies the norm; even this is biased, because directions drift
from layer to layer (Belrose et al. 2023, arXiv 2303.08112). A root-mean-square norm divides a state by its length, which keeps
all ranks, and multiplies each coordinate by a weight, which changes ranks: those weights reduce the few huge coordinates of a
residual stream. log p also depends on the length.

A row name says which distribution the ranks are from: `target`; `3 none` and `3 final` (layer 3, raw and after the final
norm); `draft`; and `target where drafted`, the target on the tokens that the draft predicts.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dflash_mcmc.components import Settings, identity, register
from dflash_mcmc.forcing.answers import Answer
from dflash_mcmc.probe import SKIPPED, AnswerProbe, Each, Observations, Summary, Table, Unit, Work, measured
from dflash_mcmc.report.figure import GREEN, INK, OTHER, RIGHT, WRONG, bars_of, end_of, legend_below, panels
from dflash_mcmc.statistics.estimates import IntervalEstimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dflash_mcmc.engine.batching.language_model import LanguageModel
    from dflash_mcmc.engine.speculative.drafter import DFlashDrafter


@register("probe", "layer_rank")
@dataclass(slots=True, kw_only=True)
class LayerRank(AnswerProbe):
    """Rank and log p of an answer's tokens through the target's head from every decoder layer, raw and after the final norm.

    The draft is measured in its usual mode, on whole blocks from the answer's first token on. It does not predict the first
    token of a block, so the target is also reported on the tokens that the draft predicts.
    """

    hard_below: float = identity(0.01, "a token is hard if its probability under the target is smaller than this", gt=0, lt=1)

    takes_draft = True

    def recorder(self, config: Settings, model: "LanguageModel", draft: "DFlashDrafter | None",
                 work: Work) -> Callable[[Unit, Answer], dict]:
        """The tokens of an answer by row name.

        `hard` has the places of the hard tokens, and `vocabulary` the number of ids that have a token. By row: `ranks`, from
        1, null where the draft does not predict the token; `log_p`, sums in nats over all predicted tokens and over the hard
        ones; `agreements`, places at which the most likely token is the target's, among the same two.
        """
        import torch

        from dflash_mcmc.forcing import sequences

        def record(unit: Unit, answer: Answer) -> dict:
            tokens = torch.from_numpy(answer.tokens).to(model.device)
            standing: dict[str, sequences.Standing] = {}
            for last, outputs in sequences.readings(model, answer, range(len(model.layers))):
                if not standing:  # every group of layers comes with the same last states
                    standing[TARGET] = sequences.standings(model, sequences.layer_source(model, last, "none"), tokens)
                for layer, states in outputs.items():
                    for norm in ("none", "final"):
                        source = sequences.layer_source(model, states, norm)
                        standing[f"{layer} {norm}"] = sequences.standings(model, source, tokens)
            every = torch.ones_like(tokens, dtype=torch.bool)
            speaks = dict.fromkeys(standing, every)
            if draft is not None:
                source = sequences.draft_source(model, draft, answer)
                standing[DRAFT], standing[TARGET_WHERE_DRAFTED] = sequences.standings(model, source, tokens), standing[TARGET]
                speaks[DRAFT] = speaks[TARGET_WHERE_DRAFTED] = source.speaks
            hard = standing[TARGET].log_p < math.log(self.hard_below)
            parts = {name: (tokens_of, tokens_of & hard) for name, tokens_of in speaks.items()}
            return {"num_tokens": len(tokens), "num_hard": int(hard.sum()), "vocabulary": int((~model.forbidden).sum()),
                    "hard": hard.nonzero()[:, 0].tolist(),
                    "ranks": {name: [rank if known else None for rank, known in zip(
                        row.rank.tolist(), speaks[name].tolist(), strict=True)] for name, row in standing.items()},
                    "log_p": {name: [float(f"{float(row.log_p[part].sum()):.9g}") for part in parts[name]]
                              for name, row in standing.items()},
                    "agreements": {name: [int((row.best == standing[TARGET].best)[part].sum()) for part in parts[name]]
                                   for name, row in standing.items()}}

        return record

    def summarise(self, config: Settings, records: list[dict]) -> Summary:
        """The tables of layers and of norms, over all tokens and over hard ones."""
        kept, tables = measured(records), dict[str, list[dict]]()
        for part in LAYERS:
            of = [row_of(kept, name, bool(part)) for name in (kept[0]["ranks"] if kept else ())]
            tables[f"{part}layers"] = LAYERS[part].rows(of)
            raw, normed = ({row["layer"]: row for row in of if row["norm"] == norm} for norm in ("none", "final"))
            tables[f"{part}norms"] = NORMS[part].rows(
                raw[layer].row(raw=raw[layer], normed=normed[layer]) for layer in sorted(raw))
        return Summary(VALUES.row({"records": records, "kept": kept, "layers": tables["layers"]}), tables, {})

    def figures(self, config: Settings, records: list[dict], summary: Summary) -> "dict[str, Figure]":
        """`fig_layer_probe_ranks`: mean and median rank by layer, for all tokens and for hard ones, on a logarithmic axis."""
        if not summary.tables["layers"]:
            return {}
        panels_of = {"All tokens": summary.tables["layers"]}
        if summary.values["num_hard"]:
            panels_of[f"Tokens with p < {self.hard_below:g}"] = summary.tables["hard_layers"]
        figure, drawn = panels((5.6 * len(panels_of), 4.6), 1, len(panels_of), sharey=True)
        for axes, (title, rows) in zip(drawn, panels_of.items(), strict=True):
            for norm, colour, marker, label, aside in (("none", WRONG, "o", "raw", -0.12),
                                                       ("final", RIGHT, "s", "after the final norm", 0.12)):
                layers = [row for row in rows if row["norm"] == norm]
                for name, style, fill in (("mean", "-", "full"), ("median", "--", "none")):
                    axes.errorbar([row["layer"] + aside for row in layers], [row[f"{name}_rank"] for row in layers],
                                  bars_of(layers, f"{name}_rank"), color=colour, linestyle=style, marker=marker,
                                  markersize=4.0, fillstyle=fill, linewidth=1.2, elinewidth=0.9, capsize=2.0,
                                  label=f"{name}, {label}")
            for source, colour, style, label in ((TARGET, INK, "-", "mean, target"),
                                                 (DRAFT, GREEN, "-.", "mean, draft (on its tokens)")):
                for row in [row for row in rows if row["source"] == source and row["mean_rank"] is not None]:
                    axes.axhline(row["mean_rank"], color=colour, linestyle=style, linewidth=1.1, label=label)
                    axes.axhspan(*(end_of(row, "mean_rank", end) for end in ("low", "high")), color=colour, alpha=0.12,
                                 linewidth=0)
            axes.axhline(summary.number("chance_rank"), color=OTHER, linestyle=":", label="chance")
            axes.set(title=f"{title} (n = {next(row['n'] for row in rows if row['source'] == TARGET):,})", yscale="log",
                     xlabel="decoder layer")
            axes.yaxis.set_major_formatter("{x:,.0f}")
            axes.yaxis.set_minor_formatter("")
            axes.set_xticks([row["layer"] for row in layers][:: 1 + len(layers) // 12])
        drawn[0].set_ylabel("rank of the next token (1 is best)")
        legend_below(figure, 2 * len(panels_of))
        return {"fig_layer_probe_ranks": figure}


_PUBLISHED_FROM_END = 3
"""Distance of the published layer from the end: layer 33 of 36."""
TARGET, DRAFT, TARGET_WHERE_DRAFTED = "target", "draft", "target where drafted"


def median_of(ranks: list[np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    """A function for `Clusters.statistic`, from the weights of the problems to the median of all ranks.

    The median is the smallest rank that at least half of the ranks do not exceed. Bisection finds it. A resample has hundreds
    of thousands of ranks. They are never in memory together: for each value that bisection tries, the function only counts the
    ranks of each problem up to that value.
    """
    largest = max((int(of.max()) for of in ranks if len(of)), default=1)
    counts, offsets = np.array([len(of) for of in ranks]), (largest + 1) * np.arange(len(ranks))
    keys = np.concatenate([np.sort(of).astype(np.int64) + offset for of, offset in zip(ranks, offsets, strict=True)])
    before = np.cumsum(counts) - counts

    def median(weights: np.ndarray) -> np.ndarray:
        total = weights @ counts
        low, high = np.ones(len(weights), np.int64), np.full(len(weights), largest)
        while (low < high).any():
            tried, index = np.unique((low + high) // 2, return_inverse=True)
            upto = np.searchsorted(keys, offsets + tried[:, None], side="right") - before
            enough = 2 * (weights @ upto.T.astype(np.float64))[np.arange(len(weights)), index] >= total
            low, high = np.where(enough, low, tried[index] + 1), np.where(enough, tried[index], high)
        return np.where(total > 0, low, np.nan)

    return median


def row_of(records: list[dict], name: str, hard: bool) -> Observations:
    """The tokens of a row, `target`, `3 none` (a layer and its norm), `draft` or `target where drafted`, summed by problem.

    Columns: the number `n` of tokens, and sums of ranks, of ranks 1, of log p and of agreements. The name `ranks` has float64
    arrays, one for each problem.

    Args:
        records: one per problem, at least one.
        hard: whether the row is about hard tokens alone.
    """
    every = [np.array(record["ranks"][name], np.float64)[record["hard"] if hard else slice(None)] for record in records]
    ranks, (layer, _, norm) = [values[~np.isnan(values)] for values in every], name.partition(" ")
    columns = {
        "problem": [record["problem"] for record in records], "n": [len(values) for values in ranks],
        "rank": [values.sum() for values in ranks], "first": [(values == 1).sum() for values in ranks],
        "log_p": [record["log_p"][name][hard] for record in records],
        "agreement": [record["agreements"][name][hard] for record in records]}
    source, layer, norm = ("layer", int(layer), norm) if layer.isdecimal() else (name, None, None)  # type: ignore[assignment]
    return Observations(columns, source=source, layer=layer, norm=norm, ranks=ranks)


def _median(of: Observations) -> IntervalEstimate:
    """Median rank, with an interval if two problems have tokens."""
    median = of.clusters.statistic(median_of(of["ranks"]))
    return median if (of.values["n"] > 0).sum() > 1 else median._replace(low=None, high=None)


def _better(of: Observations, one: str, other: str) -> IntervalEstimate:
    """Share of tokens with a better rank in the first row."""
    return of.mean([(a < b).sum() for a, b in zip(of[one]["ranks"], of[other]["ranks"], strict=True)])


_N = ("n", "tokens of the row", lambda of: of.n)
_LAYERS = (
    ("source", "`layer` (the head on a layer's output), `target`, `draft`, or `target where drafted`: the target on the "
               "tokens that the draft predicts"),
    ("layer", "number of the layer, from 0"),
    ("norm", "`none`: the raw output; `final`: after the target's final norm"),
    ("mean_rank", "mean rank of the answer's tokens", lambda of: of.mean("rank")),
    ("median_rank", "median rank of the answer's tokens", _median),
    ("mean_log_p", "mean log-probability of the answer's tokens, nats", lambda of: of.mean("log_p")),
    ("share_rank_1", "share of tokens with rank 1", lambda of: of.mean("first")),
    ("agreement", "share of tokens at which the most likely token is also the target's"),
    _N,
)
_NORMS = (  # of a raw layer, whose name `normed` is the same layer after the norm
    ("layer", "number of the layer, from 0"),
    ("mean_rank_raw_over_normed", "raw mean rank divided by the mean rank after the final norm; above 1 the norm helps",
     lambda of: of.ratio("rank", of["normed"].values["rank"])),
    ("share_better_raw", "share of tokens with a better rank without the norm", lambda of: _better(of, "raw", "normed")),
    ("share_better_normed", "share of tokens with a better rank after the norm", lambda of: _better(of, "normed", "raw")),
    _N,
)
LAYERS, NORMS = ({part: Table(f"{part}{name}", columns) for part in ("", "hard_")}
                 for name, columns in (("layers", _LAYERS), ("norms", _NORMS)))


def _shown(rows: list[dict]) -> dict[str, dict]:
    """The rows of the published layer, of target and draft."""
    published = max((row["layer"] for row in rows if row["layer"] is not None), default=0) + 1 - _PUBLISHED_FROM_END
    return {row["source"].replace(" ", "_") if row["layer"] is None else f"published_layer/{row['norm']}": row
            for row in rows if row["layer"] in (None, published)}


VALUES = Table("values", (  # of all `records`, those that are `kept`, and the table `layers`
    SKIPPED,
    ("num_tokens", "tokens of all answers", lambda of: sum(record["num_tokens"] for record in of["kept"])),
    ("num_hard", "hard tokens: those that the target gives a probability below `probe.hard_below`",
     lambda of: sum(record["num_hard"] for record in of["kept"])),
    Each(lambda of: _shown(of["layers"]), (
        ("{source}/mean_rank", "mean rank for target, draft, target where drafted, and the third layer from the end, "
                               "`published_layer/none` (raw) and `published_layer/final` (normed)",
         lambda of, row: row["mean_rank"]),
        ("{source}/median_rank", "its median rank", lambda of, row: row["median_rank"]),
    )),
    ("chance_rank", "mean rank of a token in a random order",
     lambda of: (of["kept"][0]["vocabulary"] + 1) / 2 if of["kept"] else None),
))
ALL = (VALUES, LAYERS[""], LAYERS["hard_"], NORMS[""], NORMS["hard_"])
