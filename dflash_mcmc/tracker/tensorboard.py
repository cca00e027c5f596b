"""Tracking with TensorBoard event files in the run folder, for users without a tracking service."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_mcmc.errors import UserError
from dflash_mcmc.registry import register
from dflash_mcmc.tracker import RunInfo, TrackedRun, Tracker

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from dflash_mcmc.settings import Settings

COLUMNS = ("problem", "chain", "level", "subject", "verdict", "answer", "gold", "num_tokens", "log_p", "proposals", "accepted",
           "moved", "seconds")
_FLUSH_SECONDS = 1  # a kill loses at most these seconds of data; the default is two minutes


@register("tracker", "tensorboard")
@dataclass(slots=True, kw_only=True)
class TensorBoardTracker(Tracker):
    """TensorBoard event files in the run folder. To view them: tensorboard --logdir outputs."""

    def check(self, config: Settings) -> None:
        """Raises UserError before sampling if the package is missing."""
        if importlib.util.find_spec("tensorboard") is None:
            raise UserError("tracker=tensorboard: the package tensorboard is not installed: pip install tensorboard")

    def start(self, info: RunInfo) -> TensorBoardRun:
        """Opens an event file in the run folder. A resumed run has several event files, which TensorBoard reads as one run."""
        from torch.utils.tensorboard import SummaryWriter

        return TensorBoardRun(SummaryWriter(str(info.folder), flush_secs=_FLUSH_SECONDS), info)


class TensorBoardRun(TrackedRun):
    """An open run. Scalars are logged over the number of samples, tables as texts."""

    def __init__(self, writer: SummaryWriter, info: RunInfo):
        self._writer, self._steps = writer, 0
        writer.add_text("run", "\n".join([f"# {info.name or info.condition}", *(f"- {tag}" for tag in info.tags)]))

    def log(self, metrics: dict, step: int) -> None:
        self._steps = step
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def summary(self, metrics: dict, records: list[dict]) -> None:
        """Logs numbers of the summary as scalars `summary/...`, and the table of all samples as a text."""
        self._steps = len(records)
        for name, value in metrics.items():
            if isinstance(value, (int, float)):
                self._writer.add_scalar(f"summary/{name}", value, self._steps)
        samples = [record for record in records if "verdict" in record]
        if samples:
            self._writer.add_text("samples", _markdown(samples, COLUMNS), self._steps)

    def publish(self, folder: Path, tables: dict[str, list[dict]], figures: list[Path]) -> None:
        """Logs tables as texts and figures as images. Records and configuration are already in the folder."""
        from matplotlib.image import imread

        for name, rows in tables.items():
            self._writer.add_text(f"tables/{name}", _markdown(rows, tuple(rows[0]) if rows else ()), self._steps)
        for path in figures:
            self._writer.add_image(f"figures/{path.stem}", imread(path), self._steps, dataformats="HWC")

    def finish(self, exit_code: int) -> None:
        self._writer.close()


def _markdown(rows: Sequence[dict], columns: Sequence[str]) -> str:
    from tabulate import tabulate

    cells = [[str(row.get(column, "")).replace("|", "\\|").replace("\n", " ") for column in columns] for row in rows]
    return tabulate(cells, headers=columns, tablefmt="github", disable_numparse=True)
