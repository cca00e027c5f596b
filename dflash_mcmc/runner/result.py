"""The result of a start of a run, and the line that tells it."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple


def _no_table(folders: Sequence[Path]) -> str:
    return ""


class RunResult(NamedTuple):
    """The state of a run after this start."""

    folder: Path
    summary: dict
    """Empty if `num_left` is not 0."""
    num_new: int
    """Tasks recorded since this start, by this or another process."""
    num_beyond: int
    """Tasks of earlier starts that this start did not request. The summary covers them."""
    num_left: int = 0
    """Tasks that other processes are still doing. The last of these processes writes the summary."""
    unit: str = "sample"
    """The word for one task."""
    table: Callable[[list[Path]], str] = _no_table
    """Renders one table for all folders whose results have this same function."""

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.table([self.folder]) or self.line())}</pre>"

    def line(self) -> str:
        """The result in a line."""
        units = self.unit + "s" * (self.num_new != 1)
        drawn = f"{self.num_new} new {units}" if self.num_new else "already complete, nothing drawn"
        beyond = (f"; {self.num_beyond} recorded {self.unit}s that were not requested are counted as well"
                  if self.num_beyond else "")
        left = f"; {self.num_left} more are being drawn by other processes" if self.num_left else ""
        return f"{self.folder}: {drawn}{beyond}{left}"
