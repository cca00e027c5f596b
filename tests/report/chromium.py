"""A page in Chromium without a window, and what a script sees in it."""

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


def told_by(body: str, folder: Path, *arguments: str) -> tuple[dict, str]:
    """What a page's script hands to `told`, and the messages of the browser."""
    (folder / "frame.html").write_text(
        f"""<!DOCTYPE html><meta charset="utf-8"><link rel="icon" href="data:,"><body><pre></pre><script>
        const told = text => {{ document.querySelector("pre").textContent = text; }};</script>{body}""",
        encoding="utf-8", errors="surrogatepass")
    done = browser("--enable-logging=stderr", "--window-size=1300,1000", "--dump-dom", *arguments,
                   f"file://{folder}/frame.html")
    return json.loads(html.unescape(re.findall(r"<pre>(.*?)</pre>", done.stdout, flags=re.DOTALL)[-1])), done.stderr


def visit(files: list[Path], folder: Path, script: str, widths: list[int]) -> dict[int, dict[str, dict]]:
    """What a function body of `page` and `view` returns in each of the files, by width and address.

    A page is loaded once, at the first width, and its frame then takes the other widths.
    """
    addresses = json.dumps([file.as_uri() for file in files])
    body = f"""<iframe height="900" style="border:0"></iframe><script type="module">
    const frame = document.querySelector("iframe"), found = {{}}, widths = {widths};
    for (const address of {addresses}) {{
      frame.width = widths[0];
      await new Promise(done => {{ frame.onload = done; frame.src = address; }});
      const view = frame.contentWindow;
      for (const width of widths) {{
        frame.width = width;
        await new Promise(done => setTimeout(done, 300));
        (found[width] ??= {{}})[address] = ((page, view) => {{ {script} }})(view.document, view);
      }}
    }}
    told(JSON.stringify(found));</script>"""
    found, _ = told_by(body, folder, "--allow-file-access-from-files", "--virtual-time-budget=100000")
    return {int(width): seen for width, seen in found.items()}


def look(text: str, folder: Path, script: str, width: int = 1280, scheme: int = LIGHT, quiet: bool = True) -> dict:
    """What a script returns in a page of this width.

    The page is in a frame, because a window cannot be narrower than 500 pixels.

    Args:
        script: body of an async function of `page`, the document, and `view`, its window. It begins when samples are there.
        quiet: whether a message on the console fails.
    """
    frame = f'<iframe width="{width}" height="900" style="border:0" srcdoc="{html.escape(text)}"></iframe>'
    body = f"""{frame}<script>
        document.querySelector("iframe").addEventListener("load", async event => {{
          const view = event.target.contentWindow, page = view.document;
          while (page.querySelector(".samples:not([data-ready])")) await new Promise(done => setTimeout(done, 20));
          const seen = (async (page, view) => {{ {script} }})(page, view);
          seen.then(found => told(JSON.stringify(found)), error => told(JSON.stringify({{error: String(error)}})));
        }});</script>"""
    found, messages = told_by(body, folder, f"--blink-settings=preferredColorScheme={scheme}", "--virtual-time-budget=20000")
    assert not (quiet and "CONSOLE" in messages), re.findall(r".*CONSOLE.*", messages)
    return found
