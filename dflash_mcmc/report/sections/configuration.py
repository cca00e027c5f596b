"""The settings of the runs, a picture of one run with its settings, and where the runs were made."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dflash_mcmc.config.identity import followed
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.fields import restored, specs_of
from dflash_mcmc.grading.verdicts import NOT_DRAWN, TOO_LONG
from dflash_mcmc.registry import components
from dflash_mcmc.report.parts import Drawing, ReportColumn, ReportTable, Section, count, counted, named, paragraphs
from dflash_mcmc.report.published import published_settings
from dflash_mcmc.report.reading import Run, blended_layers
from dflash_mcmc.report.study import Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

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


def _differences(columns: Mapping[str, Mapping[str, object]]) -> ReportTable:
    """One row per setting with several values, one column per run or source."""
    rows = []
    for key in dict.fromkeys(key for of in columns.values() for key in of):
        values = {name: of.get(key) for name, of in columns.items()}
        if len({json.dumps(value) for value in values.values() if value is not None}) > 1:
            rows.append({"setting": key, **values})

    def column(name: str) -> ReportColumn:
        return ReportColumn(name, lambda row: "-" if row[name] is None else str(row[name]), number=False)

    return ReportTable("configuration", "Differences of configuration", [named("setting", "setting"), *map(column, columns)],
                       rows)


def _extra(runs: list[Run]) -> ReportTable:
    """One row per run: what it samples from, its cost per token, and the parameters that it adds."""
    rows = [{"run": run.label, "base": _BASES.get(blend := run.component("blend"), blend), "sampler": run.component("sampler"),
             "forwards_per_token": _forwards(run), "extra_parameters": extra_parameters(run)} for run in runs]
    forwards = ReportColumn("token-forwards / token",
                            lambda row: "-" if row["forwards_per_token"] is None else f"{row['forwards_per_token']:.1f}")
    parameters = ReportColumn("extra parameters",
                              lambda row: "unknown" if row["extra_parameters"] is None else count(row["extra_parameters"]))
    return ReportTable("extra_parameters", "Extra parameters", [named("run", "run"), named("base distribution", "base"),
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
    fields = {name: values[name] for name in specs_of(cls) if name in values}
    with suppress(ConfigError):  # the folder is on the machine of the run
        return restored(cls, fields).checkpoint_size().parameters if len(fields) == len(specs_of(cls)) else None
    return None


_SETTING_TEXT = """
The diagram shows the settings of {run}. A sequence grows block by block. In each step a proposal redraws a random suffix, and
the Metropolis-Hastings rule accepts the proposal or keeps the sequence.
"""


def setting_section(study: Study) -> Section | None:
    """The diagram of the first `power_mh` run with a blend, else of the first `power_mh` run. None without such a run."""
    samplers = [run for run in study.runs if run.component("sampler") == "power_mh"]
    if not samplers:
        return None
    run = next((run for run in samplers if run.component("blend") != "none"), samplers[0])
    return Section("setting", "How samples are drawn", paragraphs(_SETTING_TEXT.format(run=run.label)), (),
                   [Drawing(f"fig_{study.dataset}_architecture", f"How {run.label} draws a sample.", lambda: _figure(run))])


def _figure(run: Run) -> Figure:
    from matplotlib.figure import Figure

    from dflash_mcmc.report.figure import INK, OTHER, RIGHT, WRONG

    blend, matched = run.component("blend"), run.identity.get("sampler.proposal") == "matched"
    drawn = Figure(figsize=(9.2, 4.1))
    axes = drawn.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_axis_off()
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 48)
    law = r"$p^{\,\alpha}$" if blend == "none" else r"$p_{\mathrm{guided}}^{\,\alpha}$"
    target = _box(axes, 13, 35, "target model\nlogits of the last layer", RIGHT)
    kernel = _box(axes, 77, 24, f"Metropolis-Hastings on {law}\nα = {_number(run, 'sampler.alpha')}, "
                  f"{_number(run, 'sampler.num_blocks')} blocks,\n{_number(run, 'sampler.num_steps')} steps per block", RIGHT)
    kernel.set_parse_math(True)  # its text has no name of a run
    proposal = _box(axes, 77, 42, f"proposal: a redrawn suffix\nat temperature {_temperature(run)}", OTHER)
    answer = _box(axes, 77, 6, "sequence of tokens,\ngraded answer", INK)
    if blend == "none":
        _arrow(axes, target, kernel)
        _arrow(axes, target, proposal)
    else:
        layer = f"{blended_layers(run)}\nthrough the same head"
        other = layer if blend == "layer" else f"{blend}\nblock by block"
        mixed = _box(axes, 43, 24, f"blend\n(1 - β) target + β other\nβ = {_number(run, 'blend.beta')}", INK)
        _arrow(axes, target, mixed)
        _arrow(axes, _box(axes, 13, 13, other, WRONG), mixed)
        _arrow(axes, mixed, kernel)
        _arrow(axes, mixed if matched else target, proposal)
    _arrow(axes, proposal, kernel, "<|-|>", "each step: propose, accept or keep")
    _arrow(axes, kernel, answer, "-|>", "after the last block")
    return drawn


def _number(run: Run, key: str) -> str:
    value = run.identity.get(key)
    return f"{value:g}" if isinstance(value, int | float) else "?"


def _temperature(run: Run) -> str:
    follows = followed(run.identity).get("sampler.proposal_temperature") == "1/alpha"
    return ("1/α = " if follows else "") + _number(run, "sampler.proposal_temperature")


def _box(axes: Axes, x: float, y: float, text: str, colour: str) -> Text:
    return axes.text(x, y, text, ha="center", va="center", fontsize=9.5, linespacing=1.35, zorder=3,
                     bbox={"boxstyle": "round,pad=0.6", "linewidth": 1.3, "facecolor": "white", "edgecolor": colour})


def _arrow(axes: Axes, start: Text, end: Text, style: str = "-|>", label: str = "") -> None:
    """Draws an arrow between the edges of two boxes, with a label next to it."""
    from dflash_mcmc.report.figure import INK

    axes.annotate("", end.get_position(), start.get_position(), arrowprops={
        "arrowstyle": style, "linewidth": 1.2, "color": INK, "patchA": start.get_bbox_patch(), "patchB": end.get_bbox_patch(),
        "shrinkA": 3, "shrinkB": 3})
    (x, y), (end_x, end_y) = start.get_position(), end.get_position()
    axes.annotate(label, ((x + end_x) / 2, (y + end_y) / 2), (6, 0), textcoords="offset points", fontsize=8, va="center")


_PROVENANCE_TEXT = """
Expected is the number of problems times chains that the last start of the run asked for. Everything on this page is computed
from the records. To complete an interrupted run, repeat its command.
"""


def provenance_section(study: Study) -> Section:
    """Four tables: the runs, the settings in which they differ, the settings that they share, and the package versions."""
    identities = {run.label: run.identity for run in study.runs}
    keys = list(dict.fromkeys(key for identity in identities.values() for key in identity))
    varying = [key for key in keys if len({json.dumps(identity.get(key)) for identity in identities.values()}) > 1]
    tables = [ReportTable("provenance", "Runs", _columns(), [_row(run) for run in study.runs])]
    if varying:
        rows = [{"run": label, **{key: identity.get(key) for key in varying}} for label, identity in identities.items()]
        tables.append(ReportTable("identities", "Settings that differ", [named("run", "run"), *map(_field, varying)], rows))
    first = study.runs[0].identity
    shared = [{"field": key, "value": json.dumps(first.get(key), ensure_ascii=False)} for key in keys if key not in varying]
    tables.append(ReportTable("shared", "Settings that all runs share", [named("field", "field"), named("value", "value")],
                              shared))
    tables.append(_packages(study.runs))
    return Section("provenance", "Provenance", paragraphs(_PROVENANCE_TEXT), tables)


def _row(run: Run) -> dict:
    first, last = (run.sessions[0], run.sessions[-1]) if run.sessions else ({}, {})
    return {"run": run.label, "experiment": run.experiment, "identity": run.digest, "problems": len(run.problems),
            "chains": run.num_chains, "records": len(run.records), "expected": run.expected,
            "state": "complete" if run.complete else "interrupted",
            "not_drawn": sum(record["verdict"] == NOT_DRAWN for record in run.records),
            "too_long": sum(record["verdict"] == TOO_LONG for record in run.records), "starts": len(run.sessions),
            "started": first.get("started"),
            "commit": _joined(run, lambda start: (start.get("commit") or "")[:10] + "*" * bool(start.get("dirty"))),
            "host": _joined(run, lambda start: start.get("host")),
            "device": _joined(run, lambda start: start.get("device")), "python": last.get("python"), "folder": str(run.folder)}


def _joined(run: Run, of: Callable[[dict], str | None]) -> str:
    """The distinct values over the starts of a run."""
    return ", ".join(dict.fromkeys(str(value) for start in run.sessions if (value := of(start))))


def _columns() -> list[ReportColumn]:
    def text(header: str, key: str) -> ReportColumn:
        return ReportColumn(header, lambda row: str(row[key] or "-"), number=False)

    started = ReportColumn("first start", lambda row: (row["started"] or "-")[:16].replace("T", " "), number=False)
    return [named("run", "run"), text("experiment", "experiment"), text("identity", "identity"),
            counted("problems", "problems"), counted("chains", "chains"), counted("records", "records"),
            counted("expected", "expected"), text("state", "state"), counted("starts", "starts"), started,
            text("commit (* modified)", "commit"), text("host", "host"), text("device", "device"), text("Python", "python")]


def _field(key: str) -> ReportColumn:
    def text(row: dict) -> str:
        value = row[key]
        return "-" if value is None else value if isinstance(value, str) else json.dumps(value)
    return ReportColumn(key, text, number=False)


def _packages(runs: list[Run]) -> ReportTable:
    """Package versions over all starts of all runs."""
    versions: dict[str, list[str]] = {}
    for run in runs:
        for session in run.sessions:
            for name, version in (session.get("packages") or {}).items():
                if version and version not in versions.setdefault(name, []):
                    versions[name].append(version)
    rows = [{"package": name, "versions": ", ".join(used)} for name, used in versions.items()]
    return ReportTable("packages", "Packages", [named("package", "package"), named("versions", "versions")], rows)
