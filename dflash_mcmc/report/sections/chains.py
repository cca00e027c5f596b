"""Several chains of a problem: votes and passes, weighted votes, votes at equal cost, equal laws, and how chains mix."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import combinations
from textwrap import fill
from typing import Any

import numpy as np

from dflash_mcmc.components import registered
from dflash_mcmc.grading.verdicts import UNDRAWN
from dflash_mcmc.report import figure, parts, reading
from dflash_mcmc.report.study import Study, cost_of, rules_asked_for, same_but, votes, weighted_rules
from dflash_mcmc.statistics import chains, estimates
from dflash_mcmc.statistics.estimates import Clusters, Combined, IntervalEstimate, accuracy_of, aligned, by_problem, outcomes
from dflash_mcmc.statistics.paired import LEVEL, agreement, compare

_MOST_DRAWN, _MOST_PANELS = 7, 3
"""The largest number of curves that a reader can distinguish, and of runs in the figure of rules."""
_PROPOSALS = """
A moved proposal is accepted and differs from the suffix it replaces; an identical one is accepted and changes nothing. An
abandoned proposal is one that stopped early because it could no longer be accepted. Tokens skipped is the share of drawn
tokens that needed no forward because they repeat the current sequence. The law error is 1 where an
answer does not end although it must, and else 0: exact. Intervals come from a bootstrap over problems.
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
_CURVE = {"k": ("k", "count"), "problems": ("n", "count"), "problems left out": ("left_out", "count")}


def section(study: Study) -> parts.Section | None:
    """A diagnostics table for runs with proposals, and curves over the number of chains for runs with several chains."""
    text, tables, drawings = "", [], []
    became = ("accepted", "moved", "identical", "abandoned")
    diagnosed = []
    for run in study.runs:
        clusters = Clusters([record["problem"] for record in run.records])
        proposals = [record["proposals"] for record in run.records]
        if not any(proposals):
            continue
        counts = {name: [record[name] for record in run.records] for name in ("accepted", "moved", "abandoned")}
        counts["identical"] = [record["accepted"] - record["moved"] for record in run.records]
        skipped = sum(record["tokens_skipped"] for record in run.records)
        proposed = skipped + sum(record["tokens_drawn"] for record in run.records)
        drawn = [record["log_p"] for record in run.records if record["verdict"] not in UNDRAWN]  # it is 0 in the others
        diagnosed.append({
            "run": run.shown, "samples": len(run.records), "proposals": sum(proposals),
            **{key: end for name, own in counts.items() for key, end in clusters.ratio(own, proposals).columns(name).items()},
            "skipped": skipped / proposed if proposed else None, "mean_log_p": sum(drawn) / len(drawn) if drawn else None,
            "law_error": max(record["law_error"] for record in run.records)})
    if diagnosed:
        tables.append(parts.ReportTable("chains", "Proposals", {
            "run": "run", "samples": ("samples", "count"), "proposals": ("proposals", "count"),
            **{name: (name, "share") for name in became}, "tokens skipped": ("skipped", "share"),
            "mean log p": ("mean_log_p", ".2f"), "law error": ("law_error", ".2g")}, diagnosed))
        text += _PROPOSALS
    curves, ties = dict[str, list[dict]](), list[str]()
    for run in study.runs:
        if run.num_chains > 1:
            passed, voted = chains.pass_curve(run.records), chains.vote_curve(run.records) if votes(run) else ()
            none = IntervalEstimate().columns("majority_at_k")
            at_k = [IntervalEstimate.of(row, "accuracy").columns("majority_at_k") for row in voted] or [none] * len(passed)
            curves[run.shown] = [{"run": run.shown, **row, **vote} for row, vote in zip(passed, at_k, strict=True)]
            if voted:
                ballots = chains.majority(run.full)
                ties.append(f"{sum(vote['tied'] for vote in ballots):,} of {len(ballots):,} problems of {run.shown}")
    if curves:
        rows = [row for own in curves.values() for row in own]
        tables.append(parts.ReportTable("votes", "Several chains per problem", {
            "run": "run", "k": _CURVE["k"], "pass@k": ("pass_at_k", "share"), "majority@k": ("majority_at_k", "share"),
            **_CURVE}, rows))
        first = dict(list(curves.items())[:_MOST_DRAWN])
        of = f"; the first {_MOST_DRAWN} runs" if len(curves) > _MOST_DRAWN else ""
        title = f"pass@k, and accuracy of a majority vote over k chains{of}."
        drawings.append(parts.Drawing(f"fig_{study.dataset}_chains", title, partial(_figure, first)))
        text += "\n\n" + _PASSES + (_VOTES.format(ties=parts.listed(ties)) if ties else "")
    return parts.Section("chains", "Chain diagnostics", parts.paragraphs(text), tables, drawings) if tables else None


def _figure(curves: dict[str, list[dict]]) -> "figure.Figure":
    names = 1 if max(map(len, curves)) > 40 else 2  # in a line of the legend
    drawn, panels = figure.panels((8.6, 3.4 + 0.17 * -(-len(curves) // names)), 1, 2, sharey=True)
    for axes, key, title in zip(panels, ("pass_at_k", "majority_at_k"), ("pass@k", "majority@k"), strict=True):
        _over_chains(axes, {f"{label} (n = {rows[0]['n']:,})": rows for label, rows in curves.items()}, key, 0.02)
        axes.set_title(title)
    panels[0].set_ylabel("%, with 95 % intervals")
    figure.legend_below(drawn, names)
    return drawn


def _over_chains(axes: "figure.Axes", curves: Mapping[str, list[dict]], key: str, step: float,
                 names: Sequence[str] = ()) -> None:
    """A line for each curve over the number of chains, moved aside by `step`. `names` are all lines of the figure."""
    names = names or list(curves)
    for name, rows in curves.items():
        if rows[0][key] is None:
            continue
        shift = 1.0 + step * ((index := names.index(name)) - (len(names) - 1) / 2)
        axes.errorbar([row["k"] * shift for row in rows], [100.0 * row[key] for row in rows],
                      figure.bars_of(rows, key, 100.0), color=figure.PALETTE[index % len(figure.PALETTE)],
                      marker=figure.MARKERS[index % len(figure.MARKERS)], markersize=5, capsize=2, label=name)
    ticks = sorted({row["k"] for rows in curves.values() for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("chains per problem, k")


_MAJORITY = "majority vote"
_TEXT = """
Each rule combines the same recorded chains into one answer per problem. The power vote weighs a chain by exp(alpha log p - log
q), so that an answer's summed weight estimates its probability under p^alpha. The adaptive vote draws chains until the leading
answer is likely enough. A chain without an answer has no weight, and a tie counts as the expected value of a uniform draw
among the winners. Differences, intervals and p are those of the paired table, against the majority vote of the same run; p
(Holm) is adjusted for the rows of the table.

Effective chains are (sum of weights)^2 / (sum of squared weights), averaged over problems. If one chain has more than half of
the weight on most problems, the vote is little more than the answer of that chain.
"""
_WITHOUT = """
Importance weights need independent draws with a known log q and without truncation. These runs have none, and therefore no
power vote: {runs}.
"""


def rules_section(study: Study) -> parts.Section | None:
    """One row per run and rule, and the accuracy over the number of chains. None without several chains of answers."""
    rows, curves = list[dict[str, Any]](), dict[str, dict[str, list[dict]]]()
    voting = [run for run in study.runs if votes(run)]
    for run in voting:
        base = outcomes(chains.aggregated(run.full))
        curves[run.shown] = {_MAJORITY: chains.vote_curve(run.records)}
        rows.append({"run": run.shown, "rule": _MAJORITY, "k": run.num_chains, "problems": len(base.problems),
                     **accuracy_of(base).columns("accuracy"), "effective": None, "dominated": None,
                     **IntervalEstimate().columns("difference"), "p_value": None, "p_holm": None, "verdict": "-"})
        for rule in weighted_rules(run, study.alphas):
            combined = chains.aggregated(run.full, rule)
            own = outcomes(combined)
            means = {name: sum(row[name] for row in combined) / len(combined)  # type: ignore[literal-required]
                     for name in ("effective", "dominated")}
            rows.append({"run": run.shown, "rule": rule.shown, "k": run.num_chains, "problems": len(own.problems),
                         **accuracy_of(own).columns("accuracy"), **means, **parts.differences(compare(own, base))})
            curves[run.shown][rule.shown] = chains.vote_curve(run.records, rule)
    if not rows:
        return None
    parts.adjusted(rows)
    without = [run.shown for run in voting if not any(rule.needs_log_q for rule in weighted_rules(run))]
    text = _TEXT + ("\n\n" + _WITHOUT.format(runs=parts.listed(without)) if without else "")
    of = f"; the first {_MOST_PANELS} runs" if len(curves) > _MOST_PANELS else ""
    columns = {"run": "run", "rule": "rule", "chains": ("k", "count"), "accuracy": ("accuracy", "share"),
               "difference to majority (points)": ("difference", "points"), "p (Holm)": ("p_holm", "p"), "verdict": "verdict",
               "effective chains": ("effective", ".1f"),
               "problems with most weight on one chain": ("dominated", "share"), "problems": ("problems", "count")}
    data = [{"run": run, "rule": rule, **row} for run, rules in curves.items() for rule, own in rules.items() for row in own]
    over = {"run": "run", "rule": "rule", "k": _CURVE["k"], "accuracy": ("accuracy", "share"), **_CURVE}
    return parts.Section("rules", "Rules of votes", parts.paragraphs(text),
                         [parts.ReportTable("vote_rules", "Rules of votes", columns, rows),
                          parts.ReportTable("vote_curves", "Accuracy over the number of chains", over, data)],
                         [parts.Drawing(f"fig_{study.dataset}_vote_rules",
                                        f"Accuracy of each rule over the number of chains{of}.",
                                        partial(_rules_figure, dict(list(curves.items())[:_MOST_PANELS])))])


def _rules_figure(curves: dict[str, dict[str, list[dict]]]) -> "figure.Figure":
    """One panel per run, one line per rule."""
    names = list(dict.fromkeys(rule for rules in curves.values() for rule in rules))
    drawn, panels = figure.panels((1.4 + 3.9 * len(curves), 3.8), 1, len(curves), sharey=True)
    for axes, (run, rules) in zip(panels, curves.items(), strict=True):
        _over_chains(axes, rules, "accuracy", 0.03, names)
        axes.set_title(fill(run, 44))
    panels[0].set_ylabel("correct answers, %, with 95 % intervals")
    figure.legend_below(drawn, 2)
    return drawn


_COSTS: dict[estimates.CostField, str] = {"token_forwards": "token-forwards", "share_seconds": "device seconds"}
_MATCHED_TEXT = """
A sampler that costs as much as k independent draws should beat their vote: the majority vote, and the weighted votes that
`aggregate` names in the run of these draws. Each run is compared with votes over k chains of a run of sampler=temperature. k
is the largest number of chains that cost at most as much as one sample of the compared run; they read their prompt once. It is
at least 1 and at most the recorded number of chains. One table matches token-forwards, the other device seconds. If the vote
costs much less than the run, a fair vote would need more chains than are recorded. The accuracy of a vote of k is the mean
over all ways to choose k of a problem's chains, or over 1,000 of them for weighted votes with more ways. Differences,
intervals and p are those of the paired table; p (Holm) is adjusted for the rows of each table.
"""


def matched_section(study: Study) -> parts.Section | None:
    """A table for each cost. None unless one run has several independent draws per problem and another run can be compared."""
    drawn = [run for run in study.runs if run.component("sampler") == "temperature" and votes(run)]
    others = [run for run in study.runs if run.component("sampler") not in ("temperature", "greedy")]
    if not drawn or not others:
        return None
    ways: list[tuple[reading.Run, str, Callable[[int], list[Combined]]]] = [  # votes over k chains, computed once for each k
        (run, rule.shown if rule else _MAJORITY, cache(partial(chains.aggregated, run.full, rule or "majority")))
        for run in drawn for rule in (None, *rules_asked_for(run))]
    tables = []
    for cost, name in _COSTS.items():
        rows = list[dict[str, Any]]()
        for run in others:
            spent = cost_of(run.records, cost)
            for voting, shown, votes_of in ways:
                vote = votes_of(k := chains.affordable(voting.full, spent, cost))
                own, other, left_out = aligned(study.entry(run).outcomes, outcomes(vote))
                if own.problems:
                    rows.append({"run": run.shown, "cost": spent, **accuracy_of(own).columns("accuracy"),
                                 "votes_of": voting.label, "vote": shown, "k": k, "vote_cost": cost_of(vote, cost),
                                 **accuracy_of(other).columns("vote_accuracy"), "problems": len(own.problems),
                                 "left_out": left_out, **parts.differences(compare(own, other))})
        columns = {"run": "run", name: ("cost", "cost"), "accuracy": ("accuracy", "share"), "votes of": "votes_of",
                   "vote": "vote", "k": ("k", "count"), f"{name} of the vote": ("vote_cost", "cost"),
                   "accuracy of the vote": ("vote_accuracy", "share"), "problems": ("problems", "count"),
                   "difference (points)": ("difference", "points"), "p (Holm)": ("p_holm", "p"), "verdict": "verdict"}
        tables.append(parts.ReportTable(f"matched_{cost}", f"At equal {name}", columns, parts.adjusted(rows)))
    return parts.Section("matched", "Compared with votes of equal cost", parts.paragraphs(_MATCHED_TEXT), tables)


_NUMBERS = {"log p": "log_p", "tokens": "num_tokens"}
_AGREEMENT_TEXT = """
The samplers of these runs have the law p^alpha in the limit of many steps. If two runs have reached it, a sample of one run is
exchangeable with a sample of the other run for the same problem. Each row tests this for the mean of a number by a permutation
test within problems. p (Holm) is adjusted for all rows. A small p (Holm) means that at least one of the two runs has not
reached p^alpha. A large one does not prove equality: the test detects only differences of means, and with few samples only
large ones.
"""


def agreement_section(study: Study) -> parts.Section | None:
    """One row for each pair of runs with the same power and target, and each number. None without such a pair."""
    def values(run: reading.Run, field: str) -> dict[str, list[float]]:
        drawn = by_problem([record for record in run.records if record["verdict"] not in UNDRAWN])
        return {problem: [record[field] for record in chains]  # type: ignore[literal-required]
                for problem, chains in drawn.items()}

    rows = []
    for a, b in combinations(study.runs, 2):
        blend = registered("blend").get(a.component("blend"))  # a draft changes the target if it has the draft's logits
        draft = [] if blend is None or blend.cls.needs_draft else ["draft"]
        if a.power is None or a.power != b.power or not same_but(a, b, "sampler", "decoder", "condition", "seed", *draft):
            continue
        rows += [{"run": a.shown, "other": b.shown, "power": a.power, "number": name, **agreed._asdict(), "p_holm": None,
                  "verdict": "agree"}
                 for name, field in _NUMBERS.items() if (agreed := agreement(values(a, field), values(b, field)))]
    columns = {"run": "run", "other run": "other", "alpha": ("power", "g"), "number": "number",
               "problems": ("problems", "count"), "samples": ("samples_a", "count"),
               "samples of the other": ("samples_b", "count"), "difference of means": ("difference", ".3g"), **parts.P_VALUES,
               "verdict": "verdict"}
    parts.adjusted(rows, lambda _, p: "differ" if p <= LEVEL else "agree")
    return parts.Section("agreement", "Samplers of one law", parts.paragraphs(_AGREEMENT_TEXT), [
        parts.ReportTable("agreement", "Samplers of one law", columns, rows)]) if rows else None


_LIMIT = 1.1
_MOST_LAGS = 20
_SHOWN = "last half"
_MIXING_TEXT = f"""
Log p of the state after each step is what these numbers are of. R-hat compares the chains of a problem (rank-normalised,
split; Vehtari et al. 2021); chains that are all stuck at one value have none. *of independent draws* is the share of problems
that independent draws in equally few chains and steps put above {_LIMIT}. A stuck chain never changes its state after the
first step of the window. The effective sample size (ESS) needs {chains.LEAST_STEPS_OF_ESS} steps in the window; it is at most
the number of states that are visited, and a stuck chain adds none. The windows are all steps, the last half of them, and the
steps of the last stage, in which alone the target is always the same. Accepted and moved are shares of the steps in the
window. Intervals come from a bootstrap over problems.
"""


def mixing_section(study: Study) -> parts.Section | None:
    """Tables of convergence and autocorrelation, and the figure of the latter. None without traces of steps."""
    rows, lags = list[dict[str, Any]](), list[dict[str, Any]]()
    for run in study.runs:
        traces: dict[str, list[chains.StepChain]] = {}
        for record in run.records:
            if chain := chains.chain_of(record):
                traces.setdefault(chain.problem, []).append(chain)
        of = by_problem(run.records) if traces else {}
        spent = {problem: estimates.forwards_together(own) for problem, own in of.items()}
        for name in chains.WINDOWS if traces else ():
            steps = {problem: chains.window(own, name) for problem, own in traces.items()}
            windows, every = list(steps.values()), Clusters(list(steps))
            sizes = [window.log_p.size for window in windows]
            num_chains, lengths = zip(*(window.log_p.shape for window in windows), strict=True)
            rhats = {problem: value for problem, window in steps.items() if (value := chains.rhat(window)) is not None}
            expected = [np.mean(chains.independent_rhats(*steps[problem].log_p.shape) > _LIMIT) for problem in rhats]
            effective = {problem: value for problem, window in steps.items() if (value := chains.ess(window)) is not None}
            long = Clusters(list(effective))
            rows.append({"run": run.shown, "window": name,
                         **{"problems": len(windows), "chains": min(num_chains), "steps": min(lengths),
                            **every.ratio([window.accepted.sum() for window in windows], sizes).columns("accepted"),
                            **every.ratio([window.moved.sum() for window in windows], sizes).columns("moved"),
                            **every.ratio([window.stuck.sum() for window in windows], num_chains).columns("stuck"),
                            "rhat_problems": len(rhats), "rhat": float(np.median(list(rhats.values()))) if rhats else None,
                            **Clusters(list(rhats)).mean([value > _LIMIT for value in rhats.values()]).columns("above"),
                            "independent": float(np.mean(expected)) if expected else None, "ess_problems": len(effective),
                            **long.ratio(list(effective.values()),
                                         [steps[problem].log_p.size for problem in effective]).columns("ess"),
                            **long.ratio([1000.0 * value for value in effective.values()],
                                         [spent[problem] for problem in effective]).columns("ess_per_1000")}})
            moving = [(problem, chains.autocorrelation(row)) for problem, window in steps.items()
                      if window.log_p.shape[1] >= chains.LEAST_STEPS for row in window.log_p[~window.stuck]]
            for lag in range(1, 1 + _MOST_LAGS):
                if pairs := [(problem, curve) for problem, curve in moving if lag < len(curve)]:
                          mean = Clusters([problem for problem, _ in pairs]).mean([curve[lag] for _, curve in pairs])
                          independent = np.mean([chains.independent_autocorrelation(len(curve), lag) for _, curve in pairs])
                          lags.append({"run": run.shown, "window": name, "lag": lag, "chains": len(pairs),
                                       **mean.columns("autocorrelation"), "independent": float(independent)})
    if not rows:
        return None
    tables, drawings = [parts.ReportTable("mixing", "Convergence of parallel chains", {
        "run": "run", "window": "window", "problems": ("problems", "count"), "chains": ("chains", "count"),
        "steps": ("steps", "count"), "accepted": ("accepted", "share"), "moved": ("moved", "share"),
        "stuck chains": ("stuck", "share"), "median R-hat": ("rhat", ".3f"), f"R-hat above {_LIMIT}": ("above", "share"),
        "of independent draws": ("independent", "share"), "ESS a step": ("ess", "share"),
        "ESS for 1,000 token-forwards": ("ess_per_1000", ".2f")}, rows)], list[parts.Drawing]()
    if shown := [row for row in lags if row["window"] == _SHOWN]:
        tables.append(parts.ReportTable("autocorrelation", f"Autocorrelation of log p, {_SHOWN} of the steps", {
            "run": "run", "lag": ("lag", "count"), "moving chains": ("chains", "count"),
            "autocorrelation": ("autocorrelation", ".2f"), "of independent draws": ("independent", ".2f")},
            [row for row in shown if row["lag"] in (1, 2, 4, 8, 16)], lags))
        title = "Autocorrelation of log p over steps, and of independent draws in chains of the same length (dotted)."
        drawings.append(parts.Drawing(f"fig_{study.dataset}_autocorrelation", title, partial(_lags_figure, shown)))
    return parts.Section("mixing", "Mixing", parts.paragraphs(_MIXING_TEXT), tables, drawings)


def _lags_figure(rows: Sequence[dict[str, Any]]) -> "figure.Figure":
    """One line per run; the runs that mix slowest, by the autocorrelation of neighbours, have a colour and a name."""
    neighbours = {row["run"]: row["autocorrelation"] for row in rows if row["lag"] == 1}
    looks = dict(zip(sorted(neighbours, key=lambda run: -neighbours[run]), figure.LOOKS, strict=False))
    drawn, (axes,) = figure.panels((7.2, 3.8 + 0.2 * len(looks)))
    for run in sorted(neighbours, key=lambda run: run in looks):  # named lines are above the others
        own = [row for row in rows if row["run"] == run]
        lags, (colour, marker) = [row["lag"] for row in own], looks.get(run, (figure.OTHER, "."))
        axes.plot(lags, [row["autocorrelation"] for row in own], color=colour, marker=marker, markersize=4,
                  label=run if run in looks else "other runs, which mix faster")
        axes.plot(lags, [row["independent"] for row in own], color=colour, linestyle=":")
    axes.axhline(0.0, color="0.8", linewidth=0.8)
    axes.set_xticks(range(1, 1 + max(row["lag"] for row in rows), 2))
    axes.set_xlabel("steps apart")
    axes.set_ylabel("autocorrelation of log p")
    figure.legend_below(drawn, 1 if max(map(len, looks)) > 30 else 2)
    return drawn
