"""The default: W&B for who has an account or asks for it, else the dashboard on this machine, else nothing."""

import configparser
import contextlib
import importlib.util
import netrc
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dflash_mcmc.components import Settings, register, registered, runtime
from dflash_mcmc.errors import note
from dflash_mcmc.tracker import RunInfo, TrackedRun, Tracker

_OF_WANDB = ("WANDB_API_KEY", "WANDB_MODE", "WANDB_SWEEP_ID", "WANDB_IDENTITY_TOKEN_FILE")
"""Variables of the environment that speak of W&B."""


@register("tracker", "auto")
@dataclass(slots=True, kw_only=True)
class AutoTracker(Tracker):
    """`wandb` where W&B has an account or a variable such as `WANDB_MODE`, else `trackio` where it is installed, else `none`.

    Nothing is sent anywhere that was not asked for.
    """

    project: str = runtime("dflash_mcmc", "project name")
    folder: str = runtime("outputs", "parent folder of wandb/ or trackio/")

    def resolved(self, config: Settings) -> Any:
        """The tracker that this machine has, which a run takes in place of this one."""
        return self._chosen()

    def start(self, info: RunInfo) -> TrackedRun:
        return self._chosen().start(info)

    def _chosen(self) -> Tracker:
        if os.environ.get("WANDB_MODE") == "disabled":
            name = "none"
        elif _has_wandb():
            name = "wandb"
        else:
            name = "trackio" if importlib.util.find_spec("trackio") else "none"
            if name == "none":
                _tell()
        kind = registered("tracker")[name].cls
        return kind() if kind.is_null else kind(project=self.project, folder=self.folder)


def _has_wandb() -> bool:
    """Whether W&B has a variable of the environment, or an account: without its import, which takes half a second."""
    if any(os.environ.get(name) for name in _OF_WANDB):
        return True
    try:
        hosts = netrc.netrc(os.environ.get("NETRC", str(Path.home() / ".netrc"))).hosts
    except (OSError, netrc.NetrcParseError):
        return False
    # The servers of W&B that this user may have logged in to
    settings = configparser.ConfigParser()
    folder = os.environ.get("WANDB_CONFIG_DIR", str(Path.home() / ".config" / "wandb"))
    with contextlib.suppress(configparser.Error, UnicodeDecodeError):
        settings.read(Path(folder) / "settings")
    own = settings.get("default", "base_url", fallback="https://api.wandb.ai")
    return any(url.rpartition("//")[2].split("/")[0] in hosts
               for url in ["https://api.wandb.ai", own, os.environ.get("WANDB_BASE_URL", own)])


@cache
def _tell() -> None:
    """Once in a process."""
    note("no dashboard: here is neither an account of W&B nor the package trackio (wandb login, or pip install trackio)")
