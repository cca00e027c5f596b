"""What the tests of both harnesses share: problems of the embedded model, and the page whose commands they run."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from dflash_mcmc.config.schema import PACKAGE
from tests import pages
from tests.conftest import ROOT

TINY = str(PACKAGE / "assets/tiny")
ROWS = [json.loads(line) for line in (PACKAGE / "assets/arith.jsonl").read_text().splitlines()[:6]]
_PAGE = ROOT / "docs/howto/evaluation-harnesses.md"
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def page_commands(folder: Path, language: str, marker: str) -> list[str]:
    """Writes the page's files in a language into a folder, with problems. Returns the commands with a marker, in order."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for block in pages.blocks(_PAGE, language):
        place, _, text = block.partition("\n")
        path = folder / place.removeprefix("# ")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return [command.replace("FOLDER", TINY) for command in pages.marked(pages.commands(_PAGE), marker)]


def shell(command: str, folder: Path) -> subprocess.CompletedProcess:
    """Runs a command of the page in a folder."""
    return pages.shell(command, folder, **_ENVIRONMENT)
