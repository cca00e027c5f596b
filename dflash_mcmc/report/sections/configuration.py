"""The differences of configuration between the runs and the published settings, and the parameters that a condition adds.

These are the tables of sections 5.3 and 2.4 of the guided-power-sampling document, generated from the runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dflash_mcmc.fields import restored, specs_of
from dflash_mcmc.registry import components
from dflash_mcmc.report.parts import Column, Section, Table, count, named, paragraphs
from dflash_mcmc.report.published import published_settings
from dflash_mcmc.report.runs import Run
from dflash_mcmc.report.study import Study

_TEXT = """
The table of configuration has the settings in which the runs differ from each other or from a published setting. A hyphen
means that the setting does not exist there, or that the source does not state it.

Extra parameters are those that a condition adds to the target. A blend of a layer reuses the target's head. A draft adds its
own network; the number is unknown if the draft's checkpoint is not on this machine.
"""
_LEFT_OUT = ("version", "draft.content", "model.content", "dataset.content", "dataset.prompt")
"""Fields that a reader cannot compare: hashes and long texts. The section on provenance has them."""
_BASES = {"none": "p(token)", "layer": "p blended with a layer", "draft": "p blended with the draft"}


def section(study: Study) -> Section | None:
    """The tables of differences and of added parameters; None for a single run."""
    if len(study.runs) < 2:
        return None
    columns = {run.label: _settings(run) for run in study.runs}
    if any(run.component("sampler") == "power_mh" for run in study.runs):
        columns |= {f"{name} (published)": dict(setting) for name, setting in published_settings().items()}
    return Section("configuration", "Configuration and extra parameters", paragraphs(_TEXT),
                   [_differences(columns), _extra(study.runs)])


def _settings(run: Run) -> dict[str, object]:
    """The settings of a run, with the names that published settings use too."""
    model, blocks = dict(run.config.get("model") or {}), run.identity.get("sampler.num_blocks")
    horizon = run.identity.get("dataset.max_new_tokens")
    return {"model": str(model.get("path") or run.component("model")).rstrip("/").rpartition("/")[2],
            "problems": len(run.problems), "chains": run.num_chains,
            "tokens per block": horizon // blocks if isinstance(horizon, int) and isinstance(blocks, int) else None,
            **{key: value for key, value in run.identity.items() if key not in (*_LEFT_OUT, "model")}}


def _differences(columns: Mapping[str, Mapping[str, object]]) -> Table:
    """One row per setting with several values, one column per run or source."""
    rows = []
    for key in dict.fromkeys(key for of in columns.values() for key in of):
        values = {name: of.get(key) for name, of in columns.items()}
        if len({json.dumps(value) for value in values.values() if value is not None}) > 1:
            rows.append({"setting": key, **values})

    def column(name: str) -> Column:
        return Column(name, lambda row: "-" if row[name] is None else str(row[name]), number=False)

    return Table("configuration", "Differences of configuration", [named("setting", "setting"), *map(column, columns)], rows)


def _extra(runs: list[Run]) -> Table:
    """One row per run: what it samples from, its cost per token, and the parameters that it adds."""
    rows = [{"run": run.label, "base": _BASES.get(blend := run.component("blend"), blend), "sampler": run.component("sampler"),
             "forwards_per_token": _forwards(run), "extra_parameters": extra_parameters(run)} for run in runs]
    forwards = Column("token-forwards / token",
                      lambda row: "-" if row["forwards_per_token"] is None else f"{row['forwards_per_token']:.1f}")
    parameters = Column("extra parameters",
                        lambda row: "unknown" if row["extra_parameters"] is None else count(row["extra_parameters"]))
    return Table("extra_parameters", "Extra parameters", [named("run", "run"), named("base distribution", "base"),
                                                          named("sampler", "sampler"), forwards, parameters], rows)


def _forwards(run: Run) -> float | None:
    tokens = sum(record["num_tokens"] for record in run.records)
    return sum(record["token_forwards"] for record in run.records) / tokens if tokens else None


def extra_parameters(run: Run) -> int | None:
    """Parameters that the draft of a run adds to the target; None if its checkpoint is not on this machine."""
    values = dict(run.config.get("draft") or {})
    component = components("draft").get(run.component("draft"))
    if component is None or component.name == "none":
        return 0 if run.component("draft") == "none" else None
    cls: Any = component.cls
    specs = specs_of(cls)
    known = {name: values.get(name, spec.in_older_runs()) for name, spec in specs.items() if name in values or spec.has_off()}
    if len(known) < len(specs):
        return None
    return restored(cls, known).checkpoint_size().parameters
