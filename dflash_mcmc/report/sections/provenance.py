"""The origin of the numbers: each run's settings, machine and software, and whether its records are complete."""

from __future__ import annotations

import json
from collections.abc import Callable

from dflash_mcmc.grading.verdicts import NOT_DRAWN, TOO_LONG
from dflash_mcmc.report.parts import Column, Section, Table, counted, named, paragraphs
from dflash_mcmc.report.runs import Run
from dflash_mcmc.report.study import Study

_TEXT = """
Expected is the number of problems times chains that the last start of the run asked for. Everything on this page is computed
from the records. To complete an interrupted run, repeat its command.
"""


def section(study: Study) -> Section:
    """Four tables: the runs, the settings in which they differ, the settings that they share, and the package versions."""
    identities = {run.label: run.identity for run in study.runs}
    keys = list(dict.fromkeys(key for identity in identities.values() for key in identity))
    varying = [key for key in keys if len({json.dumps(identity.get(key)) for identity in identities.values()}) > 1]
    tables = [Table("provenance", "Runs", _columns(), [_row(run) for run in study.runs])]
    if varying:
        rows = [{"run": label, **{key: identity.get(key) for key in varying}} for label, identity in identities.items()]
        tables.append(Table("identities", "Settings that differ", [named("run", "run"), *map(_field, varying)], rows))
    first = study.runs[0].identity
    shared = [{"field": key, "value": json.dumps(first.get(key), ensure_ascii=False)} for key in keys if key not in varying]
    tables.append(Table("shared", "Settings that all runs share", [named("field", "field"), named("value", "value")], shared))
    tables.append(_packages(study.runs))
    return Section("provenance", "Provenance", paragraphs(_TEXT), tables)


def _row(run: Run) -> dict:
    first, last = (run.sessions[0], run.sessions[-1]) if run.sessions else ({}, {})
    return {"run": run.label, "experiment": run.experiment, "identity": run.digest, "problems": len(run.problems),
            "chains": run.num_chains, "records": len(run.records), "expected": run.expected,
            "state": "complete" if run.complete else "interrupted",
            "not_drawn": sum(record["verdict"] == NOT_DRAWN for record in run.records),
            "too_long": sum(record["verdict"] == TOO_LONG for record in run.records), "starts": len(run.sessions),
            "started": first.get("started"), "commit": _joined(run, _commit),
            "host": _joined(run, lambda start: start.get("host")),
            "device": _joined(run, lambda start: start.get("device")), "python": last.get("python"), "folder": str(run.folder)}


def _commit(start: dict) -> str:
    """The first ten digits of the commit, followed by a star if the working tree had changes."""
    return (start.get("commit") or "")[:10] + "*" * bool(start.get("dirty"))


def _joined(run: Run, of: Callable[[dict], str | None]) -> str:
    """The distinct values over the starts of a run."""
    return ", ".join(dict.fromkeys(str(value) for start in run.sessions if (value := of(start))))


def _columns() -> list[Column]:
    def text(header: str, key: str) -> Column:
        return Column(header, lambda row: str(row[key] or "-"), number=False)

    started = Column("first start", lambda row: (row["started"] or "-")[:16].replace("T", " "), number=False)
    return [named("run", "run"), text("experiment", "experiment"), text("identity", "identity"),
            counted("problems", "problems"), counted("chains", "chains"), counted("records", "records"),
            counted("expected", "expected"), text("state", "state"), counted("starts", "starts"), started,
            text("commit (* modified)", "commit"), text("host", "host"), text("device", "device"), text("Python", "python")]


def _field(key: str) -> Column:
    def text(row: dict) -> str:
        value = row[key]
        return "-" if value is None else value if isinstance(value, str) else json.dumps(value)
    return Column(key, text, number=False)


def _packages(runs: list[Run]) -> Table:
    """Package versions over all starts of all runs."""
    versions: dict[str, list[str]] = {}
    for run in runs:
        for session in run.sessions:
            for name, version in (session.get("packages") or {}).items():
                if version and version not in versions.setdefault(name, []):
                    versions[name].append(version)
    rows = [{"package": name, "versions": ", ".join(found)} for name, found in versions.items()]
    return Table("packages", "Packages", [named("package", "package"), named("versions", "versions")], rows)
