"""The problems that both, only one or neither of two runs solve (section 4.3 of the guided-power-sampling document)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash_mcmc.report.figure import INK, OTHER, PALE, RIGHT, WRONG
from dflash_mcmc.report.parts import Drawing, Section, Table, count, counted, named, percent, points, probability, shared
from dflash_mcmc.report.study import Study
from dflash_mcmc.statistics.outcomes import aligned
from dflash_mcmc.statistics.paired import Paired, compare

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dflash_mcmc.store.records import Record

_COLOURS = (PALE, RIGHT, WRONG, OTHER)
_HATCHES = ("", "///", "...", "")


def section(study: Study) -> Section | None:
    """The number of problems that both, only one or neither of the two runs of `study.pair` solve."""
    if study.pair is None:
        return None
    first, second = (study.entry(run) for run in study.pair)
    own, other, left_out = aligned(first.outcomes, second.outcomes)
    if not own.problems:
        return Section("overlap", "Answer overlap",
                       [f"{first.shown} and {second.shown} have no problem in common, so they cannot be compared."])
    found, n = compare(own, other), len(own.problems)
    a, b = first.run.label, second.run.label
    rows = [{"category": name, "problems": number, "share": number / n, "description": text} for name, number, text in (
        ("both correct", found.both, f"solved by both {a} and {b}"), (f"{a} only", found.only_a, f"solved by {a}, not by {b}"),
        (f"{b} only", found.only_b, f"solved by {b}, not by {a}"), ("neither", found.neither, "solved by neither"))]
    same, compared = _same_answers(first.run.records, second.run.records)
    left = f" ({left_out:,} problems left out)" if left_out else ""
    text = [f"This section compares {first.shown} with {second.shown} on the {n:,} problems that both have{left}. "
            f"{_comparison_text(found, a, b)}",
            f"Their answers are the same text on {same:,} of the {compared:,} problems that both runs answer." if compared else
            "With several chains per problem, the counts are expected values for one random chain of each run."]
    columns = [named("category", "category"), counted("problems", "problems"), shared("share", "share"),
               named("description", "description")]
    return Section("overlap", "Answer overlap", text, [Table("overlap", f"{a} and {b}", columns, rows)],
                   [Drawing(f"fig_{study.dataset}_overlap", f"Problems solved by {a} and by {b}.",
                            lambda: _figure(rows, found, n))])


def _comparison_text(found: Paired, a: str, b: str) -> str:
    outcome = {"a better": f"{a} is better", "b better": f"{b} is better", "tie": "it is a tie"}[found.verdict]
    return (f"{b} solves {count(found.only_b)} problems that {a} does not; {a} solves {count(found.only_a)} that {b} does "
            f"not. The accuracy of {a} minus that of {b} is {points(*found.difference[:3])} points, with "
            f"p = {probability(found.p_value)} ({found.test}, not adjusted): {outcome}.")


def _same_answers(first: list[Record], second: list[Record]) -> tuple[int, int]:
    """(equal, answered): the number of problems with equal answers, and the number of problems that both runs answer.

    Both are 0 if a problem has several chains.
    """
    answers = [{record["problem"]: record["answer"] for record in records} for records in (first, second)]
    if any(len(found) < len(records) for found, records in zip(answers, (first, second), strict=True)):
        return 0, 0
    both = [problem for problem in answers[0].keys() & answers[1].keys() if answers[0][problem] and answers[1][problem]]
    return sum(answers[0][problem] == answers[1][problem] for problem in both), len(both)


def _figure(rows: list[dict], found: Paired, n: int) -> Figure:
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(7.4, 2.7), layout="constrained")
    axes = drawn.subplots()
    for place, (row, colour, hatch) in enumerate(zip(rows, _COLOURS, _HATCHES, strict=True)):
        axes.barh(place, row["problems"], color=colour, hatch=hatch, edgecolor="white" if hatch else INK, height=0.66,
                  linewidth=0.5)
        axes.annotate(f"{count(row['problems'])}   {percent(row['share'])}", (row["problems"], place), (5, 0),
                      textcoords="offset points", va="center")
    axes.set_yticks(range(4), [row["category"] for row in rows])
    axes.set_ylim(3.6, -0.6)
    axes.set_xlim(0, 1.18 * max(row["problems"] for row in rows))
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"problems, n = {n:,}; p = {probability(found.p_value)} ({found.test})")
    axes.set_title("Who solves what")
    return drawn
