"""The settings of the runs, a picture of one run with its settings, and where the runs were made."""

import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from dflash_mcmc.components import registered, restored, specs_of
from dflash_mcmc.config.identity import followed
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.grading.verdicts import NOT_DRAWN, TOO_LONG
from dflash_mcmc.report import figure, parts, reading
from dflash_mcmc.report.study import Study

_TEXT = """
The table of configuration has the settings in which the runs differ from each other or from a published setting. A hyphen
means that the setting does not exist there, or that the source does not state it.

Extra parameters are those that a condition adds to the target. A blend of a layer reuses the target's head. A draft adds its
own network; the number is unknown if the draft's checkpoint is not on this machine.
"""
_BASES = {"none": "p(token)", "layer": "p blended with a layer", "draft": "p blended with the draft"}


def section(study: Study) -> parts.Section | None:
    """The tables of differences and of added parameters; None for a single run."""
    if len(study.runs) < 2:
        return None
    settings = dict[str, dict[str, object]]()
    for run in study.runs:  # with the names that published settings use too
        model, blocks = dict(run.config.get("model") or {}), run.identity.get("sampler.num_blocks")
        horizon = run.identity.get("dataset.max_new_tokens")
        settings[run.label] = {
            "model": str(model.get("path") or run.component("model")).rstrip("/").rpartition("/")[2],
            "problems": len(run.problems), "chains": run.num_chains,
            "tokens per block": horizon // blocks if isinstance(horizon, int) and isinstance(blocks, int) else None,
            **{key: value for key, value in run.identity.items() if key != "model"}}
    if any(run.component("sampler") == "power_mh" for run in study.runs):
        settings |= {f"{name} (published)": dict(setting) for name, setting in reading.published_settings().items()}
    rows, extra = list[dict[str, Any]](), list[dict[str, Any]]()
    for key in dict.fromkeys(key for of in settings.values() for key in of):  # a row per setting, a column per run or source
        values = {name: of.get(key) for name, of in settings.items()}
        if len({json.dumps(value) for value in values.values() if value is not None}) > 1:
            rows.append({"setting": key, **values})
    for run in study.runs:
        tokens, blend = sum(record["num_tokens"] for record in run.records), run.component("blend")
        forwards = sum(record["token_forwards"] for record in run.records)
        extra.append({"run": run.label, "base": _BASES.get(blend, blend), "sampler": run.component("sampler"),
                      "forwards_per_token": forwards / tokens if tokens else None, "extra_parameters": extra_parameters(run)})

    def parameters(row: dict) -> str:
        return "unknown" if row["extra_parameters"] is None else parts.count(row["extra_parameters"])

    return parts.Section("configuration", "Configuration and extra parameters", parts.paragraphs(_TEXT), [
        parts.ReportTable("configuration", "Differences of configuration",
                          {name: name for name in ("setting", *settings)}, rows),
        parts.ReportTable("extra_parameters", "Extra parameters", {
            "run": "run", "base distribution": "base", "sampler": "sampler",
            "token-forwards / token": ("forwards_per_token", ".1f"), "extra parameters": parameters}, extra)])


def extra_parameters(run: reading.Run) -> int | None:
    """Parameters that the draft of a run adds to the target; None if its checkpoint is not on this machine."""
    values = dict(run.config.get("draft") or {})
    component = registered("draft").get(run.component("draft"))
    if component is None or component.name == "none":
        return 0 if run.component("draft") == "none" else None
    cls: Any = component.cls
    fields = {name: values[name] for name in specs_of(cls) if name in values}
    with suppress(ConfigError):  # the folder is on the machine of the run
        return restored(cls, fields).num_parameters() if len(fields) == len(specs_of(cls)) else None
    return None


_SETTING_TEXT = """
The diagram shows the settings of {run}. A sequence grows block by block. In each step a proposal redraws a random suffix, and
the Metropolis-Hastings rule accepts the proposal or keeps the sequence.
"""


def setting_section(study: Study) -> parts.Section | None:
    """The diagram of the first `power_mh` run with a blend, else of the first `power_mh` run. None without such a run."""
    samplers = [run for run in study.runs if run.component("sampler") == "power_mh"]
    run = next((run for run in samplers if run.component("blend") != "none"), next(iter(samplers), None))
    return None if run is None else parts.Section(
        "setting", "How samples are drawn", parts.paragraphs(_SETTING_TEXT.format(run=run.label)), (),
        [parts.Drawing(f"fig_{study.dataset}_architecture", f"How {run.label} draws a sample.", partial(_figure, run))])


def _figure(run: reading.Run) -> "figure.Figure":
    from matplotlib.figure import Figure

    def value(key: str) -> str:
        given = run.identity.get(key)
        return f"{given:g}" if isinstance(given, int | float) else "?"

    blend, follows = run.component("blend"), followed(run.identity).get("sampler.proposal_temperature") == "1/alpha"
    law = r"$p^{\,\alpha}$" if blend == "none" else r"$p_{\mathrm{guided}}^{\,\alpha}$"
    temperature = ("1/α = " if follows else "") + value("sampler.proposal_temperature")
    places = {  # the middle of a box, its text and its colour
        "target": (13, 35, "target model\nlogits of the last layer", figure.RIGHT),
        "kernel": (77, 24, f"Metropolis-Hastings on {law}\nα = {value('sampler.alpha')}, "
                   f"{value('sampler.num_blocks')} blocks,\n{value('sampler.num_steps')} steps per block", figure.RIGHT),
        "proposal": (77, 42, f"proposal: a redrawn suffix\nat temperature {temperature}", figure.OTHER),
        "answer": (77, 6, "sequence of tokens,\ngraded answer", figure.INK)}
    arrows = [("proposal", "kernel", "<|-|>", "each step: propose, accept or keep"),
              ("kernel", "answer", "-|>", "after the last block")]
    links = [("target", "kernel"), ("target", "proposal")]
    if blend != "none":
        layer = f"layer {run.identity.get('blend.layer')}\nthrough the same head"
        places |= {"mixed": (43, 24, f"blend\n(1 - β) target + β other\nβ = {value('blend.beta')}", figure.INK),
                   "other": (13, 13, layer if blend == "layer" else f"{blend}\nblock by block", figure.WRONG)}
        matched = run.identity.get("sampler.proposal") == "matched"
        links = [("target", "mixed"), ("other", "mixed"), ("mixed", "kernel"), ("mixed" if matched else "target", "proposal")]
    drawn = Figure(figsize=(9.2, 4.1))
    axes = drawn.add_axes((0.0, 0.0, 1.0, 1.0), xlim=(0, 100), ylim=(0, 48))
    axes.set_axis_off()
    axes.text(2, 45.5, run.label, weight="bold")
    boxes = {name: axes.text(x, y, text, ha="center", va="center", fontsize=9.5, linespacing=1.35, zorder=3, bbox={
        "boxstyle": "round,pad=0.6", "linewidth": 1.3, "facecolor": "white", "edgecolor": colour})
        for name, (x, y, text, colour) in places.items()}
    boxes["kernel"].set_parse_math(True)  # its text has no name of a run
    for first, second, style, label in [*((*link, "-|>", "") for link in links), *arrows]:
        start, end = boxes[first], boxes[second]
        axes.annotate("", end.get_position(), start.get_position(), arrowprops={
            "arrowstyle": style, "linewidth": 1.2, "color": figure.INK, "patchA": start.get_bbox_patch(),
            "patchB": end.get_bbox_patch(), "shrinkA": 3, "shrinkB": 3})
        (x, y), (end_x, end_y) = start.get_position(), end.get_position()
        axes.annotate(label, ((x + end_x) / 2, (y + end_y) / 2), (6, 0), textcoords="offset points", fontsize=8, va="center")
    return drawn


_PROVENANCE_TEXT = """
Expected is the number of problems times chains that the last start of the run asked for. Everything on this page is computed
from the records. To complete an interrupted run, repeat its command.
"""


def provenance_section(study: Study) -> parts.Section:
    """Three tables: the runs, the settings that those share which have them, and the package versions."""
    def joined(run: reading.Run, of: Callable[[dict], str | None]) -> str | None:  # the distinct values over a run's starts
        return ", ".join(dict.fromkeys(str(value) for start in run.sessions if (value := of(start)))) or None

    runs = []
    for run in study.runs:
        first, last = (run.sessions[0], run.sessions[-1]) if run.sessions else ({}, {})
        verdicts = [record["verdict"] for record in run.records]
        runs.append({"run": run.label, "experiment": run.experiment, "identity": run.digest, "problems": len(run.problems),
                     "chains": run.num_chains, "records": len(run.records), "expected": run.expected,
                     "state": "complete" if run.complete else "interrupted", "not_drawn": verdicts.count(NOT_DRAWN),
                     "too_long": verdicts.count(TOO_LONG), "starts": len(run.sessions), "started": first.get("started"),
                     "commit": joined(run, lambda start: (start.get("commit") or "")[:10] + "*" * bool(start.get("dirty"))),
                     "host": joined(run, lambda start: start.get("host")),
                     "device": joined(run, lambda start: start.get("device")), "python": last.get("python"),
                     "folder": str(run.folder)})
    keys = list(dict.fromkeys(key for run in study.runs for key in run.identity))
    values = {key: {json.dumps(value, ensure_ascii=False): None for run in study.runs
                    if (value := run.identity.get(key)) is not None} for key in keys}
    shared = [{"field": key, "value": next(iter(of), "null")} for key, of in values.items() if len(of) < 2]
    versions: dict[str, dict[str, None]] = {}
    for session in (session for run in study.runs for session in run.sessions):
        for name, version in (session.get("packages") or {}).items():
            if version:
                versions.setdefault(name, {})[version] = None
    packages = [{"package": name, "versions": ", ".join(used)} for name, used in versions.items()]
    counts = {name: (name, "count") for name in ("problems", "chains", "records", "expected", "starts")}
    shown = [row | {"started": str(row["started"] or "-")[:16].replace("T", " ")} for row in runs]
    text = parts.paragraphs(_PROVENANCE_TEXT)
    return parts.Section("provenance", "Provenance", text, [parts.ReportTable("provenance", "Runs", {
        "run": "run", "experiment": "experiment", "identity": "identity", **counts, "first start": "started", "state": "state",
        "commit (* modified)": "commit", "host": "host", "device": "device", "Python": "python"}, shown, runs),
        parts.ReportTable("shared", "Settings with one value", {"field": "field", "value": "value"}, shared),
        parts.ReportTable("packages", "Packages", {"package": "package", "versions": "versions"}, packages)])
