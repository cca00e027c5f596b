"""Several chains of a problem: their votes and passes, weighted votes, votes at equal cost, and equal laws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import combinations
from typing import TYPE_CHECKING

from dflash_mcmc.grading.verdicts import UNDRAWN
from dflash_mcmc.registry import components
from dflash_mcmc.report.figure import MARKERS, PALETTE, error_bars
from dflash_mcmc.report.parts import (
    HOLM,
    P_VALUES,
    Drawing,
    ReportColumn,
    ReportTable,
    Section,
    costing,
    counted,
    differing,
    ends,
    listed,
    named,
    numbered,
    paragraphs,
    percent,
    shared,
)
from dflash_mcmc.report.reading import Run
from dflash_mcmc.report.sections.paired import VERDICTS, adjusted
from dflash_mcmc.report.study import Study, cost_of, rules_asked_for, same_but, votes, weighted_rules
from dflash_mcmc.statistics.chains import affordable, aggregated, majority, majority_curve, pass_curve, weighted_curve
from dflash_mcmc.statistics.intervals import Clusters, IntervalEstimate
from dflash_mcmc.statistics.outcomes import accuracy_of, aligned, by_problem, outcomes
from dflash_mcmc.statistics.paired import LEVEL, agreement, compare

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dflash_mcmc.statistics.outcomes import Combined, CostField
    from dflash_mcmc.statistics.rules import VoteRule

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
        tables.append(ReportTable("chains", "Proposals", _columns(), [_diagnosed(run) for run in proposing]))
        text += _PROPOSALS
    several = [run for run in study.runs if run.num_chains > 1]
    voting = [run for run in several if votes(run)]
    if several:
        curves = {run.shown: _curve(run) for run in several}
        rows = [row for curve in curves.values() for row in curve]
        columns = [named("run", "run"), counted("k", "k"), shared("pass@k", "pass_at_k"),
                   shared("majority@k", "majority_at_k"), counted("problems", "n"), counted("problems left out", "left_out")]
        tables.append(ReportTable("votes", "Several chains per problem", columns, rows))
        first = dict(list(curves.items())[:_MOST_DRAWN])
        of = f"; the first {_MOST_DRAWN} runs" if len(curves) > _MOST_DRAWN else ""
        drawings.append(Drawing(f"fig_{study.dataset}_chains", f"pass@k, and accuracy of a majority vote over k chains{of}.",
                                lambda: _figure(first)))
        text += "\n\n" + _PASSES + (_VOTES.format(ties=listed([*map(_ties, voting)])) if voting else "")
    return Section("chains", "Chain diagnostics", paragraphs(text), tables, drawings) if tables else None


def _diagnosed(run: Run) -> dict:
    of = Clusters([record["problem"] for record in run.records])
    proposals = [record["proposals"] for record in run.records]
    became = {name: [record[name] for record in run.records] for name in ("accepted", "moved", "abandoned")}
    became["identical"] = [record["accepted"] - record["moved"] for record in run.records]
    skipped = sum(record["tokens_skipped"] for record in run.records)
    proposed = skipped + sum(record["tokens_drawn"] for record in run.records)
    return {"run": run.shown, "samples": len(run.records), "proposals": sum(proposals),
            **{key: end for name, counts in became.items() for key, end in of.ratio(counts, proposals).columns(name).items()},
            "skipped": skipped / proposed if proposed else None,
            "mean_log_p": _mean_log_p(run),
            "law_error": max(record["law_error"] for record in run.records)}


def _mean_log_p(run: Run) -> float | None:
    """Mean log p of the samples that could be drawn. Other samples are left out, because their log p is recorded as 0."""
    drawn = [record["log_p"] for record in run.records if record["verdict"] not in UNDRAWN]
    return sum(drawn) / len(drawn) if drawn else None


def _columns() -> list[ReportColumn]:
    return [named("run", "run"), counted("samples", "samples"), counted("proposals", "proposals"),
            *(shared(name, name) for name in ("accepted", "moved", "identical", "abandoned")),
            shared("tokens skipped", "skipped"),
            numbered("mean log p", "mean_log_p", ".2f"), numbered("law error", "law_error", ".2g")]


def _curve(run: Run) -> list[dict]:
    """One row per k. The rows lack majority@k if the answers cannot be voted on."""
    passed = pass_curve(run.records)
    voted = [IntervalEstimate(None, None, None, 0)] * len(passed)
    if votes(run):
        voted = [IntervalEstimate(*ends(row, "accuracy"), 0) for row in majority_curve(run.records)]
    return [{"run": run.shown, **row, **of.columns("majority_at_k")} for row, of in zip(passed, voted, strict=True)]


def _ties(run: Run) -> str:
    ballots = majority(run.full)
    return f"{sum(vote['tied'] for vote in ballots):,} of {len(ballots):,} problems of {run.shown}"


def _figure(curves: dict[str, list[dict]]) -> Figure:
    from matplotlib.figure import Figure

    longest = max(map(len, curves))
    drawn = Figure(figsize=(8.6, 3.4 + 0.17 * (len(curves) if longest > 40 else -(-len(curves) // 2))), layout="constrained")
    panels = drawn.subplots(1, 2, sharey=True)
    for axes, key, title in zip(panels, ("pass_at_k", "majority_at_k"), ("pass@k", "majority@k"), strict=True):
        _over_chains(axes, {f"{label} (n = {rows[0]['n']:,})": rows for label, rows in curves.items()}, key, 0.02)
        axes.set_title(title)
    panels[0].set_ylabel("%, with 95 % intervals")
    drawn.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=1 if longest > 40 else 2)
    return drawn


def _over_chains(axes: Axes, curves: dict[str, list[dict]], key: str, step: float, names: Sequence[str] = ()) -> None:
    """A line for each curve over the number of chains, moved aside by `step`. `names` are all lines of the figure."""
    names = names or list(curves)
    for name, rows in curves.items():
        if rows[0][key] is None:
            continue
        index, estimates = names.index(name), [IntervalEstimate(*ends(row, key), row["n"]) for row in rows]
        shift = 1.0 + step * (index - (len(names) - 1) / 2)
        axes.errorbar([row["k"] * shift for row in rows], [100.0 * estimate.known for estimate in estimates],
                      error_bars(estimates), color=PALETTE[index % len(PALETTE)], marker=MARKERS[index % len(MARKERS)],
                      markersize=5, capsize=2, label=name)
    ticks = sorted({row["k"] for rows in curves.values() for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("chains per problem, k")


_MAJORITY = "majority vote"
_MOST_PANELS = 3
"""The largest number of runs in the figure."""
_TEXT = """
Each rule combines the same recorded chains into one answer per problem. The power vote weighs a chain by
exp(alpha log p - log q), so that an answer's summed weight estimates its probability under p^alpha. The adaptive vote draws
chains until the leading answer is likely enough. A chain without an answer has no weight, and a tie counts as the expected
value of a uniform draw among the winners. Differences, intervals and p are those of the paired table, against the majority
vote of the same run; p (Holm) is adjusted for the rows of the table.

Effective chains are (sum of weights)^2 / (sum of squared weights), averaged over problems. If one chain has more than half of
the weight on most problems, the vote is little more than the answer of that chain.
"""
_WITHOUT = """
Importance weights need independent draws with a known log q and without truncation. These runs have none, and therefore no
power vote: {runs}.
"""


def rules_section(study: Study) -> Section | None:
    """One row per run and rule, and the accuracy over the number of chains. None without several chains of answers."""
    voting = [run for run in study.runs if votes(run)]
    if not voting:
        return None
    rows = [row for run in voting for row in _rows(run, weighted_rules(run, study.alphas))]
    adjusted([row for row in rows if row["p_value"] is not None])
    curves = {run.shown: _curves(run, weighted_rules(run, study.alphas)) for run in voting}
    without = [run.shown for run in voting if not any(rule.needs_log_q for rule in weighted_rules(run))]
    text = _TEXT + ("\n\n" + _WITHOUT.format(runs=listed(without)) if without else "")
    shown = dict(list(curves.items())[:_MOST_PANELS])
    of = f"; the first {_MOST_PANELS} runs" if len(curves) > _MOST_PANELS else ""
    data = [row for rules in curves.values() for curve in rules.values() for row in curve]
    curve_columns = [named("run", "run"), named("rule", "rule"), counted("k", "k"), shared("accuracy", "accuracy"),
                     counted("problems", "n"), counted("problems left out", "left_out")]
    return Section("rules", "Rules of votes", paragraphs(text),
                   [ReportTable("vote_rules", "Rules of votes", _rules_columns(), rows),
                    ReportTable("vote_curves", "Accuracy over the number of chains", curve_columns, data)],
                   [Drawing(f"fig_{study.dataset}_vote_rules", f"Accuracy of each rule over the number of chains{of}.",
                            lambda: _rules_figure(shown))])


def _rows(run: Run, rules: list[VoteRule]) -> list[dict]:
    """The majority vote of a run, and each rule compared with it."""
    records = run.full
    base = outcomes(aggregated(records))
    rows = [{"run": run.shown, "rule": _MAJORITY, "k": run.num_chains, "problems": len(base.problems),
             **accuracy_of(base).columns("accuracy"), "effective": None, "dominated": None,
             **IntervalEstimate(None, None, None, 0).columns("difference"), "p_value": None, "p_holm": None, "verdict": "-"}]
    for rule in rules:
        combined = aggregated(records, rule)
        own = outcomes(combined)
        paired = compare(own, base)
        rows.append({"run": run.shown, "rule": rule.shown, "k": run.num_chains, "problems": len(own.problems),
                     **accuracy_of(own).columns("accuracy"),
                     "effective": sum(row["effective"] for row in combined) / len(combined),
                     "dominated": sum(row["dominated"] for row in combined) / len(combined),
                     **paired.difference.columns("difference"), "p_value": paired.p_value, "p_holm": None,
                     "verdict": VERDICTS["tie"]})
    return rows


def _curves(run: Run, rules: list[VoteRule]) -> dict[str, list[dict]]:
    """For each rule, one row per number of chains."""
    curves = {_MAJORITY: majority_curve(run.records), **{rule.shown: weighted_curve(run.records, rule) for rule in rules}}
    return {rule: [{"run": run.shown, "rule": rule, **row} for row in rows] for rule, rows in curves.items()}


def _rules_columns() -> list[ReportColumn]:
    return [named("run", "run"), named("rule", "rule"), counted("chains", "k"), shared("accuracy", "accuracy"),
            differing("difference to majority (points)", "difference"),
            HOLM, named("verdict", "verdict"), numbered("effective chains", "effective", ".1f"),
            ReportColumn("problems with most weight on one chain", lambda row: percent(row["dominated"])),
            counted("problems", "problems")]


def _rules_figure(curves: dict[str, dict[str, list[dict]]]) -> Figure:
    """One panel per run, one line per rule."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(rule for rules in curves.values() for rule in rules))
    drawn = Figure(figsize=(1.4 + 3.9 * len(curves), 3.8), layout="constrained")
    panels = drawn.subplots(1, len(curves), sharey=True, squeeze=False)[0]
    for axes, (run, rules) in zip(panels, curves.items(), strict=True):
        _over_chains(axes, rules, "accuracy", 0.03, names)
        axes.set_title(run if len(run) <= 44 else f"{run[:41]}...")
    panels[0].set_ylabel("correct answers, %, with 95 % intervals")
    handles = {label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    drawn.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(2, len(handles)))
    return drawn


_COSTS: dict[CostField, str] = {"token_forwards": "token-forwards", "share_seconds": "device seconds"}
_MATCHED_TEXT = """
A sampler that costs as much as k independent draws should beat their vote: the majority vote, and the weighted votes that
`aggregate` names in the run of these draws. Each run is compared with votes over k chains of a run of sampler=temperature. k
is the largest number of chains that cost at most as much as one sample of the compared run; they read their prompt once. It is
at least 1 and at most the
recorded number of chains. One table matches token-forwards, the other device seconds. If the vote costs much less than the
run, a fair vote would need more chains than are recorded. The accuracy of a vote of k is the mean over all ways to choose k of
a problem's chains, or over 1,000 of them for weighted votes with more ways. Differences, intervals and p are those of the
paired table; p (Holm) is adjusted for the rows of each table.
"""


def matched_section(study: Study) -> Section | None:
    """A table for each cost. None unless one run has several independent draws per problem and another run can be compared."""
    drawn = [run for run in study.runs if run.component("sampler") == "temperature" and votes(run)]
    others = [run for run in study.runs if run.component("sampler") not in ("temperature", "greedy")]
    if not drawn or not others:
        return None
    tables = [ReportTable(f"matched_{cost}", f"At equal {name}", _matched_columns(name),
                          _matched_rows(study, drawn, others, cost))
              for cost, name in _COSTS.items()]
    return Section("matched", "Compared with votes of equal cost", paragraphs(_MATCHED_TEXT), tables)


def _matched_rows(study: Study, drawn: list[Run], others: list[Run], cost: CostField) -> list[dict]:
    votes_of = [_MatchedVotes(voting, rule) for voting in drawn for rule in (None, *rules_asked_for(voting))]
    return adjusted([row for run in others for matched in votes_of if (row := _row(study, run, matched, cost)) is not None])


class _MatchedVotes:
    """The votes of a run over k chains, computed once for each k. Without a rule they are majority votes."""

    def __init__(self, run: Run, rule: VoteRule | None):
        self.run, self.records = run, run.full
        self.shown = rule.shown if rule else "majority vote"
        self.of: Callable[[int], list[Combined]] = cache(partial(aggregated, self.records, rule or "majority", None))
        """One record per problem: the vote over k of its chains."""


def _row(study: Study, run: Run, votes_of: _MatchedVotes, cost: CostField) -> dict | None:
    """The comparison of a run with the votes of another one; None if the two runs have no problem in common."""
    spent = cost_of(run.records, cost)
    k = affordable(votes_of.records, spent, cost)
    vote = votes_of.of(k)
    own, other, left_out = aligned(study.entry(run).outcomes, outcomes(vote))
    if not own.problems:
        return None
    paired = compare(own, other)
    return {"run": run.shown, "cost": spent, **accuracy_of(own).columns("accuracy"), "votes_of": votes_of.run.label,
            "vote": votes_of.shown, "k": k,
            "vote_cost": cost_of(vote, cost), **accuracy_of(other).columns("vote_accuracy"), "problems": len(own.problems),
            "left_out": left_out, **paired.difference.columns("difference"), "p_value": paired.p_value, "p_holm": None,
            "verdict": VERDICTS["tie"]}


def _matched_columns(cost: str) -> list[ReportColumn]:
    return [named("run", "run"), costing(cost, "cost"), shared("accuracy", "accuracy"), named("votes of", "votes_of"),
            named("vote", "vote"), counted("k", "k"), costing(f"{cost} of the vote", "vote_cost"),
            shared("accuracy of the vote", "vote_accuracy"), counted("problems", "problems"),
            differing("difference (points)", "difference"), HOLM,
            named("verdict", "verdict")]


_NUMBERS = {"log p": "log_p", "tokens": "num_tokens"}
_AGREEMENT_TEXT = """
The samplers of these runs have the law p^alpha in the limit of many steps. If two runs have reached it, a sample of one run is
exchangeable with a sample of the other run for the same problem. Each row tests this for the mean of a number by a permutation
test within problems. p (Holm) is adjusted for all rows. A small p (Holm) means that at least one of the two runs has not
reached p^alpha. A large one does not prove equality: the test detects only differences of means, and with few samples only
large ones.
"""


def agreement_section(study: Study) -> Section | None:
    """One row for each pair of runs with the same power and target, and each number. None without such a pair."""
    pairs = [(a, b) for a, b in combinations(study.runs, 2)
             if a.power is not None and a.power == b.power and same_but(a, b, *_otherwise_equal(a))]
    rows = [row for a, b in pairs for name in _NUMBERS if (row := _agreement_row(a, b, name))]
    if not rows:
        return None
    adjusted(rows, lambda _, p: "differ" if p <= LEVEL else "agree")
    return Section("agreement", "Samplers of one law", paragraphs(_AGREEMENT_TEXT),
                   [ReportTable("agreement", "Samplers of one law", _agreement_columns(), rows)])


def _otherwise_equal(run: Run) -> list[str]:
    """Groups that do not change the law p^alpha of a run's target. The draft does if the target has its logits."""
    blend = components("blend").get(run.component("blend"))
    return ["sampler", "decoder", "condition", "seed", *([] if blend is None or blend.cls.needs_draft else ["draft"])]


def _agreement_row(a: Run, b: Run, name: str) -> dict | None:
    agreed = agreement(_values(a, _NUMBERS[name]), _values(b, _NUMBERS[name]))
    return agreed and {"run": a.shown, "other": b.shown, "power": a.power, "number": name, **agreed._asdict(), "p_holm": None,
                       "verdict": "agree"}


def _values(run: Run, field: str) -> dict[str, list[float]]:
    drawn = by_problem([record for record in run.records if record["verdict"] not in UNDRAWN])
    return {problem: [record[field] for record in chains] for problem, chains in drawn.items()}  # type: ignore[literal-required]


def _agreement_columns() -> list[ReportColumn]:
    return [named("run", "run"), named("other run", "other"), numbered("alpha", "power", "g"),
            named("number", "number"), counted("problems", "problems"), counted("samples", "samples_a"),
            counted("samples of the other", "samples_b"),
            numbered("difference of means", "difference"), *P_VALUES, named("verdict", "verdict")]
