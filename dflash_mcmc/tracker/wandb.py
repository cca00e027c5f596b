"""Tracking with Weights & Biases. It never prompts, never hangs and never stops a run."""

import contextlib
import json
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dflash_mcmc.components import register, runtime
from dflash_mcmc.errors import reason_of
from dflash_mcmc.process import stopping
from dflash_mcmc.store.records import PROBLEMS
from dflash_mcmc.tracker import RunInfo, TrackedRun, Tracker, sample_rows

if TYPE_CHECKING:
    import wandb

_UNWRITTEN_SECONDS = 3.0
"""The longest time for which logged metrics may be unwritten. W&B's process writes and sends every one or two seconds."""
_STEPS = 3
"""Steps of W&B's history for each record: the record, and, if it is the last one, the samples and the report."""
_IN_ARTIFACT = ("records*.jsonl", PROBLEMS, "config.yaml", "run.json", "summary.json", "*.csv")


@register("tracker", "wandb")
@dataclass(slots=True, kw_only=True)
class WandbTracker(Tracker):
    """Weights & Biases: online when the user is logged in, otherwise offline, to be synced later."""

    project: str = runtime("dflash_mcmc", "project name in W&B")
    entity: str | None = runtime(None, "user or team; null takes the user's default")
    mode: Literal["auto", "offline"] = runtime("auto", "auto = online when logged in, else offline; offline = always offline")
    folder: str = runtime("outputs", "parent folder of wandb/")

    def key(self) -> str:
        """Key under which the run folder notes what was logged. Another project and an agent of a sweep have their own."""
        if "WANDB_SWEEP_ID" in os.environ:
            return f"wandb/{os.environ['WANDB_RUN_ID']}"
        if os.environ.get("WANDB_MODE") == "disabled":
            return "wandb/disabled"
        return "wandb" if (self.entity, self.project) == (None, "dflash_mcmc") else f"wandb/{self.entity}/{self.project}"

    def start(self, info: RunInfo) -> "WandbRun":
        """Opens the W&B run, or resumes it. Its id contains the identity of the run."""
        import wandb

        mode, why = self._mode(wandb)
        folder = Path(self.folder).resolve()
        (folder / "wandb").mkdir(parents=True, exist_ok=True)
        # The data is next to the run, not in the home folder, so that an offline run can be synced from another machine.
        os.environ.setdefault("WANDB_DATA_DIR", str(folder / "wandb" / "data"))
        try:
            return WandbRun(lambda: self._init(wandb, info, mode), info, mode, why)
        except wandb.Error as error:
            if mode == "offline":
                raise
            reason = reason_of(error, 120)
            wandb.teardown()  # the service still reserves the run's id for the failed attempt
            return WandbRun(lambda: self._init(wandb, info, "offline"), info, "offline", f"no connection: {reason}")

    def _mode(self, wandb) -> tuple[str, str]:
        if os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun"):
            return "offline" if os.environ["WANDB_MODE"] != "disabled" else "disabled", "WANDB_MODE is set"
        if self.mode == "offline":
            return "offline", "tracker.mode=offline"
        # This looks for an API key in the environment and in netrc. It asks neither the user nor the server.
        return ("online", "") if wandb.login(prompt=False, verify=False) else ("offline", "not logged in")

    def _init(self, wandb, info: RunInfo, mode: str) -> "wandb.Run":
        settings = wandb.Settings(
            init_timeout=30, finish_timeout=120, silent=True, console="off",
            # By default 15 s of data are kept in memory, which a kill would lose.
            x_transaction_log_flush_interval=1, x_file_stream_transmit_interval=2,
        )
        # In a sweep W&B uses the id, project and account of its agent instead of these.
        return wandb.init(
            project=self.project, entity=self.entity, id=f"{info.experiment}-{info.identity}",
            name=info.name or info.condition, group=info.experiment, job_type=info.condition, tags=list(info.tags),
            config={**info.config, "identity": info.identity}, dir=self.folder, mode=mode, resume="allow", settings=settings,
            reinit="finish_previous",
        )


class WandbRun(TrackedRun):
    """An open W&B run.

    SLURM ends a job with a SIGTERM to each of its processes. W&B's own process, which writes and sends the data, dies at once.
    Our process still has its grace time: it starts another process of W&B and logs the recent metrics again.
    """

    def __init__(self, open_run: "Callable[[], wandb.Run]", info: RunInfo, mode: str, why: str):
        self._open, self._info = open_run, info
        self._finished = 0
        """Records so far."""
        self._recent: deque[tuple[float, int, dict]] = deque()
        """Time, step and values of what was logged lately."""
        self._run, self._defined = self._begun()
        if mode == "offline":
            from tqdm.auto import tqdm

            # A run's bar is on the terminal's last line. This clears it, and shows it again below the line.
            tqdm.write(f"W&B is offline ({why}); to upload this run: wandb sync {Path(self._run.dir).parent}", file=sys.stderr)

    def _begun(self) -> "tuple[wandb.Run, set[str]]":
        """An open run of W&B, and the metrics that are defined in it."""
        run = self._open()
        run.define_metric("finished", hidden=True, summary="none")
        return run, {"finished"}

    def log(self, metrics: dict, step: int) -> None:
        """Logs a sample. `step`, the number of samples so far, is the x axis: a resumed run continues the count."""
        self._finished = step
        self._log(metrics, _STEPS * step)

    def summary(self, metrics: dict, records: list[dict]) -> None:
        """Sets the summary and logs the table of all samples. `label` in the summary is the run's name in charts over runs."""
        self._finished = len(records)
        if rows := sample_rows(records, self._info.folder):
            self._log({"samples": _table(rows)}, _STEPS * self._finished + 1)
        self._run.summary.update({**metrics, "label": self._info.name or self._info.condition})

    def publish(self, folder: Path, tables: dict[str, list[dict]], figures: list[Path]) -> None:
        """Logs tables and figures, and uploads records, configuration and tables of the folder as a version of an artifact."""
        import wandb

        shown: dict[str, Any] = {f"tables/{name}": _table(rows) for name, rows in tables.items()}
        shown.update({f"figures/{path.stem}": wandb.Image(str(path)) for path in figures})
        if shown:
            self._log(shown, _STEPS * self._finished + 2)
        identity = json.loads((folder / "run.json").read_text())["identity"]
        artifact = wandb.Artifact(artifact_name("records", self._info.experiment, self._info.identity), "records",
                                  description=f"records of {self._info.name or self._info.condition}",
                                  metadata={"identity": identity, "identity_hash": self._info.identity})
        for path in sorted(path for pattern in _IN_ARTIFACT for path in folder.glob(pattern)):
            artifact.add_file(str(path))
        self._run.log_artifact(artifact)

    def preempt(self) -> None:
        self._outlive(lambda: self._run.mark_preempting())

    def finish(self, exit_code: int) -> None:
        self._outlive(lambda: self._run.finish(exit_code=exit_code))

    def _outlive(self, call: Callable[[], None]) -> None:
        """Calls `call`. If that fails after a signal, W&B's process is dead. Another one is started and `call` repeated."""
        try:
            call()
        except Exception:
            if not stopping.requested():
                raise
            self._begin_again()
            call()

    def _begin_again(self) -> None:
        import wandb

        with contextlib.suppress(Exception):  # it contacts the dead process
            wandb.teardown()
        self._run, self._defined = self._begun()
        for _, step, metrics in self._recent:
            self._run.log(metrics, step, commit=True)

    def _log(self, metrics: dict, step: int) -> None:
        """Logs values at a step of W&B's history: 3 n for record number n, 3 n + 1 and 3 n + 2 for what follows n records.

        A new session without a connection would count from 0 again, and its upload would replace the steps of the session
        before it. These numbers follow from the run's records instead, so that they are the same in every session.
        """
        self._recent.append((time.monotonic(), step, {**metrics, "finished": self._finished}))
        while self._recent[0][0] < time.monotonic() - _UNWRITTEN_SECONDS:
            self._recent.popleft()
        try:
            # Each name is defined, because W&B uses any one of several matching patterns.
            for name in metrics.keys() - self._defined:
                of_one = name.startswith(("sample/", "unit/"))  # values of the last sample or unit do not describe the run
                self._run.define_metric(name, step_metric="finished", summary="none" if of_one else None)
            self._defined |= metrics.keys()
            self._run.log(self._recent[-1][2], step, commit=True)  # else a kill loses it
        except Exception:
            if not stopping.requested():
                raise
            self._begin_again()


def artifact_name(*parts: str) -> str:
    """A name such as `records-<experiment>-<identity>`. W&B allows ASCII letters, digits, `.`, `_` and `-`."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", "-".join(parts))


def _table(rows: list[dict]) -> "wandb.Table":
    import wandb

    columns = dict.fromkeys(key for row in rows for key in row)
    # A column, such as the level, may contain a number in one row and a text in another.
    return wandb.Table(columns=list(columns), data=[[row.get(column) for column in columns] for row in rows],
                       allow_mixed_types=True)
