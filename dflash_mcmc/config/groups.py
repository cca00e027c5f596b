"""The folder `conf/`: its groups and their options. Imports neither Hydra nor the components, so that help costs no time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


def config_folder() -> Path:
    """`conf/` of the checkout, or the copy inside an installed package."""
    checkout = _PACKAGE.parent / "conf"
    return checkout if (checkout / "config.yaml").is_file() else _PACKAGE / "conf"


def option_files(more: Sequence[Path] = ()) -> dict[str, dict[str, Path]]:
    """Group -> option -> file, for every group of `conf/`, including groups that are no field of the configuration.

    Args:
        more: further folders with options, from `--config-dir`.
    """
    groups: dict[str, dict[str, Path]] = {}
    for folder in (config_folder(), *more):
        for file in sorted(folder.glob("*/*.yaml")):
            groups.setdefault(file.parent.name, {})[file.stem] = file
    return {group: dict(sorted(groups[group].items())) for group in sorted(groups)}
