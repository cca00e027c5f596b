"""Where a run's records come from: configuration, identity, command, commit, packages and device of each start."""

import datetime
import importlib.metadata
import platform
import socket
import subprocess
import sys
from pathlib import Path

from dflash_mcmc.config.identity import as_yaml, plain
from dflash_mcmc.config.schema import PACKAGE, Config
from dflash_mcmc.errors import note
from dflash_mcmc.process import machine
from dflash_mcmc.runner.tasks import Tasks
from dflash_mcmc.store.files import is_there, read_regular
from dflash_mcmc.store.folder import RunStore
from dflash_mcmc.store.records import CONFIG, PROBLEMS, add_problems, json_object

COMMIT_NOTE = "commit.json"
"""The file in a grid's copy of the code that holds the commit of the original."""
_PACKAGES = ("torch", "transformers", "tokenizers", "datasets", "numpy", "scipy", "math-verify", "latex2sympy2_extended",
             "sympy", "matplotlib", "hydra-core", "omegaconf", "wandb", "accelerate")


def describe(store: RunStore, config: Config, identity: dict[str, object], device: str | None, tasks: Tasks) -> None:
    """Writes the configuration, the identity, and an entry for this start of the run."""
    name = None
    if device is not None:
        import torch

        is_gpu = device.startswith("cuda")
        name = torch.cuda.get_device_name(device) if is_gpu else f"{machine.cpu_name()}, {torch.get_num_threads()} threads"
    store.write_config(as_yaml(plain(config)))
    store.write_session(identity, {
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": [sys.executable, *sys.orig_argv[1:]],
        **commit(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "host": socket.gethostname(),
        "device": name,
        **tasks.notes(),
    })


def renew(store: RunStore, config: Config, identity: dict[str, object], tasks: Tasks) -> None:
    """Writes again what a complete run has lost, and a configuration that is not this command's: reports read it."""
    if b"name" not in (read_regular(store.folder / CONFIG) or b""):
        note(f"{store.folder / CONFIG}: has no configuration, and is written again from this command")
    store.write_config(as_yaml(plain(config)))
    if not store.is_described():
        describe(store, config, identity, None, tasks)
    if not is_there(store.folder / PROBLEMS):
        with store.mutex():
            add_problems(store.folder, tasks.missing_problems)


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
