"""Accuracy, cost and measures of every run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from dflash_mcmc.config.identity import varying
from dflash_mcmc.grading.verdicts import VERDICTS
from dflash_mcmc.report import figure, parts
from dflash_mcmc.report.figure import OTHER, plain_ticks
from dflash_mcmc.report.study import Entry, Study, cost_of
from dflash_mcmc.report.table import HEADERS, row_of
from dflash_mcmc.statistics import summaries
from dflash_mcmc.statistics.intervals import Clusters, cautions
from dflash_mcmc.statistics.summaries import TIMES, times
from dflash_mcmc.store import finishes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dflash_mcmc.statistics.outcomes import CostField

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
adaptive vote the sum over the chains until it stops. Answers
count as the same vote if their normalised strings are equal; the gold answer has no influence. Independent draws have a row
for each number of chains that costs as much as another run, as a baseline of equal compute. The weighted votes that a run's
`aggregate` names have rows too; the section on rules of votes explains them and compares all of them.
"""


def section(study: Study) -> parts.Section:
    """One row per run, and one per way to combine its chains if it has several."""
    rows = [{"run": entry.shown, **summary_of(entry)} for entry in study.entries]
    columns = [parts.named("condition", "run"), *_columns()]
    if any(row["accepted_length"] is not None for row in rows):
        columns.append(parts.numbered("accepted length", "accepted_length", ".2f"))
    text = parts.paragraphs(_TEXT) + (parts.paragraphs(_VOTES) if any(entry.voted for entry in study.entries) else [])
    verdicts = [{"run": entry.shown, **summary_of(entry)} for entry in study.entries if not entry.voted]
    runs = [entry for entry in study.drawn if not entry.voted]  # a vote has no end of its own
    ends: list[dict[str, Any]] = [{"run": entry.shown, **finishes.counts(entry.records)} for entry in runs]
    cut = f"finish_reason/{finishes.LENGTH}"
    remarks = [f"{entry.shown}: {remark}" for entry, row in sorted(zip(runs, ends, strict=True), key=lambda of: -of[1][cut])
               if (remark := finishes.remark(row, entry.run.identity.get("dataset.max_new_tokens")))]
    more = f" (of {len(remarks)} such runs, those with the most; the table of ends has all)" if len(remarks) > 3 else ""
    text += [f"{'; '.join(remarks[:3])}{more}."] if remarks else []
    text += cautions(len(entry.outcomes.problems) for entry in study.entries if not entry.outcomes.single)
    return parts.Section("overall", "Overall", text, [parts.ReportTable("overall", "All runs", columns, rows),
                                                parts.ReportTable("verdicts", "Verdicts", _verdict_columns(), verdicts),
                                                parts.ReportTable("ends", "Why answers ended", _end_columns(), ends)],
                   [parts.Drawing(f"fig_{study.dataset}_accuracy",
                            "Accuracy of every run with its 95 % interval. Diamond: the highest.", lambda: _figure(study))])


def summary_of(entry: Entry) -> dict:
    """`summaries.summarise` of an entry; for a vote the number of correct answers is its expected value."""
    if not entry.voted:
        return {**summaries.summarise(entry.run.condition, entry.records), "complete": entry.run.complete}
    summary = summaries.summarise(entry.run.condition, entry.records)
    return {**summary, "correct": float(entry.outcomes.correct.sum()), "complete": entry.run.complete}


def _columns() -> list[parts.ReportColumn]:
    """The columns of `report/table.py`, so that the page and the terminal agree."""
    def cell(index: int) -> parts.ReportColumn:
        return parts.ReportColumn(HEADERS[index], lambda row: row_of("", row)[index])
    return [cell(index) for index in range(1, len(HEADERS))]


def _verdict_columns() -> list[parts.ReportColumn]:
    """The count of every verdict, and the accuracy by string match."""
    return [parts.named("run", "run"), *(parts.counted(verdict.replace("_", " "), verdict) for verdict in VERDICTS),
            parts.ReportColumn("accuracy", lambda row: parts.percent(row["accuracy"])),
            parts.ReportColumn("string match",
                               lambda row: parts.percent(row["same_string"] and row["same_string"] / row["num_samples"]))]


def _end_columns() -> list[parts.ReportColumn]:
    """The count of every reason why a sequence ended."""
    names = {finishes.STOP_ID: "stop id", finishes.STOP_STRING: "stop string", finishes.LENGTH: "cut off"}
    return [parts.named("run", "run"), *(parts.counted(names.get(reason, reason.replace("_", " ")), f"finish_reason/{reason}")
                                   for reason in finishes.REASONS)]


def _figure(study: Study) -> Figure:
    from matplotlib.figure import Figure

    labels, estimates = [entry.shown for entry in study.drawn], [entry.accuracy for entry in study.drawn]
    same = set(study.baseline.problems)  # runs over other, maybe easier, problems are not ranked
    ranked = [entry.run.complete and set(entry.outcomes.problems) == same for entry in study.drawn]
    best = max((entry.accuracy.known for entry, counts in zip(study.drawn, ranked, strict=True) if counts), default=None)
    texts = [f"{parts.percent(estimate.value)}   {parts.count(estimate.known * estimate.n)} of {estimate.n:,}"
             for estimate in estimates]
    drawn = Figure(figsize=figure.rows_size(labels), layout="constrained")
    axes = drawn.subplots()
    figure.draw_estimates(axes, labels, estimates, texts,
                          [counts and entry.accuracy.value == best
                           for entry, counts in zip(study.drawn, ranked, strict=True)])
    axes.axvline(100.0 * study.entry(study.baseline).accuracy.known, color=figure.INK, linewidth=0.8, linestyle=":", zorder=1)
    axes.set_title(f"Accuracy on {study.dataset}")
    axes.set_xlabel(f"correct answers, %, with 95 % intervals; dotted: {study.baseline.label}")
    return drawn


_MOST_NAMED = 10
"""The most methods that have a colour and a name in the figure of cost."""
_COSTS: dict[CostField, str] = {"token_forwards": "token-forwards per answer", "share_seconds": "device seconds per answer"}
_COST_TEXT = """
Token-forwards are the positions that the target evaluates for an answer: prompt, recomputed prefixes and drawn tokens. Device
seconds are the answer's share of the engine's time in its batch. Prefill and draw are their two parts: reading prompts and
prefixes, and everything else. The grader works beside the engine; its seconds are no part of the device seconds. Seconds to
the answer are the time from its start to its end, while other answers run in the same batch. A vote costs what the engine
evaluated for its chains together, which read their prompt once. Its seconds to the answer are those of its slowest chain, and
an adaptive vote adds those of its chains. A dash means that the seconds were not measured: engine=vllm measures no prefill,
and a vote has no parts of its own.

A finished run is on the Pareto front if no other run is at least as accurate at a lower cost, or more accurate at the same
cost. The front uses the measured accuracies; neighbouring points may differ by chance. It includes only runs over the same
problems, because accuracies over different problems are not comparable: of several such groups, that with the most answers.
"""


def cost_section(study: Study) -> parts.Section:
    """One row per run and per vote."""
    rows = [_row(entry) for entry in study.entries]
    problems = Counter(frozenset(entry.outcomes.problems) for entry in study.entries if entry.run.complete and not entry.voted)
    largest = max(problems, key=lambda ids: problems[ids] * len(ids), default=frozenset())
    for row, entry in zip(rows, study.entries, strict=True):
        row["comparable"] = entry.run.complete and frozenset(entry.outcomes.problems) == largest
    for cost in _COSTS:
        for row in rows:
            row[f"front_{cost}"] = _on_front(row, rows, cost)
    return parts.Section("cost", "Accuracy against cost", parts.paragraphs(_COST_TEXT),
                   [parts.ReportTable("cost", "Cost of an answer", _cost_columns(), rows)],
                   [parts.Drawing("fig_pareto", "Accuracy against the cost of an answer, with the Pareto front.",
                            lambda: _cost_figure(study, rows))])


def _row(entry: Entry) -> dict:
    names: tuple[CostField, ...] = (*_COSTS, "seconds")
    costs = {name: cost_of(entry.records, name) for name in names}
    split = {} if entry.voted else times(entry.run.records)  # a vote has no times of its own
    seconds = {f"{part}_seconds": split.get(f"mean_{part}_seconds") for part in TIMES}
    return {"run": entry.shown, **parts.accurate(entry.accuracy), **costs, **seconds, "complete": entry.run.complete}


def _on_front(row: dict, rows: Sequence[dict], cost: str) -> bool:
    """Whether a row is comparable and no other comparable row is better. `section` sets `comparable` in each row."""
    return row["comparable"] and not any(
        other["comparable"] and other[cost] <= row[cost] and other["accuracy"] >= row["accuracy"]
        and (other[cost] < row[cost] or other["accuracy"] > row["accuracy"]) for other in rows)


def _cost_columns() -> list[parts.ReportColumn]:
    def front(header: str, cost: str) -> parts.ReportColumn:
        return parts.ReportColumn(header, lambda row: "yes" if row[f"front_{cost}"] else "-" if row["comparable"] else
                            "other problems" if row["complete"] else "not complete", number=False)

    return [parts.named("run", "run"), parts.shared("accuracy", "accuracy"),
            parts.numbered("token-forwards", "token_forwards", ",.0f"),
            parts.numbered("device seconds", "share_seconds"), parts.numbered("of them prefill", "prefill_seconds"),
            parts.numbered("of them draw", "draw_seconds"), parts.numbered("grade seconds", "grade_seconds"),
            parts.numbered("seconds to the answer", "seconds"),
            front("on front by token-forwards", "token_forwards"), front("on front by device seconds", "share_seconds")]


def _method(entry: Entry, varying: Collection[str]) -> str:
    """The name of an entry's method: its run's label without the numbers that are a budget, and how chains are combined."""
    budgets = {key.partition(".")[2] for key in varying if key.startswith("sampler.num_")}
    words = [word for word in entry.run.label.split(" ") if word.partition("=")[0] not in budgets]
    ways = {"sample": "", "majority": ", majority vote", "log_p": ", best by log p", "drawn": ", weighed by p^alpha"}
    return " ".join(words) + ways.get(entry.by, f", {entry.by} vote")


def _cost_figure(study: Study, rows: list[dict]) -> Figure:
    """Accuracy over each cost: a line for each method over its budgets, with its name at the end of the line."""
    from matplotlib.figure import Figure

    varies = varying([run.identity for run in study.runs])
    methods: dict[str, list[dict]] = {}
    for entry, row in zip(study.entries, rows, strict=True):
        methods.setdefault(_method(entry, varies), []).append(row)
    best = {name: max([row["accuracy"] for row in own if row["comparable"]], default=-1.0) for name, own in methods.items()}
    named = sorted(sorted(best, key=lambda name: -best[name])[:_MOST_NAMED], key=list(methods).index)
    looks = dict(zip(named, figure.LOOKS, strict=False))
    drawn = Figure(figsize=(10.4, 4.6), layout="constrained")
    panels = drawn.subplots(1, 2, sharey=True)
    for axes, (cost, words) in zip(panels, _COSTS.items(), strict=True):
        axes.set_xscale("log")
        front = sorted((row[cost], 100.0 * row["accuracy"]) for row in rows if row[f"front_{cost}"])
        axes.step([spent for spent, _ in front], [height for _, height in front], where="post", color=OTHER, linewidth=5.0,
                  alpha=0.35, zorder=1)
        for name, own in methods.items():
            _line(axes, own, cost, *looks.get(name, (OTHER, "o")))
        axes.margins(x=0.1)
        plain_ticks(axes)
        axes.set_xlabel(words)
    panels[0].set_ylabel("correct answers, %, with 95 % intervals")
    panels[0].set_title(f"Accuracy against cost on {study.dataset}")
    panels[1].set_title("grey band: Pareto front; crosses: not complete, or other problems", fontsize=8.5, fontweight="normal",
                        loc="right")
    drawn.draw_without_rendering()  # the limits of the axes are final
    ends = {name: max((row["share_seconds"], 100.0 * row["accuracy"]) for row in methods[name]) for name in named}
    figure.name_lines(drawn, panels[1], [(name, *ends[name], looks[name][0]) for name in named])
    return drawn


def _line(axes: Axes, rows: list[dict], cost: str, colour: str, marker: str) -> None:
    """A method's points in the order of their cost. Runs that cannot be compared are crosses beside the line."""
    for row in rows:
        axes.plot([row[cost]] * 2, [100.0 * row["accuracy_low"], 100.0 * row["accuracy_high"]], color=colour, linewidth=0.8,
                  alpha=0.4, zorder=2)
    styles: tuple[tuple[bool, dict[str, Any]], ...] = (
        (True, {"marker": marker, "linewidth": 1.4}), (False, {"marker": "x", "linewidth": 0.0}))
    for kept, style in styles:
        points = sorted((row[cost], 100.0 * row["accuracy"]) for row in rows if row["comparable"] is kept)
        axes.plot([spent for spent, _ in points], [height for _, height in points], color=colour, markersize=5, zorder=3,
                  **style)


_MEASURES_TEXT = """
Some samplers add numbers of their own to each record. The documentation of a sampler says what they mean. Means are over the
samples of a run, with 95 % bootstrap intervals over problems.
"""


def measures_section(study: Study) -> parts.Section | None:
    """One row per run and number. None if no sampler adds numbers."""
    rows = []
    for run in study.runs:
        for name in dict.fromkeys(name for record in run.records for name in record.get("measures", {})):
            records = [record for record in run.records if name in record.get("measures", {})]
            values = [record["measures"][name] for record in records]
            mean = Clusters([record["problem"] for record in records]).mean(values)
            rows.append({"run": run.shown, "number": name, "samples": len(values), **mean.columns("mean"),
                         "least": min(values), "greatest": max(values)})
    if not rows:
        return None
    columns = [parts.named("run", "run"), parts.named("number", "number"), parts.counted("samples", "samples"),
               parts.numbered("mean", "mean", ".4g"),
               parts.ReportColumn("95 % interval", _interval), parts.numbered("least", "least", ".4g"),
               parts.numbered("greatest", "greatest", ".4g")]
    return parts.Section("measures", "Numbers of the samplers", parts.paragraphs(_MEASURES_TEXT),
                   [parts.ReportTable("sampler_measures", "Numbers of the samplers", columns, rows)], [])


def _interval(row: dict) -> str:
    return "-" if row["mean_low"] is None else f"{row['mean_low']:.4g} - {row['mean_high']:.4g}"
