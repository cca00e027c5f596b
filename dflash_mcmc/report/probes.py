"""A report of probe runs: the tables of each probe, with published rows beside the rows of the runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dflash_mcmc.config.labels import labels_of
from dflash_mcmc.errors import UserError
from dflash_mcmc.report.page import Heading
from dflash_mcmc.report.parts import Section, paragraphs
from dflash_mcmc.report.probed import table_of
from dflash_mcmc.report.published import RUN, beside, source_of
from dflash_mcmc.report.reading import RUN as RUN_FILE
from dflash_mcmc.report.reading import Found
from dflash_mcmc.report.table import configuration_of
from dflash_mcmc.store.described import json_object

_TEXT = """
Figures are in the folders of the runs: {folders}. Intervals are 95 %, from a bootstrap over problems.
"""
_PUBLISHED = """
Rows whose first cell begins with "published" are quoted without change from {source}. They are shown beside the rows of the
same kind, and are not used in any statistic.
"""


class ProbeRun(NamedTuple):
    """A finished run of a probe."""

    folder: Path
    identity: dict
    summary: dict


def are_probes(found: Sequence[Found]) -> bool:
    """Whether all of the run folders are runs of probes. A folder whose run.json cannot be read does not count as one."""
    return all("probe" in (_json(entry.folder / RUN_FILE).get("identity") or {}) for entry in found)


def _is_of_a_probe(summary: dict) -> bool:
    """Whether a summary has the tables of a probe, each a list of rows."""
    tables, names = summary.get("tables"), (summary.get("probe"), summary.get("condition"))
    return isinstance(tables, dict) and all(isinstance(name, str) for name in names) and all(
        isinstance(rows, list) and all(isinstance(row, dict) for row in rows) for rows in tables.values())


def report_of(found: Sequence[Found]) -> tuple[Heading, list[Section]]:
    """The heading and a section per probe. Raises UserError if no run is finished."""
    runs, warnings = [], []
    for entry in found:
        summary = _json(entry.folder / "summary.json")
        if _is_of_a_probe(summary):
            runs.append(ProbeRun(entry.folder, _json(entry.folder / RUN_FILE)["identity"], summary))
        else:
            warnings.append(f"left out: {entry.folder}: not a finished run of a probe")
    if not runs:
        raise UserError("; ".join(warnings))
    of_probe: dict[str, list[ProbeRun]] = {}
    for run in runs:
        of_probe.setdefault(run.summary["probe"], []).append(run)
    experiments = ", ".join(dict.fromkeys(run.folder.parent.name for run in runs))
    heading = Heading(f"{experiments}: {len(runs)} run{'s' * (len(runs) > 1)} of probes",
                      f"Probes: {', '.join(of_probe)}.", warnings)
    return heading, [_section(probe, of) for probe, of in of_probe.items()]


def _section(probe: str, runs: list[ProbeRun]) -> Section:
    labels = labels_of([run.summary["condition"] for run in runs], [run.identity for run in runs],
                       [configuration_of(run.folder) for run in runs])
    identities = {label: run.identity for label, run in zip(labels, runs, strict=True)}
    tables = []
    for name in dict.fromkeys(name for run in runs for name in run.summary["tables"]):
        rows = [{RUN: label, **row} for label, run in zip(labels, runs, strict=True)
                for row in run.summary["tables"].get(name, [])]
        if rows:
            tables.append(table_of(f"{probe}_{name}", name.replace("_", " "), beside(probe, identities, name, rows)))
    text = paragraphs(_TEXT.format(folders=", ".join(run.folder.name for run in runs)))
    source = source_of(probe)
    return Section(probe, f"probe={probe}", text + (paragraphs(_PUBLISHED.format(source=source)) if source else []), tables)


def _json(path: Path) -> dict:
    try:
        return json_object(path)
    except UserError:
        return {}
