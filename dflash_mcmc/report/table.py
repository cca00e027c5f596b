"""What runs print at their end: the table of samples (section 4.1 of the guided-power-sampling document), and of probes."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_mcmc.config.identity import configuration_of, labels_of, with_names
from dflash_mcmc.report.parts import ReportTable, percent, text_of
from dflash_mcmc.statistics.intervals import cautions
from dflash_mcmc.statistics.summaries import TIMES, aggregates_of
from dflash_mcmc.store import records
from dflash_mcmc.store.records import RUN, described, json_object

COLUMNS: dict[str, Any] = {
    "correct": ("correct", "count"), "total": ("num_samples", "d"), "accuracy": lambda row: percent(row["accuracy"]),
    "95 % interval": lambda row: f"{100 * row['accuracy_low']:.1f} - {100 * row['accuracy_high']:.1f}",
    "avg tokens": ("mean_tokens", ".1f"), "avg time (s)": ("mean_seconds", ".2f"),
    "MH accept": lambda row: percent(row["acceptance"]), "moved": lambda row: percent(row["moved_rate"]),
    "no answer": lambda row: str(row["no_answer"] + row["not_drawn"]), "token-forwards": ("token_forwards", ",.0f")}
"""The columns of a summary that every table of runs has."""
DRAFTED = {"accepted length": ("accepted_length", ".2f")}
"""A column that is shown if a run used a draft."""
_TOO_LONG = {"too long": lambda row: str(row.get("too_long", 0))}
"""A column that is shown if prompts did not fit into the model's positions. These samples count as not correct."""
_UNLIKE = ("The rows cover different samples: each row uses all recorded samples of its run. python -m dflash_mcmc.report "
           "compares runs on the problems that they share.")


def overall(folders: Sequence[Path]) -> str:
    """The summary table, with rows in the order of the folders. Settings in which runs of one condition differ are named."""
    summaries = [json_object(folder / "summary.json") for folder in folders]
    identities = [described(folder / RUN).identity for folder in folders]
    labels = labels_of([s["condition"] for s in summaries], identities, [configuration_of(folder) for folder in folders])
    rows: list[dict[str, Any]] = []
    for label, summary in zip(labels, summaries, strict=True):  # a summary has its chains combined to one answer, too
        combined = [{**way, "run": str(way["condition"]).replace(summary["condition"], label, 1)}
                    for way in aggregates_of(summary)]
        rows += [row for row in ({**summary, "run": label}, *combined) if summary["num_samples"] and row["num_samples"]]
    columns = {"condition": "run", **COLUMNS}
    columns |= DRAFTED if any(row["accepted_length"] is not None for row in rows) else {}
    columns |= _TOO_LONG if any(row.get("too_long") for row in rows) else {}
    weights = [f"{row['run']}: {row['effective_chains']:.1f} effective chains (mean); one chain has most of the weight on "
               f"{100 * row['dominated']:.0f} % of the problems." for row in rows if "effective_chains" in row]
    measured, ends, spent = [], [], []
    for label, summary, identity in zip(labels, summaries, identities, strict=True):
        means = [f"{name.removeprefix('measures/')} {value:.3g}" for name, value in summary.items()
                 if name.startswith("measures/")]
        measured += [f"{label}: {', '.join(means)} (means)"] if means else []
        if remark := records.finish_remark(summary, identity.get("dataset.max_new_tokens")):
            ends.append(f"{label}: {remark}.")
        seconds = {part: summary.get(f"mean_{part}_seconds") for part in TIMES}
        known = [f"{part} {value:.3g}" if value >= 0.001 else f"{part} < 0.001"
                 for part, value in seconds.items() if value is not None]
        unknown = " and ".join(part for part, value in seconds.items() if value is None)
        if known:
            spent.append(f"{label}: seconds a sample: {', '.join(known)}{f' ({unknown} not measured)' if unknown else ''}.")
    few = cautions(each["num_problems"] for each in summaries if each["num_samples"] > each["num_problems"])
    unlike = [_UNLIKE] if len({summary["num_samples"] for summary in summaries if summary["num_samples"]}) > 1 else []
    lines = map("\n".join, (weights, measured, ends, spent, few, unlike))
    return "\n\n".join(filter(None, [text_of(ReportTable("", "", columns, rows)), *lines]))


def of_probes(folders: Sequence[Path]) -> str:
    """The tables of finished runs. Runs of a probe share its tables; the first columns are the settings that vary."""
    identities = [json_object(folder / RUN)["identity"] for folder in folders]
    identities = with_names(identities, [configuration_of(folder) for folder in folders])
    runs: dict[str, list[tuple[dict, dict]]] = {}
    for folder, identity in zip(folders, identities, strict=True):
        summary = json_object(folder / "summary.json")
        runs.setdefault(summary["probe"], []).append((identity, summary))
    texts = []
    for probe, of_probe in runs.items():
        keys = dict.fromkeys(key for identity, _ in of_probe for key in identity)
        varying = {key: key.removesuffix(".content").rpartition(".")[2] for key in keys  # `model` for `model.content`
                   if len({json.dumps(identity.get(key)) for identity, _ in of_probe}) > 1}
        for name in dict.fromkeys(name for _, summary in of_probe for name in summary["tables"]):
            rows = [{**{header: identity.get(key) for key, header in varying.items()}, **row}
                    for identity, summary in of_probe for row in summary["tables"].get(name, [])]
            texts.append(f"{probe}: {name}\n" + text_of(table_of(name, "", rows)))
        texts += cautions([summary.get("num_problems", 0) for _, summary in of_probe])
    return "\n\n".join(texts)


def table_of(name: str, title: str, rows: Sequence[Mapping[str, Any]]) -> ReportTable:
    """A table: numbers with four significant digits, an interval after its value."""
    merged = []
    for row in rows:  # `x`, `x_low` and `x_high` are one cell
        of = {key: (row[f"{key}_low"], row[f"{key}_high"]) for key in row if f"{key}_low" in row}
        ends = {f"{key}{end}" for key in of for end in ("_low", "_high")}
        merged.append({key: (value, *of[key]) if key in of else value for key, value in row.items() if key not in ends})
    keys = dict.fromkeys(key for row in merged for key in row)
    numbers = {key for key in keys if all(isinstance(row.get(key), int | float | tuple | None) for row in merged)}
    texts = [{key: _cell(row.get(key)) for key in keys} for row in merged]
    columns = {key.replace("_", " "): (key, "") if key in numbers else key for key in keys}
    return ReportTable(name, title, columns, texts, data=rows)


def _cell(value: object, digits: int = 4) -> str:
    if isinstance(value, tuple):
        of, low, high = (_cell(end, digits=3) for end in value)
        return of if low == "-" else f"{of} [{low}, {high}]"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.{digits}g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else "-" if value is None else str(value)
