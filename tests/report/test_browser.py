"""The page in a real browser: it fits, logs nothing to the console, has a dark and a light scheme, and sorts tables."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dflash_mcmc.report.build import build
from tests import published
from tests.report.folders import identity, record, write

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
DARK, LIGHT = 0, 1
LOOK = """
const frame = document.querySelector("iframe"), page = frame.contentDocument, root = page.documentElement;
const scrolls = element => getComputedStyle(element).overflowX === "auto";
const inside = element => element.parentElement && (scrolls(element.parentElement) || inside(element.parentElement));
const beyond = element => element.getBoundingClientRect().right > root.clientWidth + 1;
const wide = [...page.querySelectorAll("body *")].filter(element => beyond(element) && !inside(element));
const head = page.querySelector("#overall thead th:nth-child(2) [role=button]");
const column = () => [...head.closest("table").tBodies[0].rows].map(row => row.cells[1].textContent);
const before = column();
head.click();
document.querySelector("pre").textContent = JSON.stringify({
  width: root.clientWidth, scroll: root.scrollWidth, wide: wide.map(e => e.outerHTML.slice(0, 80)),
  broken: [...page.images].filter(image => !image.complete || !image.naturalWidth).length, images: page.images.length,
  scrolled: [...page.querySelectorAll(".table")].filter(e => e.scrollWidth > e.clientWidth).length,
  hidden: [...page.querySelectorAll(".table")].filter(e => scrolls(e) && e.scrollHeight > e.clientHeight).length,
  dark: frame.contentWindow.matchMedia("(prefers-color-scheme: dark)").matches,
  ground: frame.contentWindow.getComputedStyle(page.body).backgroundColor,
  before, after: column(), sorted: head.parentNode.getAttribute("aria-sort"),
});
"""


def browser(*arguments: str) -> subprocess.CompletedProcess:
    """Runs Chromium without a window. The root user has no sandbox."""
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    return subprocess.run([CHROMIUM, "--headless=new", *sandbox, "--disable-gpu", "--hide-scrollbars", *arguments],
                          capture_output=True, text=True, timeout=180, check=True)


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """The report of the document's conditions, of a sweep with several chains and long labels, and of an interrupted run."""
    if CHROMIUM is None:
        pytest.skip("NO BROWSER: the page is not checked; to check it: apt-get install chromium")
    folder = tmp_path_factory.mktemp("outputs") / "document"
    for name in ("greedy", "temp", "ps", "blend_greedy", "blend_ps", "draft_blend_ps"):
        write(folder, name, published.records(name))
    for steps in (4, 10):
        for beta in (0.05, 0.2):
            chains = [{**line, "chain": chain} for chain in range(2) for line in published.records("blend_ps")]
            made = identity("blend_ps", blend__beta=beta, sampler__num_steps=steps, dataset__prompt="{question} Reason " * 20)
            write(folder, "blend_ps", chains, made, num_chains=2)
    write(folder, "ps", [record("test/algebra/0.json", gold="2")], identity("ps", seed=1), limit=104, finished=False)
    return build([folder]).page


def look(text: str, folder: Path, width: int, scheme: int) -> dict:
    """The browser's measurements of a page of this width, in a frame, because a window cannot be narrower than 500 pixels."""
    frame = f'<iframe width="{width}" height="900" style="border:0" srcdoc="{html.escape(text)}"></iframe>'
    (folder / "frame.html").write_text(
        f'<!DOCTYPE html><meta charset="utf-8"><link rel="icon" href="data:,"><body>{frame}<pre></pre>'
        f'<script>document.querySelector("iframe").addEventListener("load", () => {{ {LOOK} }});</script>')
    done = browser("--enable-logging=stderr", f"--blink-settings=preferredColorScheme={scheme}", "--window-size=1200,1000",
                   "--dump-dom", f"file://{folder}/frame.html")
    assert "CONSOLE" not in done.stderr, re.findall(r".*CONSOLE.*", done.stderr)
    return json.loads(html.unescape(re.findall(r"<pre>(.*?)</pre>", done.stdout, flags=re.DOTALL)[-1]))


@pytest.mark.parametrize(("width", "scheme"), [(1000, LIGHT), (420, DARK), pytest.param(1000, DARK, marks=pytest.mark.slow),
                                               pytest.param(420, LIGHT, marks=pytest.mark.slow)])
def test_the_page_fits_and_logs_nothing(page, tmp_path, width, scheme):
    seen = look(page.read_text(), tmp_path, width, scheme)
    assert (seen["width"], seen["scroll"], seen["wide"]) == (width, width, [])
    assert seen["scrolled"] > 0  # wide tables scroll in their own frame
    assert (seen["broken"], seen["images"] >= 9) == (0, True)
    assert seen["dark"] == (scheme == DARK)
    assert (max(map(int, re.findall(r"\d+", seen["ground"]))) < 60) == (scheme == DARK)
    assert seen["sorted"] == "descending"
    assert seen["after"] == sorted(seen["before"], key=float, reverse=True) != seen["before"]


@pytest.mark.parametrize("scheme", [DARK, pytest.param(LIGHT, marks=pytest.mark.slow)])
def test_screenshot(page, tmp_path, scheme):
    """The first screen shows text and a figure on its background, and nothing at the right edge."""
    shot = tmp_path / "shot.png"
    browser(f"--blink-settings=preferredColorScheme={scheme}", "--window-size=1000,1400", f"--screenshot={shot}",
            f"file://{page}")
    with Image.open(shot) as image:
        grey = np.asarray(image.convert("L"), np.int64)
    ground = int(np.bincount(grey[:200].ravel()).argmax())
    assert (ground < 60) == (scheme == DARK)
    inked = np.abs(grey - ground) > 60
    assert inked[:100].any()
    assert inked[700:].any()
    assert 0.01 < inked.mean() < 0.6
    assert not inked[:, -4:].any()


@pytest.mark.slow
def test_on_paper_nothing_is_cut_off(page, tmp_path):
    """A4 landscape, 1047 pixels between its margins: tables that scroll on a screen are expanded and fit."""
    text = page.read_text()
    assert text.count("@media print") == 1
    seen = look(text.replace("@media print", "@media screen"), tmp_path, 1032, LIGHT)
    assert (seen["scroll"], seen["wide"], seen["scrolled"], seen["hidden"]) == (1032, [], 0, 0)
    paper = tmp_path / "page.pdf"
    browser("--no-pdf-header-footer", f"--print-to-pdf={paper}", f"file://{page}")
    assert paper.stat().st_size > 50_000
