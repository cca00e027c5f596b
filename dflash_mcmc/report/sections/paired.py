"""Paired comparisons with the baseline: over all problems, problem by problem, and on parts of the problems."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np

from dflash_mcmc.report import figure, parts
from dflash_mcmc.report.study import Entry, Study
from dflash_mcmc.statistics.estimates import IntervalEstimate, Outcome, PairedOutcomes, accuracy, aligned, prompt_forwards
from dflash_mcmc.statistics.paired import Paired, VarianceParts, compare

SOUGHT = 0.03
"""The difference of accuracies that the power analysis plans for."""
_FEWEST = 10
"""The smallest number of common problems of a comparison in the figure. With fewer problems, intervals are too wide."""
_PLAN = ("detectable_difference", "problems_needed", "chains_needed", "cheaper")
_NOTHING = ("both", "only_run", "only_baseline", "neither", "difference", "difference_low", "difference_high", "p_value",
            "p_holm")
_TEXT = """
Each run is compared with {baseline} on the problems that both have. The difference is in percentage points of accuracy; each
problem counts once. Its 95 % interval is Student's over problems, adjusted for few problems (Bonett & Price 2012). p comes
from the exact McNemar test if every problem has one chain in both runs, else from a paired permutation test over problems. p
(Holm) is adjusted for all rows of the table. A run is called better or worse if p (Holm) is at most 0.05; else the difference
is not resolved.

Four columns help to plan the next experiment, for a single comparison at p = 0.05 with 80 % power: the smallest difference
that is detected with as many problems and chains as in this comparison; the number of problems with as many chains, and the
number of chains with as many problems, that detect {sought:.0f} points; and which of the two costs fewer token-forwards of the
run. More chains divide the variance within a problem and not that between problems. Where both runs have one chain, the two
cannot be told apart, and the number of chains is the smallest that can suffice. A hyphen means that no number suffices.
"""


def section(study: Study) -> parts.Section | None:
    """One row for each run and vote other than the baseline."""
    base, rows = study.entry(study.baseline), list[dict[str, Any]]()
    for entry in study.entries:
        if entry is base:
            continue
        own, other, left_out = aligned(entry.outcomes, base.outcomes)
        rows.append({"run": entry.shown, "baseline": base.shown, "problems": len(own.problems), "left_out": left_out})
        if not own.problems:
            rows[-1] |= dict.fromkeys((*_NOTHING, *_PLAN)) | {"test": "none", "verdict": "not compared: no problem in common"}
            continue
        paired = compare(own, other)
        rows[-1] |= {"both": paired.both, "only_run": paired.only_a, "only_baseline": paired.only_b, "neither": paired.neither,
                     **parts.differences(paired), "test": paired.test, **_planned(entry, own, other, SOUGHT)}
    if not rows:
        return None
    columns = {"run": "run", "problems": ("problems", "count"), "difference (points)": ("difference", "points"),
               **parts.P_VALUES, "verdict": "verdict", "both correct": ("both", "count"),
               "only run correct": ("only_run", "count"), "only baseline correct": ("only_baseline", "count"), "test": "test",
               "detectable difference (points)": lambda row: parts.points(row["detectable_difference"]).lstrip("+"),
               "problems to detect 3 points": ("problems_needed", "count"), "chains for that": ("chains_needed", "count"),
               "cheaper": "cheaper"}
    title, names = f"Difference to {study.baseline.label}", {entry.shown for entry in study.drawn}
    few = sum(row["problems"] < _FEWEST for row in parts.adjusted(rows))
    shown = [row for row in rows if row["run"] in names and row["problems"] >= _FEWEST] or rows
    rest = f"; {few} with fewer than {_FEWEST} common problems are only in the table" if 0 < few < len(rows) else ""
    panel = (title, "difference in accuracy (points), with 95 % intervals; p adjusted for all rows (Holm)",
             [IntervalEstimate.of(row, "difference") for row in shown],
             [row["verdict"] if row["difference"] is None else f"{parts.points(row['difference'])}   "
              f"{parts.p_is(row['p_holm'])}   {row['verdict']}   n {row['problems']:,}" for row in shown])
    return parts.Section("paired", "Compared with the baseline",
                         parts.paragraphs(_TEXT.format(baseline=study.baseline.label, sought=100.0 * SOUGHT)),
                         [parts.ReportTable("paired", f"Compared with {study.baseline.label}", columns, rows)],
                         [parts.Drawing(f"fig_{study.dataset}_paired", f"{title} with its 95 % interval{rest}.", partial(
                       figure.estimates, [row["run"] for row in shown], panel, line=(0.0, "-"),
                       strong=[row["verdict"] in ("better", "worse") for row in shown]))])


def verdict_of(study: Study, sections: Sequence[parts.Section]) -> list[str]:
    """The first lines of a part: the resolved differences, the largest of the others, and what would resolve it."""
    rows = [row for part in sections if part.name == "paired" for row in part.tables[0].rows if row["difference"] is not None]
    if not rows:
        return []
    partial = {entry.shown for entry in study.entries if not entry.run.complete}
    rows = sorted(rows, key=lambda row: (row["run"] in partial, -abs(row["difference"])))

    def told(row: dict) -> str:
        return f"{row['run']} {parts.number(row, 'difference', 'points')} points ({parts.p_is(row['p_holm'])})"

    resolved = [told(row) for row in rows if row["verdict"] in ("better", "worse")]
    lines = [f"Compared with {study.baseline.label}, " + (f"{len(resolved)} of {len(rows)} differences are resolved: "
             f"{parts.listed(resolved)}." if resolved else f"none of {len(rows)} differences is resolved.")]
    if others := [row for row in rows if row["verdict"] == parts.VERDICTS["tie"] and row["difference"]]:
        entry = next(entry for entry in study.entries if entry.shown == others[0]["run"])
        own, other, _ = aligned(entry.outcomes, study.entry(study.baseline).outcomes)
        plan = _planned(entry, own, other, abs(others[0]["difference"]))
        chains = f", or {plan['chains_needed']:,} chains a problem," if plan["chains_needed"] else ""
        needed = plan["problems_needed"]  # by a normal law, which the exact test does not always bear out
        lines.append(f"The largest that is not resolved is {told(others[0])} on {others[0]['problems']:,} problems" + (
            f"; about {needed:,} problems{chains} would resolve one of this size (80 % power, one "
            "comparison)." if isinstance(needed, int) and needed > others[0]["problems"] else "."))
    return lines


def _planned(entry: Entry, own: PairedOutcomes, other: PairedOutcomes, sought: float) -> dict[str, float | str | None]:
    """What these numbers of problems and chains detect, what detects `sought`, and which of the two is cheaper.

    Values are None if fewer than two problems differ, and a number that does not exist.
    """
    if len(own.problems) < 2 or not np.ptp(own.correct - other.correct):
        return dict.fromkeys(_PLAN)
    noise, num_problems = VarianceParts.of(own, other), len(own.problems)
    num_chains = int(max(own.chains.min(), other.chains.min()))
    problems, chains = noise.problems_needed(sought, num_chains), noise.chains_needed(sought, num_problems)
    prompt = float(np.mean([prompt_forwards(record) for record in entry.records]))
    draw = float(np.mean([record["token_forwards"] for record in entry.records])) - prompt
    by_problems = problems * (prompt + num_chains * draw)
    by_chains = math.inf if chains is None else num_problems * (prompt + chains * draw)
    return dict(zip(_PLAN, (noise.resolved(num_problems, num_chains), problems, chains,
                            "problems" if by_problems <= by_chains else "chains"), strict=True))


_LOOKS = ((figure.PALE, ""), (figure.RIGHT, "///"), (figure.WRONG, "..."), (figure.OTHER, ""))
"""Colours and hatches of the four bars."""


def overlap_section(study: Study) -> parts.Section | None:
    """The number of problems that both, only one or neither of the two runs of `study.pair` solve."""
    if study.pair is None:
        return None
    first, second = (study.entry(run) for run in study.pair)
    own, other, left_out = aligned(first.outcomes, second.outcomes)
    if not own.problems:
        text = [f"{first.shown} and {second.shown} have no problem in common, so they cannot be compared."]
        return parts.Section("overlap", "Answer overlap", text)
    paired, n = compare(own, other), len(own.problems)
    a, b = first.run.label, second.run.label
    rows = [{"category": name, "problems": solved, "share": solved / n, "description": text} for name, solved, text in (
        ("both correct", paired.both, f"solved by both {a} and {b}"),
        (f"{a} only", paired.only_a, f"solved by {a}, not by {b}"),
        (f"{b} only", paired.only_b, f"solved by {b}, not by {a}"), ("neither", paired.neither, "solved by neither"))]
    verdict = {"a better": f"{a} is better", "b better": f"{b} is better", "tie": "it is not resolved"}[paired.verdict]
    left = f" ({left_out:,} problems left out)" if left_out else ""
    text = [f"This section compares {first.shown} with {second.shown} on the {n:,} problems that both have{left}. "
            f"{b} solves {parts.count(paired.only_b)} problems that {a} does not; {a} solves {parts.count(paired.only_a)} "
            f"that {b} does not. The accuracy of {a} minus that of {b} is {parts.points(*paired.difference[:3])} points, "
            f"with {parts.p_is(paired.p_value)} ({paired.test}, not adjusted): {verdict}."]
    answers = [{record["problem"]: record["answer"] for record in run.records} for run in (first.run, second.run)]
    if [*map(len, answers)] == [len(first.run.records), len(second.run.records)]:
        both = [problem for problem in answers[0] if answers[0][problem] and answers[1].get(problem)]
        same = sum(answers[0][problem] == answers[1][problem] for problem in both)
        text.append(f"Their answers are the same text on {same:,} of the {len(both):,} problems that both runs answer.")
    else:
        text.append("With several chains per problem, the counts are expected values for one random chain of each run.")
    columns = {"category": "category", "problems": ("problems", "count"), "share": ("share", "share"),
               "description": "description"}
    return parts.Section("overlap", "Answer overlap", text, [parts.ReportTable("overlap", f"{a} and {b}", columns, rows)],
                         [parts.Drawing(f"fig_{study.dataset}_overlap", f"Problems solved by {a} and by {b}.",
                                        partial(_overlap_figure, rows, paired))])


def _overlap_figure(rows: list[dict], paired: Paired) -> "figure.Figure":
    drawn, (axes,) = figure.panels((7.4, 2.7))
    for bar, (row, (colour, hatch)) in enumerate(zip(rows, _LOOKS, strict=True)):
        axes.barh(bar, row["problems"], color=colour, hatch=hatch, edgecolor="white" if hatch else figure.INK, height=0.66,
                  linewidth=0.5)
        axes.annotate(f"{parts.count(row['problems'])}   {parts.percent(row['share'])}", (row["problems"], bar), (5, 0),
                      textcoords="offset points", va="center")
    axes.set_yticks(range(4), [row["category"] for row in rows])
    axes.set_ylim(3.6, -0.6)
    axes.set_xlim(0, 1.18 * max(row["problems"] for row in rows))
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"problems, n = {paired.difference.n:,}; {parts.p_is(paired.p_value)} ({paired.test})")
    axes.set_title("Who solves what")
    return drawn


_BY_GREEDY = ("easy (greedy right)", "hard (greedy wrong)")
_EASY = """
Easy problems are those that {greedy} solves. Hard problems are the others. Its own 100 % and 0 % follow from this definition.
The split depends on a single outcome of greedy decoding. It makes every other run look better on the hard part and worse on
the easy part than it is. Within a part, compare runs with each other, not with greedy decoding.
"""
_COUNTS = """
The counts after each accuracy are correct samples and all samples; n in a heading is the number of problems. The CSV files
have the intervals.
"""


def strata_section(study: Study) -> parts.Section | None:
    """A table for each split of the problems that has at least two parts."""
    text, tables, drawings = "", [], []
    if greedy := study.role("greedy", "none"):
        of = study.entry(greedy[0]).outcomes
        parted = {problem: _BY_GREEDY[int(share <= 0.5)] for problem, share in zip(of.problems, of.correct, strict=True)}
        tables.append(_strata(study, "difficulty", "By the correctness of greedy decoding", parted, _BY_GREEDY))
        caption = "Accuracy on problems that greedy decoding solves, and on those that it does not."
        drawings.append(parts.Drawing(f"fig_{study.dataset}_difficulty", caption, partial(_strata_figure, study, tables[0])))
        text += _EASY.format(greedy=greedy[0].shown)
    splits: tuple[Literal["level", "subject"], ...] = ("level", "subject")
    for key in splits:
        parted = {record["problem"]: str(record[key]) for run in study.runs for record in run.records
                  if record[key] is not None}
        strata = sorted(set(parted.values()), key=lambda name: (not name.isdigit(), int(name) if name.isdigit() else 0, name))
        if len(strata) > 1:
            tables.append(_strata(study, f"{key}s", f"By {key}", parted, strata))
    return parts.Section("strata", "By difficulty and subject", parts.paragraphs(f"{text}\n\n{_COUNTS}"), tables,
                         drawings) if tables else None


def _strata(study: Study, name: str, title: str, stratum_of: Mapping[str, str], strata: Sequence[str]) -> parts.ReportTable:
    """One row per run, one column per stratum; in the file, a row for each run and stratum that the run has records in."""
    rows, wide = list[dict[str, Any]](), list[dict[str, Any]]()
    for entry in study.entries:
        by_stratum: dict[str, list[Outcome]] = {stratum: [] for stratum in strata}
        for record in entry.records:
            if record["problem"] in stratum_of:
                by_stratum[stratum_of[record["problem"]]].append(record)
        wide.append({"run": entry.shown})
        for stratum, records in by_stratum.items():
            if records:
                share = accuracy(records)
                rows.append({"run": entry.shown, "stratum": stratum, "correct": share.known * share.n,
                             **share.columns("accuracy"), "n": share.n,
                             "problems": len({record["problem"] for record in records})})
                wide[-1][stratum] = f"{parts.percent(share.value)} ({parts.count(share.known * share.n)}/{share.n:,})"
    problems = {stratum: max((row["problems"] for row in rows if row["stratum"] == stratum), default=0) for stratum in strata}
    columns = {f"{stratum}, n = {problems[stratum]:,}": (stratum, "") for stratum in strata}
    return parts.ReportTable(name, title, {"run": "run", **columns}, [row for row in wide if len(row) > 1], rows)


def _strata_figure(study: Study, table: parts.ReportTable) -> "figure.Figure":
    labels, panels = [entry.shown for entry in study.drawn], list[figure.Panel]()
    for stratum in _BY_GREEDY:
        of = {row["run"]: row for row in table.data or () if row["stratum"] == stratum}
        panels.append((f"{stratum}, n = {max((row['problems'] for row in of.values()), default=0):,}",
                       "correct answers, %, with 95 % intervals",
                       [IntervalEstimate.of(of[label], "accuracy") if label in of else IntervalEstimate() for label in labels],
                       [f"{parts.count(of[label]['correct'])}/{of[label]['n']:,}" if label in of else "-"
                        for label in labels]))
    drawn = figure.estimates(labels, *panels)
    for axes in drawn.axes:
        axes.set_xlim(-4, 104)
    return drawn
