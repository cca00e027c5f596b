"""Published accuracies and their sources, read from a data file of the package."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

from omegaconf import OmegaConf

from dflash_mcmc.config.schema import PACKAGE
from dflash_mcmc.statistics.intervals import IntervalEstimate
from dflash_mcmc.statistics.shares import wilson

DATASET = "math500"
"""The dataset of all published rows."""
_FILE = PACKAGE / "assets" / "published" / "power_sampling.yaml"


class Published(NamedTuple):
    """The published accuracies of a model."""

    model: str
    source: str
    """Short name of the source."""
    text: str
    """Full reference of the source."""
    setting: str
    accuracy: dict[str, IntervalEstimate]
    """Accuracies by method (greedy, temp, ps, grpo, blend_greedy, blend_ps, draft_blend_ps). They have Wilson's intervals if
    the counts are known."""


def published_settings() -> dict[str, dict[str, object]]:
    """The settings of each source, by the source's name. The settings have the keys of a run's identity."""
    return {source["name"]: dict(source["fields"]) for source in _content()["sources"].values()}


def published() -> list[Published]:
    """The published accuracies of each model, in the order of the file."""
    content = _content()
    models: dict[tuple[str, str], Published] = {}
    for row in content["rows"]:
        source = content["sources"][row["source"]]
        model = models.setdefault((row["source"], row["model"]), Published(row["model"], source["name"], source["text"],
                                                                           source["setting"], {}))
        model.accuracy[row["method"]] = wilson(row["correct"], row["total"]) if "correct" in row \
            else IntervalEstimate(float(row["accuracy"]), None, None, 0)
    return list(models.values())


def _content() -> dict[str, Any]:
    return cast("dict[str, Any]", OmegaConf.to_container(OmegaConf.load(_FILE)))
