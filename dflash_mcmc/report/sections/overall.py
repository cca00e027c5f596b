"""Accuracy and cost of every run."""

from collections import Counter
from functools import partial
from typing import Any

from dflash_mcmc.config.identity import varying
from dflash_mcmc.grading.verdicts import VERDICTS
from dflash_mcmc.report import figure, parts
from dflash_mcmc.report.study import Study, cost_of
from dflash_mcmc.statistics.estimates import CostField, cautions
from dflash_mcmc.statistics.summaries import TIMES, summarise, times
from dflash_mcmc.store import records

_TEXT = """
Accuracy counts every sample. Intervals are 95 %: Wilson's with one chain per problem, else from a bootstrap over problems. MH
accept is the share of proposals that were accepted; moved is the share that was accepted and changed the sequence.

Every sample that is not correct counts as wrong. Methods can differ strongly in how many samples have no answer at all; a gain
in accuracy may then be a gain in formatting. Unsupported answers exceed a limit of the grader, timeouts used up its time, and
errors made it fail. String match is the accuracy by the string rule of published numbers (PRM800K's normalisation without its
algebra), for comparison only; the verdicts do not use it.
"""
_VOTES = """
A majority or best-of-N row combines the given number of chains into one answer per problem, for the problems that have all
chains. A tied vote counts as its expected value. If a vote uses fewer chains than are recorded, the row is the mean over all
ways to choose them. Its tokens and token-forwards are sums over its chains. Its time is that of the slowest chain, for an
adaptive vote the sum over the chains until it stops. Answers count as the same vote if their normalised strings are equal; the
gold answer has no influence. Independent draws have a row for each number of chains that costs as much as another run, as a
baseline of equal compute. The weighted votes that a run's `aggregate` names have rows too; the section on rules of votes
explains them and compares all of them.
"""
_ENDS = {records.STOP_ID: "stop id", records.STOP_STRING: "stop string", records.LENGTH: "cut off"}


def section(study: Study) -> parts.Section:
    """One row per run, and one per way to combine its chains if it has several."""
    rows = []
    for entry in study.entries:  # the number of correct answers of a vote is its expected value
        correct = {"correct": float(entry.outcomes.correct.sum())} if entry.voted else {}
        summary = summarise(entry.run.condition, entry.records) | correct
        rows.append({"run": entry.shown, **summary, "complete": entry.run.complete})
    drafted = any(row["accepted_length"] is not None for row in rows)
    verdicts = [row for row, entry in zip(rows, study.entries, strict=True) if not entry.voted]
    runs = [entry for entry in study.drawn if not entry.voted]  # a vote has no end of its own
    ends: list[dict[str, Any]] = [{"run": entry.shown, **records.finish_counts(entry.records)} for entry in runs]
    cut = f"finish_reason/{records.LENGTH}"
    remarks = [f"{entry.shown}: {remark}" for entry, row in sorted(zip(runs, ends, strict=True), key=lambda of: -of[1][cut])
               if (remark := records.finish_remark(row, entry.run.identity.get("dataset.max_new_tokens")))]
    more = f" (of {len(remarks)} such runs, those with the most; the table of ends has all)" if len(remarks) > 3 else ""
    text = parts.paragraphs(_TEXT + "\n\n" + (_VOTES if any(entry.voted for entry in study.entries) else ""))
    text += [f"{'; '.join(remarks[:3])}{more}."] if remarks else []
    text += cautions(len(entry.outcomes.problems) for entry in study.entries if not entry.outcomes.single)
    columns = {"condition": "run", **parts.COLUMNS, **(parts.DRAFTED if drafted else {})}
    tables = [
        parts.ReportTable("overall", "All runs", columns, rows),
        parts.ReportTable("verdicts", "Verdicts", {
            "run": "run", **{verdict.replace("_", " "): (verdict, "count") for verdict in VERDICTS},
            "accuracy": lambda row: parts.percent(row["accuracy"]),
            "string match": lambda row: parts.percent(row["same_string"] and row["same_string"] / row["num_samples"]),
        }, verdicts),
        parts.ReportTable("ends", "Why answers ended", {
            "run": "run", **{_ENDS.get(reason, reason.replace("_", " ")): (f"finish_reason/{reason}", "count")
                             for reason in records.REASONS}}, ends)]
    labels, estimates = [entry.shown for entry in study.drawn], [entry.accuracy for entry in study.drawn]
    same = set(study.baseline.problems)  # runs over other, maybe easier, problems are not ranked
    ranked = [entry.run.complete and set(entry.outcomes.problems) == same for entry in study.drawn]
    best = max((estimate.known for estimate, counts in zip(estimates, ranked, strict=True) if counts), default=None)
    panel = (f"Accuracy on {study.dataset}", f"correct answers, %, with 95 % intervals; dotted: {study.baseline.label}",
             estimates, [f"{parts.percent(of.value)}   {parts.count(of.known * of.n)} of {of.n:,}" for of in estimates])
    return parts.Section("overall", "Overall", text, tables, [parts.Drawing(
        f"fig_{study.dataset}_accuracy", "Accuracy of every run with its 95 % interval. Diamond: the highest.", partial(
            figure.estimates, labels, panel, line=(100.0 * study.entry(study.baseline).accuracy.known, ":"),
            strong=[counts and estimate.value == best for estimate, counts in zip(estimates, ranked, strict=True)]))])


_MOST_NAMED = 10
"""The most methods that have a colour and a name in the figure of cost."""
_COSTS: dict[CostField, str] = {"token_forwards": "token-forwards per answer", "share_seconds": "device seconds per answer"}
_COST_TEXT = """
Token-forwards are the positions that the target evaluates for an answer: prompt, recomputed prefixes and drawn tokens. Device
seconds are the answer's share of the engine's time in its batch. Prefill and draw are their two parts: reading prompts and
prefixes, and everything else. The grader works beside the engine; its seconds are no part of the device seconds. Seconds to
the answer are the time from its start to its end, while other answers run in the same batch. A vote costs what the engine
evaluated for its chains together, which read their prompt once. Its seconds to the answer are those of its slowest chain, and
an adaptive vote adds those of its chains. A dash means that the seconds were not measured: engine=vllm and engine=api
measure no prefill, and a vote has no parts of its own.

A finished run is on the Pareto front if no other run is at least as accurate at a lower cost, or more accurate at the same
cost. The front uses the measured accuracies; neighbouring points may differ by chance. It includes only runs over the same
problems, because accuracies over different problems are not comparable: of several such groups, that with the most answers.
"""


def cost_section(study: Study) -> parts.Section:
    """One row per run and per vote."""
    problems = Counter(frozenset(entry.outcomes.problems) for entry in study.entries if entry.run.complete and not entry.voted)
    largest = max(problems, key=lambda ids: problems[ids] * len(ids), default=frozenset())
    rows: list[dict[str, Any]] = []
    for entry in study.entries:
        split = {} if entry.voted else times(entry.run.records)  # a vote has no times of its own
        costs: tuple[CostField, ...] = (*_COSTS, "seconds")
        rows.append({"run": entry.shown, **entry.accuracy.columns("accuracy"), "n": entry.accuracy.n,
                     **{cost: cost_of(entry.records, cost) for cost in costs},
                     **{f"{part}_seconds": split.get(f"mean_{part}_seconds") for part in TIMES},
                     "complete": entry.run.complete,
                     "comparable": entry.run.complete and frozenset(entry.outcomes.problems) == largest})
    others = [row for row in rows if row["comparable"]]
    for cost in _COSTS:
        for row in rows:
            beaten = any(other[cost] <= row[cost] and other["accuracy"] >= row["accuracy"]
                         and (other[cost] < row[cost] or other["accuracy"] > row["accuracy"]) for other in others)
            row[f"front_{cost}"] = (("no" if beaten else "yes") if row["comparable"] else
                                    "other problems" if row["complete"] else "not complete")
    columns = {"run": "run", "accuracy": ("accuracy", "share"), "token-forwards": ("token_forwards", ",.0f"),
               "device seconds": ("share_seconds", ".3g"), "of them prefill": ("prefill_seconds", ".3g"),
               "of them draw": ("draw_seconds", ".3g"), "grade seconds": ("grade_seconds", ".3g"),
               "seconds to the answer": ("seconds", ".3g"), "on front by token-forwards": "front_token_forwards",
               "on front by device seconds": "front_share_seconds"}
    return parts.Section("cost", "Accuracy against cost", parts.paragraphs(_COST_TEXT),
                         [parts.ReportTable("cost", "Cost of an answer", columns, rows)],
                         [parts.Drawing("fig_pareto", "Accuracy against the cost of an answer, with the Pareto front.",
                                        partial(_cost_figure, study, rows))])


def _cost_figure(study: Study, rows: list[dict]) -> "figure.Figure":
    """Accuracy over each cost: a line for each method over its budgets, with its name at the end of the line."""
    varies = varying([run.identity for run in study.runs])
    budgets = {key.partition(".")[2] for key in varies if key.startswith("sampler.num_")}
    ways = {"sample": "", "majority": ", majority vote", "log_p": ", best by log p"}
    methods: dict[str, list[dict]] = {}
    for entry, row in zip(study.entries, rows, strict=True):  # a method is a label without the numbers that are a budget
        methods.setdefault(entry.run.label_without(budgets) + ways.get(entry.by, f", {entry.by} vote"), []).append(row)
    best = {name: max([row["accuracy"] for row in own if row["comparable"]], default=-1.0) for name, own in methods.items()}
    named = sorted(sorted(best, key=lambda name: -best[name])[:_MOST_NAMED], key=list(methods).index)
    looks = dict(zip(named, figure.LOOKS, strict=False))
    drawn, panels = figure.panels((10.4, 4.6), 1, 2, sharey=True)
    for axes, (cost, title) in zip(panels, _COSTS.items(), strict=True):
        axes.set_xscale("log")
        front = sorted((row[cost], 100.0 * row["accuracy"]) for row in rows if row[f"front_{cost}"] == "yes")
        axes.step([spent for spent, _ in front], [height for _, height in front], where="post", color=figure.OTHER,
                  linewidth=5.0, alpha=0.35, zorder=1)
        for name, own in methods.items():
            colour, marker = looks.get(name, (figure.OTHER, "o"))
            for row in own:
                axes.plot([row[cost]] * 2, [100.0 * row["accuracy_low"], 100.0 * row["accuracy_high"]], color=colour,
                          linewidth=0.8, alpha=0.4, zorder=2)
            for kept, sign, width in ((True, marker, 1.4), (False, "x", 0.0)):  # crosses are no part of the line
                points = sorted((row[cost], 100.0 * row["accuracy"]) for row in own if row["comparable"] is kept)
                axes.plot([spent for spent, _ in points], [height for _, height in points], color=colour, marker=sign,
                          linewidth=width, markersize=5, zorder=3)
        axes.margins(x=0.1)
        figure.plain_ticks(axes)
        axes.set_xlabel(title)
    panels[0].set_ylabel("correct answers, %, with 95 % intervals")
    panels[0].set_title(f"Accuracy against cost on {study.dataset}")
    drawn.supxlabel("grey band: Pareto front; crosses: not complete, or other problems", fontsize=8.5)
    drawn.draw_without_rendering()  # the limits of the axes are final
    ends = {name: max((row["share_seconds"], 100.0 * row["accuracy"]) for row in methods[name]) for name in named}
    figure.name_lines(drawn, panels[1], [(name, *ends[name], looks[name][0]) for name in named])
    return drawn
