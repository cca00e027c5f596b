"""`make docs-pictures`: makes the pictures of docs/assets again, by the commands of the pages that show them.

The commands run in the checkout, so that runs which are complete in outputs/ are not drawn again. The pictures of the report's
page need Chromium. `python docs/pictures.py report samples` makes two pictures.
"""

import os
import re
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
    script: str = ""
    """What happens in the page before the screenshot, as the body of an async function of the browser of samples."""


_REPORT = ("make demo", "make report")
_OPEN = """
const section = browser.root.closest("section");
for (const other of document.querySelectorAll("section, header")) if (other !== section) other.remove();
for (const text of section.querySelectorAll(":scope > p, h2")) text.remove();
browser.show.value = "pair";
browser.first.value = String(browser.runs.indexOf("blend_ps"));
browser.second.value = String(browser.runs.indexOf("greedy"));
await browser.filter();
await browser.select(browser.shown[0]);
"""
_LAYERS = "python -m dflash_mcmc probe=layer_rank draft=tiny dataset.limit=8"


def _stored(name: str) -> tuple[str, str]:
    """The commands that draw the figures of packed runs."""
    return (f"mkdir -p outputs && tar -xJf docs/findings/records/{name}.tar.xz -C outputs  # in a checkout",
            f"python -m dflash_mcmc.report outputs/{name}  # in a checkout")


PICTURES = (
    Picture("report", "tutorial/report.md", _REPORT, "outputs/demo/report/report.html"),
    Picture("samples", "tutorial/report.md", _REPORT, "outputs/demo/report/report.html", _OPEN),
    Picture("paired", "tutorial/report.md", _REPORT, "outputs/demo/report/figures/fig_arith_paired.png"),
    Picture("cost", "tutorial/report.md", _REPORT, "outputs/demo/report/figures/fig_pareto.png"),
    Picture("layer_rank", "howto/probes.md", (_LAYERS,), "outputs/default/layer_rank-*/fig_layer_probe_ranks.png"),
    Picture("rejection_sampling", "howto/probes.md", ("python -m dflash_mcmc experiment=rejection_sampling",),
            "outputs/rejection_sampling/rejection_sampling-*/*.png"),
    Picture("equal_cost", "findings/equal-cost-on-gsm8k.md", _stored("cost_gsm8k"),
            "outputs/cost_gsm8k/report/figures/fig_pareto.png"),
    Picture("study_paired", "findings/index.md", _stored("programs"),
            "outputs/programs/report/figures/fig_humaneval_paired.png"),
    Picture("sources_agreement", "findings/sources-of-second-logits.md", _stored("sources"),
            "outputs/sources/report/figures/fig_gain_over_agreement.png"),
    Picture("sources_beta", "findings/sources-of-second-logits.md", _stored("sources"),
            "outputs/sources/report/figures/fig_gain_over_beta.png"),
    Picture("signflip_all", "findings/sign-of-beta.md", _stored("signflip164"),
            "outputs/signflip164/report/figures/fig_gain_over_beta.png"),
)


def main(*names: str) -> None:
    """Runs each command once and writes the pictures with these names; without names, every picture."""
    chosen = [picture for picture in PICTURES if picture.name in names or not names]
    for command in dict.fromkeys(command for picture in chosen for command in picture.commands):
        run(command)
    for picture in chosen:
        found = sorted(ROOT.glob(picture.source), key=lambda file: file.stat().st_mtime)
        with tempfile.TemporaryDirectory() as folder:
            shot = screenshot(found[-1], Path(folder), picture.script) if found[-1].suffix == ".html" else found[-1]
            small(shot, ASSETS / f"{picture.name}.png")


def run(command: str) -> None:
    """Runs a command as a reader with .venv does."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(command, shell=True, check=True, cwd=ROOT, env={**os.environ, "PATH": path})


def screenshot(page: Path, folder: Path, script: str = "") -> Path:
    """The first screen of a page, after a script."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit("no browser: install chromium (apt-get install chromium)")
    sandbox: Sequence[str] = ["--no-sandbox"] if os.geteuid() == 0 else []
    shot = folder / "page.png"
    if script:  # a copy of the page may run it, the page may not
        text = re.sub('<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text(encoding="utf-8"))
        ready = 'const ready = () => document.querySelector(".samples[data-ready]")?.browser;'
        wait = "while (!ready()) await new Promise(done => setTimeout(done, 20));"
        run_it = f"<script>(async () => {{ {ready} {wait} const browser = ready(); {script} }})()</script></body>"
        page = folder / "page.html"
        page.write_text(text.replace("</body>", run_it), encoding="utf-8")
    subprocess.run([browser, "--headless=new", *sandbox, "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=10000",
                    "--blink-settings=preferredColorScheme=1", f"--window-size={SIZE[0]},{SIZE[1]}", f"--screenshot={shot}",
                    f"file://{page}"], check=True, capture_output=True, timeout=180)
    return shot


def small(source: Path, target: Path) -> None:
    """The picture with 128 colours, which are chosen so that rare colours are kept."""
    with Image.open(source) as image:
        image.convert("RGB").quantize(128, method=Image.Quantize.MAXCOVERAGE).save(target, optimize=True)
    print(f"{target.relative_to(ROOT)}: {target.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main(*sys.argv[1:])
