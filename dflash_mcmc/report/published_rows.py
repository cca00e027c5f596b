"""Published numbers beside the rows of a probe's tables. A data file of the package has the numbers and their sections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, cast

from omegaconf import OmegaConf

from dflash_mcmc.config.schema import PACKAGE

RUN = "run"
"""The column that says where a row comes from."""
_FILE = PACKAGE / "assets" / "published" / "probes.yaml"


def source_of(probe: str) -> str | None:
    """The reference of a probe's published numbers; None if there are none."""
    return _content().get(probe, {}).get("source")


def beside(probe: str, identities: Mapping[str, Mapping[str, object]], table: str, rows: Sequence[dict]) -> list[dict]:
    """The rows of a table, each followed by the published row of its kind.

    A published row is of the same kind as a row if both agree in the columns that the data file names. It is shown after the
    last such row of a run with the setting of the document, once. No number of a published row enters a statistic.

    Args:
        identities: the identities of the runs as in run.json, by the value of `RUN` in their rows.
        rows: rows with the column `RUN`.
    """
    shown, of = list(rows), _content().get(probe, {"tables": {}})
    found = of["tables"].get(table)
    if found is None:
        return shown
    runs = {label for label, identity in identities.items() if _holds(of["where"], identity)}
    for published in found["rows"]:
        alike = [place for place, row in enumerate(shown)
                 if row.get(RUN) in runs and all(row.get(key) == published.get(key) for key in found["by"])]
        if alike:
            shown.insert(alike[-1] + 1, {RUN: f"published, section {found['section']}", **published})
    return shown


def _holds(where: Mapping[str, object], identity: Mapping[str, object]) -> bool:
    return all(identity.get(key) == value for key, value in where.items())


@cache
def _content() -> dict[str, Any]:
    return cast("dict[str, Any]", OmegaConf.to_container(OmegaConf.load(_FILE)))
