"""Reads `run.json`, the description of a run, and other files with one JSON object."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from dflash_mcmc.errors import UserError, reason_of
from dflash_mcmc.store.files import read_regular

RUN = "run.json"


class Described(NamedTuple):
    """The content of `run.json`."""

    identity: dict[str, Any]
    sessions: list[dict[str, Any]]
    """One entry per start of the run; at least one."""


def hash_of(identity: dict[str, object]) -> str:
    """Twelve hexadecimal digits of an identity. Reads no dataset and no checkpoint."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]


def described(path: Path) -> Described:
    """The description of a run. Raises UserError for a file that a run did not write."""
    content = json_object(path)
    identity, sessions = content.get("identity"), content.get("sessions")
    if not isinstance(identity, dict) or not identity:
        raise UserError(f"{path}: holds no identity; allowed: the file as a run wrote it")
    if not isinstance(sessions, list) or not sessions or not all(isinstance(session, dict) for session in sessions):
        raise UserError(f"{path}: holds no identity or no sessions; allowed: the file as a run wrote it")
    return Described(identity, sessions)


def json_object(path: Path) -> dict[str, Any]:
    """The object in a file of JSON. Raises UserError for a file that is missing, cannot be read or holds something else."""
    content = read_regular(path)
    if content is None:
        raise UserError(f"{path}: cannot be read: No such file or directory; a run folder has it next to its records")
    try:
        found = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        reason = reason_of(error, 120)
        raise UserError(f"{path}: cannot be parsed: {reason}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path}: holds no JSON object; a run did not write this file")
    return found
