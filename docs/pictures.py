"""`make docs-pictures`: makes the pictures of docs/assets again, by the commands of the pages that show them.

The commands run in the checkout, so that runs which are complete in outputs/ are not drawn again. The picture of the report's
page needs Chromium.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
ASSETS = ROOT / "docs/assets"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
SIZE = (1100, 1000)


class Picture(NamedTuple):
    """A picture, the page that shows it with its commands, and the file that the commands make."""

    name: str
    page: str
    commands: tuple[str, ...]
    source: str
    """Pattern of one file below the root: a PNG, or a page for a screenshot."""


_REPORT = ("make demo", "make report")
_BUDGET = ("make equal-cost",)
_LAYERS = "python -m dflash_mcmc probe=layer_rank draft=tiny tracker=none dataset.limit=8"
PICTURES = (
    Picture("report", "tutorial/report.md", _REPORT, "outputs/demo/report/report.html"),
    Picture("paired", "tutorial/report.md", _REPORT, "outputs/demo/report/figures/fig_arith_paired.png"),
    Picture("cost", "tutorial/report.md", _REPORT, "outputs/demo/report/figures/fig_pareto.png"),
    Picture("budget", "howto/compare-samplers.md", _BUDGET, "outputs/equal_cost/report/figures/fig_budget.png"),
    Picture("layer_rank", "howto/probes.md", (_LAYERS,), "outputs/default/layer_rank-*/fig_layer_probe_ranks.png"),
    Picture("rejection_sampling", "howto/probes.md", ("python -m dflash_mcmc experiment=rejection_sampling",),
            "outputs/rejection_sampling/rejection_sampling-*/*.png"),
)


def main() -> None:
    """Runs each command once and writes every picture."""
    for command in dict.fromkeys(command for picture in PICTURES for command in picture.commands):
        run(command)
    for picture in PICTURES:
        found = sorted(ROOT.glob(picture.source), key=lambda file: file.stat().st_mtime)
        with tempfile.TemporaryDirectory() as folder:
            shot = screenshot(found[-1], Path(folder)) if found[-1].suffix == ".html" else found[-1]
            small(shot, ASSETS / f"{picture.name}.png")


def run(command: str) -> None:
    """Runs a command as a reader with .venv does."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(command, shell=True, check=True, cwd=ROOT, env={**os.environ, "PATH": path})


def screenshot(page: Path, folder: Path) -> Path:
    """The first screen of a page."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit("no browser: install chromium (apt-get install chromium)")
    sandbox: Sequence[str] = ["--no-sandbox"] if os.geteuid() == 0 else []
    shot = folder / "page.png"
    subprocess.run([browser, "--headless=new", *sandbox, "--disable-gpu", "--hide-scrollbars",
                    "--blink-settings=preferredColorScheme=1", f"--window-size={SIZE[0]},{SIZE[1]}", f"--screenshot={shot}",
                    f"file://{page}"], check=True, capture_output=True, timeout=180)
    return shot


def small(source: Path, target: Path) -> None:
    """The picture with 128 colours, which are chosen so that rare colours are kept."""
    with Image.open(source) as image:
        image.convert("RGB").quantize(128, method=Image.Quantize.MAXCOVERAGE).save(target, optimize=True)
    print(f"{target.relative_to(ROOT)}: {target.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
