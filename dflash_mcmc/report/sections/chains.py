"""Chain diagnostics: outcomes of the proposals, and pass@k and majority@k over the chains of a problem."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash_mcmc.grading.verdicts import UNDRAWN
from dflash_mcmc.report.parts import Column, Drawing, Section, Table, counted, ends, named, paragraphs, shared
from dflash_mcmc.report.runs import Run
from dflash_mcmc.report.study import Study, full, votes
from dflash_mcmc.statistics.chains import majority, majority_curve, pass_curve
from dflash_mcmc.statistics.intervals import Clusters, IntervalEstimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_DRAWN = 7
"""The largest number of curves that a reader can distinguish."""
_PROPOSALS = """
A moved proposal is accepted and differs from the suffix it replaces; an identical one is accepted and changes nothing. An
abandoned proposal is one that stopped early because it could no longer be accepted. Tokens skipped is the share of drawn
tokens that needed no forward because they repeat the current sequence. The law error bounds the total variation distance that
early rejection with epsilon adds; 0 means exact. Intervals come from a bootstrap over problems.
"""
_PASSES = """
pass@k is the probability that at least one of k chains is correct (unbiased estimate, Chen et al. 2021). It uses the problems
that have all chains.
"""
_VOTES = """
majority@k is the accuracy of the most frequent answer among k chains, averaged over all ways to choose k. Answers count as the
same vote if their normalised strings are equal. A tie counts as its expected accuracy when the winner is drawn uniformly. The
votes of all chains are tied on {ties}.
"""


def section(study: Study) -> Section | None:
    """A diagnostics table for runs with proposals, and curves over the number of chains for runs with several chains."""
    text, tables, drawings = "", [], []
    proposing = [run for run in study.runs if any(record["proposals"] for record in run.records)]
    if proposing:
        tables.append(Table("chains", "Proposals", _columns(), [_diagnosed(run) for run in proposing]))
        text += _PROPOSALS
    several = [run for run in study.runs if run.num_chains > 1]
    voting = [run for run in several if votes(run)]
    if several:
        curves = {run.shown: _curve(run) for run in several}
        rows = [row for curve in curves.values() for row in curve]
        tables.append(Table("votes", "Several chains per problem", _vote_columns(), rows))
        first = dict(list(curves.items())[:_MOST_DRAWN])
        of = f"; the first {_MOST_DRAWN} runs" if len(curves) > _MOST_DRAWN else ""
        drawings.append(Drawing(f"fig_{study.dataset}_chains", f"pass@k, and accuracy of a majority vote over k chains{of}.",
                                lambda: _figure(first)))
        text += "\n\n" + _PASSES + (_VOTES.format(ties=", ".join(map(_ties, voting))) if voting else "")
    return Section("chains", "Chain diagnostics", paragraphs(text), tables, drawings) if tables else None


def _diagnosed(run: Run) -> dict:
    of = Clusters([record["problem"] for record in run.records])
    proposals = [record["proposals"] for record in run.records]
    became = {name: [record[name] for record in run.records] for name in ("accepted", "moved", "abandoned")}
    became["identical"] = [record["accepted"] - record["moved"] for record in run.records]
    drawn = sum(record["tokens_drawn"] for record in run.records)
    return {"run": run.shown, "samples": len(run.records), "proposals": sum(proposals),
            **{key: end for name, values in became.items() for key, end in of.ratio(values, proposals).columns(name).items()},
            "skipped": sum(record["tokens_skipped"] for record in run.records) / drawn if drawn else None,
            "mean_log_p": _mean_log_p(run),
            "law_error": max(record["law_error"] for record in run.records)}


def _mean_log_p(run: Run) -> float | None:
    """Mean log p of the samples that could be drawn. Other samples are left out, because their log p is recorded as 0."""
    drawn = [record["log_p"] for record in run.records if record["verdict"] not in UNDRAWN]
    return sum(drawn) / len(drawn) if drawn else None


def _columns() -> list[Column]:
    return [named("run", "run"), counted("samples", "samples"), counted("proposals", "proposals"),
            *(shared(name, name) for name in ("accepted", "moved", "identical", "abandoned")),
            shared("tokens skipped", "skipped"),
            Column("mean log p", lambda row: "-" if row["mean_log_p"] is None else f"{row['mean_log_p']:.2f}"),
            Column("law error", lambda row: f"{row['law_error']:.2g}")]


def _curve(run: Run) -> list[dict]:
    """One row per k. The rows lack majority@k if the answers cannot be voted on."""
    passed = pass_curve(run.records)
    voted = [IntervalEstimate(None, None, None, 0)] * len(passed)
    if votes(run):
        voted = [IntervalEstimate(*ends(row, "accuracy"), 0) for row in majority_curve(run.records)]
    return [{"run": run.shown, **row, **of.columns("majority_at_k")} for row, of in zip(passed, voted, strict=True)]


def _ties(run: Run) -> str:
    found = majority(full(run))
    return f"{sum(vote['tied'] for vote in found):,} of {len(found):,} problems of {run.shown}"


def _vote_columns() -> list[Column]:
    return [named("run", "run"), counted("k", "k"), shared("pass@k", "pass_at_k"), shared("majority@k", "majority_at_k"),
            counted("problems", "n"), counted("problems left out", "left_out")]


def _figure(curves: dict[str, list[dict]]) -> Figure:
    from matplotlib.figure import Figure

    from dflash_mcmc.report.figure import MARKERS, PALETTE, error_bars

    longest = max(map(len, curves))
    drawn = Figure(figsize=(8.6, 3.4 + 0.17 * (len(curves) if longest > 40 else -(-len(curves) // 2))), layout="constrained")
    panels = drawn.subplots(1, 2, sharey=True)
    for axes, key, title in zip(panels, ("pass_at_k", "majority_at_k"), ("pass@k", "majority@k"), strict=True):
        for number, (label, rows) in enumerate(curves.items()):
            if rows[0][key] is None:
                continue
            estimates = [IntervalEstimate(*ends(row, key), row["n"]) for row in rows]
            shift = 1.0 + 0.02 * (number - (len(curves) - 1) / 2)
            axes.errorbar([row["k"] * shift for row in rows], [100.0 * estimate.known for estimate in estimates],
                          error_bars(estimates), color=PALETTE[number], marker=MARKERS[number], markersize=5, capsize=2,
                          label=f"{label} (n = {rows[0]['n']:,})")
        ticks = sorted({row["k"] for rows in curves.values() for row in rows})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.set_xlabel("chains per problem, k")
        axes.set_title(title)
    panels[0].set_ylabel("%, with 95 % intervals")
    drawn.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=1 if longest > 40 else 2)
    return drawn
