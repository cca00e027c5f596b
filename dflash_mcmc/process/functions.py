"""Functions of the user, given as FILE:FUNCTION. A file is run with the user's rights."""

import hashlib
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash_mcmc.errors import ConfigError, UserError


def place_of(field: str, path: str | None) -> tuple[Path, str]:
    """The file and the name of the function. Raises ConfigError."""
    name, _, function = str(path or "").rpartition(":")
    if not name or not function.isidentifier() or not Path(name).expanduser().is_file():
        raise ConfigError(field, path, "FILE:FUNCTION, a file of Python that exists and a function in it")
    return Path(name).expanduser(), function


def function_at(field: str, path: str | None) -> Callable[..., Any]:
    """The function. Runs the file, with the user's rights. Raises UserError."""
    file, function = place_of(field, path)
    try:
        defined = {name: value for name, value in runpy.run_path(str(file)).items() if not name.startswith("_")}
    except Exception as error:  # the user's code may raise anything
        raise UserError(f"{field}: {file} cannot be run: {type(error).__name__}: {' '.join(str(error).split())}") from error
    if not callable(defined.get(function)):
        raise ConfigError(field, path, "FILE:FUNCTION, where the file defines the function; it has "
                          f"{', '.join(name for name, value in defined.items() if callable(value)) or 'none'}")
    return defined[function]


def fingerprint(field: str, path: str | None) -> str:
    """A hash of the file and of the function's name. Raises ConfigError."""
    file, function = place_of(field, path)
    return hashlib.sha256(file.read_bytes() + f":{function}".encode()).hexdigest()[:32]
