"""The summary table of runs, one row per run (section 4.1 of the guided-power-sampling document)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dflash_mcmc.config.identity import configuration_of, labels_of
from dflash_mcmc.report.parts import count, tabulated
from dflash_mcmc.statistics.intervals import cautions
from dflash_mcmc.statistics.summaries import TIMES, aggregates_of
from dflash_mcmc.store import finishes
from dflash_mcmc.store.described import RUN, described, json_object

HEADERS = ("condition", "correct", "total", "accuracy", "95 % interval", "avg tokens", "avg time (s)", "MH accept",
           "moved", "no answer", "token-forwards")
"""The columns that every table of runs has."""
_UNLIKE = ("The rows cover different samples: each row uses all recorded samples of its run. python -m dflash_mcmc.report "
           "compares runs on the problems that they share.")
_DRAFTED = "accepted length"
"""Heading of a column that is shown if a run used a draft."""
_TOO_LONG = "too long"
"""Heading of a column that is shown if prompts did not fit into the model's positions. These samples count as not correct."""


def overall(folders: Sequence[Path]) -> str:
    """The summary table, with rows in the order of the folders. Settings in which runs of one condition differ are named."""
    summaries = [json_object(folder / "summary.json") for folder in folders]
    labels = labels_of([s["condition"] for s in summaries], [described(folder / RUN).identity for folder in folders],
                       [configuration_of(folder) for folder in folders])
    pairs = [pair for label, summary in zip(labels, summaries, strict=True) if summary["num_samples"]
             for pair in _with_aggregates(label, summary)]
    rows, headers = [row_of(label, summary) for label, summary in pairs], list(HEADERS)
    if any(summary["accepted_length"] is not None for _, summary in pairs):
        headers.append(_DRAFTED)
        rows = [[*row, _number(summary["accepted_length"], "{:.2f}")] for row, (_, summary) in zip(rows, pairs, strict=True)]
    if any(summary.get("too_long") for _, summary in pairs):
        headers.append(_TOO_LONG)
        rows = [[*row, str(summary.get("too_long", 0))] for row, (_, summary) in zip(rows, pairs, strict=True)]
    align = ("left", *["right"] * (len(headers) - 1))
    table = tabulated(headers, rows, align)
    alike = len({summary["num_samples"] for summary in summaries if summary["num_samples"]}) <= 1
    weights = "\n".join(_weights(*pair) for pair in pairs if "effective_chains" in pair[1])
    measured = "\n".join(filter(None, map(_measures, labels, summaries)))
    ends = "\n".join(filter(None, map(_remark, labels, summaries, folders)))
    spent = "\n".join(filter(None, map(_spent, labels, summaries)))
    few = "\n".join(cautions(each["num_problems"] for each in summaries if each["num_samples"] > each["num_problems"]))
    return "\n\n".join(filter(None, [table, weights, measured, ends, spent, few, "" if alike else _UNLIKE]))


def _with_aggregates(label: str, summary: dict) -> list[tuple[str, dict]]:
    """The row of a run's samples, and a row for each way in which the summary has them combined to one answer per problem."""
    return [(label, summary), *((str(combined["condition"]).replace(summary["condition"], label, 1), combined)
                                for combined in aggregates_of(summary) if combined["num_samples"])]


def _weights(label: str, summary: dict) -> str:
    """A line on the weights of a vote: few effective chains mean that the vote is that of one chain."""
    return (f"{label}: {summary['effective_chains']:.1f} effective chains (mean); one chain has most of the weight on "
            f"{100 * summary['dominated']:.0f} % of the problems.")


def _measures(label: str, summary: dict) -> str:
    """A line with the means of the sampler's own numbers. It is empty if the sampler has none."""
    start = "measures/"
    means = [f"{name.removeprefix(start)} {value:.3g}" for name, value in summary.items() if name.startswith(start)]
    return f"{label}: {', '.join(means)} (means)" if means else ""


def _seconds(value: float) -> str:
    """Seconds with three digits, and no more places than a millisecond has."""
    return f"{value:.3g}" if value >= 0.001 else "< 0.001"


def _spent(label: str, summary: dict) -> str:
    """A line on where the seconds of a sample go. It is empty if none were measured."""
    seconds_of = {part: summary.get(f"mean_{part}_seconds") for part in TIMES}
    if not any(seconds is not None for seconds in seconds_of.values()):
        return ""
    measured = [f"{part} {_seconds(seconds)}" for part, seconds in seconds_of.items() if seconds is not None]
    unknown = [part for part, seconds in seconds_of.items() if seconds is None]
    note = f" ({' and '.join(unknown)} not measured)" if unknown else ""
    return f"{label}: seconds a sample: {', '.join(measured)}{note}."


def _remark(label: str, summary: dict, folder: Path) -> str:
    """A line on answers that were cut off or ended at a stop string. It is empty if there are none."""
    remark = finishes.remark(summary, described(folder / RUN).identity.get("dataset.max_new_tokens"))
    return f"{label}: {remark}." if remark else ""


def row_of(label: str, summary: dict) -> list[str]:
    """The cells of a row, in the order of `HEADERS`."""
    share = f"{100 * summary['accuracy']:.1f} %"
    interval = f"{100 * summary['accuracy_low']:.1f} - {100 * summary['accuracy_high']:.1f}"
    rates = [_number(summary[name], "{:.1%}").replace("%", " %") for name in ("acceptance", "moved_rate")]
    return [label, count(summary["correct"]), str(summary["num_samples"]), share, interval,
            _number(summary["mean_tokens"], "{:.1f}"), _number(summary["mean_seconds"], "{:.2f}"), *rates,
            str(summary["no_answer"] + summary["not_drawn"]), f"{summary['token_forwards']:,.0f}"]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
