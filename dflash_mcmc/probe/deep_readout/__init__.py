"""Measures what a draft extracts from the target's features along an answer, as in the document `deep_readout_diagnostic`.

The document assumed that every block after the first sees only the features of one block. But the cache of a DFlash draft
keeps those of all positions. The option `context` can impose the limit.

The tables are those of sections 3.1 to 4.1 and 6, with intervals. Ranks begin at 1, and tokens with equal logits share a rank.
The draft or the target wins a token if it is strictly better. Mean ranks are sensitive to outliers, so the tables also have
medians or geometric means. A reader is `target`, or a mode of the draft: `mask`, `gold`, `random`, `reinject`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from dflash_mcmc.chains import cost
from dflash_mcmc.components import Settings, identity, register
from dflash_mcmc.forcing.answers import Answer
from dflash_mcmc.probe import PROBLEMS, SKIPPED, AnswerProbe, Each, Observations, Table, measured
from dflash_mcmc.report.figure import INK, ORANGE, OTHER, PALE, RIGHT, WRONG, bars_of, end_of, legend_below, panels
from dflash_mcmc.rng import Key
from dflash_mcmc.statistics.estimates import IntervalEstimate
from dflash_mcmc.types import Summary, Unit, UnitCost, Work

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dflash_mcmc.engine.batching.language_model import LanguageModel
    from dflash_mcmc.engine.speculative.drafter import DFlashDrafter


TARGET, MODES = "target", ("mask", "gold", "random")
REINJECT = "reinject"
"""The mode of section 6, which is measured only if the probe asks for it."""
PROMPT_AGAIN = "+ prompt's features again"
BUCKETS = (("< 0.01", 0.0, 0.01), ("0.01 - 0.1", 0.01, 0.1), ("0.1 - 0.5", 0.1, 0.5), ("0.5 - 0.9", 0.5, 0.9),
           (">= 0.9", 0.9, math.inf))
"""Ranges of the target's probability: name, lower end, upper end (exclusive)."""
_SINGLE_BLOCKS = 10
"""Number of first blocks that have one row each. Every later row covers twice as many blocks as the row before."""
_BINS_AN_OCTAVE = 2


@register("probe", "deep_readout")
@dataclass(slots=True, kw_only=True)
class DeepReadout(AnswerProbe):
    """Probability and rank of an answer's tokens in target and draft.

    The draft is measured in several modes. It reads masks; the answer's own tokens; the answer's own tokens, with noise
    instead of the target's features; or masks, with the prompt's features re-injected. An answer is teacher-forced in whole
    blocks. Answers shorter than a block are skipped and counted.
    """

    context: Literal["full", "block", "prompt"] = identity(
        "full", "features before a block that the block sees: full = all, as in training; block = only those since the "
        "previous block (for the first block, the prompt's); prompt = only the prompt's")
    reinject_every: int | None = identity(None, "adds the mode reinject: masks, where every block whose number (from 0) is a "
                                          "positive multiple of this number sees the prompt's features once more; null leaves "
                                          "the mode out", ge=1)

    needs_draft = True
    is_timed = False

    def expected_cost(self, config: Settings) -> UnitCost:
        """The cost of drawing the answer, reading prompt and whole blocks once, and drafting each block in every mode."""
        answer = cost.forced(config)
        modes = len(MODES) + (self.reinject_every is not None)
        return UnitCost(answer.drawing + answer.prompt + answer.blocks * answer.block_size, modes * answer.blocks)

    def recorder(self, config: Settings, model: "LanguageModel", draft: "DFlashDrafter | None",
                 work: Work) -> Callable[[Unit, Answer], dict]:
        """Number of the block, probability and rank of each compared token, by reader, and the parameters of the pair."""
        from dflash_mcmc.probe.deep_readout.readout import count_parameters, hidden_states, read_out

        assert draft is not None  # `needs_draft`
        counts, key = count_parameters(model, draft.network), Key(config.seed).fold_in("deep_readout")
        modes = MODES if self.reinject_every is None else (*MODES, REINJECT)

        def record(unit: Unit, answer: Answer) -> dict:
            hidden = hidden_states(draft, answer.prompt, answer.tokens, self.context, key.fold_in(unit.problem, "noise"),
                                   modes, self.reinject_every)
            count, n = hidden.tokens.shape
            return {"prompt_length": len(answer.prompt), "block_size": n + 1,
                    "block": [index for index in range(count) for _ in range(n)], **read_out(draft, hidden, modes),
                    "parameters": counts}

        return record

    def summarise(self, config: Settings, records: list[dict]) -> Summary:
        """The document's tables: overall, by the target's confidence, decomposed, by block, re-injection, and parameters.

        Intervals are clustered by problem. `factor` is the factor by which a signal lowers the mean rank.
        """
        tokens, kept = tokens_of(records, self.context, self.reinject_every), measured(records)
        found = rows(tokens)
        data = {name: found.pop(name) for name in ("block_curves", "position_curves")}
        again, found["parameters"] = found.pop("reinjection"), []
        if again:
            found["reinjection"] = again
        if kept:
            found["parameters"] = parameter_rows(kept[0]["parameters"])  # the same in all records
        values = VALUES.row(tokens.row(records=records, decomposition=found["decomposition"]))
        return Summary(values, found, data)

    def figures(self, config: Settings, records: list[dict], summary: Summary) -> "dict[str, Figure]":
        """The document's figures, named as in the document; none if there is no token to compare."""
        if not (kept := measured(records)):
            return {}
        return {"fig_architecture": architecture(kept[0]["parameters"]),
                "fig_bucket_rank_comparison": buckets(summary.tables["confidence"]),
                "fig_signal_decomposition": decomposition(summary.tables["decomposition"]),
                "fig_block_rank_decay": by_block(summary.data["block_curves"], self.context),
                "fig_extended_context": by_position(summary.data["position_curves"], self.context)}


def tokens_of(records: Sequence[dict], context: str, reinject_every: int | None = None) -> Observations:
    """The compared tokens of all records that have any, with the names `modes`, `readers` and `words`, the vocabulary's size.

    Columns by reader: `p_mask`, `rank_mask`, `log_mask` (the logarithm of the rank); for the reader `chance` the expectations
    in a random order. `position` is the number of positions before the token's block, `context` the number of those that the
    draft sees, and `again` is whether the block sees the prompt's features once more in the mode `reinject`.
    """
    modes = MODES if reinject_every is None else (*MODES, REINJECT)
    readers, kept = (TARGET, *modes), measured(records)
    words = kept[0]["parameters"]["words"] if kept else 1

    def joined(lists: list[list], dtype: type) -> np.ndarray:
        return np.concatenate([np.empty(0, dtype), *(np.asarray(values, dtype) for values in lists)])

    block = joined([record["block"] for record in kept], np.int64)
    problem, prompt, size = (joined([[record[name]] * len(record["block"]) for record in kept], dtype) for name, dtype in (
        ("problem", object), ("prompt_length", np.int64), ("block_size", np.int64)))
    position = prompt + size * block
    columns = {
        "problem": problem, "block": block, "position": position,
        "context": {"full": position, "prompt": prompt, "block": np.where(block == 0, prompt, size)}[context],
        "again": (block > 0) & (block % (reinject_every or 1) == 0),
        "rank_chance": np.full(len(block), (words + 1) / 2.0),
        "log_chance": np.full(len(block), math.lgamma(words + 1) / words)}
    for reader in readers:
        columns[f"p_{reader}"], columns[f"rank_{reader}"] = (
            joined([record[part][reader] for record in kept], np.float64) for part in ("p", "rank"))
        columns[f"log_{reader}"] = np.log(columns[f"rank_{reader}"])
    return Observations(columns, modes=modes, readers=readers)


def _geometric(of: Observations, before: str, after: str) -> IntervalEstimate:
    """The geometric mean rank before a signal is added, divided by the one with it."""
    return of.mean(of.values[f"log_{before}"] - of.values[f"log_{after}"]).mapped(math.exp)


_MODE = ("mode", "how the draft reads the block: `mask` (as in drafting), `gold` (with all gold tokens of the block), "
                 "`random` (with noise instead of the target's features), `reinject` (with the prompt's features again)")
_RANK = "of a gold token among all tokens by logit, from 1 (best)"
_N = ("n", "tokens of the row", lambda of: of.n)
_OF_MODE = (
    ("rank_draft_wins", "share of tokens with a strictly better rank under the draft than under the target",
     lambda of: of.mean(of.values[f"rank_{of['mode']}"] < of.values["rank_target"])),
    ("p_draft_wins", "share of tokens with a strictly higher probability under the draft than under the target",
     lambda of: of.mean(of.values[f"p_{of['mode']}"] > of.values["p_target"])),
    _N,
)
_RANKS = (
    ("mean_rank_target", f"mean rank {_RANK}, under the target", lambda of: of.mean("rank_target")),
    ("mean_rank_draft", "mean rank under the draft", lambda of: of.mean(f"rank_{of['mode']}")),
)

OVERALL = Table("overall", (  # section 3.1
    _MODE,
    ("mean_p_target", "mean probability of the gold tokens under the target", lambda of: of.mean("p_target")),
    ("mean_p_draft", "mean probability of the gold tokens under the draft", lambda of: of.mean(f"p_{of['mode']}")),
    *_RANKS,
    ("median_rank_target", "median rank under the target", lambda of: of.quantiles("rank_target", [0.5])[0]),
    ("median_rank_draft", "median rank under the draft", lambda of: of.quantiles(f"rank_{of['mode']}", [0.5])[0]),
    *_OF_MODE,
))
CONFIDENCE = Table("confidence", (  # section 3.2
    ("p_target", "range of the target's probability of the token"), _MODE, *_RANKS, *_OF_MODE))
DECOMPOSITION = Table("decomposition", (  # section 3.3
    ("tokens", "`all`, or the tokens that the target gives a probability below 0.01"),
    ("component", "source of signal that is added"),
    ("computation", "modes that are compared: before -> after",
     lambda of: "-" if of["before"] == of["after"] else f"{of['before']} -> {of['after']}"),
    ("mean_rank", "mean rank with the added signal", lambda of: of.mean(f"rank_{of['after']}")),
    ("factor", "mean rank before divided by mean rank after; above 1 the signal helps",
     lambda of: of.ratio(f"rank_{of['before']}", f"rank_{of['after']}")),
    ("factor_of_geometric_means", "the same for geometric means of ranks, which outliers move less",
     lambda of: _geometric(of, of["before"], of["after"])),
    _N,
))
BLOCKS = Table("blocks", (  # section 3.4
    ("block", "number of the block in the answer, from 0, or a range of numbers",
     lambda of: str(of["first"]) if of["end"] == of["first"] + 1 else f"{of['first']} - {of['end'] - 1}"),
    ("context_positions", "mean number of positions before the block that the draft sees", lambda of: of.mean("context")),
    Each(lambda of: of["readers"], [
        ("rank_{reader}", "mean rank for this reader", lambda of, reader: of.mean(f"rank_{reader}"))]),
    _N,
))
# `factor` is 1, up to rounding, for the blocks that do not see the features again: they are the same in both modes.
REINJECTION = Table("reinjection", (  # section 6
    ("blocks", "whether the blocks of the row see the prompt's features again"),
    Each(lambda of: (TARGET, "mask", REINJECT), [
        ("mean_rank_{reader}", "mean rank for this reader", lambda of, reader: of.mean(f"rank_{reader}"))]),
    ("factor", "mean rank in the mode `mask` divided by that in the mode `reinject`",
     lambda of: of.ratio("rank_mask", "rank_reinject")),
    ("factor_of_geometric_means", "the same for geometric means of ranks", lambda of: _geometric(of, "mask", REINJECT)),
    ("rank_improved", "share of tokens with a better rank in the mode `reinject`",
     lambda of: of.mean(of.values["rank_reinject"] < of.values["rank_mask"])),
    ("rank_worsened", "share of tokens with a worse rank in the mode `reinject`",
     lambda of: of.mean(of.values["rank_reinject"] > of.values["rank_mask"])),
    _N,
))
_CURVE = (
    ("reader", "`target`, or a mode of the draft"),
    ("mean_rank", f"mean rank {_RANK}", lambda of: of.mean(f"rank_{of['reader']}")),
    ("geometric_mean_rank", "geometric mean of these ranks", lambda of: of.mean(f"log_{of['reader']}").mapped(math.exp)),
    ("mean_p", "mean probability of the gold tokens", lambda of: of.mean(f"p_{of['reader']}")),
    _N,
)
BLOCK_CURVES = Table("block_curves", (
    ("first_block", "first block of the group, from 0", lambda of: of["first"]),
    ("last_block", "last block of the group", lambda of: of["end"] - 1),
    *_CURVE,
))
POSITION_CURVES = Table("position_curves", (
    ("from", "smallest number of positions before the block in this bin"),
    ("to_below", "end of the bin, exclusive"),
    *_CURVE,
))


def rows(tokens: Observations) -> dict[str, list[dict]]:
    """The rows of the tables that are computed from the tokens, and of both curves."""
    p, block, modes = tokens.values["p_target"], tokens.values["block"], tokens["modes"]
    again = [(PROMPT_AGAIN, "mask", REINJECT)] if REINJECT in modes else []
    # As in the document for the tokens that the target finds least likely, and for all.
    signals = (("random baseline", "random", "random"), ("+ features", "random", "mask"), ("+ gold tokens", "mask", "gold"),
               ("features and gold tokens", "random", "gold"), *again, (TARGET, "random", TARGET),
               ("chance", "random", "chance"))
    groups = [tokens.row(p < BUCKETS[0][2], tokens=f"p_target {BUCKETS[0][0]}"), tokens.row(tokens="all")]
    buckets = [tokens.row((p >= least) & (p < end), p_target=name) for name, least, end in BUCKETS]
    blocks, first = [], 0
    while first <= block.max(initial=-1):
        end = first + 1 if first < _SINGLE_BLOCKS else 2 * first
        blocks.append(tokens.row((block >= first) & (block < end), first=first, end=end))
        first = end
    # Bins of positions have equal width on a logarithmic axis.
    bins, places = np.floor(_BINS_AN_OCTAVE * np.log2(tokens.values["position"])).astype(int), []
    for index in np.unique(bins):
        low, high = (math.ceil(2.0 ** (at / _BINS_AN_OCTAVE)) for at in (index, index + 1))
        places.append(tokens.row(bins == index, **{"from": low, "to_below": high}))
    seen = tokens.values["again"]
    return {
        "overall": OVERALL.rows(tokens.row(mode=mode) for mode in modes),
        "confidence": CONFIDENCE.rows(bucket.row(mode=mode) for bucket in buckets for mode in modes),
        "decomposition": DECOMPOSITION.rows(group.row(component=component, before=before, after=after)
                                            for group in groups for component, before, after in signals),
        "blocks": BLOCKS.rows(blocks),
        "reinjection": REINJECTION.rows([tokens.row(seen, blocks="with the prompt's features"),
                                         tokens.row(~seen, blocks="without")] if again else []),
        "block_curves": BLOCK_CURVES.rows(each.row(reader=reader) for each in blocks for reader in tokens["readers"]),
        "position_curves": POSITION_CURVES.rows(each.row(reader=reader) for each in places for reader in tokens["readers"]),
    }


def _factors(signals: list[dict], everything: bool) -> dict[str, float]:
    """The factor of each signal that was measured, over all tokens or over those of low confidence."""
    names = {"+ features": "features", "+ gold tokens": "gold", PROMPT_AGAIN: "reinject", TARGET: "target"}
    factors = {row["component"]: row["factor"] for row in signals if (row["tokens"] == "all") == everything}
    return {name: factors[component] for component, name in names.items() if component in factors}


VALUES = Table("values", (  # of the tokens, with all `records` and the table `decomposition`
    PROBLEMS, SKIPPED,
    ("num_tokens", "compared tokens", lambda of: of.n),
    ("num_low_confidence_tokens", "tokens that the target gives a probability below 0.01",
     lambda of: next(row["n"] for row in of["decomposition"] if row["tokens"] != "all")),
    Each(lambda of: of["readers"], [("mean_rank_{reader}", "mean rank of all compared tokens for this reader",
                                     lambda of, reader: of.mean(f"rank_{reader}").value)]),
    Each(lambda of: of["readers"], [("mean_p_{reader}", "mean probability of all compared tokens for this reader",
                                     lambda of, reader: of.mean(f"p_{reader}").value)]),
    Each(lambda of: _factors(of["decomposition"], True), [
        ("{signal}_factor", "`factor` of the signal in `decomposition` (features, gold, reinject, target), over all tokens",
         lambda of, factor: factor)]),
    Each(lambda of: _factors(of["decomposition"], False), [
        ("{signal}_factor_low_confidence", "the same over the tokens that the target gives a probability below 0.01",
         lambda of, factor: factor)]),
))


PARAMETERS = Table("parameters", (  # section 4.1
    ("component", "part of target or draft"),
    ("parameters", "number of its parameters"),
    ("of_target_layers", "this number divided by that of the target's layers", lambda of: of["parameters"] / of["layers"]),
    ("role", "what the part does"),
))


def parameter_rows(counts: dict) -> list[dict]:
    """A row for each part of target and draft."""
    taps, hidden, tied = len(counts["tapped_layers"]), counts["hidden_size"], counts["tied"]
    return PARAMETERS.rows({"component": name, "parameters": size, "role": role, "layers": counts["target_layers"]}
                           for name, size, role in (
        (f"target: {counts['num_target_layers']} layers", counts["target_layers"], "deep processing"),
        ("target: embedding", counts["embedding"], "shared with the draft"),
        ("target: head", counts["head"], "shared with the draft" + (", same weights as the embedding" if tied else "")),
        ("target: other", counts["target_other"], "final norm, and positions if they are learned"),
        (f"draft: fc ({taps * hidden} to {hidden})", counts["draft_fc"], f"linear, {taps} to 1"),
        (f"draft: {counts['num_draft_layers']} layers", counts["draft_layers"], "read the features"),
        ("draft: norms", counts["draft_norms"], "after fc and at the end"),
    ))


ALL = (VALUES, OVERALL, CONFIDENCE, DECOMPOSITION, BLOCKS, REINJECTION, PARAMETERS, BLOCK_CURVES, POSITION_CURVES)


class Look(NamedTuple):
    """The style of a reader. Styles differ in more than their colour."""

    name: str
    colour: str
    marker: str
    line: str
    hatch: str


LOOKS = {TARGET: Look("target", INK, "s", "-", ""), "mask": Look("draft, masks", RIGHT, "o", "-", "//"),
         "gold": Look("draft, gold tokens", ORANGE, "^", "--", ".."),
         "random": Look("draft, gold tokens, noise instead of features", OTHER, "x", ":", "xx"),
         REINJECT: Look("draft, masks, prompt's features again", WRONG, "D", "-.", "\\\\")}
_SHOWN = {"full": "all features before a block", "block": "only the features since the previous block",
          "prompt": "only the prompt's features"}
_TITLES = {"mean_rank": "mean rank (sensitive to outliers)", "geometric_mean_rank": "geometric mean of ranks",
           "mean_p": "mean probability of the token"}


def buckets(table: list[dict]) -> "Figure":
    """Mean ranks by the target's probability of the token, for all ranges with tokens. `table` is the table `confidence`."""
    figure, (axes,) = panels((8.5, 4.0))
    readers = (TARGET, *dict.fromkeys(row["mode"] for row in table))
    rows, width = {(row["p_target"], row["mode"]): row for row in table if row["n"]}, 0.8 / len(readers)
    names = [name for name, *_ in BUCKETS if (name, MODES[0]) in rows]
    for index, reader in enumerate(readers):
        column, look = "mean_rank_target" if reader == TARGET else "mean_rank_draft", LOOKS[reader]
        mine = [rows[name, MODES[0] if reader == TARGET else reader] for name in names]
        bars = axes.bar(np.arange(len(mine)) + (index - (len(readers) - 1) / 2) * width, [row[column] for row in mine], width,
                        color=look.colour, edgecolor="white", hatch=look.hatch, label=look.name, yerr=bars_of(mine, column),
                        ecolor=INK, error_kw={"linewidth": 0.9})
        axes.bar_label(bars, [_short(row[column]) for row in mine], fontsize=7, rotation=90, padding=2)
    axes.set(title="Rank of the token by the target's probability", xlabel="target's probability of the token",
             ylabel="mean rank")
    _log_ranks(axes)
    axes.set_xticks(range(len(names)), [f"{name}\nn = {rows[name, MODES[0]]['n']:,}" for name in names])
    legend_below(figure, 4)
    return figure


def decomposition(table: list[dict]) -> "Figure":
    """The mean rank with noise, with each added signal, and of the target. `table` is the table `decomposition`.

    A bar is hatched if the signal makes the rank worse.
    """
    groups = list(dict.fromkeys(row["tokens"] for row in table if row["n"]))
    figure, places = panels((5.6 * len(groups), 4.2), 1, len(groups))
    for axes, tokens in zip(places, groups, strict=True):
        rows = {row["component"]: row for row in table if row["tokens"] == tokens}
        names = {"random baseline": "noise", "+ features": "+ features\n(masks)", "+ gold tokens": "+ gold\ntokens",
                 PROMPT_AGAIN: "+ prompt's\nfeatures again", TARGET: "target\n(from noise)"}
        mine = [rows[component] for component in names if component in rows]
        axes.set(title=f"{'All tokens' if tokens == 'all' else tokens.replace('p_target', 'Target p')} "
                       f"(n = {rows[TARGET]['n']:,})", ylabel="mean rank")
        for x, row in enumerate(mine):
            worse, size = row["factor"] < 1.0, max(row["factor"], 1.0 / row["factor"])
            colour = {"random baseline": OTHER, TARGET: INK}.get(row["component"], WRONG if worse else RIGHT)
            bar = axes.bar(x, row["mean_rank"], 0.62, color=colour, hatch="//" if worse else "", edgecolor="white",
                           yerr=bars_of([row], "mean_rank"), ecolor=INK, capsize=2.5)
            factor = (f"{size:,.0f}x" if size >= 100.0 else f"{size:.1f}x") + (" worse" if worse else " better")
            axes.bar_label(bar, [_short(row["mean_rank"]) + (f"\n{factor}" if x else "")], fontsize=8, padding=3)
        axes.axhline(chance := rows["chance"]["mean_rank"], color=OTHER, linestyle="--", linewidth=1.0)
        axes.annotate(f"chance: {_short(chance)}", (len(mine) - 0.6, chance), (0, 2), textcoords="offset points", ha="right",
                      va="bottom", fontsize=8)
        _log_ranks(axes)
        axes.set_xticks(range(len(mine)), [names[row["component"]] for row in mine])
    return figure


def by_block(curves: list[dict], context: str) -> "Figure":
    """Ranks by block number. `curves` is the table `block_curves`."""
    groups = {(row["first_block"], row["last_block"]): row["n"] for row in curves}
    ticks = [f"{first if first == last else f'{first}-{last}'}\n{n:,}" for (first, last), n in groups.items()]
    return _two_panels(curves, ("mean_rank", "geometric_mean_rank"), list(range(len(groups))), ticks, xlabel="block, n",
                       title=f"Rank by block. The draft sees {_SHOWN[context]}")


def by_position(curves: list[dict], context: str) -> "Figure":
    """Rank and probability by the number of positions before the block. `curves` is the table `position_curves`."""
    bins = {(row["from"], row["to_below"]): row["n"] for row in curves}
    ticks = [f"{low:,}-{high - 1:,}\n{n:,}" for (low, high), n in bins.items()]
    return _two_panels(curves, ("geometric_mean_rank", "mean_p"), [math.sqrt(low * high) for low, high in bins], ticks,
                       xlabel="positions before the block, n", xscale="log",
                       title=f"Rank by context length. The draft sees {_SHOWN[context]}")


def _two_panels(curves: list[dict], columns: tuple[str, str], places: list[float], ticks: list[str], title: str,
                **axis: str) -> "Figure":
    """A panel per column, with a line per reader and its interval as a band."""
    figure, pair = panels((11.0, 4.6), 1, 2)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    for axes, column in zip(pair, columns, strict=True):
        for reader in dict.fromkeys(row["reader"] for row in curves):
            rows, look = [row for row in curves if row["reader"] == reader], LOOKS[reader]
            axes.plot(places, [row[column] for row in rows], look.line, marker=look.marker, markersize=4.5, color=look.colour,
                      label=look.name)
            low, high = ([end_of(row, column, end) for row in rows] for end in ("low", "high"))
            axes.fill_between(places, low, high, color=look.colour, alpha=0.18, linewidth=0)
        axes.set(ylabel=_TITLES[column], **axis)
        if column == "mean_p":
            axes.set_ylim(0.0, 1.0)
        else:
            _log_ranks(axes)
        axes.xaxis.minorticks_off()
        axes.set_xticks(places, ticks, fontsize=7, rotation=40 if len(ticks) > 9 else 0)
    legend_below(figure, 4)
    return figure


def _log_ranks(axes: "Axes") -> None:
    """Sets a logarithmic axis of ranks with plain numbers, and room for labels."""
    axes.set_yscale("log")
    axes.margins(y=0.2)
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.grid(visible=False, axis="x")


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def architecture(counts: dict) -> "Figure":
    """The diagram of target and draft, side by side. It shows tapped layers, the compression, and shared parts.

    The picture is 10 by 10, with the target's layers from the bottom on the left and the draft's on the right.

    Args:
        counts: see `readout.count_parameters`.
    """
    from matplotlib.patches import Rectangle

    figure, (axes,) = panels((9.5, 6.2))
    bottom, top, middle, hidden = 1.6, 8.2, 4.9, counts["hidden_size"]
    axes.set(xlim=(0.0, 10.0), ylim=(0.0, 10.0), title="The draft reads the target's layers and shares its embedding and head")
    axes.set_axis_off()

    def box(x: float, y: float, width: float, height: float, colour: str, text: str = "", size: float = 9.0) -> None:
        axes.add_patch(Rectangle((x, y), width, height, facecolor=colour, edgecolor=INK, linewidth=0.7))
        axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=size)

    # The embedding below and the head above both stacks of layers.
    head = "same weights as the embedding" if counts["tied"] else f"{_millions(counts['head'])} parameters"
    box(0.6, 0.3, 8.5, 0.6, "#EFEFEF", f"embedding, shared: {_millions(counts['embedding'])} parameters")
    box(0.6, 9.0, 8.5, 0.6, "#EFEFEF", f"head, shared: {head}")
    for x, fed in ((1.9, "all tokens"), (8.0, "known token, masks")):
        for start, end in ((0.9, bottom), (top, 9.0)):
            axes.annotate("", (x, end), (x, start), arrowprops={"arrowstyle": "-|>", "color": OTHER})
        axes.text(x - 0.1, 1.25, fed, ha="right", va="center", fontsize=8)
    # The target's layers, of which the draft reads the filled ones, through the compression, in every layer of its own.
    height = (top - bottom) / counts["num_target_layers"]
    for layer in range(counts["num_target_layers"]):
        y, reads = bottom + layer * height, layer in counts["tapped_layers"]
        box(0.6, y + 0.08 * height, 2.6, 0.84 * height, RIGHT if reads else "white")
        if reads:
            axes.text(0.5, y + height / 2, str(layer), ha="right", va="center", fontsize=7.5)
            axes.plot([3.2, 4.3], [y + height / 2, middle], color=RIGHT, linewidth=1.1)
    box(4.3, middle - 0.9, 0.9, 1.8, PALE, "fc", 10.0)
    axes.text(4.75, middle - 1.05, f"{hidden * len(counts['tapped_layers']):,} to {hidden:,}\n"
              f"{_millions(counts['draft_fc'])} parameters\nno nonlinearity", ha="center", va="top", fontsize=8.5)
    height = (top - bottom) / counts["num_draft_layers"]
    for layer in range(counts["num_draft_layers"]):
        y = bottom + layer * height
        box(6.9, y + 0.05 * height, 2.2, 0.9 * height, PALE, f"layer {layer}", 8.0)
        axes.annotate("", (6.9, y + height / 2), (5.2, middle), arrowprops={"arrowstyle": "-|>", "color": RIGHT})
    share = counts["draft_layers"] / counts["target_layers"]
    for x, side, text in ((2.02, "left", f"target: {counts['num_target_layers']} layers\n{_millions(counts['target_layers'])} "
                           "parameters"), (7.88, "right", f"draft: {counts['num_draft_layers']} layers\n"
                           f"{_millions(counts['draft_layers'])} parameters, {share:.1%} of the target's")):
        axes.text(x, 8.62, text, ha=side, va="center", fontsize=9)
    return figure


def _millions(number: int) -> str:
    return f"{number / 1e6:,.1f} M" if number >= 1e6 else f"{number / 1e3:,.1f} K"
