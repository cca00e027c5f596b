"""Published numbers and their sources, read from data files of the package: accuracies, and rows beside those of probes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, cast

from omegaconf import OmegaConf

from dflash_mcmc.config.schema import PACKAGE
from dflash_mcmc.statistics.intervals import IntervalEstimate
from dflash_mcmc.statistics.outcomes import wilson

DATASET = "math500"
"""The dataset of all published rows."""


def published_settings() -> dict[str, dict[str, object]]:
    """The settings of each source, by the source's name. The settings have the keys of a run's identity."""
    return {source["name"]: dict(source["fields"]) for source in _content("power_sampling")["sources"].values()}


def sources() -> list[str]:
    """Full references and settings of the published accuracies."""
    rows, of = _content("power_sampling")["rows"], _content("power_sampling")["sources"]
    return [f"{of[name]['text']} ({of[name]['setting']})" for name in dict.fromkeys(row["source"] for row in rows)]


def published() -> dict[tuple[str, str], dict[str, IntervalEstimate]]:
    """The published accuracies by model and short name of the source, in the order of the file.

    Those of a model are by method (base, greedy, temp, ps, grpo, blend_greedy, blend_ps, draft_blend_ps, tempering, vote).
    They have Wilson's intervals if the counts are known.
    """
    content, models = _content("power_sampling"), dict[tuple[str, str], dict[str, IntervalEstimate]]()
    for row in content["rows"]:
        models.setdefault((row["model"], content["sources"][row["source"]]["name"]), {})[row["method"]] = (
            wilson(row["correct"], row["total"]) if "correct" in row else IntervalEstimate(float(row["accuracy"])))
    return models


@cache
def _content(name: str) -> dict[str, Any]:
    return cast("dict[str, Any]", OmegaConf.to_container(OmegaConf.load(PACKAGE / "assets" / "published" / f"{name}.yaml")))


RUN = "run"
"""The column that says where a row comes from."""


def source_of(probe: str) -> str | None:
    """The reference of a probe's published numbers; None if there are none."""
    return _content("probes").get(probe, {}).get("source")


def beside(probe: str, identities: Mapping[str, Mapping[str, object]], table: str, rows: Sequence[dict]) -> list[dict]:
    """The rows of a table, each followed by the published row of its kind.

    A published row is of the same kind as a row if both agree in the columns that the data file names. It is shown after the
    last such row of a run with the setting of the document, once. No number of a published row enters a statistic.

    Args:
        identities: the identities of the runs as in run.json, by the value of `RUN` in their rows.
        rows: rows with the column `RUN`.
    """
    shown, of = list(rows), _content("probes").get(probe, {"tables": {}})
    paper = of["tables"].get(table)
    if paper is None:
        return shown
    runs = {label for label, own in identities.items() if all(own.get(key) == of["where"][key] for key in of["where"])}
    for published in paper["rows"]:
        alike = [index for index, row in enumerate(shown)
                 if row.get(RUN) in runs and all(row.get(key) == published.get(key) for key in paper["by"])]
        if alike:
            shown.insert(alike[-1] + 1, {RUN: f"published, section {paper['section']}", **published})
    return shown
