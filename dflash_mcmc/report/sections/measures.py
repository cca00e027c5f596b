"""The numbers that samplers add to their records, such as the estimate log Z of particles or the swap rates of rungs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash_mcmc.report.parts import Column, Section, Table, counted, named, paragraphs
from dflash_mcmc.statistics.intervals import Clusters

if TYPE_CHECKING:
    from dflash_mcmc.report.study import Study

_TEXT = """
Some samplers add numbers of their own to each record. The documentation of a sampler says what they mean. Means are over the
samples of a run, with 95 % bootstrap intervals over problems.
"""


def section(study: Study) -> Section | None:
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
    return Section("measures", "Numbers of the samplers", paragraphs(_TEXT),
                   [Table("sampler_measures", "Numbers of the samplers", _columns(), rows)], [])


def _columns() -> list[Column]:
    return [named("run", "run"), named("number", "number"), counted("samples", "samples"),
            Column("mean", lambda row: f"{row['mean']:.4g}"), Column("95 % interval", _interval),
            Column("least", lambda row: f"{row['least']:.4g}"), Column("greatest", lambda row: f"{row['greatest']:.4g}")]


def _interval(row: dict) -> str:
    return "-" if row["mean_low"] is None else f"{row['mean_low']:.4g} - {row['mean_high']:.4g}"
