"""Compares samples of runs whose samplers have the same law, p^alpha. Exact samplers must agree."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

from dflash_mcmc.grading.verdicts import UNDRAWN
from dflash_mcmc.report.parts import Column, Section, Table, counted, named, paragraphs, probability
from dflash_mcmc.report.runs import Run
from dflash_mcmc.report.study import same_but
from dflash_mcmc.statistics.agreement import agreement
from dflash_mcmc.statistics.paired import LEVEL, holm

if TYPE_CHECKING:
    from dflash_mcmc.report.study import Study

_NUMBERS = {"log p": "log_p", "tokens": "num_tokens"}
_OTHERWISE_EQUAL = ("sampler", "decoder", "draft", "condition", "seed")
"""Groups that do not change the law p^alpha of a target."""
_TEXT = """
The samplers of these runs have the law p^alpha in the limit of many steps. If two runs have reached it, a sample of one run is
exchangeable with a sample of the other run for the same problem. Each row tests this for the mean of a number by a permutation
test within problems. p (Holm) is adjusted for all rows. A small p (Holm) means that at least one of the two runs has not
reached p^alpha. A large one does not prove equality: the test detects only differences of means, and with few samples only
large ones.
"""


def section(study: Study) -> Section | None:
    """One row for each pair of runs with the same power and target, and each number. None without such a pair."""
    pairs = [(a, b) for a, b in combinations(study.runs, 2)
             if a.power is not None and a.power == b.power and same_but(a, b, *_OTHERWISE_EQUAL)]
    rows = [row for a, b in pairs for name in _NUMBERS if (row := _row(a, b, name))]
    if not rows:
        return None
    for row, adjusted in zip(rows, holm([row["p_value"] for row in rows]), strict=True):
        row["p_holm"] = adjusted
        row["verdict"] = "differ" if adjusted is not None and adjusted <= LEVEL else "agree"
    return Section("agreement", "Samplers of one law", paragraphs(_TEXT),
                   [Table("agreement", "Samplers of one law", _columns(), rows)])


def _row(a: Run, b: Run, name: str) -> dict | None:
    found = agreement(_values(a, _NUMBERS[name]), _values(b, _NUMBERS[name]))
    return found and {"run": a.shown, "other": b.shown, "power": a.power, "number": name, **found._asdict()}


def _values(run: Run, field: str) -> dict[str, list[float]]:
    values: dict[str, list[float]] = {}
    for record in run.records:
        if record["verdict"] not in UNDRAWN:
            values.setdefault(record["problem"], []).append(record[field])  # type: ignore[literal-required]
    return values


def _columns() -> list[Column]:
    return [named("run", "run"), named("other run", "other"), Column("alpha", lambda row: f"{row['power']:g}"),
            named("number", "number"), counted("problems", "problems"), counted("samples", "samples_a"),
            counted("samples of the other", "samples_b"),
            Column("difference of means", lambda row: f"{row['difference']:.3g}"),
            Column("p", lambda row: probability(row["p_value"])), Column("p (Holm)", lambda row: probability(row["p_holm"])),
            Column("verdict", lambda row: row["verdict"], number=False)]
