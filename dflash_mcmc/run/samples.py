"""One run: open the folder, find what is pending, have it drawn, summarise."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from omegaconf import OmegaConf

from dflash_mcmc.config.identity import hash_of, identity_of, plain, run_folder
from dflash_mcmc.config.schema import PACKAGE, Config
from dflash_mcmc.grading import check_golds
from dflash_mcmc.process import ranks, stopping
from dflash_mcmc.run import build
from dflash_mcmc.run.sampling import Pending, Sampling, metrics_of
from dflash_mcmc.run.tracking import Tracking
from dflash_mcmc.statistics import summaries
from dflash_mcmc.store.folder import RunStore

_NOT_KEPT = ("tokens", "trace", "walk")
"""Of a record: needed by nothing here, and most of it."""
COMMIT_NOTE = "commit.json"
_PACKAGES = ("torch", "transformers", "tokenizers", "datasets", "numpy", "scipy", "math-verify", "latex2sympy2_extended",
             "sympy", "matplotlib", "hydra-core", "omegaconf", "wandb", "accelerate")


class RunResult(NamedTuple):
    """A run, as far as this start has brought it."""

    folder: Path
    summary: dict
    """Empty where `num_left` is not 0."""
    num_new: int
    """Samples recorded since this start, whichever process has drawn them."""
    num_beyond: int
    """Samples of earlier starts that were not asked for now: the summary covers them too."""
    num_left: int = 0
    """Samples that other processes are still drawing: the last of them writes the summary."""


def execute(config: Config) -> RunResult:
    """Draws what the run lacks and summarises it. A run that lacks nothing loads no model. Raises UserError and Stopped.

    Any number of processes draw a run together, each what no other has claimed; one at a time tells the tracker.
    """
    identity = identity_of(config)
    digest = hash_of(identity)
    with stopping.heeded(config.hardware.grace_seconds):
        with (RunStore.open(run_folder(config, digest), _NOT_KEPT) as store,
              Tracking(store, config, digest, metrics_of) as tracking):
            result = _complete(store, config, identity, tracking)
        stopping.check()
    return result


def _complete(store: RunStore, config: Config, identity: dict[str, object], tracking: Tracking) -> RunResult:
    # Chains of one problem stand together, so that its prompt is read once.
    problems = config.dataset.problems()
    asked = {(problem.id, chain): problem for problem in problems for chain in range(config.num_chains)}
    recorded = store.recorded()
    todo = {key: problem for key, problem in asked.items() if key not in recorded}
    if todo:
        check_golds(config.grader, list(todo.values()))
        device = config.hardware.resolve()
        model = config.model.load(device)
        prompts = build.prompts(config, model, list(todo.values()))
        engine = build.engine(config, model, max(map(len, prompts.values())), len(todo))
        if not ranks.rank() or not store.is_described():
            describe(store, config, identity, device, {"num_problems": len(problems)})
        pending = {key: Pending(problem, key[1], prompts[problem.id]) for key, problem in todo.items()}
        Sampling(store, config, engine, pending, tracking).run()
    store.look_again()  # behind its own last record: of all processes the last to look sees the run complete
    num_new = len(todo.keys() & store.recorded())
    if num_left := len(asked) - len(asked.keys() & store.recorded()):
        return RunResult(store.folder, {}, num_new, 0, num_left)
    with store.summarising():
        summary = _summary(config, store.in_order(list(asked)))
        if not ranks.rank():
            store.write_summary(summary)
    tracking.complete(summary)
    return RunResult(store.folder, summary, num_new, len(store.records) - len(asked))


def _summary(config: Config, records: list[dict]) -> dict[str, object]:
    summary = {**summaries.summarise(config.label(), records), **summaries.rates(records)}
    if config.aggregate:
        summary |= summaries.aggregate(config.label(), records, config.aggregate, config.num_chains)
    return summary


def describe(store: RunStore, config: Config, identity: dict[str, object], device: str, more: dict | None = None) -> None:
    """Writes configuration, identity, and what this start runs on."""
    store.write_config(OmegaConf.to_yaml(OmegaConf.create(plain(config))))
    store.write_session(identity, {
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": [sys.executable, *sys.orig_argv[1:]],
        **commit(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "host": socket.gethostname(),
        "device": _device_name(device),
        **(more or {}),
    })


def commit() -> dict[str, object]:
    """Commit of the code, and whether anything of it was changed since; null outside a checkout of this project.

    A grid's copy of the code has a note of its own.
    """
    noted = PACKAGE.parent / COMMIT_NOTE
    if noted.is_file():
        return json.loads(noted.read_text())

    def git(*arguments: str) -> str | None:
        done = subprocess.run(["git", "-C", str(PACKAGE), *arguments], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else None

    try:
        top = git("rev-parse", "--show-toplevel")
        if top is None or Path(top) != PACKAGE.parent:
            return {"commit": None, "dirty": None}
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except OSError:  # no git on this machine
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
    return f"{_processor()}, {torch.get_num_threads()} threads"


def _processor() -> str:
    """Its model where the machine tells it, so that a report can say that seconds are of different machines."""
    try:
        described = Path("/proc/cpuinfo").read_text()
    except OSError:
        described = ""
    model = re.search(r"^model name\s*:\s*(.+)$", described, flags=re.MULTILINE)
    return f"{platform.machine()} CPU" + (f" {' '.join(model[1].split())}" if model else "")
