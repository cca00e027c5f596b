"""Where a run's records come from: configuration, identity, command, commit, packages and device of each start."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import socket
import subprocess
import sys
from pathlib import Path

from omegaconf import OmegaConf

from dflash_mcmc.config.identity import plain
from dflash_mcmc.config.schema import PACKAGE, Config
from dflash_mcmc.errors import note
from dflash_mcmc.process import machine
from dflash_mcmc.store.described import CONFIG, json_object
from dflash_mcmc.store.files import read_regular
from dflash_mcmc.store.folder import RunStore

COMMIT_NOTE = "commit.json"
"""The file in a grid's copy of the code that holds the commit of the original."""
_PACKAGES = ("torch", "transformers", "tokenizers", "datasets", "numpy", "scipy", "math-verify", "latex2sympy2_extended",
             "sympy", "matplotlib", "hydra-core", "omegaconf", "wandb", "accelerate")


def describe(store: RunStore, config: Config, identity: dict[str, object], device: str, notes: dict[str, object]) -> None:
    """Writes the configuration, the identity, and an entry for this start of the run."""
    _write_config(store, config)
    store.write_session(identity, {
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": [sys.executable, *sys.orig_argv[1:]],
        **commit(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "host": socket.gethostname(),
        "device": _device_name(device),
        **notes,
    })


def restore_config(store: RunStore, config: Config) -> None:
    """Writes the configuration of a described run again if its file is missing or has no content: reports read it."""
    path = store.folder / CONFIG
    if store.is_described() and b"name" not in (read_regular(path) or b""):
        note(f"{path}: has no configuration, and is written again from this command")
        _write_config(store, config)


def _write_config(store: RunStore, config: Config) -> None:
    store.write_config(OmegaConf.to_yaml(OmegaConf.create(plain(config))))


def commit() -> dict[str, object]:
    """The commit of the code and whether the code has uncommitted changes; null outside a checkout of this project.

    In a grid's copy of the code, both are read from a file.
    """
    noted = PACKAGE.parent / COMMIT_NOTE
    if noted.is_file():
        return json_object(noted)

    def git(*arguments: str) -> str | None:
        done = subprocess.run(["git", "-C", str(PACKAGE), *arguments], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else None

    try:
        top = git("rev-parse", "--show-toplevel")
        if top is None or Path(top) != PACKAGE.parent:
            return {"commit": None, "dirty": None}
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except OSError:  # git is not installed
        return {"commit": None, "dirty": None}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device_name(device: str) -> str:
    import torch

    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"{machine.cpu_name()}, {torch.get_num_threads()} threads"
