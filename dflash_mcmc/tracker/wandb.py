"""Weights & Biases. Never prompts, never hangs, never stops a run."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_mcmc.fields import runtime
from dflash_mcmc.registry import register
from dflash_mcmc.tracker import RunInfo

if TYPE_CHECKING:
    import wandb

TABLE_COLUMNS = ("problem", "chain", "level", "subject", "verdict", "answer", "gold", "num_tokens", "log_p", "proposals",
                 "accepted", "moved", "seconds", "text")


@register("tracker", "wandb")
@dataclass(slots=True, kw_only=True)
class WandbTracker:
    """Weights & Biases: online when the user is logged in, otherwise offline, to be synced later."""

    project: str = runtime("project in the dashboard")
    entity: str | None = runtime("user or team; null takes the user's default")
    mode: str = runtime("auto = online when logged in, otherwise offline; offline", choices=("auto", "offline"))
    folder: str = runtime("folder below which wandb/ is made")
    connect_seconds: float = runtime("longest wait for the server before going on offline", gt=0)

    def start(self, info: RunInfo) -> WandbRun:
        """Opens the run, or continues it: its id is the identity."""
        import wandb

        mode, why = self._mode(wandb)
        folder = Path(self.folder).resolve()
        (folder / "wandb").mkdir(parents=True, exist_ok=True)
        # Beside the run instead of in the home folder: an offline run can then be synced from another machine.
        os.environ.setdefault("WANDB_DATA_DIR", str(folder / "wandb" / "data"))
        try:
            return WandbRun(self._init(wandb, info, mode), info, mode, why)
        except wandb.Error as error:
            if mode == "offline":
                raise
            reason = " ".join(str(error).split())[:120]
            wandb.teardown()  # the service still holds the run's id for the attempt that failed
            return WandbRun(self._init(wandb, info, "offline"), info, "offline", f"no connection: {reason}")

    def _mode(self, wandb) -> tuple[str, str]:
        if os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun"):
            return "offline" if os.environ["WANDB_MODE"] != "disabled" else "disabled", "WANDB_MODE says so"
        if self.mode == "offline":
            return "offline", "tracker.mode says so"
        # Looks for a key in the environment and in netrc; asks nobody and no server.
        return ("online", "") if wandb.login(prompt=False, verify=False) else ("offline", "not logged in")

    def _init(self, wandb, info: RunInfo, mode: str) -> wandb.Run:
        settings = wandb.Settings(
            init_timeout=self.connect_seconds, finish_timeout=120, silent=True, console="off",
            # The default keeps 15 s of data in memory, which a kill would lose.
            x_transaction_log_flush_interval=1, x_file_stream_transmit_interval=2,
        )
        return wandb.init(
            project=self.project, entity=self.entity, id=f"{info.experiment}-{info.identity}",
            name=f"{info.condition}-{info.identity}", group=info.experiment, job_type=info.condition, config=info.config,
            dir=self.folder, mode=mode, resume="allow", settings=settings, reinit="finish_previous",
        )


class WandbRun:
    """An open run."""

    def __init__(self, run: wandb.Run, info: RunInfo, mode: str, why: str):
        self._run, self._info, self._mode = run, info, mode
        run.define_metric("finished")
        run.define_metric("*", step_metric="finished")
        if mode == "offline":
            print(f"W&B is offline ({why}); to upload this run: wandb sync {Path(run.dir).parent}", file=sys.stderr)

    def log(self, metrics: dict, step: int) -> None:
        """Logs a sample. `step`, the number of samples so far, is the x axis: it goes on where an earlier start stopped."""
        self._run.log({**metrics, "finished": step})

    def summary(self, metrics: dict, records: list[dict]) -> None:
        """Sets the summary and logs the table of all samples."""
        import wandb

        rows = [[record.get(column) for column in TABLE_COLUMNS] for record in records]
        self._run.log({"samples": wandb.Table(columns=list(TABLE_COLUMNS), data=rows), "finished": len(records)})
        self._run.summary.update(metrics)

    def finish(self, exit_code: int) -> None:
        """Writes what is left and closes the run."""
        self._run.finish(exit_code=exit_code)
