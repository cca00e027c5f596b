"""A page in Chromium without a window, and what a script sees in it."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.processes import HANG

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
DARK, LIGHT = 0, 1


def needed() -> None:
    """Skips a test where there is no browser."""
    if CHROMIUM is None:
        pytest.skip("NO BROWSER: the page is not checked; to check it: apt-get install chromium")


def browser(*arguments: str) -> subprocess.CompletedProcess:
    """Runs Chromium without a window. The root user has no sandbox."""
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    return subprocess.run([str(CHROMIUM), "--headless=new", *sandbox, "--disable-gpu", "--hide-scrollbars", *arguments],
                          capture_output=True, text=True, timeout=HANG, check=True)


def look(text: str, folder: Path, script: str, width: int = 1280, scheme: int = LIGHT, quiet: bool = True) -> dict:
    """What a script returns in a page of this width.

    The page is in a frame, because a window cannot be narrower than 500 pixels.

    Args:
        script: body of an async function of `page`, the document, and `view`, its window. It begins when samples are there.
        quiet: whether a message on the console fails.
    """
    frame = f'<iframe width="{width}" height="900" style="border:0" srcdoc="{html.escape(text)}"></iframe>'
    (folder / "frame.html").write_text(
        f"""<!DOCTYPE html><meta charset="utf-8"><link rel="icon" href="data:,"><body>{frame}<pre></pre><script>
        const told = text => {{ document.querySelector("pre").textContent = text; }};
        document.querySelector("iframe").addEventListener("load", async event => {{
          const view = event.target.contentWindow, page = view.document;
          while (page.querySelector(".samples:not([data-ready])")) await new Promise(done => setTimeout(done, 20));
          const seen = (async (page, view) => {{ {script} }})(page, view);
          seen.then(found => told(JSON.stringify(found)), error => told(JSON.stringify({{error: String(error)}})));
        }});</script>""", encoding="utf-8", errors="surrogatepass")
    done = browser("--enable-logging=stderr", f"--blink-settings=preferredColorScheme={scheme}", "--window-size=1300,1000",
                   "--virtual-time-budget=20000", "--dump-dom", f"file://{folder}/frame.html")
    assert not (quiet and "CONSOLE" in done.stderr), re.findall(r".*CONSOLE.*", done.stderr)
    return json.loads(html.unescape(re.findall(r"<pre>(.*?)</pre>", done.stdout, flags=re.DOTALL)[-1]))
