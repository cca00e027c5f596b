"""Typed configurations of overrides."""

from pathlib import Path

from dflash_mcmc.config.command import composer
from dflash_mcmc.config.schema import Config, to_config


def composed(folder: Path, *overrides: str) -> Config:
    """The typed configuration of overrides, with outputs below the folder. The tracker is none unless it is chosen."""
    with composer("config") as composing:
        return to_config(composing.compose([f"paths.outputs={folder}", "tracker=none", *overrides]).values)
