"""A job: one run that a command line requests. It is composed and checked once, and all later code reads it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from dflash_mcmc.config.schema import Config

_NONE: Mapping[str, str] = MappingProxyType({})


class Job(NamedTuple):
    """One run. All fields but `config` describe it in tables and trackers; they do not change what it does."""

    config: Config
    overrides: tuple[str, ...] = ()
    """The overrides of the command line that apply to this job."""
    choices: Mapping[str, str] = _NONE
    """The chosen option of each configuration group, by group."""
    left_out: tuple[str, ...] = ()
    """Names of the fields and groups that the command line sets and that do not apply to this job."""
    title: str = ""
    """The name of a job of a sweep in its progress bar, `[3/12] blend_ps alpha=4`; empty outside a sweep."""
